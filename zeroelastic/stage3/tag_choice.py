"""Which tag a load takes: the one it is given, or the one that ``latest`` names, the same on every rank."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeroelastic.agree import together
from zeroelastic.errors import CheckpointError, MissingFileError, UnreadableError
from zeroelastic.quarantine import read_mark
from zeroelastic.save_place import recover
from zeroelastic.source import LATEST
from zeroelastic.storage import read_whole
from zeroelastic.tags import committed_after

logger = logging.getLogger(__name__)

_NAMED = 3
_MOST_LATEST_BYTES = 1 << 12


def about_choice(load_dir: Path, tag: str, newer: tuple[str, ...]) -> list[str]:
    """Sentences for the report about the choice of a tag: the same on every rank."""
    said: list[str] = []
    if newer:
        said.append(
            f"NOT THE NEWEST: {load_dir / LATEST} names {tag}, and {', '.join(newer[:_NAMED])} "
            f"{'was' if len(newer) == 1 else 'were'} committed at a later step. Unless you pointed it there, the file "
            "is damaged"
        )
    return said


def choose_tag(load_dir: Path, tag: Any, *, node_local: bool) -> tuple[str | None, tuple[str, ...]]:
    """The tag to load, agreed by all ranks, and the newer ones where ``latest`` names it. Collective.

    The tag is None when there is no ``latest`` to choose it. With ``node_local`` storage a node may have none:
    DeepSpeed writes one, on the first node.
    """

    def read() -> tuple[str | None, tuple[str, ...]]:
        named = str(tag) if tag is not None else _read_latest(load_dir / LATEST)
        if named is None or dist.get_rank() != 0:
            return named, ()
        with suppress(OSError):  # a directory that cannot be written: what is missing is said when it is opened
            recover(load_dir / named)
        if tag is not None:
            return named, ()
        if not node_local and not (load_dir / named).is_dir():
            raise MissingFileError(
                f"{load_dir / LATEST}: names {named!r}, which is not in {load_dir}. The file is damaged, or the tag "
                "was removed: pass a tag, or let `zeroelastic latest --fix` write it anew."
            )
        return named, committed_after(load_dir, named)

    (chosen, _), outcomes = together(read)
    newer = outcomes[0][1]
    all_chosen = [other for other, _ in outcomes]
    named = {other for other in all_chosen if other is not None}
    if node_local and len(named) == 1:
        return named.pop(), newer
    if any(other != chosen for other in all_chosen):
        raise CheckpointError(
            f"{load_dir}: the ranks do not see the same tag ({', '.join(sorted({str(t) for t in all_chosen}))}). Pass "
            "the same tag everywhere, on a directory that all nodes share."
        )
    return chosen, newer


def warn_of_mark(tag_dir: Path) -> None:
    """Say on rank 0 that a tag which is going to be loaded all the same was found damaged before."""
    if dist.get_rank() != 0:
        return
    with suppress(UnreadableError):  # which a load says itself
        mark = read_mark(tag_dir)
        if mark is not None:
            logger.warning("%s %s", tag_dir, mark.sentence)


def _read_latest(path: Path) -> str | None:
    """What the file names, None where there is none. A tag may lie deeper than in the directory itself here."""
    try:
        data = read_whole(path, limit=_MOST_LATEST_BYTES)
    except MissingFileError:
        return None
    tag = data.decode(errors="replace").strip()
    if not tag or not tag.isprintable() or "\ufffd" in tag:
        raise CheckpointError(f"{path}: holds no name of a tag ({data[:80]!r}). It is damaged; pass the tag to load.")
    return tag
