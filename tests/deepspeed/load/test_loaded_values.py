"""What a file says is checked before a load touches anything, value by value."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_files import record_again
from training import Job, build_engine, train_and_save, train_step

from zeroelastic.testing import RankPool, compare_states, fingerprint, gather_state

Edit = Callable[[dict[str, Any]], None]


class Mine:
    """A loss scaler that DeepSpeed does not have."""

    cur_scale = 8.0


def of_scaler(change: Callable[[dict[str, Any]], None]) -> Edit:
    return lambda root: change(vars(root["optimizer_state_dict"]["loss_scaler"]))


def of_options(**values: Any) -> Edit:
    def edit(root: dict[str, Any]) -> None:
        root["optimizer_state_dict"]["zeroelastic"]["param_groups"][0].update(values)

    return edit


def another_scaler(root: dict[str, Any]) -> None:
    root["optimizer_state_dict"]["loss_scaler"] = Mine()


OPTIM: dict[str, tuple[Edit, str]] = {
    "scaler without a scale": (of_scaler(lambda scaler: scaler.pop("cur_scale")), "loss_scaler has cur_scale None"),
    "a scale of text": (of_scaler(lambda scaler: scaler.update(cur_scale="high")), "loss_scaler has cur_scale 'high'"),
    "a scale of nothing": (of_scaler(lambda scaler: scaler.update(cur_scale=0)), "loss_scaler has cur_scale 0"),
    "a window of text": (of_scaler(lambda scaler: scaler.update(scale_window=[])), "loss_scaler has scale_window []"),
    "another scaler": (another_scaler, f"loss_scaler is a {__name__}.Mine"),
    "a number of text": (of_scaler(lambda scaler: scaler.update(cur_iter="1")), "loss_scaler has cur_iter '1'"),
    "a rate of text": (of_options(lr="fast"), "lr of optimizer group 0 is 'fast' in the checkpoint and "),
    "betas of one number": (of_options(betas=0.9), "betas of optimizer group 0 is 0.9 in the checkpoint and ("),
}
MODEL: dict[str, tuple[Edit, str]] = {
    "no schedule": (lambda root: root.update(lr_scheduler=None), "lr_scheduler is None"),
    "half a schedule": (lambda root: root["lr_scheduler"].pop("base_lrs"), "lr_scheduler lacks base_lrs"),
    "no counter": (lambda root: root.pop("skipped_steps"), "skipped_steps is missing"),
    "a counter of text": (lambda root: root.update(global_samples="7"), "global_samples is '7'"),
    "another buffer": (
        lambda root: root["module"].update(batches_seen=torch.zeros(3)),
        "buffer batches_seen is of shape [3], and of shape [2] in the run",
    ),
    "no buffer": (lambda root: root["module"].update(batches_seen="2"), "buffer batches_seen is no tensor"),
}


def load_each(job: Job, directory: str, tags: list[str]) -> list[tuple[str, str, list[str]]]:
    """The error of each load, and in what it changed the state of the engine."""
    engine = build_engine(job)
    train_step(engine, 0)
    before, found = fingerprint(gather_state(engine)), []
    for tag in tags:
        try:
            engine.load_checkpoint(directory, tag=tag)
            found.append(("", "", []))
        except Exception as error:
            changed = compare_states(before, fingerprint(gather_state(engine)))
            found.append((type(error).__name__, str(error), changed))
    return found


def test_a_value_that_cannot_be_taken_is_named_and_nothing_is_touched(rank_pool: RankPool, tmp_path: Path) -> None:
    """Two ranks saved, whose files agree; three load them into one engine, file after file."""
    job = Job(precision="fp16")
    rank_pool.run(train_and_save, 2, job, str(tmp_path), before=1, after=0, tag="good")
    for edits, pattern in ((OPTIM, "*optim_states.pt"), (MODEL, "*model_states.pt")):
        for tag, (edit, _) in edits.items():
            shutil.copytree(tmp_path / "good", tmp_path / tag)
            for path in (tmp_path / tag).glob(pattern):
                root = torch.load(path, weights_only=False)
                edit(root)
                torch.save(root, path)
            record_again(tmp_path / tag)
    every = OPTIM | MODEL
    other = job.other(options={"allow_globals": [f"{__name__}.Mine"]})
    outcomes = rank_pool.run(load_each, 3, other, str(tmp_path), list(every))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    for (tag, (_, words)), (kind, text, changed) in zip(every.items(), outcomes[0], strict=True):
        assert kind in ("CheckpointError", "UnsupportedError", "LayoutMismatchError"), (tag, text)
        assert words in text and tag in text, (tag, text)
        assert changed == [], tag


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "rigid"])
def test_a_load_that_leaves_the_schedule_out_does_not_ask_for_it(
    rank_pool: RankPool, tmp_path: Path, elastic: bool
) -> None:
    rank_pool.run(train_and_save, 2, Job(elastic=elastic), str(tmp_path), before=1, after=0, tag="good")
    for path in (tmp_path / "good").glob("*model_states.pt"):
        root = torch.load(path, weights_only=False)
        root["lr_scheduler"] = None
        torch.save(root, path)
    record_again(tmp_path / "good")
    assert rank_pool.run(load_without_schedule, 3, Job().other(), str(tmp_path)) == [1, 1, 1]


def test_the_schedule_of_an_older_torch_is_taken(rank_pool: RankPool, tmp_path: Path) -> None:
    """Schedulers of torch have ``_is_initial`` in their state since they have set it in their constructor."""
    rank_pool.run(train_and_save, 2, Job(), str(tmp_path), before=1, after=0, tag="good")
    for path in (tmp_path / "good").glob("*model_states.pt"):
        root = torch.load(path, weights_only=False)
        root["lr_scheduler"].pop("_is_initial", None)
        torch.save(root, path)
    record_again(tmp_path / "good")
    assert rank_pool.run(load_schedule, 3, Job().other(), str(tmp_path)) == [(1, False)] * 3


@pytest.mark.parametrize("stage", [2, 3])
def test_a_buffer_that_is_cast_is_said_to_be(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    rank_pool.run(train_and_save, 2, Job(stage=stage), str(tmp_path), before=1, after=0, tag="good")
    casts = rank_pool.run(load_into_other_buffers, 3, Job(stage=stage).other(), str(tmp_path))
    assert casts == [[[], ["buffers: cast from float32 to float16"]]] * 3


def load_into_other_buffers(job: Job, directory: str) -> list[list[str]]:
    engine, found = build_engine(job), list[list[str]]()
    for dtype in (torch.float32, torch.float16):
        engine.module.batches_seen = engine.module.batches_seen.to(dtype)
        engine.load_checkpoint(directory, tag="good")
        found.append([note for note in engine.zeroelastic_report.notes if note.startswith("buffers: ")])
    return found


def load_schedule(job: Job, directory: str) -> tuple[int, bool]:
    engine = build_engine(job)
    engine.load_checkpoint(directory, tag="good")
    return engine.lr_scheduler.last_epoch, getattr(engine.lr_scheduler, "_is_initial", False)


def load_without_schedule(job: Job, directory: str) -> int:
    engine = build_engine(job)
    engine.load_checkpoint(directory, tag="good", load_lr_scheduler_states=False)
    return int(engine.global_steps)


class Countdown:
    """A scheduler of one's own, whose state is no mapping."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: type) -> None:
        self.optimizer, self.kind, self.steps = optimizer, kind, 0

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + self.steps)

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> object:
        return self.steps if self.kind is int else [self.steps]

    def load_state_dict(self, state: Any) -> None:
        self.steps = state if self.kind is int else state[0]


def train_by_countdown(job: Job, directory: str, kind: type, *, loads: bool) -> int:
    engine = build_engine(job)
    engine.lr_scheduler = Countdown(engine.optimizer.optimizer, kind)
    if loads:
        engine.load_checkpoint(directory)
        return int(engine.lr_scheduler.steps)
    for step in range(2):
        train_step(engine, step)
    engine.save_checkpoint(directory)
    return int(engine.lr_scheduler.steps)


@pytest.mark.parametrize("kind", [int, list])
def test_a_scheduler_whose_state_is_no_mapping_resumes(rank_pool: RankPool, tmp_path: Path, kind: type) -> None:
    """DeepSpeed saves and loads whatever the scheduler has; such a run could be saved, and not loaded."""
    assert rank_pool.run(partial(train_by_countdown, loads=False), 2, Job(), str(tmp_path), kind) == [2, 2]
    assert rank_pool.run(partial(train_by_countdown, loads=True), 3, Job().other(), str(tmp_path), kind) == [2] * 3
