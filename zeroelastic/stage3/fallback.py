"""Walk back over the tags of a run to the newest one that loads; damaged ones are marked and never deleted.

The ranks agree on a tag before any of them opens it. What is wrong with a tag passes it over for the one before it;
what is wrong with the run (another model, another configuration) is raised, whatever the tag.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from zeroelastic.agree import broadcast, settle
from zeroelastic.errors import CheckpointError, UnreadableError, UsageError
from zeroelastic.quarantine import write_mark
from zeroelastic.record import RECORD_NAME
from zeroelastic.report import ResumeReport
from zeroelastic.save_place import recover
from zeroelastic.tags import Tag, check_quickly, check_tag, is_damage, list_run, named_latest

logger = logging.getLogger(__name__)

T = TypeVar("T")


class UnusableError(CheckpointError):
    """A tag that is whole, and that this run cannot go on from all the same: passed over, and not marked."""


@dataclass(slots=True)
class Walk:
    """A walk over tags, newest first. ``remaining`` is known to rank 0 alone, ``passed`` are sentences on both."""

    root: Path
    remaining: list[Tag] | None = None
    passed: list[str] = field(default_factory=list)


def walk_back(
    root: Path,
    candidates: Callable[[], Sequence[Tag]],
    load: Callable[[str, str, tuple[str, ...]], T],
    *,
    refuse: Callable[[Tag], str | None] = lambda tag: None,
) -> tuple[T | None, tuple[str, ...]]:
    """The result of the first load that succeeds, None where none does, and the tags before it with the reasons.

    ``candidates`` are asked for once, and ``refuse`` for each, on rank 0; ``load(directory, tag, passed over so far)``
    runs on every rank and raises the same there. A tag that is damaged although its commit record says that it was
    finished gets a mark of quarantine, and is not read by the next walk. Whatever ``load`` raises that is no
    CheckpointError ends the walk. Collective.
    """
    walk = Walk(root)

    def choose() -> tuple[str, str, tuple[str, ...]] | None:
        if dist.get_rank() != 0:
            return None
        if walk.remaining is None:
            walk.remaining = list(candidates())
        tag = _next(walk, refuse)
        return None if tag is None else (str(tag.tag_dir.parent), tag.tag_dir.name, tuple(walk.passed))

    while True:
        chosen = broadcast(settle(choose))
        if chosen is None:
            return None, broadcast(tuple(walk.passed))
        directory, name, passed = chosen
        try:
            return load(directory, name, passed), passed
        except CheckpointError as error:
            if dist.get_rank() == 0:
                walk.passed.append(f"{name}: {error}")
                logger.warning("passed over %s, which cannot be loaded: %s", name, error)
                _quarantine(Path(directory) / name, error)


def _next(walk: Walk, refuse: Callable[[Tag], str | None]) -> Tag | None:
    """The newest of the remaining tags that looks whole; those before it are passed over."""
    while walk.remaining:
        tag = walk.remaining.pop(0)
        problem = refuse(tag)
        if problem is None:
            verdict = check_tag(tag, check_quickly)
            if verdict is None:
                return tag
            problem = " ".join(verdict.problems)
            if not (verdict.undecided or verdict.quarantined) and tag.unfinished is None:
                _quarantine(Path(str(tag.tag_dir)), CheckpointError(problem))
        walk.passed.append(f"{tag.name}: {problem}")
        logger.warning("passed over %s: %s", tag.name, problem)
    return None


def _quarantine(tag_dir: Path, error: CheckpointError) -> None:
    """Mark what was finished once and is damaged now. A tag without a record never was, or is not of ours to judge."""
    if isinstance(error, UnusableError) or not is_damage(error) or not (tag_dir / RECORD_NAME).exists():
        return
    try:
        write_mark(tag_dir, str(error))
    except (OSError, UnreadableError) as problem:
        logger.warning("%s is damaged and could not be marked so (%s): the next walk reads it again", tag_dir, problem)
    else:
        logger.warning("%s is quarantined; nothing of it was deleted", tag_dir)


def load_newest(root: Path, load: Callable[[str, str], T], engine: Any) -> tuple[T] | None:
    """What ``load(directory, tag)`` returns for the tag that ``latest`` names, or the newest older one that loads.

    Where ``latest`` cannot be read, or names nothing that is there, the walk begins at the newest tag; newer ones than
    it names are left alone, because somebody may have pointed it at an older tag on purpose. None where there are no
    tags. Raises CheckpointError where there are some and none can be loaded. Collective.
    """

    def candidates() -> Sequence[Tag]:
        named, problem = named_latest(root)
        if named is not None:
            with suppress(OSError):
                recover(root / named)
        try:
            run = list_run(root)
        except UsageError:
            return ()
        if run.in_folders:  # which have a ``latest`` each
            return ()
        tags = run.tags
        at = next((i for i, tag in enumerate(tags) if tag.name == named), None)
        if at is not None:
            return tags[at:]
        said = problem or (f"names {named!r}, which is not there" if named else "is not there")
        logger.warning("%s/latest: %s. The newest tag that verifies is taken instead", root, said.rstrip("."))
        return tags

    def attempt(directory: str, tag: str, passed: tuple[str, ...]) -> tuple[str, T]:
        return tag, load(directory, tag)

    found, passed = walk_back(root, candidates, attempt)
    if found is None:
        if not passed:
            return None
        raise none_loads(root, passed)
    tag, outcome = found
    if passed:
        note = f"FELL BACK to {tag}; passed over: {'; '.join(passed)}"
        report: ResumeReport | None = getattr(engine, "zeroelastic_report", None)
        if report is not None:
            engine.zeroelastic_report = replace(report, notes=(note, *report.notes))
        if dist.get_rank() == 0:
            logger.warning("%s: %s", root, note)
    return (outcome,)


def none_loads(root: Path, passed: Sequence[str]) -> CheckpointError:
    """The error for a directory whose every tag was passed over."""
    listed = "".join(f"\n  - {one}" for one in passed)
    return CheckpointError(
        f"{root}: none of the checkpoints can be loaded:{listed}\nThe engine may hold damaged state: do not train "
        "on it. To begin anew, give another directory."
    )
