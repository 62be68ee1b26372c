"""How fast a directory's file system writes and reads, by one bounded file that is never left behind."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from zeroelastic.cli.outcome import unwinding_signals
from zeroelastic.cli.sizes import format_size

_CHUNK_BYTES = 8 << 20
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}
_STILL_CACHED = 0.1  # above this share in memory after being dropped, a read says nothing about the device


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes per second, one thread: written and made durable, read from the page cache, read from the device.

    A figure is None when it was not measured: all of them with a ``problem``, ``read_cold`` with a ``note`` that says
    why.
    """

    directory: str
    nbytes: int
    write: float | None
    read_warm: float | None
    read_cold: float | None
    note: str
    problem: str


def measure_disk(directory: Path, *, nbytes: int, progress: Callable[[str], None]) -> DiskSpeed:
    """Write, flush and read back ``nbytes`` in a file of ``directory``, which is gone afterwards.

    Gone also on Ctrl-C, SIGTERM and SIGHUP, which are passed on; where the file system has files without a name, even
    on SIGKILL. What the file system refuses is the result's ``problem``.
    """
    shown = str(directory.resolve())
    try:
        with unwinding_signals(), scratch_file(directory) as fd:
            free = shutil.disk_usage(directory).free
            if free < nbytes:
                raise OSError(errno.ENOSPC, f"{format_size(free)} are free, {format_size(nbytes)} are needed")
            progress(f"writing {format_size(nbytes)} in {shown}")
            write = _write(fd, nbytes)
            progress(f"reading {format_size(nbytes)} from memory")
            warm = _read(fd, nbytes)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            cached = cached_share(fd, nbytes)
            if cached > _STILL_CACHED:
                note = f"not measured: {cached:.0%} of the file stay in memory, as on a RAM disk"
                return DiskSpeed(shown, nbytes, write, warm, None, note, "")
            progress(f"reading {format_size(nbytes)} from the device")
            return DiskSpeed(shown, nbytes, write, warm, _read(fd, nbytes), "", "")
    except OSError as error:
        return DiskSpeed(shown, nbytes, None, None, None, "", _explain(shown, error))


def _explain(directory: str, error: OSError) -> str:
    what = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{directory} is full: {what}. Free some space or give a smaller --disk-size."
    if error.errno == errno.EFBIG:
        return f"{directory}: {what}. Give a smaller --disk-size, or raise the limit (ulimit -f)."
    if error.errno == errno.EROFS:
        return f"{directory} is on a read-only file system. Give a directory that checkpoints can be written to."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{directory} cannot be written to: {what}. Give another directory, or have its permissions changed."
    return f"{directory}: the measurement failed: {what}."


@contextmanager
def scratch_file(directory: Path) -> Iterator[int]:
    """An empty file: without a name where that is possible, else removed at the end, whatever the end is."""
    flags = os.O_RDWR | os.O_CLOEXEC
    path = directory / f".zeroelastic-{os.getpid()}-{time.time_ns()}"
    fd, named = -1, False
    try:
        try:
            fd = os.open(directory, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            named = True  # before it is: Ctrl-C may come at any time
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        yield fd
    finally:
        if named:
            with suppress(FileNotFoundError):
                path.unlink()
        if fd >= 0:
            os.close(fd)


def _write(fd: int, nbytes: int) -> float:
    # Random, so that a file system that compresses has nothing to gain.
    chunk = memoryview(os.urandom(min(_CHUNK_BYTES, nbytes)))
    start = time.perf_counter()
    written = 0
    while written < nbytes:
        written += os.pwrite(fd, chunk[: nbytes - written], written)
    os.fsync(fd)
    return nbytes / (time.perf_counter() - start)


def _read(fd: int, nbytes: int) -> float:
    buffer = bytearray(min(_CHUNK_BYTES, nbytes))
    start = time.perf_counter()
    done = 0
    while done < nbytes:
        got = os.preadv(fd, [buffer], done)
        if got == 0:
            raise OSError(errno.EIO, f"the file ends at byte {done} of {nbytes} written")
        done += got
    return nbytes / (time.perf_counter() - start)


def cached_share(fd: int, nbytes: int) -> float:
    """Which part of a file's first bytes is in the page cache, by mincore(2); 1 for a file that is somebody else's."""
    num_pages = -(-nbytes // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * num_pages)()
    with mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY) as mapped:  # copy: files opened for reading as well
        address = ctypes.c_char.from_buffer(mapped)
        try:
            failed = ctypes.CDLL(None).mincore(
                ctypes.c_void_p(ctypes.addressof(address)), ctypes.c_size_t(nbytes), resident
            )
        finally:
            del address  # a mapping that is pointed into cannot be closed
    return 0.0 if failed else sum(page & 1 for page in resident) / num_pages
