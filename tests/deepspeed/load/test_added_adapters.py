"""Resumes of runs that put an adapter on another module, or take one off: base weights have another name then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training import initialize

from zeroelastic.checkpoint.param_changes import renamed_base_weights
from zeroelastic.testing import RankPool


def build(seed: int, targets: list[str], stage: int, copied: list[str]) -> Any:
    """An engine of a base model of this seed, with adapters on these modules and trained copies of others."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    layers = {name: torch.nn.Linear(8, 8) for name in ("up", "down", "head")}
    model = torch.nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    adapters = LoraConfig(r=2, target_modules=targets, init_lora_weights=False, modules_to_save=copied or None)
    model = get_peft_model(model, adapters)
    options = {"format": "elastic", "on_mismatch": "initialize", "verify": True}
    return initialize(model, {"stage": stage}, train_micro_batch_size_per_gpu=2, zeroelastic=options)


def weights(engine: Any, stage: int) -> dict[str, torch.Tensor]:
    """By name without what PEFT puts in."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        named = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    return {name.replace(".base_layer", "").replace(".original_module", ""): value for name, value in named.items()}


def save(directory: str, stage: int) -> dict[str, torch.Tensor]:
    engine = build(1, ["up", "head"], stage, [])
    inputs = torch.linspace(-1, 1, 16).reshape(2, 8)
    engine.backward(engine(inputs).square().mean())
    engine.step()
    engine.save_checkpoint(directory)
    return weights(engine, stage)


Change = tuple[list[str], list[str]]
"""The modules with an adapter, and those with a trained copy."""


def resume(directory: str, stage: int, changes: list[Change]) -> list[tuple[dict[str, Any], str]]:
    found = []
    for targets, copied in changes:
        engine = build(2, targets, stage, copied)
        engine.load_checkpoint(directory)
        found.append((weights(engine, stage), " ".join(engine.zeroelastic_report.changed)))
    return found


@pytest.mark.parametrize("stage", [1, 2, pytest.param(3, marks=pytest.mark.quick)])
def test_base_weights_are_restored_under_their_new_names(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    """At another size, by a run that made its base model with other weights."""
    changes: list[Change] = [(["up", "down", "head"], []), (["up", "head"], ["down"]), (["head"], [])]
    saved = rank_pool.run(save, 2, str(tmp_path), stage)[0]
    for (loaded, changed), change in zip(
        rank_pool.run(resume, 1, str(tmp_path), stage, changes)[0], changes, strict=True
    ):
        base = [name for name in saved if "lora" not in name]
        assert [name for name in base if not torch.equal(saved[name], loaded[name])] == [], change
        assert "(saved as base_model.model." in changed
        assert "frozen and not in the checkpoint" not in changed and "model does not have" not in changed


def test_weights_into_which_an_adapter_may_be_merged_are_not_taken_for_its_base() -> None:
    """A module that had an adapter has its weights under the name of the base layer."""
    live = {"up.base_layer.weight": (2, 2), "down.base_layer.weight": (2, 2)}
    found = renamed_base_weights(
        saved_frozen={"up.weight": (2, 2), "down.weight": (2, 2)},
        live_frozen=live,
        saved=["up.weight", "up.lora_A.default.weight", "down.weight"],
        live=[*live, "up.lora_A.default.weight", "down.lora_A.default.weight"],
    )
    assert found == {"down.base_layer.weight": "down.weight"}


def test_weights_of_another_shape_are_not_taken() -> None:
    found = renamed_base_weights(
        saved_frozen={"up.weight": (2, 3)},
        live_frozen={"up.base_layer.weight": (2, 2)},
        saved=["up.weight"],
        live=["up.base_layer.weight"],
    )
    assert found == {}
