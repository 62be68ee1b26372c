"""The tag that a run continues from, and the file ``latest``: found, repaired, and set back to an older tag.

A job on another host may save at the same time, so the directory is listed again before and after the file is written.
A repaired ``latest`` gets the time of the commit that it names, so that it does not look like one that was set back to
an older tag (``order.pointed_at``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from zeroelastic.errors import CheckpointError, UnreadableError, UsageError
from zeroelastic.io.paths import FilePath
from zeroelastic.runs.candidates import (
    Check,
    PassedOver,
    Run,
    check_quickly,
    check_tag,
    find_newest,
    going_on_from,
    list_run,
)
from zeroelastic.runs.names import LATEST, named_latest
from zeroelastic.runs.order import Tag, left_behind, without_other_runs
from zeroelastic.runs.run_store import RunStore


@dataclass(frozen=True, slots=True)
class Latest:
    """``tag`` is the newest that verifies among ``run.tags`` from ``at`` on, from which the run continues.

    ``at`` is more than 0 where ``latest`` was set back to an older tag. ``named`` is the tag that the file names,
    ``problem`` the problem with the file; ``written``: it was, or would be, changed to name ``tag``.
    """

    run: Run
    at: int
    tag: Tag | None
    passed: tuple[PassedOver, ...]
    named: str | None
    problem: str | None
    written: bool = False

    @property
    def newer(self) -> tuple[Tag, ...]:
        """Tags that were committed later than the one ``latest`` was set back to."""
        return self.run.tags[: self.at]

    @property
    def left(self) -> tuple[Tag, ...]:
        """Tags of branches that the run has left."""
        return () if self.tag is None else left_behind(self.run.tags, self.tag)


def find_latest(root: FilePath, check: Check, verdicts: dict[Tag, PassedOver | None] | None = None) -> Latest:
    """The checkpoint that ``resume`` would load. Raises UsageError where there are none.

    Where runs of different parameters save here, it is that of the run whose tag ``latest`` names. ``verdicts`` as in
    ``find_newest``. Example::

        find_latest(Path("ckpt"), check_quickly).tag
    """
    named, problem = named_latest(root)
    run = _continued(root, named)
    at = 0 if run.in_folders else going_on_from(root, run.tags)
    return Latest(run, at, *find_newest(run.tags[at:], check, verdicts), named, problem)


def fix_latest(root: Path, check: Check, *, dry_run: bool = False) -> Latest:
    """Make ``latest`` name the checkpoint that ``find_latest`` finds. Raises UsageError, OSError.

    Raises UnreadableError where a newer tag may be whole and cannot be read now. A ``latest`` that was set back to an
    older tag is kept, and so is one that names a commit made meanwhile.
    """
    verdicts: dict[Tag, PassedOver | None] = {}
    written = False
    store = RunStore(root)
    while True:
        written_at = store.written_at()
        found = find_latest(root, check, verdicts)
        _refuse_folders(found.run, "--fix")
        if found.tag is not None and found.tag.name != found.named:
            _refuse_unreadable(found.passed)
        if found.tag is None or found.tag.name == found.named or dry_run:
            wrong = found.tag is not None and found.tag.name != found.named
            return replace(found, written=written or wrong)
        if store.written_at() != written_at or _commits(found.run) != _commits(_continued(root, found.named)):
            continue
        store.write_latest(found.tag.name, written_at if found.at else found.tag.modified_at)
        written = True
        if _commits(_continued(root, found.tag.name)) == _commits(found.run):
            return replace(found, written=True)


def _continued(root: FilePath, named: str | None) -> Run:
    """The tags of a directory without those of runs of other parameters than the tag ``named`` has, or the newest."""
    run = list_run(root)
    tag = next((tag for tag in run.tags if tag.name == named), run.tags[0])
    return replace(run, tags=without_other_runs(run.tags, tag.trained_params))


def set_latest(root: Path, name: str, check: Check = check_quickly, *, dry_run: bool = False) -> Latest:
    """Roll back: make ``latest`` name this tag, so that the next start of the job continues from it.

    Raises UsageError where there is no such tag, CheckpointError where it is damaged, UnreadableError, OSError::

        set_latest(Path("ckpt"), "global_step100")
    """
    run = list_run(root)
    _refuse_folders(run, "--set")
    at = next((i for i, tag in enumerate(run.tags) if tag.name == name), None)
    if at is None:
        there = ", ".join(tag.name for tag in run.tags[:8])
        raise UsageError(f"{root}: has no tag {name}. There are, newest first: {there}.")
    verdict = check_tag(run.tags[at], check)
    if verdict is not None:
        kind = UnreadableError if verdict.undecided else CheckpointError
        raise kind(f"{run.tags[at].tag_dir}: {verdict.problems[0]} {LATEST} was not changed.")
    named, problem = named_latest(root)
    if not dry_run:
        RunStore(root).roll_back(name, run.tags)
    return Latest(run, at, run.tags[at], (), named, problem, True)


def _refuse_unreadable(passed: Iterable[PassedOver]) -> None:
    for verdict in passed:
        if verdict.may_be_newest:
            raise UnreadableError(
                f"{verdict.tag.tag_dir}: {verdict.problems[0].rstrip('.')}. It may be whole, and is newer than every "
                f"tag that verifies: {LATEST} was not changed. Run it again where this tag can be read, or name a "
                "tag with --set.",
                remedy="",
            )


def _commits(run: Run) -> frozenset[tuple[str, str | None, float]]:
    return frozenset((tag.name, tag.save_id, tag.modified_at) for tag in run.tags)


def _refuse_folders(run: Run, option: str) -> None:
    if run.in_folders:
        raise UsageError(
            f"{run.root}: its checkpoints are in folders, which have a latest each; {option} is for tags. Give one "
            "of the folders."
        )
