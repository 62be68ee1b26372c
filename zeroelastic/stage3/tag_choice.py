"""Which tag a load takes: the one it is given, or the one that ``latest`` names, the same on every rank."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeroelastic.absent import about_absent, about_absent_tag
from zeroelastic.agree import settle, together
from zeroelastic.errors import CheckpointError, MissingFileError, UnreadableError, printable, shown
from zeroelastic.pinned import PinnedPath
from zeroelastic.quarantine import read_mark
from zeroelastic.save_place import open_tag, recover
from zeroelastic.stage3.node_tags import agree_on_latest
from zeroelastic.tag_names import LATEST, read_latest
from zeroelastic.tags import committed_after

logger = logging.getLogger(__name__)

_NAMED = 3


def about_choice(load_dir: Path, tag: str, newer: tuple[str, ...]) -> list[str]:
    """Sentences for the report about the choice of a tag: the same on every rank."""
    said: list[str] = []
    if newer:
        said.append(
            f"NOT THE NEWEST: {load_dir / LATEST} names {printable(tag)}, and "
            f"{', '.join(map(printable, newer[:_NAMED]))} {'was' if len(newer) == 1 else 'were'} committed later. "
            "Unless you pointed it there, the file is damaged, or a save ended before it was written"
        )
    return said


def choose_tag(load_dir: Path, tag: Any) -> tuple[str | None, tuple[str, ...]]:
    """The tag to load, agreed by all ranks, and the newer ones where ``latest`` names it. Collective.

    The tag is None when there is no ``latest`` to choose it. Nodes with disks of their own may name different ones:
    then the newest is taken (``agree_on_latest``).
    """

    def read() -> str | None:
        named = str(tag) if tag is not None else read_latest(load_dir)
        if named is not None and dist.get_rank() == 0:
            with suppress(OSError):  # a directory that cannot be written: what is missing is said when it is opened
                recover(load_dir / named)
        return named

    chosen, all_chosen = together(read)
    if tag is not None:
        if any(other != chosen for other in all_chosen):
            raise CheckpointError(
                f"{load_dir}: the ranks are to load different tags ({', '.join(sorted(map(str, set(all_chosen))))}). "
                "Pass the same tag everywhere."
            )
        _, there = together(lambda: (load_dir / str(chosen)).is_dir())
        if not any(there):
            raise MissingFileError(f"{about_absent_tag(load_dir, str(chosen))} Nothing was loaded.")
        return chosen, ()
    named = agree_on_latest(load_dir, all_chosen)
    if named is None:
        return None, ()

    def look() -> tuple[bool, tuple[str, ...]]:
        there = isinstance(open_tag(load_dir / named), PinnedPath)
        return there, committed_after(load_dir, named) if there and dist.get_rank() == 0 else ()

    _, outcomes = together(look)
    if not any(there for there, _ in outcomes):
        raise MissingFileError(
            f"{load_dir / LATEST}: names {shown(named)}, which is not in {load_dir}. The file is damaged, or the "
            "tag was removed: pass a tag, or let `zeroelastic latest --fix` write it anew."
        )
    return named, outcomes[0][1]


def nothing_to_load(load_dir: Path, *, required: bool) -> None:
    """Say on rank 0 that the run begins from scratch, since there is nothing to load. Collective.

    Raises MissingFileError on every rank where a checkpoint is ``required``.
    """

    def refuse() -> None:
        if dist.get_rank() == 0:
            said = about_absent(load_dir)
            if required:
                raise MissingFileError(f"{said} A checkpoint is required here, so the run does not begin from scratch.")
            logger.warning('%s The run begins from scratch; "required": true makes that an error', said)

    settle(refuse)


def warn_of_mark(tag_dir: Path) -> None:
    """Say on rank 0 that a tag which is going to be loaded all the same was found damaged before."""
    if dist.get_rank() != 0:
        return
    with suppress(UnreadableError):  # which a load says itself
        mark = read_mark(tag_dir)
        if mark is not None:
            logger.warning("%s %s", tag_dir, mark.sentence)
