"""Checkpoints that serve many loads: what a run saved and did afterwards, and what every resume of it must match."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from training import LOSS_RTOL, Job, Outcome, train_and_save

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.testing import RankPool, compare_states


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk, and what the run that wrote it looked like and did afterwards."""

    directory: str
    outcome: Outcome

    @property
    def tag_dir(self) -> Path:
        return next(Path(self.directory).glob("global_step*"))

    @property
    def root(self) -> str:
        record = read_record(self.tag_dir)
        assert record is not None
        return record.content_root


Saver = Callable[[Job, int], Saved]


def save_once(rank_pool: RankPool, directories: pytest.TempPathFactory, **steps: int) -> Saver:
    """A function that runs a job and saves it, once for each job and world size."""
    made: dict[str, Saved] = {}

    def save(job: Job, world_size: int) -> Saved:
        key = f"{job}@{world_size}"
        if key not in made:
            directory = str(directories.mktemp("save"))
            outcomes = rank_pool.run(train_and_save, world_size, job, directory, **steps)
            assert all(outcome.state == outcomes[0].state for outcome in outcomes)
            made[key] = Saved(directory, outcomes[0])
        return made[key]

    return save


def check_resumed(saved: Saved, outcomes: list[Outcome], job: Job) -> None:
    """Every rank sees the saved state; training goes on as the uninterrupted run did."""
    for rank, outcome in enumerate(outcomes):
        assert compare_states(saved.outcome.state, outcome.state) == [], f"rank {rank}"
        assert outcome.gathered == saved.outcome.gathered, f"rank {rank}"
        assert outcome.report == outcomes[0].report
        assert outcome.client_state["note"] == "hello"
        steps, distinct = outcome.steps
        assert distinct in (0, sum(step is not None for step in steps)), "sub-groups share one step tensor"
        for got, want in zip(outcome.losses, saved.outcome.losses, strict=True):
            assert got == pytest.approx(want, rel=LOSS_RTOL[job.precision])
