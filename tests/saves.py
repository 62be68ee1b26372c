"""Checkpoints that serve many loads: what a run saved and did afterwards, and what every resume of it must match."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from saved_files import record_of
from training import LOSS_RTOL, Job, Outcome, resume, train_and_save

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
        return record_of(self.tag_dir).content_root


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


def save_each(jobs: Sequence[Job], directory: str, **steps: int) -> list[Outcome]:
    return [train_and_save(job, f"{directory}/{number}", **steps) for number, job in enumerate(jobs)]


def resume_each(jobs: Sequence[Job], directory: str, **steps: int) -> list[Outcome]:
    return [resume(job, f"{directory}/{number}", **steps) for number, job in enumerate(jobs)]


def check_each(
    rank_pool: RankPool, runs: Mapping[str, tuple[Job, Job]], sizes: tuple[int, int], directory: Path, **steps: int
) -> dict[str, Saved]:
    """Save the first run of each pair on so many ranks, resume by the second on others, and compare: two starts."""
    (before, after), where = sizes, str(directory)
    saves = rank_pool.run(save_each, before, [job for job, _ in runs.values()], where, timeout=300, **steps)
    resumes = rank_pool.run(resume_each, after, [other for _, other in runs.values()], where, timeout=300, **steps)
    found: dict[str, Saved] = {}
    for number, (name, (job, _)) in enumerate(runs.items()):
        assert all(outcomes[number].state == saves[0][number].state for outcomes in saves), name
        found[name] = Saved(f"{where}/{number}", saves[0][number])
        check_resumed(found[name], [outcomes[number] for outcomes in resumes], job, what=name)
        assert resumes[0][number].report.root_matches, name
    return found


def check_resumed(saved: Saved, outcomes: list[Outcome], job: Job, *, what: str = "") -> None:
    """Every rank sees the saved state; training goes on as the uninterrupted run did."""
    for rank, outcome in enumerate(outcomes):
        assert compare_states(saved.outcome.state, outcome.state) == [], f"{what} rank {rank}"
        assert outcome.gathered == saved.outcome.gathered, f"{what} rank {rank}"
        assert outcome.report == outcomes[0].report
        assert outcome.client_state["note"] == "hello"
        steps, distinct = outcome.steps
        assert distinct in (0, sum(step is not None for step in steps)), "sub-groups share one step tensor"
        for got, want in zip(outcome.losses, saved.outcome.losses, strict=True):
            assert got == pytest.approx(want, rel=LOSS_RTOL[job.precision])
