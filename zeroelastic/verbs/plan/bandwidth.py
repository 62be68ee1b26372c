"""How fast the file system of a checkpoint is, in about half a second: what a plan's seconds are computed from."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

from zeroelastic.byte_sizes import format_size
from zeroelastic.verbs.report import Part

_READ_BYTES, _READ_S = 256 << 20, 0.3
_WRITE_BYTES, _WRITE_S = 64 << 20, 0.2
_CHUNK_BYTES = 4 << 20
_MOST_THREADS = 4
_LEAST_BYTES = 16 << 20  # below this much a measurement is mostly latency
_STILL_CACHED = 0.1
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}


class Bandwidth(Part):
    """Bytes per second of reading and writing, None where they are not known; ``notes`` say why, and what to doubt.

    ``cached`` is whether what was read was in memory, so that the device may be slower; None without a measurement.
    """

    read: float | None
    write: float | None
    origin: Literal["given", "measured", "none"]
    cached: bool | None = None
    bytes_measured: int = 0
    notes: tuple[str, ...] = ()


def measure_bandwidth(files: Sequence[Path], directory: Path) -> Bandwidth:
    """Read some of ``files``, the largest first, and write a file of ``directory`` that has no name and is gone then.

    At most 256 MiB and 0.3 seconds are read, with a few threads, after they were dropped from the page cache, which
    needs no privileges but does not always work; 64 MiB and 0.2 seconds are written and flushed.
    """
    notes: list[str] = []
    read, cached, nbytes = None, None, 0
    try:
        read, cached, nbytes = _read(files)
        if cached:
            notes.append("what was read was in memory and could not be dropped: the device may be slower")
        if nbytes < _LEAST_BYTES:
            notes.append(f"there were only {format_size(nbytes)} to read, which says little")
    except OSError as error:
        notes.append(f"reading was not measured: {error.strerror or error}")
    write = None
    try:
        write = _write(directory)
    except OSError as error:
        notes.append(f"writing was not measured: {directory}: {error.strerror or error}")
    return Bandwidth(
        read=read, write=write, origin="measured", cached=cached, bytes_measured=nbytes, notes=tuple(notes)
    )


def _read(files: Sequence[Path]) -> tuple[float | None, bool, int]:
    """Bytes per second, whether they came from memory, and how many; what is read is spread over the files."""
    sizes = sorted(((path.stat().st_size, path) for path in files), reverse=True, key=lambda item: item[0])
    sizes = [item for item in sizes if item[0] > 0]
    chosen: list[tuple[Path, int]] = []
    left = _READ_BYTES
    share = -(-_READ_BYTES // max(1, min(len(sizes), _MOST_THREADS)))
    for size, path in sizes:
        if left > 0:
            chosen.append((path, min(size, share, left)))
            left -= chosen[-1][1]
    if not chosen:
        return None, False, 0
    with ExitStack() as stack:
        opened: list[tuple[int, int]] = []
        resident = 0.0
        for path, nbytes in chosen:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            os.posix_fadvise(fd, 0, nbytes, os.POSIX_FADV_DONTNEED)
            resident += cached_share(fd, nbytes) * nbytes
            opened.append((fd, nbytes))
        total = sum(nbytes for _, nbytes in opened)
        start = time.perf_counter()
        with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)), len(opened))) as pool:
            jobs = [pool.submit(_read_until, fd, nbytes, start + _READ_S) for fd, nbytes in opened]
            done = sum(job.result() for job in jobs)
        seconds = time.perf_counter() - start
    return done / seconds if done else None, resident > _STILL_CACHED * total, done


def _read_until(fd: int, nbytes: int, deadline: float) -> int:
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, nbytes)))
    done = 0
    while done < nbytes and (done == 0 or time.perf_counter() < deadline):
        got = os.preadv(fd, [buffer[: nbytes - done]], done)
        if got == 0:
            break
        done += got
    return done


def _write(directory: Path) -> float:
    chunk = os.urandom(_CHUNK_BYTES)
    with scratch_file(directory) as fd:
        start = time.perf_counter()
        done = 0
        while done < _WRITE_BYTES and (done == 0 or time.perf_counter() - start < _WRITE_S):
            done += os.pwrite(fd, chunk, done)
            if done % (4 * _CHUNK_BYTES) == 0:
                os.fdatasync(fd)
        os.fdatasync(fd)
        return done / (time.perf_counter() - start)


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
