"""What a target needs: a free place, space set aside, bytes flushed to the device, a name that replaces nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from zeroelastic.errors import UsageError
from zeroelastic.io.atomic import name_in_errors, rename_new, reserve_space, start_writeback, sync_directory, sync_path

_FLUSHING_THREADS = 8
_FLUSH_EVERY = 128 << 20


def check_free(dst: Path, *, sources: tuple[Path, ...] = ()) -> None:
    """Raise UsageError when ``dst`` cannot be made: it is there, lies inside a source, or its parent is not there."""
    if os.path.lexists(dst):
        raise UsageError(f"{dst}: is there already; nothing is overwritten. Remove it or give another name.")
    if not dst.parent.is_dir():
        raise UsageError(f"{dst.parent}: no such directory. Make it first.")
    for source in sources:
        if dst.parent.resolve().joinpath(dst.name).is_relative_to(source.resolve()):
            raise UsageError(f"{dst}: lies inside the source {source}, which is not touched. Give a name beside it.")


def reserve_file(path: Path, nbytes: int) -> None:
    """Make a file of this size, its space set aside where the file system can: a full disk is noticed before work.

    Raises OSError naming it.
    """
    with name_in_errors(path), open(path, "xb", buffering=0) as file:
        os.truncate(file.fileno(), nbytes)
        reserve_space(file.fileno(), nbytes)


class EarlyFlush:
    """Passes progress on, and lets the device begin with what has been written since it last did."""

    def __init__(self, paths: Sequence[Path], progress: Callable[[int], None] | None) -> None:
        self._paths, self._progress, self._waiting = tuple(paths), progress, 0

    def told(self, nbytes: int) -> None:
        """So many bytes more were moved into the files."""
        self._waiting += nbytes
        if self._waiting >= _FLUSH_EVERY:
            self._waiting = 0
            for path in self._paths:
                start_writeback(path)
        if self._progress is not None:
            self._progress(nbytes)


def flush_tree(directory: Path) -> None:
    """fsync all files in a directory, then the directories, the innermost first."""
    tree = list(os.walk(directory, topdown=False))
    with ThreadPoolExecutor(_FLUSHING_THREADS) as pool:
        files = (Path(folder, name) for folder, _, names in tree for name in names)
        for _ in pool.map(sync_path, files):
            pass
    for folder, _, _ in tree:
        sync_directory(Path(folder))


def publish_new(hidden: Path, target: Path) -> None:
    """Rename, but never over something that has come to be there meanwhile. Raises UsageError, OSError."""
    with suppress(FileExistsError):
        if rename_new(hidden, target):
            return
    check_free(target)
    os.rename(hidden, target)
