"""Tags over nodes with disks of their own: which there are, which one ``latest`` names, and whether one is complete.

A node that was away has old tags and an old ``latest``, a new one has none. Where the ranks see the same, rank 0's word
is enough, and asking the others costs one small gather.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from zeroelastic.agree import gather, settle, together
from zeroelastic.checkpoint import Listing, TensorParallel, open_checkpoint
from zeroelastic.commit_order import Tag, newest_first
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    UnreadableError,
    UnsupportedError,
    UsageError,
    printable,
)
from zeroelastic.record import read_record
from zeroelastic.save_place import recover_all
from zeroelastic.stage3.nodes import Sight, look_around
from zeroelastic.storage import file_sizes, folders
from zeroelastic.tags import list_run, named_latest

logger = logging.getLogger(__name__)

_ABSENT = (-1.0, -1)
_TOLD_BY = {"record": 3, "header": 2, "name": 1, None: 0}


def agree_on_latest(load_dir: Path, named: Sequence[str | None]) -> str | None:
    """The tag to load, given what ``latest`` names on each rank: None where it is nowhere. Collective.

    A new node has no ``latest``, and a node that was away may have one of before: the tag that was committed last, as
    its record states, is taken then. Raises CheckpointError on every rank where no record tells which is newer.
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

    _, ages = together(age)
    stated: dict[str, list[tuple[float, int] | None]] = {name: [] for name in names}
    for name, found in zip(named, ages, strict=True):
        if name is not None and found != _ABSENT:
            stated[name].append(found)
    newest = {name: max((s for s in found if s is not None), default=None) for name, found in stated.items() if found}
    known = {name: found for name, found in newest.items() if found is not None}
    if not known or len(known) < len(newest) or len(set(known.values())) < len(known):
        raise CheckpointError(
            f"{load_dir}: the ranks do not see the same tag ({', '.join(map(printable, names))}), and no commit record "
            "tells which is newer. Pass the tag to load."
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


def seen_alike(directory: Path) -> bool:
    """Whether all ranks see the same files, by name and size, in a directory. Collective."""
    return len(set(gather(_fingerprint(directory)))) == 1


def _fingerprint(directory: Path) -> str:
    try:
        return hashlib.sha256(repr(sorted(file_sizes(directory).items())).encode()).hexdigest()
    except (CheckpointError, UnreadableError):
        return ""


def tags_of_all_nodes(root: Path) -> list[Tag]:
    """The tags that any rank sees in a directory, newest first: complete on rank 0, any list elsewhere. Collective.

    Of a tag that several nodes have, what the one says that knows most of it: a commit record before a header before a
    name.
    """

    def look() -> str:
        with suppress(OSError):  # not there, or not to be written: what is missing is said when it is opened
            if dist.get_rank() == 0:
                _recover(root)
        try:
            return hashlib.sha256(repr((folders(root), named_latest(root))).encode()).hexdigest()
        except MissingFileError:
            return ""

    mark, marks = together(look)
    rank = dist.get_rank()
    asked = marks.index(mark) == rank if len(set(marks)) > 1 else rank == 0
    own = settle(partial(_tags, root) if asked else list[Tag])
    lists = gather(own) if len(set(marks)) > 1 else [own]
    best: dict[str, Tag] = {}
    for tag in (tag for one in lists for tag in one):
        if tag.name not in best or _knowledge(tag) > _knowledge(best[tag.name]):
            best[tag.name] = tag
    return list(newest_first(best.values(), named_latest(root)[0]))


def _recover(root: Path) -> None:
    """Finish replacements that were cut short, where ``latest`` may name a tag. Raises OSError."""
    recover_all(root)
    named, _ = named_latest(root)
    if named is not None and "/" in named:
        recover_all((root / named).parent)


def _knowledge(tag: Tag) -> tuple[bool, int, int]:
    return tag.unfinished is None, _TOLD_BY[tag.step_from], tag.step or 0


def _tags(root: Path) -> list[Tag]:
    """The checkpoints that are seen here, newest first; none where there is no directory yet."""
    try:
        return list(list_run(root).tags)
    except UsageError:
        return []


def problem_over_nodes(tag_dir: Path, problem: str, rank: int, tp: TensorParallel) -> str | None:
    """What is wrong with a tag, over all nodes, in which rank 0 alone saw a ``problem``; None where nothing is.

    ``rank`` is that of the data parallel group, of tensor parallel rank ``tp``. Headers are not opened. Collective.
    """
    sight: Sight | None = None
    try:
        sight = look_around(tag_dir, rank, tp)
        if sight is None:
            return problem
        listing = Listing(sight.sizes, sight.record, sight.world_size, sight.away)
        settle(lambda: open_checkpoint(tag_dir, tp=tp, listing=listing))
    except (CheckpointError, UnreadableError, UnsupportedError) as error:
        return str(error)
    return None
