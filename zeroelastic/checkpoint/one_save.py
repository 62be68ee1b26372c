"""Guarantees that everything read from a tag is of one save, although another job may save the tag again meanwhile.

A load or a verb looks at the tag directory once (``watch``), passes that path to all readers, and looks again when it
has read everything. Every save writes its commit record anew, so where there is one its state tells; other
checkpoints have none, and are told by the states of their files, which DeepSpeed rewrites in place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.errors import SavedAgainError, UnreadableError, ZeroElasticError
from zeroelastic.io.paths import FilePath, FileState, RemotePath, WatchedPath, file_state, watched_path
from zeroelastic.io.remote import changed_since_listed


def watch(tag_dir: FilePath) -> FilePath:
    """A path of this directory that remembers the state of its files; a missing directory's path is unchanged."""
    if isinstance(tag_dir, RemotePath):
        if tag_dir.first_seen is not None:
            return tag_dir
        return RemotePath(tag_dir.protocol, tag_dir.path, tag_dir.options, first_seen={})
    if isinstance(tag_dir, WatchedPath) and tag_dir.first_seen is not None:
        return tag_dir
    found = _states(tag_dir)
    return tag_dir if found is None else watched_path(tag_dir, found)


def is_watched(tag_dir: FilePath) -> bool:
    """Whether a local directory was there when it was first looked at."""
    return isinstance(tag_dir, WatchedPath) and tag_dir.first_seen is not None


def _states(tag_dir: Path) -> dict[str, FileState] | None:
    """The state of a tag's commit record; without one those of its files; None where there is no directory.

    The record is opened: a network file system may answer ``stat`` with what it was told earlier.
    """
    with suppress(OSError):
        fd = os.open(tag_dir / RECORD_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return {RECORD_NAME: file_state(os.fstat(fd))}
        finally:
            os.close(fd)
    found: dict[str, FileState] = {}
    try:
        for entry in os.scandir(tag_dir):
            with suppress(OSError):
                if not entry.is_dir():
                    found[entry.name] = file_state(entry.stat(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:  # it cannot be listed, which is the error of whoever reads it
        pass
    return found


def was_saved_again(tag_dir: FilePath) -> bool:
    """Whether a directory is gone or has files of another save by now; False where that cannot be found out.

    One that is not watched was not there when it was first looked at.
    """
    if isinstance(tag_dir, Path) and not is_watched(tag_dir):
        return tag_dir.is_dir()
    try:
        return _has_changed(tag_dir)
    except UnreadableError:  # the caller has an error already
        return False


def _has_changed(tag_dir: FilePath) -> bool:
    if isinstance(tag_dir, RemotePath):
        return changed_since_listed(tag_dir)
    if not isinstance(tag_dir, WatchedPath) or tag_dir.first_seen is None:
        return False
    now = _states(tag_dir)
    return now is None or any(now.get(name) != state for name, state in tag_dir.first_seen.items())


def check_one_save(tag_dir: FilePath) -> None:
    """Raise SavedAgainError where a watched directory is gone or has files of another save; UnreadableError."""
    if _has_changed(tag_dir):
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
