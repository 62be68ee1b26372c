"""The mark of a checkpoint in an object store whose upload is not finished.

An object store has no rename, so the files of a tag appear one by one. The mark of an upload is there before the first
of them appears and goes after the commit record did: a directory with this mark and without a commit record is no
checkpoint, whatever else is in it.
"""

from __future__ import annotations

from collections.abc import Container

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.errors import CheckpointError
from zeroelastic.io.paths import FilePath

UNFINISHED_NAME = "zeroelastic-unfinished.json"


def refuse_unfinished(tag_dir: FilePath, names: Container[str]) -> None:
    """Raise CheckpointError for a tag directory, with the files ``names``, whose upload did not finish."""
    if UNFINISHED_NAME in names and RECORD_NAME not in names:
        raise CheckpointError(
            f"{tag_dir}: its upload is on its way or did not finish ({UNFINISHED_NAME}, and no {RECORD_NAME}). Resume "
            "from another tag.",
            remedy="",
        )
