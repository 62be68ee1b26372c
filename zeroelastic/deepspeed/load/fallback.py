"""Load the newest tag that loads: a damaged tag is passed over, with a warning, for an older one.

The ranks agree on a tag before any of them opens it. A problem of the run (another model, another configuration) is
raised. Nothing is written or deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.kinds import opaque_tensor_parallel
from zeroelastic.deepspeed.node_local.node_tags import find_tags_to_try, problem_over_nodes
from zeroelastic.distributed.collective import all_or_raise, broadcast, broadcast_or_raise
from zeroelastic.errors import CheckpointError, SavedAgainError, SaveError, UnreadableError, finding
from zeroelastic.io.paths import FilePath
from zeroelastic.report import ResumeReport
from zeroelastic.runs.candidates import check_quickly, check_tag, refuse_fresh_start
from zeroelastic.runs.tags import Tag

logger = logging.getLogger(__name__)

T = TypeVar("T")


class UnusableError(CheckpointError):
    """A complete tag that this run cannot resume from."""


def load_first(tags: Sequence[Tag], load: Callable[[Tag], T], *, engine: Engine) -> tuple[T | None, tuple[str, ...]]:
    """Return the result of the first ``load(tag)`` that succeeds, or None, and why the tags before it were passed over.

    ``load`` runs on every rank and raises the same there. Its errors other than CheckpointError and UnreadableError end
    the walk, and so does a SavedAgainError: the tag before the one that is being saved is not the newest. Collective.
    """
    passed: list[str] = []
    for tag in tags:
        problem = None
        if not tag.in_memory:
            verdict = broadcast_or_raise(partial(check_tag, tag, check_quickly))  # opens no file of a committed tag
            problem = None if verdict is None else " ".join(verdict.problems)
        if problem is not None:
            problem = problem_over_nodes(tag.tag_dir, problem, opaque_tensor_parallel(engine))
        if problem is None:
            try:
                return load(tag), tuple(passed)
            except (CheckpointError, UnreadableError, SaveError) as error:
                if isinstance(error, (SavedAgainError, SaveError)) and not tag.in_memory:
                    raise
                problem = finding(error)
        name = f"step {tag.step} in memory" if tag.in_memory else tag.name
        passed.append(broadcast(f"{name}: {problem}"))
        if dist.get_rank() == 0:
            logger.warning("passed over %s", passed[-1])
    return None, tuple(passed)


def load_newest(root: FilePath, load: Callable[[str, str], T], engine: Engine) -> T | None:
    """Return ``load(directory, tag)`` of the first of the directory's tags to try (``runs.tags``) that loads.

    Returns None where there is no checkpoint. Raises CheckpointError where there are some and none loads. Collective.
    """
    found = find_tags_to_try(engine, root)
    tags = [tag for tag in found.tags if tag.path == tag.tag_dir]  # folders of a framework have a ``latest`` each

    def attempt(tag: Tag) -> tuple[str, T]:
        directory, name = tag.asked_for
        return tag.name, load(str(directory), name)

    loaded, passed = load_first(tags, attempt, engine=engine)
    if loaded is None:
        if passed:
            raise none_loads(root, passed)
        all_or_raise(lambda: refuse_fresh_start(root))
        return None
    name, outcome = loaded
    fell_back = [f"FELL BACK to {name}; passed over: {'; '.join(passed)}"] if passed else []
    add_notes(engine, root, [*fell_back, *found.notes])
    return outcome


def add_notes(engine: Engine, root: FilePath, notes: Sequence[str]) -> ResumeReport | None:
    """Put notes on the choice of a tag first in the engine's report, which is returned, and warn of them on rank 0."""
    report: ResumeReport | None = getattr(engine, "zeroelastic_report", None)
    if notes and report is not None:
        report = engine.zeroelastic_report = replace(report, notes=(*notes, *report.notes))
    if notes and dist.get_rank() == 0:
        logger.warning("%s: %s", root, ". ".join(notes))
    return report


def none_loads(root: FilePath, passed: Sequence[str]) -> CheckpointError:
    """Return the error for a directory whose every tag was passed over."""
    listed = "".join(f"\n  - {one}" for one in passed)
    return CheckpointError(
        f"{root}: none of the checkpoints can be loaded:{listed}", remedy="To begin anew, give another directory."
    )
