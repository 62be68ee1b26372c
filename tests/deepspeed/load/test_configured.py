"""A load names the configured values that the saved ones replace, and is silent about what training made of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from saved_files import logged
from torch.optim.lr_scheduler import LambdaLR

from zeroelastic.testing import RankPool

FORMS = [(1, False), (2, True), (3, False), (3, True)]
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}}
MARK = "CONFIGURED VALUES NOT USED"


def warm(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))


def build(stage: int, elastic: bool, of_client: bool, scheduler: Any = None, **params: Any) -> Any:
    """An engine with two optimizer groups, of which the second has a weight decay of its own."""
    import deepspeed

    import zeroelastic

    zeroelastic.install()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Linear(5, 3))
    groups: list[dict[str, Any]] = [
        {"params": [param for param in model.parameters() if param.ndim > 1]},
        {"params": [param for param in model.parameters() if param.ndim == 1], "weight_decay": 0.0},
    ]
    config: dict[str, Any] = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": stage, "elastic_checkpoint": elastic},
    }
    params = {"lr": 0.01, "weight_decay": 0.1, **params}
    arguments: dict[str, Any] = {"model_parameters": groups}
    if of_client:
        arguments = {"optimizer": torch.optim.AdamW(groups, **params)}
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True, **params}}
    if isinstance(scheduler, dict):
        config["scheduler"] = scheduler
    elif scheduler is not None:
        arguments["lr_scheduler"] = scheduler(arguments["optimizer"]) if of_client else scheduler
    return deepspeed.initialize(model=model, config=config, **arguments)[0]


def train(engine: Any, steps: int) -> None:
    for step in range(steps):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).chunk(dist.get_world_size())
        engine.backward(engine(batch[dist.get_rank()]).square().mean())
        engine.step()


RUNS: dict[str, dict[str, Any]] = {
    "json": {"of_client": False},
    "warmup": {"of_client": False, "scheduler": WARMUP},
    "client": {"of_client": True},
    "warm": {"of_client": True, "scheduler": warm},
    "json, warm": {"of_client": False, "scheduler": warm},
}


def save_all(directory: Path, stage: int, elastic: bool, names: list[str]) -> None:
    for name in names:
        engine = build(stage, elastic, **RUNS[name])
        train(engine, 3)
        if name == "json":  # by hand
            engine.optimizer.param_groups[0].update(lr=0.003, weight_decay=0.05)
        engine.save_checkpoint(str(directory / name))


def notes_of(
    directory: Path, stage: int, elastic: bool, name: str, changes: dict[str, Any], *, again: bool = False, **flags: Any
) -> list[str]:
    """What the report of a load says about configured values; it is logged as a warning where it says so aloud."""
    engine = build(stage, elastic, **{**RUNS[name], **changes})
    if again:
        engine.load_checkpoint(str(directory / name))
    said = logged("", logging.WARNING)
    engine.load_checkpoint(str(directory / name), **flags)
    found = [note for note in engine.zeroelastic_report.notes if "configured" in note or MARK in note]
    assert any(MARK in text for text in said) is (dist.get_rank() == 0 and any(MARK in one for one in found))
    return found


def ordinary(directory: Path, stage: int, elastic: bool) -> dict[str, list[str]]:
    return {name: notes_of(directory, stage, elastic, name, {}) for name in ("warmup", "client", "warm", "json, warm")}


def changed(directory: Path, stage: int, elastic: bool) -> list[list[str]]:
    new = {"lr": 0.005, "weight_decay": 0.3, "betas": [0.8, 0.9]}
    where = directory, stage, elastic
    return [
        notes_of(*where, "json", new),
        notes_of(*where, "warm", {"lr": 0.005}),
        notes_of(*where, "json, warm", {"lr": 0.005}),
        notes_of(*where, "warm", {"lr": 0.005, "weight_decay": 0.3}, load_optimizer_states=False),
        notes_of(*where, "warmup", {"lr": 0.5, "scheduler": {**WARMUP, "params": {"warmup_max_lr": 0.5}}}),
        notes_of(*where, "client", {"weight_decay": 0.3}, again=True),
    ]


@pytest.mark.parametrize(("stage", "elastic"), FORMS)
def test_a_load_lists_the_hyper_parameters_that_the_saved_ones_replace(
    rank_pool: RankPool, tmp_path: Path, stage: int, elastic: bool
) -> None:
    rank_pool.run(save_all, 2, tmp_path, stage, elastic, [*RUNS])
    json, warm_lr, by_json, weights, of_deepspeed, again = rank_pool.run(changed, 1, tmp_path, stage, elastic)[0]
    assert json == [
        f"{MARK}, the checkpoint has others: betas of optimizer groups 0 to 1: (0.8, 0.9) configured, (0.9, 0.999) "
        "now; lr of optimizer group 0: 0.005 configured, 0.003 now; lr of optimizer group 1: 0.005 configured, 0.01 "
        "now; weight_decay of optimizer group 0: 0.3 configured, 0.05 now. To train with the configured ones, set them "
        "in engine.optimizer.param_groups after load_checkpoint"
    ]
    for found in (warm_lr, by_json):
        assert len(found) == 1
        assert "has others: initial_lr of optimizer groups 0 to 1: 0.005 configured, 0.01 now. To" in found[0]
    assert weights == of_deepspeed == again == []  # these go on as configured; a second load finds no configured values


@pytest.mark.parametrize(("stage", "elastic"), FORMS)
def test_what_a_scheduler_made_of_a_value_is_no_other_configuration(
    rank_pool: RankPool, tmp_path: Path, stage: int, elastic: bool
) -> None:
    rank_pool.run(save_all, 1, tmp_path, stage, elastic, [*RUNS])
    for found in rank_pool.run(ordinary, 2, tmp_path, stage, elastic):
        assert set(map(len, found.values())) == {0}, found
