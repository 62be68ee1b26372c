"""Which tag a load takes: the one it is given, or the one that ``latest`` names, the same on every rank."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.engine_state import refuse_damaged
from zeroelastic.deepspeed.node_local.node_tags import agree_on_latest
from zeroelastic.distributed.collective import all_gather_or_raise, all_or_raise
from zeroelastic.errors import CheckpointError, MissingFileError, shown
from zeroelastic.io.paths import FilePath, local_path
from zeroelastic.io.storage import directory_exists
from zeroelastic.runs.locate import about_absent, about_absent_tag
from zeroelastic.runs.names import LATEST, directory_of, read_latest
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.tag_directory import open_tag, recover

logger = logging.getLogger(__name__)


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
            "tag was removed: pass a tag, or let `zeroelastic latest --fix` write it anew.",
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
