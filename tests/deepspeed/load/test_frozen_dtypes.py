"""Frozen parameters and buffers of every dtype: saved, loaded and resharded at another size, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic import SAVED_DTYPES, filled, raw
from training import initialize, wait_for_every_gather

import zeroelastic
from zeroelastic.testing import RankPool

BROADCAST_AT_STAGE_3 = ("float", "bfloat16", "int8", "int32", "int64", "uint8", "bool")
"""DeepSpeed broadcasts parameters as they are, and gloo takes these."""


class Model(torch.nn.Module):
    def __init__(self, stage: int, seed: int) -> None:
        super().__init__()
        self.trained = torch.nn.Linear(8, 5)
        for i, dtype in enumerate(SAVED_DTYPES):
            self.register_buffer(f"buffer_{dtype}", filled(dtype, (5, 3), seed=seed + i))
            if stage == 3 and dtype not in ("float16", "float32", "float64", *BROADCAST_AT_STAGE_3):
                continue
            frozen = torch.nn.Parameter(filled(dtype, (7, 3), seed=seed + 100 + i), requires_grad=False)
            self.register_parameter(f"frozen_{dtype}", frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(x)


def build(stage: int, seed: int) -> Any:
    wait_for_every_gather()
    torch.manual_seed(seed)
    zero = {"stage": stage, "elastic_checkpoint": stage == 3}
    return initialize(Model(stage, seed), zero, train_batch_size=6, zeroelastic={"verify": True})


def others(engine: Any) -> dict[str, tuple[str, bytes]]:
    """Dtype and bytes of everything that is not trained."""
    import deepspeed

    found = dict(engine.module.named_buffers())
    frozen = {name: param for name, param in engine.module.named_parameters() if name.startswith("frozen")}
    whole = list(frozen.values()) if hasattr(next(iter(frozen.values())), "ds_id") else []
    with deepspeed.zero.GatheredParameters(whole):
        found |= {name: param.detach().clone() for name, param in frozen.items()}
        return {name: (str(tensor.dtype), raw(tensor)) for name, tensor in found.items()}


def save(stage: int, directory: str) -> dict[str, tuple[str, bytes]]:
    engine = build(stage, seed=1)
    x = torch.ones(engine.train_micro_batch_size_per_gpu(), 8)
    engine.backward(engine(x).pow(2).mean())
    engine.step()
    engine.save_checkpoint(directory, tag="tag")
    return others(engine)


def load(stage: int, directory: str, tag: str) -> tuple[dict[str, tuple[str, bytes]], bool | None]:
    engine = build(stage, seed=50)
    engine.load_checkpoint(directory, tag=tag)
    return others(engine), engine.zeroelastic_report.root_matches


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("stage", [2, 3])
def test_every_dtype_survives_a_load_and_a_reshard_at_another_size(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    run, resharded = tmp_path / "run", tmp_path / "resharded"
    saved, _ = rank_pool.run(save, 2, stage, str(run), timeout=120)
    assert zeroelastic.verify(run).valid
    zeroelastic.reshard(run, resharded, world_size=3)
    assert zeroelastic.verify(resharded).valid and zeroelastic.diff(run, resharded).equal
    for directory in (run, resharded):
        for loaded, verified in rank_pool.run(load, 3, stage, str(directory), "tag", timeout=120):
            assert loaded == saved and verified
    with zeroelastic.open(run) as checkpoint:
        for name, (dtype, data) in saved.items():
            found = checkpoint[name].torch()
            assert (str(found.dtype), raw(found)) == (dtype, data)
