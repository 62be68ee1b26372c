"""A job that is killed between any two files of a save goes on from the newest complete save, or says what to do.

The files are those of the Trainer, accelerate, Lightning and Fabric, in a new directory and in one that is used again,
saved at once and in the background. What goes on is exact in state, schedule, generators and samples, on another number
of ranks.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from boundaries import distinct
from extended import with_swept
from torn_jobs import FIRST, LAST, SECOND, Case, Run, another_trainer, resume, save_twice

from zeroelastic.testing import RankError, RankPool, compare_states

FRAMEWORKS = ("accelerate", "Trainer", "Lightning", "Fabric")
RENAMED, BEHIND = {"is_used": True, "is_async": False, "exchanges": False}, {"is_used": False, "is_async": True}
PAIRS = [Case(framework, **how) for framework in FRAMEWORKS for how in (RENAMED, BEHIND)]
PAIRS += [Case("accelerate", is_used=True, is_async=True), Case("Lightning", is_used=False, is_async=False)]
"""Each framework with each of what a case may be, and each two of these; real kills have the rest (``KILLS``)."""
REST = [Case(framework, *how) for framework in FRAMEWORKS for how in itertools.product((True, False), repeat=2)]
LIMIT_S = 250.0
SAYS_WHAT_TO_DO = {
    "accelerate": ("CheckpointError: ", "Load another checkpoint, and save into a new directory each time"),
    "Lightning": ("MissingFileError: ", "or its save was cut short."),
    "Fabric": ("MissingFileError: ", "or its save was cut short."),
}


def named(case: Case) -> str:
    how = f"{case.framework}, {'used' if case.is_used else 'new'}, {'background' if case.is_async else 'at once'}"
    return how if case.exchanges else f"{how}, by two renames"


def check(case: Case, references: list[list[Run]], seen: list[Run], image: Path) -> int:
    """Return the step from which the ranks have gone on; 0 where they have said what to do."""
    where = f"{image.name}: {sorted(path.name for path in image.rglob('*'))}"
    if seen[0].error:
        assert case.is_used == (case.framework == "accelerate") and case.framework != "Trainer", (where, seen[0].error)
        for text in SAYS_WHAT_TO_DO[case.framework]:
            assert text in seen[0].error, (where, seen[0].error)
        assert all(run.error for run in seen), where
        return 0
    start = seen[0].start
    assert start in (FIRST, SECOND), where
    fitting = [
        reference
        for reference in references
        if start in reference[0].state and compare_states(reference[0].state[start], seen[0].state[start]) == []
    ]
    assert fitting, f"{where}: the state at step {start} is none that was saved"
    for rank, run in enumerate(seen):
        saved = fitting[0][min(rank, 1)]
        if rank < 2 and start in saved.draws:
            assert run.draws[start] == saved.draws[start], where
        end = saved.start + len(saved.rates)
        assert run.rates[: end - start] == pytest.approx(saved.rates[start - saved.start :], rel=1e-12), where
        assert run.samples[: end - start] == saved.samples[start - saved.start :], where
        assert start + len(run.rates) == LAST, where
    return start


@pytest.mark.extended
@pytest.mark.parametrize("case", with_swept(dict.fromkeys([*PAIRS, *REST]), {*REST} - {*PAIRS}), ids=named)
def test_a_save_that_is_killed_anywhere(frameworks_pool: RankPool, tmp_path: Path, case: Case) -> None:
    references = []
    run = tmp_path / "run"
    if case.framework == "Trainer" and case.is_used:  # by a run that began anew in it
        references = [frameworks_pool.run(another_trainer, 2, str(run), timeout=LIMIT_S)]
    references = [
        frameworks_pool.run(save_twice, 2, case, str(run), str(tmp_path / "images"), timeout=LIMIT_S),
        *references,
    ]
    assert sum(path.is_dir() for path in (tmp_path / "images").iterdir()) > 20
    images = distinct(tmp_path / "images")
    starts = []
    for image in images:
        seen = frameworks_pool.run(resume, 3, case, str(image), timeout=LIMIT_S)
        starts.append(check(case, references, seen, image))
    assert starts[-1] == SECOND and FIRST in starts, starts
    if len(references) == 1:  # else the newest at first is the one that is used again
        done = [start for start in starts if start]
        assert done == sorted(done), starts


KILLS = {
    "accelerate": [(0, "scheduler.bin"), (1, "random_states_1.pkl")],
    "Trainer": [(0, "scheduler.pt"), (1, "rng_state_1.pth"), (0, "trainer_state.json")],
    "Lightning": [(0, "latest")],
    "Fabric": [(0, "latest")],
}


@pytest.mark.parametrize(
    ("case", "kill"),
    [
        pytest.param(
            Case(framework, is_used=True, is_async=False), kill, marks=[pytest.mark.quick] * (kill == kills[0])
        )
        for framework, kills in KILLS.items()
        for kill in kills
    ],
    ids=lambda value: named(value) if isinstance(value, Case) else value[1],
)
def test_a_job_that_is_killed_between_two_files_goes_on(
    frameworks_pool: RankPool, tmp_path: Path, case: Case, kill: tuple[int, str]
) -> None:
    """With real kills of all ranks, in a directory that is used again."""
    images = str(tmp_path / "images")
    whole = frameworks_pool.run(save_twice, 2, case, str(tmp_path / "whole"), images, timeout=LIMIT_S)
    run = tmp_path / "run"
    if case.framework == "Trainer":
        frameworks_pool.run(another_trainer, 2, str(run), timeout=LIMIT_S)
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        frameworks_pool.run(save_twice, 2, case, str(run), images, kill, timeout=LIMIT_S)
    check(case, [whole], frameworks_pool.run(resume, 3, case, str(run), timeout=LIMIT_S), run)
