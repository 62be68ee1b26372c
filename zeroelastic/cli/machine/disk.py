"""How fast a directory's file system writes and reads, measured with one temporary file."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.output.outcome import unwinding_signals
from zeroelastic.verbs.plan.bandwidth import cached_share, scratch_file

_CHUNK_BYTES = 8 << 20
_STILL_CACHED = 0.1  # with a larger share still in memory after the drop, a read does not measure the device


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
    """Write, flush and read back ``nbytes`` in a temporary file of ``directory``.

    The file is removed also on Ctrl-C, SIGTERM and SIGHUP, and on SIGKILL where the file system supports files without
    a name. An OSError becomes the result's ``problem``.
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
        return f"{directory} cannot be written to: {what}. Give another directory, or change its permissions."
    return f"{directory}: the measurement failed: {what}."


def _write(fd: int, nbytes: int) -> float:
    # Random data, which a compressing file system cannot shrink.
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
