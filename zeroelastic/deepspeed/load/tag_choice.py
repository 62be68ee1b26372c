"""Which tag a load takes: the one it is given, the one that ``latest`` names, or the newest that loads.

The ranks agree on a tag before any of them opens it. Where the newest is taken, a damaged tag is passed over, with a
warning, for an older one; a problem of the run (another model, another configuration) is raised. Nothing is written or
deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.engine_state import refuse_damaged
from zeroelastic.deepspeed.live.kinds import opaque_tensor_parallel
from zeroelastic.deepspeed.node_local.node_tags import agree_on_latest, find_tags_to_try, problem_over_nodes
from zeroelastic.distributed.collective import all_gather_or_raise, all_or_raise, broadcast, broadcast_or_raise
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    SavedAgainError,
    SaveError,
    UnreadableError,
    finding,
    shown,
)
from zeroelastic.io.paths import FilePath, local_path
from zeroelastic.io.storage import directory_exists
from zeroelastic.report import ResumeReport
from zeroelastic.runs.locate import about_absent, about_absent_tag
from zeroelastic.runs.names import LATEST, directory_of, read_latest
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.tag_directory import open_tag, recover
from zeroelastic.runs.tags import Tag
from zeroelastic.runs.verdicts import check_quickly, check_tag, refuse_fresh_start

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TagLookup(NamedTuple):
    """One rank's view: the tag to load, whether it is there, and on rank 0 the tags that were committed later."""

    named: str | None
    there: bool
    newer: tuple[str, ...]


def choose_tag(load_dir: FilePath, tag: Any) -> tuple[str | None, tuple[str, ...]]:
    """Return the tag to load, the same on all ranks, and the newer ones where ``latest`` names it. Collective.

    The tag is None when there is no ``latest`` to choose it. Where nodes with disks of their own name different ones,
    the newest is taken (``agree_on_latest``).
    """
    here, rank = local_path(load_dir), dist.get_rank()
    looks = rank == 0 or here is not None  # rank 0 asks for all at a URL

    def look(named: str | None) -> TagLookup:
        if named is None or not looks:
            return TagLookup(named, False, ())
        opened = open_tag(directory_of(load_dir, named))
        there = directory_exists(opened)
        newer = RunStore(load_dir).committed_after(named) if tag is None and there and rank == 0 else ()
        return TagLookup(named, there, newer)

    def read() -> TagLookup:
        if tag is not None:
            named: str | None = str(tag)
        else:
            named = read_latest(load_dir) if looks else None
        if named is not None and rank == 0 and here is not None:
            with suppress(OSError):  # a directory that cannot be written: opening the tag reports what is missing
                recover(here / named)
        return look(named)

    _, seen = all_gather_or_raise(read)
    names, named = [each.named for each in seen], seen[0].named
    if len(set(names)) > 1 and tag is not None:
        raise CheckpointError(
            f"{load_dir}: the ranks are to load different tags ({', '.join(sorted(map(str, set(names))))}). "
            "Pass the same tag everywhere.",
            remedy="",
        )
    if len(set(names)) > 1 and here is not None:
        named = agree_on_latest(here, names)
        _, seen = all_gather_or_raise(lambda: look(named))
    if named is not None and not any(each.there for each in seen):
        if tag is not None:
            raise MissingFileError(
                f"{about_absent_tag(load_dir, named)} Nothing was loaded.",
                remedy="Pass a tag that is there, or none to load what latest names.",
            )
        raise MissingFileError(
            f"{load_dir / LATEST}: names {shown(named)}, which is not in {load_dir}. The file is damaged, or the "
            "tag was removed. Pass a tag, or repair the file with `zeroelastic latest DIR --fix`.",
            remedy="",
        )
    return named, seen[0].newer


def nothing_to_load(engine: Engine, load_dir: FilePath, *, required: bool) -> None:
    """Warn on rank 0 that there is nothing to load and the run begins from scratch. Collective.

    Raises MissingFileError where a checkpoint is ``required``, CheckpointError for an engine that an earlier load
    damaged.
    """

    def refuse() -> None:
        refuse_damaged(engine)
        if dist.get_rank() == 0:
            text = about_absent(load_dir)
            if required:
                raise MissingFileError(
                    f"{text} A checkpoint is required here, so the run does not begin from scratch.",
                    remedy='Give the directory of one, or leave "required" out for the first run.',
                )
            logger.warning('%s The run begins from scratch; "required": true makes that an error', text)

    all_or_raise(refuse)


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
    to_try, _, notes = find_tags_to_try(engine, root)
    tags = [tag for tag in to_try if tag.path == tag.tag_dir]  # folders of a framework have a ``latest`` each

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
    add_notes(engine, root, [*fell_back, *notes])
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
