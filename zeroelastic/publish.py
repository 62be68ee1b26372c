"""What a target needs: a free place, space set aside, bytes flushed to the device, a name that replaces nothing."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zeroelastic.archive import reserve_space
from zeroelastic.errors import UsageError

_NOREPLACE = 1  # linux/fs.h: RENAME_NOREPLACE
_FLUSHING_THREADS = 8
_FLUSH_EVERY = 128 << 20

_libc = ctypes.CDLL(None, use_errno=True)


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
    try:
        with open(path, "xb", buffering=0) as file:
            os.truncate(file.fileno(), nbytes)
            reserve_space(file.fileno(), nbytes)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def start_flushing(path: Path) -> None:
    """Let the device begin with what is in the page cache of a file, without waiting for it."""
    if hasattr(_libc, "sync_file_range"):
        with open(path, "rb", buffering=0) as file:
            _libc.sync_file_range(file.fileno(), ctypes.c_int64(0), ctypes.c_int64(0), 2)  # SYNC_FILE_RANGE_WRITE


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
                start_flushing(path)
        if self._progress is not None:
            self._progress(nbytes)


def flush_tree(directory: Path) -> None:
    """fsync all files in a directory, then the directories, the innermost first."""
    tree = list(os.walk(directory, topdown=False))
    with ThreadPoolExecutor(_FLUSHING_THREADS) as pool:
        files = (Path(folder, name) for folder, _, names in tree for name in names)
        for _ in pool.map(_sync, files):
            pass
    for folder, _, _ in tree:
        _sync(Path(folder), os.O_DIRECTORY)


def _sync(path: Path, flags: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    finally:
        os.close(fd)


def rename_new(hidden: Path, target: Path) -> None:
    """Rename, but never over something that has come to be there meanwhile. Raises UsageError, OSError."""
    if hasattr(_libc, "renameat2"):
        here = -100  # AT_FDCWD
        if _libc.renameat2(here, os.fsencode(hidden), here, os.fsencode(target), _NOREPLACE) == 0:
            return
        error = ctypes.get_errno()
        if error not in (errno.ENOSYS, errno.EINVAL, errno.EEXIST):
            raise OSError(error, os.strerror(error), os.fspath(target))
    check_free(target)
    os.rename(hidden, target)
