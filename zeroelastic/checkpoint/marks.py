"""Marks in a tag directory: of a checkpoint that proved damaged, and of one in a store that is not finished.

A tag with the mark of quarantine is passed over by whatever looks for one that is whole, without being read again.
Nothing is deleted, and a load that names the tag is not kept from it. ``zeroelastic verify --lift-quarantine`` takes
the mark away from a tag that turns out whole, and so does a save into the tag.

An object store has no rename, so the files of a tag appear one by one. The mark of a save or a removal is there before
the first of them appears and goes after the last one did: a directory with this mark and without a commit record is no
checkpoint, whatever else is in it. The mark of a save also keeps two jobs from saving one tag at the same time.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Container
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import ClassVar, Literal

from pydantic import ConfigDict

from zeroelastic._version import __version__
from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.distributed.process_identity import Life, identity, life_of
from zeroelastic.errors import CheckpointError, MissingFileError
from zeroelastic.io.atomic import sync_directory
from zeroelastic.io.objects import remove_objects
from zeroelastic.io.paths import FilePath, RemotePath
from zeroelastic.io.storage import file_names, file_size, read_whole, write_small

MARK_NAME = "zeroelastic-quarantine.json"
UNFINISHED_NAME = "zeroelastic-unfinished.json"

_MAX_BYTES = 1 << 20
_MAX_WHY = 4000

Work = Literal["save", "removal"]


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


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What is done to a tag: by which process (``process_identity``), since when, in seconds since 1970."""

    work: Work
    save_id: str = ""
    owner: str = ""
    began_at: float = 0.0

    @property
    def text(self) -> bytes:
        """The content of the mark."""
        return (json.dumps({**asdict(self), "zeroelastic": __version__}, indent=1) + "\n").encode()

    @property
    def life(self) -> Life:
        """Whether the process that made the mark still runs."""
        return life_of(self.owner)

    @property
    def is_own(self) -> bool:
        """Whether this process made the mark."""
        return self.owner == identity(os.getpid())


def new_mark(work: Work, save_id: str = "") -> Unfinished:
    """The mark of work that this process begins now."""
    return Unfinished(work, save_id, identity(os.getpid()), time.time())


def read_unfinished(tag_dir: FilePath) -> Unfinished | None:
    """The mark of a tag directory, None where there is none; one that cannot be read has no owner.

    Raises UnreadableError where that cannot be known now.
    """
    try:
        found = json.loads(read_whole(tag_dir / UNFINISHED_NAME, limit=_MAX_BYTES))
    except MissingFileError:
        return None
    except (ValueError, RecursionError):  # a CheckpointError for a file that is too large, among them
        found = None
    fields = found if isinstance(found, dict) else {}
    began_at = fields.get("began_at")
    return Unfinished(
        work="removal" if fields.get("work") == "removal" else "save",
        save_id=str(fields.get("save_id", "")),
        owner=str(fields.get("owner", "")),
        began_at=float(began_at) if isinstance(began_at, (int, float)) else 0.0,
    )


def refuse_unfinished(tag_dir: FilePath, names: Container[str]) -> None:
    """Raise CheckpointError for a tag directory, with the files ``names``, whose save or removal did not finish."""
    if UNFINISHED_NAME in names and RECORD_NAME not in names:
        raise CheckpointError(
            f"{tag_dir}: its save, or its removal, is on its way or did not finish ({UNFINISHED_NAME}, and no "
            f"{RECORD_NAME}). Resume from another tag; `zeroelastic prune` removes what a dead save has left.",
            remedy="",
        )
