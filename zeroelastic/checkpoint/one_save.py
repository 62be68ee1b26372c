"""Guarantees that everything read from a tag is of one save, although another job may save the tag again meanwhile.

A load or a verb pins the tag directory once (``pin``) and passes that path to all readers. An error is then not damage
where the tag was saved again (``was_saved_again``); a success is of one save, unless files were rewritten in place, as
DeepSpeed alone does, or are behind a URL (``check_one_save``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from zeroelastic.errors import SavedAgainError, UnreadableError, ZeroElasticError
from zeroelastic.io.paths import FilePath, PinnedPath, RemotePath, pin_directory
from zeroelastic.io.remote import changed_since_listed


def pin(tag_dir: FilePath) -> FilePath:
    """A path that keeps leading to this directory, or remembers its files; a missing directory's path is unchanged."""
    if isinstance(tag_dir, RemotePath):
        if tag_dir.first_seen is not None:
            return tag_dir
        return RemotePath(tag_dir.protocol, tag_dir.path, tag_dir.options, first_seen={})
    return pin_directory(tag_dir)


def was_saved_again(tag_dir: FilePath) -> bool:
    """Whether a pinned directory was replaced or removed since, or files that were opened in it were rewritten."""
    if isinstance(tag_dir, RemotePath):
        try:
            return changed_since_listed(tag_dir)
        except UnreadableError:  # the caller has an error already
            return False
    if isinstance(tag_dir, PinnedPath):
        return tag_dir.was_replaced or bool(tag_dir.rewritten)
    return os.path.isdir(tag_dir)  # it did not exist when it was pinned


def may_mix_saves(tag_dir: FilePath, *, alone: bool = True) -> bool:
    """Whether the data read from a pinned directory may be of two saves.

    A replaced directory is still consistent for a process that read it ``alone``, but not for several processes, which
    may have pinned different ones, and not together with files beside it.
    """
    if isinstance(tag_dir, RemotePath):
        return changed_since_listed(tag_dir)
    if isinstance(tag_dir, PinnedPath):
        return bool(tag_dir.rewritten) or (not alone and tag_dir.was_replaced)
    return False


def check_one_save(tag_dir: FilePath, *, alone: bool = True) -> None:
    """Raise SavedAgainError where ``may_mix_saves``."""
    if may_mix_saves(tag_dir, alone=alone):
        raise saved_again(tag_dir)


@contextmanager
def one_save(*tag_dirs: FilePath) -> Iterator[None]:
    """A block that reads pinned directories: an error in it becomes a SavedAgainError where one was saved again.

    The end of the block calls ``check_one_save`` for each.
    """
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
