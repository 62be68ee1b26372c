"""A load names the configured values that the saved ones replace, and is silent about what training made of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

from zeroelastic.deepspeed.load.configured import scheduler_parameters
from zeroelastic.testing import RankPool

FORMS = [(1, False), (2, True), (3, False), (3, True)]
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}}
MARK = "CONFIGURED VALUES NOT USED"


def warm(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))


def cosine(steps: int) -> Any:
    return lambda optimizer: CosineAnnealingLR(optimizer, steps)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return ReduceLROnPlateau(optimizer, patience=0, threshold=10)


def build(
    stage: int, elastic: bool, of_client: bool, scheduler: Any = None, fp16: dict[str, Any] | None = None, **params: Any
) -> Any:
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
    if fp16 is not None:
        config["fp16"] = fp16
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
        mine = batch[dist.get_rank()].half() if engine.fp16_enabled() else batch[dist.get_rank()]
        engine.backward(engine(mine).float().square().mean())
        engine.step(lr_kwargs={"metrics": 1.0} if isinstance(engine.lr_scheduler, ReduceLROnPlateau) else None)


RUNS: dict[str, dict[str, Any]] = {
    "json": {"of_client": False},
    "warmup": {"of_client": False, "scheduler": WARMUP},
    "client": {"of_client": True},
    "warm": {"of_client": True, "scheduler": warm},
    "json, warm": {"of_client": False, "scheduler": warm},
    "cosine": {"of_client": True, "scheduler": cosine(10)},
    "plateau": {"of_client": True, "scheduler": plateau},
}


def save_all(directory: Path, stage: int, elastic: bool, names: list[str]) -> None:
    for name in names:
        engine = build(stage, elastic, **RUNS[name])
        train(engine, 3)
        if name == "json":  # by hand
            engine.optimizer.param_groups[0].update(lr=0.003, weight_decay=0.05)
        engine.save_checkpoint(str(directory / name))


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.warnings.append(record.getMessage())


def notes_of(
    directory: Path, stage: int, elastic: bool, name: str, changes: dict[str, Any], *, again: bool = False, **flags: Any
) -> list[str]:
    """What the report of a load says about configured values; it is logged as a warning where it says so aloud."""
    engine = build(stage, elastic, **{**RUNS[name], **changes})
    if again:
        engine.load_checkpoint(str(directory / name))
    kept = _Kept()
    logging.getLogger("zeroelastic").addHandler(kept)
    engine.load_checkpoint(str(directory / name), **flags)
    logging.getLogger("zeroelastic").removeHandler(kept)
    found = [note for note in engine.zeroelastic_report.notes if "configured" in note or MARK in note]
    assert any(MARK in text for text in kept.warnings) is (dist.get_rank() == 0 and any(MARK in one for one in found))
    return found


def ordinary(directory: Path, stage: int, elastic: bool) -> dict[str, list[str]]:
    return {name: notes_of(directory, stage, elastic, name, {}) for name in RUNS if name != "client"}


def changed(directory: Path, stage: int, elastic: bool) -> list[list[str]]:
    new = {"lr": 0.005, "weight_decay": 0.3, "betas": [0.8, 0.9]}
    where = directory, stage, elastic
    return [
        notes_of(*where, "json", new),
        notes_of(*where, "client", {**new, "betas": (0.9, 0.999)}),
        notes_of(*where, "warm", {"lr": 0.005}),
        notes_of(*where, "warm", {"lr": 0.005}, load_lr_scheduler_states=False),
        notes_of(*where, "warm", {"lr": 0.005, "weight_decay": 0.3}, load_optimizer_states=False),
        notes_of(*where, "json, warm", {"lr": 0.005}),
        notes_of(*where, "cosine", {"scheduler": cosine(20)}),
        notes_of(*where, "warmup", {"scheduler": None}),
        notes_of(*where, "warmup", {"lr": 0.5, "scheduler": {**WARMUP, "params": {"warmup_max_lr": 0.5}}}),
        notes_of(*where, "client", {"weight_decay": 0.3}, again=True),
    ]


@pytest.mark.parametrize(("stage", "elastic"), FORMS)
def test_a_load_names_the_configured_values_that_the_saved_ones_replace(
    rank_pool: RankPool, tmp_path: Path, stage: int, elastic: bool
) -> None:
    names = ["json", "client", "warm", "json, warm", "cosine", "warmup"]
    rank_pool.run(save_all, 2, tmp_path, stage, elastic, names)
    ranks = rank_pool.run(changed, 1, tmp_path, stage, elastic)
    json, client, warm_lr, kept, weights, by_json, longer, removed, of_deepspeed, again = ranks[0]
    assert len(json) == 1 and json[0].startswith(
        f"{MARK}, the checkpoint has others: lr of optimizer group 0: 0.005 configured, 0.003 now; lr of optimizer "
        "group 1: 0.005 configured, 0.01 now; betas of optimizer groups 0 to 1: (0.8, 0.9) configured, (0.9, 0.999) "
        "now; weight_decay of optimizer group 0: 0.3 configured, 0.05 now. To train with the configured ones, set them "
        "after load_checkpoint"
    )
    assert client[0].startswith(f"{MARK}, the checkpoint has others: weight_decay of optimizer group 0: 0.3 configured")
    assert client[1:] == [
        "lr of optimizer groups 0 to 1: 0.005 configured, 0.01 now, from the checkpoint, where training may have set it"
    ]
    for found in (warm_lr, weights, by_json):
        assert len(found) == 1
        assert "has others: base_lrs of the scheduler: (0.005, 0.005) configured, (0.01, 0.01) now. To" in found[0]
    assert len(longer) == 1 and "has others: T_max of the scheduler: 20 configured, 10 now. To" in longer[0]
    assert len(removed) == 1 and "lr of optimizer groups 0 to 1: 0.01 configured, 0.00" in removed[0]
    assert kept == of_deepspeed == again == []  # these go on as configured; a second load finds no configured values


@pytest.mark.parametrize(("stage", "elastic"), FORMS)
def test_what_training_made_of_a_value_is_no_other_configuration(
    rank_pool: RankPool, tmp_path: Path, stage: int, elastic: bool
) -> None:
    rank_pool.run(save_all, 1, tmp_path, stage, elastic, [name for name in RUNS if name != "client"])
    for found in rank_pool.run(ordinary, 2, tmp_path, stage, elastic):
        assert set(map(len, found.values())) == {0}, found


def other_loss_scale(directory: Path, stage: int) -> list[list[str]]:
    from training import allow_fp16_on_cpu

    allow_fp16_on_cpu()
    found = []
    for was, now in (
        ({}, {}),
        ({}, {"loss_scale_window": 50, "hysteresis": 3}),
        ({"loss_scale": 8}, {"loss_scale": 4}),
    ):
        precision = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}
        engine = build(stage, True, False, fp16={**precision, **was})
        train(engine, 3)
        engine.save_checkpoint(str(directory / repr(now)))
        engine = build(stage, True, False, fp16={**precision, **now})
        engine.load_checkpoint(str(directory / repr(now)))
        found.append([note for note in engine.zeroelastic_report.notes if "configured" in note])
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_load_names_what_was_configured_otherwise_of_the_loss_scale(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    for same, dynamic, static in rank_pool.run(other_loss_scale, 1, tmp_path, stage):
        assert same == []
        begin = (
            "has others: loss_scale_window of the loss scale: 50 configured, 2 now; hysteresis of the loss scale: 3 "
        )
        assert len(dynamic) == 1 and begin in dynamic[0]
        assert "load_checkpoint, in engine.optimizer.loss_scaler." in dynamic[0]
        assert len(static) == 1 and "loss_scale of the loss scale: 4 configured, 8 now" in static[0]


def test_the_parameters_of_a_scheduler_are_what_it_was_made_with() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    parts = LinearLR(optimizer, 0.25, total_iters=4), cosine(9)(optimizer)
    sequence = scheduler_parameters(SequentialLR(optimizer, [*parts], [4]))
    assert sequence["start_factor of LinearLR 0"] == 0.25 and sequence["T_max of CosineAnnealingLR 1"] == 9
    for make in (warm, cosine(9), plateau, lambda one: OneCycleLR(one, max_lr=0.1, total_steps=50)):
        scheduler: Any = make(optimizer)
        before = scheduler_parameters(scheduler)
        for _ in range(3):
            optimizer.step()
            scheduler.step(*([1.0] if make is plateau else []))
        assert before == scheduler_parameters(scheduler)
