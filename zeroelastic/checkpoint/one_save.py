"""Guarantees that everything read from a tag is of one save, although another job may save the tag again meanwhile.

A load or a verb looks at the tag directory once (``watch``), passes that path to all readers, and looks again when it
has read everything. Every save writes its commit record anew, so where there is one its state tells; other
checkpoints have none, and are told by the states of their files, which DeepSpeed rewrites in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.errors import SavedAgainError, UnreadableError, ZeroElasticError
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import place


def watch(tag_dir: FilePath) -> FilePath:
    """A path of this directory that remembers the state of the files; a missing directory's path is unchanged."""
    return place(tag_dir).watched(RECORD_NAME)


def was_saved_again(tag_dir: FilePath) -> bool:
    """Whether a directory is gone or has files of another save by now; False where that cannot be found out.

    One that is not watched was not there when it was first looked at.
    """
    try:
        return place(tag_dir).has_changed(RECORD_NAME) or watch(tag_dir) is not tag_dir
    except UnreadableError:  # the caller has an error already
        return False


def check_one_save(tag_dir: FilePath) -> None:
    """Raise SavedAgainError where a watched directory is gone or has files of another save; UnreadableError."""
    if place(tag_dir).has_changed(RECORD_NAME):
        raise saved_again(tag_dir)


@contextmanager
def one_save(*tag_dirs: FilePath) -> Iterator[None]:
    """A block that reads watched directories: where one was saved again, it ends with SavedAgainError."""
    try:
        yield
    except (ZeroElasticError, OSError) as error:
        for tag_dir in tag_dirs:
            if not isinstance(error, SavedAgainError) and was_saved_again(tag_dir):
                raise saved_again(tag_dir) from error
        raise
    for tag_dir in tag_dirs:
        check_one_save(tag_dir)


def saved_again(tag_dir: FilePath) -> SavedAgainError:
    """The error for a tag that changed while it was read."""
    return SavedAgainError(f"{tag_dir}: the checkpoint was saved again, or removed, while it was read. Run it again.")
