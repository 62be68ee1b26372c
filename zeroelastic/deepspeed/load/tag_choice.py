"""Which tag a load takes: the one it is given, or the one that ``latest`` names, the same on every rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from zeroelastic.checkpoint.one_save import is_watched
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.engine_state import refuse_damaged
from zeroelastic.deepspeed.node_local.node_tags import agree_on_latest
from zeroelastic.distributed.collective import all_gather_alike, all_gather_or_raise, all_or_raise, broadcast_or_raise
from zeroelastic.errors import CheckpointError, MissingFileError, shown
from zeroelastic.io.paths import FilePath, RemotePath
from zeroelastic.runs.candidates import committed_after
from zeroelastic.runs.locate import about_absent, about_absent_tag
from zeroelastic.runs.names import LATEST, directory_of, holds_something, read_latest
from zeroelastic.runs.tag_directory import open_tag, recover

logger = logging.getLogger(__name__)


class TagLookup(NamedTuple):
    """What one rank sees: the tag to load, whether it is there, and on rank 0 those that were committed later."""

    named: str | None
    there: bool
    newer: tuple[str, ...]


def choose_tag(load_dir: FilePath, tag: Any) -> tuple[str | None, tuple[str, ...]]:
    """The tag to load, agreed by all ranks, and the newer ones where ``latest`` names it. Collective.

    The tag is None when there is no ``latest`` to choose it. Nodes with disks of their own may name different ones:
    then the newest is taken (``agree_on_latest``).
    """

    if isinstance(load_dir, RemotePath):
        return _choose_in_store(load_dir, tag)

    def look(named: str | None) -> TagLookup:
        if named is None:
            return TagLookup(None, False, ())
        there = is_watched(open_tag(load_dir / named))
        newer = committed_after(load_dir, named) if tag is None and there and dist.get_rank() == 0 else ()
        return TagLookup(named, there, newer)

    def read() -> TagLookup:
        named = str(tag) if tag is not None else read_latest(load_dir)
        if named is not None and dist.get_rank() == 0:
            with suppress(OSError):  # a directory that cannot be written: opening the tag reports what is missing
                recover(load_dir / named)
        return look(named)

    _, seen = all_gather_or_raise(read)
    names = [each.named for each in seen]
    if len(set(names)) > 1:
        if tag is not None:
            raise _different_tags(load_dir, names)
        named = agree_on_latest(load_dir, names)
        _, seen = all_gather_or_raise(lambda: look(named))
    else:
        named = names[0]
    if named is not None and not any(each.there for each in seen):
        raise _absent_tag(load_dir, named) if tag is not None else _dangling(load_dir, named)
    return named, seen[0].newer


def _choose_in_store(load_dir: RemotePath, tag: Any) -> tuple[str | None, tuple[str, ...]]:
    """``choose_tag`` for a URL: rank 0 asks for all. Collective."""
    asked = all_gather_alike(None if tag is None else str(tag))
    if len(set(asked)) > 1:
        raise _different_tags(load_dir, asked)

    def look() -> tuple[str | None, tuple[str, ...]]:
        named = asked[0] if asked[0] is not None else read_latest(load_dir)
        if named is None:
            return None, ()
        if not holds_something(directory_of(load_dir, named)):
            if asked[0] is not None:
                raise _absent_tag(load_dir, named)
            raise _dangling(load_dir, named)
        return named, committed_after(load_dir, named) if asked[0] is None else ()

    return broadcast_or_raise(look)


def _different_tags(load_dir: FilePath, tags: Sequence[object]) -> CheckpointError:
    return CheckpointError(
        f"{load_dir}: the ranks are to load different tags ({', '.join(sorted(map(str, set(tags))))}). "
        "Pass the same tag everywhere.",
        remedy="",
    )


def _absent_tag(load_dir: FilePath, tag: str) -> MissingFileError:
    return MissingFileError(
        f"{about_absent_tag(load_dir, tag)} Nothing was loaded.",
        remedy="Pass a tag that is there, or none to load what latest names.",
    )


def _dangling(load_dir: FilePath, named: str) -> MissingFileError:
    return MissingFileError(
        f"{load_dir / LATEST}: names {shown(named)}, which is not in {load_dir}. The file is damaged, or the "
        "tag was removed: pass a tag, or let `zeroelastic latest --fix` write it anew.",
        remedy="",
    )


def nothing_to_load(engine: Engine, load_dir: FilePath, *, required: bool) -> None:
    """Warn on rank 0 that there is nothing to load and the run begins from scratch. Collective.

    Raises MissingFileError on every rank where a checkpoint is ``required``, and CheckpointError where an earlier load
    has left the engine damaged.
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
