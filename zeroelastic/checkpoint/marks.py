"""Marks in a tag directory: of a checkpoint that proved damaged, and of one in a store that is not finished.

A tag with the mark of quarantine is passed over by whatever looks for one that is whole, without being read again.
Nothing is deleted, and a load that names the tag is not kept from it. ``zeroelastic verify --lift-quarantine`` takes
the mark away from a tag that turns out whole, and so does a save into the tag.

An object store has no rename, so the files of a tag appear one by one. The mark of an upload is there before the first
of them appears and goes after the commit record did: a directory with this mark and without a commit record is no
checkpoint, whatever else is in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import ClassVar

from pydantic import ConfigDict

from zeroelastic._version import __version__
from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.errors import CheckpointError, MissingFileError
from zeroelastic.io.atomic import sync_directory
from zeroelastic.io.objects import remove_objects
from zeroelastic.io.paths import FilePath, RemotePath
from zeroelastic.io.storage import file_names, file_size, read_whole, write_small

MARK_NAME = "zeroelastic-quarantine.json"
UNFINISHED_NAME = "zeroelastic-unfinished.json"

_MAX_BYTES = 1 << 20
_MAX_WHY = 4000


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Why a tag is not to be used: ``why`` as a sentence, the ``files`` it names, when and by which version.

    ``marked_at`` is a UTC time in ISO 8601. A mark that cannot be read is one all the same, with what is wrong with it
    as its reason.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, json_schema_serialization_defaults_required=True
    )  # within a report

    why: str
    files: tuple[str, ...] = ()
    marked_at: str = ""
    version: str = ""

    @property
    def sentence(self) -> str:
        """All of it, for people."""
        since = f" since {self.marked_at}" if self.marked_at else ""
        return f"is quarantined{since}: {self.why}"


def read_mark(tag_dir: FilePath) -> Quarantine | None:
    """The mark of a tag directory, None where there is none. Raises UnreadableError where that cannot be known now."""
    try:
        found = json.loads(read_whole(tag_dir / MARK_NAME, limit=_MAX_BYTES))
    except MissingFileError:
        return None
    except (ValueError, RecursionError) as error:  # a CheckpointError for a file that is too large, among them
        return Quarantine(f"its mark ({MARK_NAME}) cannot be read: {error}")
    fields = found if isinstance(found, dict) else {}
    files = fields.get("files")
    return Quarantine(
        why=str(fields.get("why", "the mark does not say why")),
        files=tuple(map(str, files)) if isinstance(files, list) else (),
        marked_at=str(fields.get("marked_at", "")),
        version=str(fields.get("zeroelastic", "")),
    )


def write_mark(tag_dir: FilePath, why: str) -> Quarantine:
    """Mark a tag directory as damaged; a mark that is there stays. On return it is on disk. Raises OSError,
    UnreadableError.

    Example::

        write_mark(Path("ckpt/global_step100"), "zero_pp_rank_0_mp_rank_00_model_states.pt: ...")
    """
    earlier = read_mark(tag_dir)
    if earlier is not None:
        return earlier
    said = {word.rstrip(".") for word in re.findall(r"[\w.-]+", why)}
    said -= set() if f"{RECORD_NAME}:" in why else {RECORD_NAME}  # other sentences mention it, too
    files = tuple(sorted(said.intersection(file_names(tag_dir))))
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    mark = Quarantine(why[:_MAX_WHY], files, now, __version__)
    data = {"why": mark.why, "files": list(files), "marked_at": now, "zeroelastic": __version__}
    text = (json.dumps(data, indent=1) + "\n").encode()
    write_small(tag_dir / MARK_NAME, text)
    return mark


def lift_mark(tag_dir: FilePath) -> bool:
    """Take the mark away; whether there was one. On return it is gone from the disk. Raises OSError."""
    if isinstance(tag_dir, RemotePath):
        there = file_size(tag_dir / MARK_NAME) is not None
        remove_objects([tag_dir / MARK_NAME] if there else [])
        return there
    try:
        (tag_dir / MARK_NAME).unlink()
    except FileNotFoundError:
        return False
    sync_directory(tag_dir)
    return True


def refuse_unfinished(tag_dir: FilePath, names: Container[str]) -> None:
    """Raise CheckpointError for a tag directory, with the files ``names``, whose upload did not finish."""
    if UNFINISHED_NAME in names and RECORD_NAME not in names:
        raise CheckpointError(
            f"{tag_dir}: its upload is on its way or did not finish ({UNFINISHED_NAME}, and no {RECORD_NAME}). Resume "
            "from another tag.",
            remedy="",
        )
