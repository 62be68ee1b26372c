"""The mark of a tag in an object store whose save, or whose removal, is on its way or did not finish.

A store has no rename, so the files of a tag appear one by one. The mark is there before the first of them appears and
goes after the last one did: a directory with the mark and without a commit record is no checkpoint, whatever else is
in it. The mark of a save also keeps two jobs from saving one tag at the same time (``save.store``).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

from zeroelastic._version import __version__
from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.distributed.process_identity import Life, identity, life_of
from zeroelastic.errors import CheckpointError, MissingFileError
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import read_whole

UNFINISHED_NAME = "zeroelastic-unfinished.json"

_MAX_BYTES = 1 << 16

Work = Literal["save", "removal"]


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
        data = {
            "work": self.work,
            "save_id": self.save_id,
            "owner": self.owner,
            "began_at": self.began_at,
            "zeroelastic": __version__,
        }
        return (json.dumps(data, indent=1) + "\n").encode()

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
