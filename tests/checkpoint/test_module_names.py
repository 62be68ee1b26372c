"""A module's state with tensors under several names and what ``get_extra_state`` returned, saved by real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zeroelastic
from zeroelastic.testing import RankPool

RUNS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1, "installed": False},
    "stage 2": {"stage": 2, "installed": False},
    "stage 2, elastic": {"stage": 2},
    "stage 2, empty": {"stage": 2, "empty": True},  # DeepSpeed cannot partition parameters without elements (0.19.8)
    "stage 3": {"stage": 3, "installed": False},
}
FIRST = {"second.weight": "first.weight", "norm_again.running_mean": "norm.running_mean", "again": "count"}
"""Further names, which DeepSpeed's lists do not have, and the names that they are of."""
STATE = torch.arange(5, dtype=torch.uint8)


class Quantized(torch.nn.Module):
    """Keeps a tensor in the module's state that is neither a parameter nor a buffer, as Transformer Engine does."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = STATE.clone()

    def get_extra_state(self) -> torch.Tensor:
        return self.scales

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scales = state


class Model(torch.nn.Module):
    def __init__(self, *, empty: bool) -> None:
        super().__init__()
        self.first = self.second = torch.nn.Linear(4, 4)
        self.norm = self.norm_again = torch.nn.BatchNorm1d(4).requires_grad_(False)
        if empty:
            self.none = torch.nn.Parameter(torch.empty(0, 4))
            self.nothing = torch.nn.Parameter(torch.empty(3, 0), requires_grad=False)
        self.quantized = Quantized()
        self.register_buffer("count", torch.arange(3.0))
        self.register_buffer("again", self.count)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm_again(self.first(rows))).square().mean()


def build(stage: int, *, installed: bool = True, empty: bool = False) -> Any:
    import deepspeed

    if installed:
        zeroelastic.install()
    torch.manual_seed(0)
    model = Model(empty=empty)
    options = {"elastic_checkpoint": True} if installed else {}
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **options},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    }
    trained = [param for param in model.parameters() if param.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def save(directory: str) -> None:
    for name, options in RUNS.items():
        zeroelastic.uninstall()
        engine = build(**options)
        engine.backward(engine(torch.arange(12.0).reshape(3, 4)))
        engine.step()
        engine.save_checkpoint(f"{directory}/{name}", tag="tag")


def load(directory: str, names: list[str], empty: bool) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The running mean and the extra state of each run after DeepSpeed's own load of a checkpoint of its size."""
    zeroelastic.uninstall()
    found = {}
    for name in names:
        engine = build(int(name[-1]), installed=False, empty=empty)
        engine.module.quantized.scales = torch.zeros(1, dtype=torch.uint8)
        engine.load_checkpoint(f"{directory}/{name}")
        found[name] = (engine.module.norm_again.running_mean, engine.module.quantized.scales)
    return found


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    rank_pool.run(save, 2, str(directory))
    return directory


@pytest.mark.parametrize("name", RUNS)
def test_a_further_name_of_a_tensor_is_tied_and_an_extra_state_is_no_parameter(saved: Path, name: str) -> None:
    with zeroelastic.open(saved / name) as ck:
        assert ck.tied == {**FIRST, "second.bias": "first.bias"} | {
            f"norm_again.{last}": f"norm.{last}" for last in ("weight", "bias", "running_var", "num_batches_tracked")
        }
        assert torch.equal(ck["second.weight"].torch(), ck["first.weight"].torch())
        assert ck["norm_again.running_mean"].kind == "buffer" and ck["norm_again.weight"].kind == "frozen"
        assert "quantized._extra_state" not in ck and ck.left_out[0].startswith("quantized._extra_state: what get_ex")
        assert "empty" not in name or (ck["none"].shape, ck["nothing"].shape) == ((0, 4), (3, 0))


@pytest.mark.parametrize("name", RUNS)
def test_every_stage_has_the_same_module_state(saved: Path, rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    targets = ["to 1", "to 2", "to 3"][: 2 if "empty" in name else 3]
    for target in targets:
        zeroelastic.reshard(saved / name, tmp_path / target, world_size=3, stage=int(target[-1]))
        with zeroelastic.open(saved / name) as one, zeroelastic.open(tmp_path / target) as two:
            assert dict(one.tied) == dict(two.tied) and one.left_out == two.left_out
    with zeroelastic.open(saved / name) as ck:
        mean = ck["norm.running_mean"].torch()
    for found in rank_pool.run(load, 3, str(tmp_path), targets, "empty" in name):
        for running, scales in found.values():
            assert torch.equal(running, mean) and torch.equal(scales, STATE)
