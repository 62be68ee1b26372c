"""Tags over nodes with disks of their own: which there are, which one ``latest`` names, and whether one is complete.

A node that was absent has old tags and an old ``latest``; a new node has none. Where all ranks see the same, rank 0
decides, and finding that out costs one small gather.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import params_digest
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.tag_files import TensorParallel
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.kinds import trained_params
from zeroelastic.deepspeed.node_local.visibility import gather_inventory
from zeroelastic.distributed.collective import all_gather, all_gather_or_raise, all_or_raise, broadcast_or_raise
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    UndescribedSlicesError,
    UnreadableError,
    UnsupportedError,
    printable,
    shown,
)
from zeroelastic.io.paths import FilePath, local_path
from zeroelastic.io.storage import folders
from zeroelastic.runs.names import LATEST, named_latest
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.tag_directory import recover_all
from zeroelastic.runs.tags import Tag, about_newer, committed_after, newest_first, tags_to_try

logger = logging.getLogger(__name__)

_SOURCE_RANK = {"record": 3, "header": 2, "name": 1, None: 0}


def agree_on_latest(load_dir: Path, named: Sequence[str | None]) -> str | None:
    """Return the tag to load, given the name in ``latest`` on each rank; None where it is nowhere. Collective.

    A new node has no ``latest``, and a node that was absent may have an old one: then the tag that was committed last,
    by the time in its record, is taken. Raises CheckpointError on every rank where no record tells which is newer.
    """
    names = sorted({name for name in named if name is not None})
    if len(names) <= 1:
        return names[0] if names else None
    tags = [tag for tag in tags_of_all_nodes(load_dir)[0] if tag.name in names]

    def choose() -> str:
        ages = {(tag.committed_at, tag.step) for tag in tags}
        if not tags or len(ages) < len(tags) or any(tag.step_from != "record" for tag in tags):
            raise CheckpointError(
                f"{load_dir}: the ranks do not see the same tag ({', '.join(map(printable, names))}), and no commit "
                "record tells which is newer. Pass the tag to load.",
                remedy="",
            )
        old = [rank for rank, name in enumerate(named) if name not in (None, tags[0].name)]
        logger.warning(
            "%s: latest names %s, which is the newest and is loaded, and another tag where ranks %s are",
            *(load_dir, tags[0].name, ", ".join(map(str, old))),
        )
        return tags[0].name

    return broadcast_or_raise(choose)


def tags_of_all_nodes(root: FilePath) -> tuple[list[Tag], list[tuple[str | None, str | None]]]:
    """Return the tags that any rank sees in a directory, newest first, and the name in ``latest`` by rank. Collective.

    The tags are complete on rank 0, and any list elsewhere. Where several nodes have a tag, the node that knows most
    about it counts: a commit record before a header before a name. Of a URL, rank 0 alone asks for ``latest``.
    """
    here = local_path(root)
    if here is None:
        return broadcast_or_raise(lambda: (list(RunStore(root).tags()), [named_latest(root)]))

    rank = dist.get_rank()

    def look() -> tuple[str, tuple[str | None, str | None]]:
        with suppress(OSError):  # missing or read-only: opening it reports what is missing
            if rank == 0:  # finish replacements that were cut short, where `latest` may name a tag
                recover_all(here)
                if "/" in (name := named_latest(here)[0] or ""):
                    recover_all((here / name).parent)
        named, seen = named_latest(root), tuple[str, ...]()
        with suppress(MissingFileError):
            seen = folders(root)
        return hashlib.sha256(repr((seen, named)).encode("utf-8", "surrogatepass")).hexdigest(), named

    (mark, _), looks = all_gather_or_raise(look)
    marks = [other for other, _ in looks]
    differ = len(set(marks)) > 1
    asked = marks.index(mark) == rank if differ else rank == 0
    own = all_or_raise(RunStore(root).tags if asked else tuple[Tag, ...])
    best: dict[str, Tag] = {}
    for tag in (tag for tags in (all_gather(own) if differ else [own]) for tag in tags):
        if tag.name not in best or _knowledge(tag) > _knowledge(best[tag.name]):
            best[tag.name] = tag
    return list(newest_first(best.values())), [named for _, named in looks]


def find_tags_to_try(engine: Engine, root: FilePath) -> tuple[tuple[Tag, ...], tuple[Tag, ...], tuple[str, ...]]:
    """Return the tags of a directory that an engine may go on from (``runs.tags``), as they are tried. Collective.

    With those that were committed after the one that ``latest`` names, and notes on that choice. Where nodes have disks
    of their own, ``latest`` is the newest tag that it names on any of them.
    """
    tags, named = tags_of_all_nodes(root)

    def choose() -> tuple[tuple[Tag, ...], tuple[Tag, ...], tuple[str, ...]]:
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
        return tried, newer, tuple(notes)

    return broadcast_or_raise(choose)


def _knowledge(tag: Tag) -> tuple[bool, int, int]:
    return tag.unfinished is None, _SOURCE_RANK[tag.step_from], tag.step or 0


def problem_over_nodes(tag_dir: FilePath, problem: str, tp: TensorParallel) -> str | None:
    """Check over all nodes a tag in which rank 0 alone saw a ``problem``; None where nothing is wrong.

    ``tp`` is this rank's place in tensor parallelism that is opaque. Headers are not opened. Collective.
    """
    if local_path(tag_dir) is None:
        return problem
    try:
        inventory = gather_inventory(tag_dir)
        if inventory.reads_headers:
            return problem
        all_or_raise(lambda: open_checkpoint(tag_dir, tp=tp, inventory=inventory))
    except UndescribedSlicesError:  # a load may take them into the same slices
        return None
    except (CheckpointError, UnreadableError, UnsupportedError) as error:
        return str(error)
    return None
