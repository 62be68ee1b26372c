"""Saves of modules that were changed after deepspeed.initialize: what a load could not give back is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_files import contents, logged
from training import initialize

from zeroelastic.elastic import every, preemption
from zeroelastic.errors import SaveError, UnsupportedError
from zeroelastic.testing import RankPool

pytestmark = pytest.mark.quick
INPUTS = torch.linspace(-1, 1, 16).reshape(2, 8)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down, self.head = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(inputs).tanh()))


def with_adapters(**options: Any) -> Any:
    from peft import LoraConfig, get_peft_model  # seconds, which each worker would spend on collecting the tests

    model = Net()
    torch.manual_seed(4)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["up"], init_lora_weights=False, **options))


def build(model: torch.nn.Module, stage: int, **options: Any) -> Any:
    options = {"format": "elastic", **options}
    return initialize(model, {"stage": stage}, train_micro_batch_size_per_gpu=2, zeroelastic=options)


def train(engine: Any) -> None:
    engine.backward(engine(INPUTS).square().mean())
    engine.step()


def outputs(engine: Any) -> torch.Tensor:
    with torch.no_grad():
        return engine(INPUTS).clone()


Change = Callable[[Any], object]


def merge(model: Any) -> None:
    model.merge_adapter()


def merge_and_unload(model: Any) -> None:
    model.merge_and_unload()


def compile_two(model: Any) -> None:
    """The same parameters, trained and frozen, have other names then, with ``_orig_mod``."""
    for name in ("up", "down"):
        setattr(model.base_model.model, name, torch.compile(getattr(model.base_model.model, name), backend="eager"))


def parametrize(model: Any) -> None:
    """The same parameter has another name, and the weight is computed from it."""
    torch.nn.utils.parametrize.register_parametrization(model.base_model.model.down, "weight", torch.nn.Identity())


def add_adapter(model: Any) -> None:
    """Its base layer gets another name; what is added is not trained."""
    from peft import LoraConfig

    model.add_adapter("other", LoraConfig(r=2, target_modules=["head"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])


def replace(model: Any) -> None:
    model.head = torch.nn.Linear(8, 8)


def remove(model: Any) -> None:
    model.base_model.model.down = torch.nn.Identity()


def save_after(stage: int, directory: str, change: Change, options: dict[str, Any]) -> str:
    """The error of a save over a good one, which stays."""
    import deepspeed

    engine = build(Net() if change is replace else with_adapters(), stage, **options)
    train(engine)
    engine.save_checkpoint(directory, tag="tag")
    before = contents(Path(directory))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0, enabled=stage == 3):
        change(engine.module)
    with pytest.raises(SaveError) as caught:
        engine.save_checkpoint(directory, tag="tag")
    torch.distributed.barrier()
    assert contents(Path(directory)) == before
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adapters_that_are_merged_into_saved_weights_are_refused(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    """A load would apply them twice."""
    for change, text in (
        (merge, "adapters are merged into the base weights of base_model.model.up. "),
        (merge_and_unload, "the adapters of base_model.model.up are no longer in the module"),
    ):
        directory = str(tmp_path / change.__name__)
        said = rank_pool.run(save_after, 2, stage, directory, change, {})
        assert all(text in one for one in said)


def test_a_trained_parameter_that_was_replaced_is_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    said = rank_pool.run(save_after, 2, 2, str(tmp_path), replace, {})
    assert all("head.bias, head.weight of the module was replaced after deepspeed.initialize" in one for one in said)


def load_without_frozen(stage: int, directory: str) -> None:
    engine = build(with_adapters(), stage)
    train(engine)
    before = outputs(engine)
    for change in (merge, merge_and_unload):
        if change is merge_and_unload:
            engine.module.unmerge_adapter()
        change(engine.module)
        engine.save_checkpoint(directory, tag=change.__name__, exclude_frozen_parameters=True)
        fresh = build(with_adapters(), stage)
        fresh.load_checkpoint(directory, tag=change.__name__, load_module_strict=False)
        assert torch.allclose(outputs(fresh), before, atol=1e-6)


def test_without_the_frozen_weights_merged_adapters_are_saved(rank_pool: RankPool, tmp_path: Path) -> None:
    """As by the Trainer: the adapters go beside a base model of the script."""
    rank_pool.run(load_without_frozen, 2, 2, str(tmp_path))


def take_while_merged(directory: str, memory: str) -> None:
    """A load and a memory checkpoint while adapters are merged, and after they are not."""
    os.environ["ZEROELASTIC_MEMORY_DIR"] = memory
    engine = build(with_adapters(), 2, verify=True, memory={"every": 1, "copies": 1})
    train(engine)
    engine.save_checkpoint(directory, tag="tag")
    before = outputs(engine)
    train(engine)
    engine.module.merge_adapter()
    with pytest.raises(UnsupportedError, match="adapters are merged into the base weights of"):
        engine.load_checkpoint(directory, tag="tag")
    with preemption(engine, directory, saving=every(steps=None)) as stop:
        assert stop._memory is not None
        stop()
        for error in ("adapters are merged into the base weights of base_model.model.up. ", "None"):
            engine.module.unmerge_adapter()
            train(engine)
            if error != "None":
                engine.module.merge_adapter()
            stop()
            stop._memory.wait()
            if torch.distributed.get_rank() == 0:
                assert error in str(stop._memory.error)
        stop._memory.forget()
    engine.load_checkpoint(directory, tag="tag")
    assert torch.equal(outputs(engine), before)


def test_nothing_is_taken_or_kept_while_adapters_are_merged(rank_pool: RankPool, tmp_path: Path) -> None:
    """Unmerging would take the adapters out of weights into which they are not merged."""
    (tmp_path / "memory").mkdir()
    rank_pool.run(take_while_merged, 2, str(tmp_path / "run"), str(tmp_path / "memory"))


def go_on_after(directory: str, changes: list[Change]) -> list[str]:
    """What is logged of saves after harmless changes, whose state a run that makes the same change restores."""
    said = logged("deepspeed.save.checks")
    for change in changes:
        engine = build(with_adapters(), 2)
        train(engine)
        change(engine.module)
        train(engine)
        engine.save_checkpoint(directory, tag=change.__name__)
        engine.save_checkpoint(directory, tag=f"{change.__name__} again")
        fresh = build(with_adapters(), 2)
        torch.manual_seed(torch.distributed.get_rank())
        change(fresh.module)
        fresh.load_checkpoint(directory, tag=change.__name__)
        assert torch.equal(outputs(fresh), outputs(engine)), change
    return said


def test_other_changes_are_saved(rank_pool: RankPool, tmp_path: Path) -> None:
    said = rank_pool.run(go_on_after, 2, str(tmp_path), [compile_two, parametrize, add_adapter])
    assert said == [[], []]


def save_without_a_layer(directory: str) -> list[str]:
    said = logged("deepspeed.save.checks")
    model = with_adapters(modules_to_save=["down"])
    engine = build(model, 2)
    train(engine)
    remove(engine.module)
    for tag in ("first", "second"):
        engine.save_checkpoint(directory, tag=tag)
    return said


def test_trained_parameters_that_the_module_no_longer_has_are_named_once(rank_pool: RankPool, tmp_path: Path) -> None:
    first, second = rank_pool.run(save_without_a_layer, 2, str(tmp_path))
    name = "base_model.model.down.modules_to_save.default"
    assert len(first) == 1 and second == []
    assert f"2 parameters of the optimizer are no longer in the module: {name}.bias, {name}.weight." in first[0]
