"""Walk back over the tags of a run to the newest one that loads; damaged tags are marked and never deleted.

The ranks agree on a tag before any of them opens it. A problem of the tag passes it over for the one before it; a
problem of the run (another model, another configuration) is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.marks import write_mark
from zeroelastic.checkpoint.one_save import was_saved_again
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.kinds import opaque_tensor_parallel
from zeroelastic.deepspeed.node_local.node_tags import problem_over_nodes, seen_alike, tags_of_this_run
from zeroelastic.distributed.collective import all_or_raise, broadcast
from zeroelastic.errors import CheckpointError, UnreadableError, finding
from zeroelastic.io.paths import FilePath, PinnedPath, as_path
from zeroelastic.io.storage import file_size
from zeroelastic.report import ResumeReport
from zeroelastic.runs.candidates import check_quickly, check_tag, is_damage
from zeroelastic.runs.names import named_latest
from zeroelastic.runs.order import Tag
from zeroelastic.runs.tag_directory import MAX_LOOKS, open_tag

logger = logging.getLogger(__name__)

T = TypeVar("T")


class UnusableError(CheckpointError):
    """A complete tag that this run cannot resume from: it is passed over and not marked."""


class _Tried(NamedTuple):
    """A tag that is tried, and its directory, pinned when that began."""

    tag: Tag
    opened: FilePath


class _Step(NamedTuple):
    """The next tag, what rank 0 sees wrong with it, whether that is damage, and the tags passed over so far."""

    directory: str
    name: str
    problem: str | None
    damage: bool
    passed: tuple[str, ...]


def walk_back(
    root: FilePath,
    tags: Sequence[Tag],
    load: Callable[[str, str, tuple[str, ...]], T],
    *,
    engine: Engine,
    postpone: Callable[[Tag], str | None] = lambda tag: None,
) -> tuple[T | None, tuple[str, ...]]:
    """The result of the first load that succeeds, None where none does, and the tags before it with the reasons.

    Rank 0's ``tags`` count, newest first; one for which ``postpone`` gives a reason there is tried after all others.
    ``load(directory, tag, passed over so far)`` runs on every rank and raises the same there. A tag that is damaged
    although its commit record says that it was finished gets a mark of quarantine, and is not read by the next walk;
    where nodes have disks of their own, nothing is marked, since what is missing may come back. One that was saved
    again, or written to, since it was first looked at is tried again instead. Errors of ``load`` other than
    CheckpointError and UnreadableError end the walk. Collective.
    """
    remaining, postponed, passed, tried = list(tags), list[Tag](), list[str](), list[_Tried]()

    def choose() -> _Step | None:
        return _next(remaining, postponed, passed, tried, postpone) if dist.get_rank() == 0 else None

    def pass_over(name: str, tag_dir: FilePath, error: CheckpointError | UnreadableError, *, damage: bool) -> None:
        # One node of several sees the same on all of its ranks, but not what the others have.
        alike = not damage or (not engine.use_node_local_storage() and seen_alike(tag_dir))
        if dist.get_rank() != 0:
            return
        tag, opened = tried[-1]
        changed = was_saved_again(opened)
        if damage and alike and not changed:
            _quarantine(opened, error)
            changed = was_saved_again(opened)
        if changed and sum(other.tag is tag for other in tried) < MAX_LOOKS:
            logger.warning("%s: was saved again while it was tried, and is tried again (%s)", name, finding(error))
            remaining.insert(0, tag)
            return
        passed.append(f"{name}: {finding(error)}")
        logger.warning("passed over %s: %s", name, finding(error))

    while True:
        step = broadcast(all_or_raise(choose))
        if step is None:
            return None, broadcast(tuple(passed))
        tag_dir = as_path(step.directory) / step.name
        if step.problem is not None:
            problem = problem_over_nodes(tag_dir, step.problem, opaque_tensor_parallel(engine))
            if problem is not None:
                pass_over(step.name, tag_dir, CheckpointError(problem), damage=step.damage)
                continue
        try:
            return load(step.directory, step.name, step.passed), step.passed
        except (CheckpointError, UnreadableError) as error:
            pass_over(step.name, tag_dir, error, damage=True)


def _next(
    remaining: list[Tag],
    postponed: list[Tag],
    passed: list[str],
    tried: list[_Tried],
    postpone: Callable[[Tag], str | None],
) -> _Step | None:
    """The newest of the remaining tags, then of the postponed ones; quarantined tags are passed over."""
    while remaining or postponed:
        late = not remaining
        tag = (postponed if late else remaining).pop(0)
        problem = None if late else postpone(tag)
        if problem is not None:
            postponed.append(tag)
        tried.append(_Tried(tag, _opened(tag.tag_dir)))
        verdict = check_tag(tag, check_quickly) if problem is None else None
        if problem is None and not (verdict is not None and verdict.quarantined):
            damage = verdict is not None and not verdict.undecided and tag.unfinished is None
            problems = " ".join(verdict.problems) if verdict is not None else None
            directory, name = tag.asked_for
            return _Step(str(directory), name, problems, damage, tuple(passed))
        if verdict is not None:
            problem = " ".join(verdict.problems)
        passed.append(f"{tag.name}: {problem}")
        logger.warning("passed over %s: %s", tag.name, problem)
    return None


def _opened(tag_dir: FilePath) -> FilePath:
    """The tag directory, pinned, with the state of all its files, so that the judgement is of one save."""
    opened = open_tag(tag_dir)
    if isinstance(opened, PinnedPath):
        with suppress(OSError):  # the check reports a directory that cannot be listed
            opened.note_all()
    return opened


def _quarantine(tag_dir: FilePath, error: CheckpointError | UnreadableError) -> None:
    """Mark a tag that was complete once and is damaged now. A tag without a record is never marked.

    ``tag_dir`` is pinned: the mark is never that of a newer save.
    """
    if isinstance(error, UnusableError) or not is_damage(error) or file_size(tag_dir / RECORD_NAME) is None:
        return
    try:
        write_mark(tag_dir, finding(error))
    except (OSError, UnreadableError) as problem:
        logger.warning("%s is damaged and could not be marked so (%s): the next walk reads it again", tag_dir, problem)
    else:
        logger.warning("%s is quarantined; nothing of it was deleted", tag_dir)


def load_newest(root: FilePath, load: Callable[[str, str], T], engine: Engine) -> tuple[T] | None:
    """What ``load(directory, tag)`` returns for the tag that ``latest`` names, or the newest older one that loads.

    Where ``latest`` cannot be read, or names nothing that is there, the walk begins at the newest tag; newer ones than
    it names are left alone, because somebody may have pointed it at an older tag on purpose. None where there are no
    tags. Raises CheckpointError where there are some and none can be loaded. Collective.
    """

    def chosen() -> Sequence[Tag]:
        if dist.get_rank() != 0 or not tags or tags[0].asked_for[0] != root:
            return ()  # in folders that have a ``latest`` each, there is no newest one of all
        named, problem = named_latest(root)
        at = next((i for i, tag in enumerate(tags) if tag.name == named), None)
        if at is not None:
            return tags[at:]
        reason = problem or (f"names {named!r}, which is no tag of this run" if named else "is not there")
        logger.warning("%s/latest: %s. The newest tag that verifies is taken instead", root, reason.rstrip("."))
        return tags

    tags = tags_of_this_run(engine, root)

    def attempt(directory: str, tag: str, passed: tuple[str, ...]) -> tuple[str, T]:
        return tag, load(directory, tag)

    found, passed = walk_back(root, all_or_raise(chosen), attempt, engine=engine)
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


def none_loads(root: FilePath, passed: Sequence[str]) -> CheckpointError:
    """The error for a directory whose every tag was passed over."""
    listed = "".join(f"\n  - {one}" for one in passed)
    return CheckpointError(
        f"{root}: none of the checkpoints can be loaded:{listed}",
        remedy="To begin anew, give another directory.",
    )
