"""Tags over nodes with disks of their own: which there are, which one ``latest`` names, and whether one is complete.

A node that was absent has old tags and an old ``latest``; a new node has none. Where all ranks see the same, rank 0
decides, and finding that out costs one small gather.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.param_table import params_digest
from zeroelastic.checkpoint.tag_files import TensorParallel
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.kinds import trained_params
from zeroelastic.deepspeed.node_local.visibility import gather_visibility
from zeroelastic.distributed.collective import (
    all_gather,
    all_gather_or_raise,
    all_or_raise,
    broadcast_or_raise,
)
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    UndescribedSlicesError,
    UnreadableError,
    UnsupportedError,
    UsageError,
    printable,
    shown,
)
from zeroelastic.io.paths import FilePath, RemotePath
from zeroelastic.io.storage import folders
from zeroelastic.runs.candidates import list_run
from zeroelastic.runs.names import LATEST, named_latest
from zeroelastic.runs.order import Tag, about_newer, committed_after, newest_first, tags_to_try
from zeroelastic.runs.tag_directory import recover_all

logger = logging.getLogger(__name__)

_ABSENT = (-1.0, -1)
_SOURCE_RANK = {"record": 3, "header": 2, "name": 1, None: 0}


def agree_on_latest(load_dir: Path, named: Sequence[str | None]) -> str | None:
    """The tag to load, given what ``latest`` names on each rank: None where it is nowhere. Collective.

    A new node has no ``latest``, and a node that was absent may have an old one: then the tag that was committed last,
    by the time in its record, is taken. Raises CheckpointError on every rank where no record tells which is newer.
    """
    names = sorted({name for name in named if name is not None})
    if len(names) <= 1:
        return names[0] if names else None
    own = named[dist.get_rank()]

    def age() -> tuple[float, int] | None:
        """Of the tag that is named here; ``_ABSENT`` for one that is not there, None for one that does not tell."""
        if own is None or not (load_dir / own).is_dir():
            return _ABSENT
        try:
            record = read_record(load_dir / own)
        except (CheckpointError, UnreadableError):
            return None
        return None if record is None else (record.committed_at or 0.0, record.global_steps)

    _, ages = all_gather_or_raise(age)
    newest: dict[str, tuple[float, int]] = {}  # of the tags that are there; _ABSENT where no rank knows
    for name, found in zip(named, ages, strict=True):
        if name is not None and found != _ABSENT:
            newest[name] = max(newest.get(name, _ABSENT), found or _ABSENT)
    known = {name: found for name, found in newest.items() if found != _ABSENT}
    if not known or len(known) < len(newest) or len(set(known.values())) < len(known):
        raise CheckpointError(
            f"{load_dir}: the ranks do not see the same tag ({', '.join(map(printable, names))}), and no commit record "
            "tells which is newer. Pass the tag to load.",
            remedy="",
        )
    chosen = max(known, key=lambda name: known[name])
    if dist.get_rank() == 0:
        old = [rank for rank, name in enumerate(named) if name not in (None, chosen)]
        logger.warning(
            "%s: latest names %s, which is the newest and is loaded, and another tag where ranks %s are",
            load_dir,
            chosen,
            ", ".join(map(str, old)),
        )
    return chosen


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()


def tags_of_all_nodes(root: FilePath) -> list[Tag]:
    """The tags that any rank sees in a directory, newest first: complete on rank 0, any list elsewhere. Collective.

    Where several nodes have a tag, the node that knows most about it counts: a commit record before a header before a
    name.
    """
    if isinstance(root, RemotePath):
        return broadcast_or_raise(lambda: _tags(root))

    rank = dist.get_rank()

    def look() -> str:
        with suppress(OSError):  # missing or read-only: opening it reports what is missing
            if rank == 0:  # finish replacements that were cut short, where `latest` may name a tag
                recover_all(root)
                if "/" in (named := named_latest(root)[0] or ""):
                    recover_all((root / named).parent)
        try:
            return _digest((folders(root), named_latest(root)))
        except MissingFileError:
            return ""

    mark, marks = all_gather_or_raise(look)
    differ = len(set(marks)) > 1
    asked = marks.index(mark) == rank if differ else rank == 0
    own = all_or_raise(partial(_tags, root) if asked else list[Tag])
    lists = all_gather(own) if differ else [own]
    best: dict[str, Tag] = {}
    for tag in (tag for one in lists for tag in one):
        if tag.name not in best or _knowledge(tag) > _knowledge(best[tag.name]):
            best[tag.name] = tag
    return list(newest_first(best.values()))


class TagsToTry(NamedTuple):
    """The tags that a run may go on from, in the order in which they are tried, and notes on that choice.

    ``newer`` were committed after the one that ``latest`` names.
    """

    tags: tuple[Tag, ...]
    newer: tuple[Tag, ...]
    notes: tuple[str, ...]


def find_tags_to_try(engine: Engine, root: FilePath) -> TagsToTry:
    """The tags of a directory that an engine may go on from (``runs.order``), the same on every rank. Collective.

    Where nodes have disks of their own, ``latest`` is the newest tag that it names on any of them.
    """
    tags = tags_of_all_nodes(root)
    named = all_gather(named_latest(root) if isinstance(root, Path) or dist.get_rank() == 0 else (None, None))

    def choose() -> TagsToTry:
        names = {name for name, _ in named}
        latest = next((tag for tag in tags if tag.name in names), None)
        params = trained_params(engine)
        digest = None if params is None else params_digest(params)
        tried = tags_to_try(tags, None if latest is None else latest.name, digest)
        newer = () if latest is None else committed_after(tags, latest)
        notes: list[str] = []
        if latest is not None:
            notes = about_newer(root, latest.name, [tag.name for tag in newer])
        elif tried and tried[0].path == tried[0].tag_dir:  # folders of a framework have a ``latest`` each
            name, problem = named[0]
            why = problem or (f"names {shown(name)}, which is not there" if name else "is not there")
            notes = [f"NOT WHAT LATEST NAMES: {root / LATEST}: {why.removeprefix(f'{root / LATEST}: ').rstrip('.')}"]
        return TagsToTry(tried, newer, tuple(notes))

    return broadcast_or_raise(choose)


def _knowledge(tag: Tag) -> tuple[bool, int, int]:
    return tag.unfinished is None, _SOURCE_RANK[tag.step_from], tag.step or 0


def _tags(root: FilePath) -> list[Tag]:
    """The checkpoints that are seen here, newest first; none where there is no directory yet."""
    try:
        return list(list_run(root).tags)
    except UsageError:
        return []


def problem_over_nodes(tag_dir: FilePath, problem: str, tp: TensorParallel) -> str | None:
    """What is wrong with a tag, over all nodes, in which rank 0 alone saw a ``problem``; None where nothing is.

    ``tp`` is this rank's place in tensor parallelism that is opaque. Headers are not opened. Collective.
    """
    if isinstance(tag_dir, RemotePath):
        return problem
    try:
        visibility = gather_visibility(tag_dir)
        if visibility.reads_headers:
            return problem
        all_or_raise(lambda: open_checkpoint(tag_dir, tp=tp, listing=visibility.listing))
    except UndescribedSlicesError:  # a load may take them into the same slices
        return None
    except (CheckpointError, UnreadableError, UnsupportedError) as error:
        return str(error)
    return None
