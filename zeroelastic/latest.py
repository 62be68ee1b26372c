"""The tag that a run goes on from, and the file ``latest``: found, mended, and pointed at an older tag.

A job may save while this works, on another host: what was looked at is looked at again before the file is written, and
after. A mended ``latest`` gets the time of the commit that it names, so that it is never taken for one that somebody
pointed at an older tag (``commit_order.pointed_at``).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from zeroelastic.commit_order import Tag, left_behind
from zeroelastic.errors import CheckpointError, UnreadableError, UsageError
from zeroelastic.record import write_atomically
from zeroelastic.storage import FilePath
from zeroelastic.tag_names import LATEST
from zeroelastic.tags import Check, PassedOver, Run, check_quickly, check_tag, going_on_from, list_run, named_latest


@dataclass(frozen=True, slots=True)
class Latest:
    """``tag`` is the newest that verifies of those that the run goes on from: ``run.tags`` from ``at`` on.

    ``at`` is more than 0 where ``latest`` was pointed at an older tag. ``named`` is what the file names, ``problem``
    what is wrong with it; ``written``: it was, or would be, made to name ``tag``.
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
        """Tags that were committed later, and from which ``latest`` was pointed away."""
        return self.run.tags[: self.at]

    @property
    def left(self) -> tuple[Tag, ...]:
        """Tags of branches that the run has left."""
        return () if self.tag is None else left_behind(self.run.tags, self.tag)


def find_latest(root: FilePath, check: Check) -> Latest:
    """The checkpoint that ``resume`` would take. Raises UsageError where there are none.

    Example::

        find_latest(Path("ckpt"), check_quickly).tag
    """
    return _find(root, check, {})


def _find(root: FilePath, check: Check, verdicts: dict[Tag, PassedOver | None]) -> Latest:
    named, problem = named_latest(root)
    run = list_run(root)
    at = 0 if run.in_folders else going_on_from(root, run.tags)
    passed: list[PassedOver] = []
    for tag in run.tags[at:]:
        if tag not in verdicts:
            verdicts[tag] = check_tag(tag, check)
        verdict = verdicts[tag]
        if verdict is None:
            return Latest(run, at, tag, tuple(passed), named, problem)
        passed.append(verdict)
    return Latest(run, at, None, tuple(passed), named, problem)


def fix_latest(root: Path, check: Check, *, dry_run: bool = False) -> Latest:
    """Let ``latest`` name the checkpoint that ``find_latest`` finds, where it does not. Raises UsageError, OSError.

    Never moves it from an older tag that it was pointed at, nor back behind a commit that is made meanwhile.
    """
    verdicts: dict[Tag, PassedOver | None] = {}
    written = False
    while True:
        modified = _modified_ns(root)
        found = _find(root, check, verdicts)
        _refuse_folders(found.run, "--fix")
        if found.tag is None or found.tag.name == found.named or dry_run:
            wrong = found.tag is not None and found.tag.name != found.named
            return replace(found, written=written or wrong)
        if _modified_ns(root) != modified or _commits(list_run(root)) != _commits(found.run):
            continue
        time_of_it = modified / 1e9 if found.at else found.tag.modified_at
        write_atomically(root / LATEST, found.tag.name.encode(), modified_at=time_of_it)
        written = True
        if _commits(list_run(root)) == _commits(found.run):
            return replace(found, written=True)


def set_latest(root: Path, name: str, *, dry_run: bool = False) -> Latest:
    """Roll back: let ``latest`` name this tag, from which the next start of the job goes on then.

    Raises UsageError where there is no such tag, CheckpointError where it is damaged, UnreadableError, OSError::

        set_latest(Path("ckpt"), "global_step100")
    """
    run = list_run(root)
    _refuse_folders(run, "--set")
    at = next((i for i, tag in enumerate(run.tags) if tag.name == name), None)
    if at is None:
        there = ", ".join(tag.name for tag in run.tags[:8])
        raise UsageError(f"{root}: has no tag {name}. There are, newest first: {there}.")
    verdict = check_tag(run.tags[at], check_quickly)
    if verdict is not None:
        kind = UnreadableError if verdict.undecided else CheckpointError
        raise kind(f"{run.tags[at].tag_dir}: {verdict.problems[0]} {LATEST} was not changed.")
    named, problem = named_latest(root)
    if not dry_run:
        last, now = max(tag.modified_at for tag in run.tags), time.time()
        write_atomically(root / LATEST, name.encode(), modified_at=now if now > last else last + 1)
    return Latest(run, at, run.tags[at], (), named, problem, True)


def _commits(run: Run) -> frozenset[tuple[str, str | None, float]]:
    return frozenset((tag.name, tag.save_id, tag.modified_at) for tag in run.tags)


def _refuse_folders(run: Run, option: str) -> None:
    if run.in_folders:
        raise UsageError(f"{run.root}: its checkpoints are in folders, which have a latest each; {option} is for tags.")


def _modified_ns(root: Path) -> int:
    try:
        return os.stat(root / LATEST).st_mtime_ns
    except FileNotFoundError:
        return 0
