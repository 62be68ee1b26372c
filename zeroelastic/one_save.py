"""That what is read of a tag is of one save, although another job may save the tag again meanwhile.

A load or a verb pins the tag directory once (``pin``), and gives everything that reads that path. What fails is then
not damage where the tag was saved again (``was_saved_again``); what succeeds is of one save, unless files were written
to in place, as DeepSpeed alone does, or lie behind a URL (``check_one_save``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from zeroelastic.errors import SavedAgainError, UnreadableError, ZeroElasticError
from zeroelastic.pinned import PinnedPath, pin_directory
from zeroelastic.storage import FilePath, RemotePath, changed_since_listed


def pin(tag_dir: FilePath) -> FilePath:
    """The directory as a path that goes on leading to it, or remembers what it was; unchanged where there is none."""
    if isinstance(tag_dir, RemotePath):
        if tag_dir.first_seen is not None:
            return tag_dir
        return RemotePath(tag_dir.protocol, tag_dir.path, tag_dir.options, first_seen={})
    return pin_directory(tag_dir)


def was_saved_again(tag_dir: FilePath) -> bool:
    """Whether a directory, pinned before, was replaced or removed since, or files that were opened were written to."""
    if isinstance(tag_dir, RemotePath):
        try:
            return changed_since_listed(tag_dir)
        except UnreadableError:  # what failed before says why
            return False
    if isinstance(tag_dir, PinnedPath):
        return tag_dir.was_replaced or bool(tag_dir.rewritten)
    return os.path.isdir(tag_dir)  # it was not there when it was to be pinned


def may_mix_saves(tag_dir: FilePath, *, alone: bool = True) -> bool:
    """Whether what was read of a pinned directory may be of two saves.

    A directory that was replaced is consistent all the same for a process that read it ``alone``: not for several,
    which may have pinned different ones, and not together with files beside it.
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
    """While it lasts, pinned directories are read: an error becomes a SavedAgainError where one was saved again.

    So does the end of the block, as of ``check_one_save``.
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
    """The error about a tag that changed under whoever read it."""
    return SavedAgainError(f"{tag_dir}: the checkpoint was saved again, or removed, while it was read. Run it again.")
