"""Files in shared memory whose pages are used again: a new page costs as much time as two copies of it.

A file grows where it has to and is never written beyond what the system has to spare: a write to a page that the system
cannot give ends the process with SIGBUS, and memory that is not there ends somebody's process.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import torch

from zeroelastic.byte_sizes import format_size
from zeroelastic.io.atomic import name_in_errors

_SLACK = 64 << 10
_PAGE = mmap.PAGESIZE
_SPARED = 256 << 20
"""Memory that is left to the rest of the system."""


class MemoryFile:
    """A file at ``path``, made when it is first needed; ``take`` maps it. One thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._memory: torch.Tensor | None = None
        self._capacity = self._size = 0

    @property
    def nbytes(self) -> int:
        """The bytes of shared memory that the file takes."""
        return self._capacity

    def take(self, nbytes: int) -> torch.Tensor:
        """The file's bytes, shape ``(nbytes,)``, uint8, from the beginning of a page; the file has just this size.

        What is in them is of no meaning. Raises OSError naming the file where the memory is not there.
        """
        with name_in_errors(self.path):
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if self._memory is None or self._capacity < nbytes:
                    self._grow(fd, nbytes)
                elif nbytes > self._size:
                    os.posix_fallocate(fd, 0, nbytes)  # pages that a smaller size has freed
                os.ftruncate(fd, nbytes)
            finally:
                os.close(fd)
        self._size = nbytes
        assert self._memory is not None
        return self._memory[:nbytes]

    def _grow(self, fd: int, nbytes: int) -> None:
        capacity = -(-(nbytes + nbytes // 64 + _SLACK) // _PAGE) * _PAGE  # what is pickled may grow a little
        require_memory(self.path.parent, capacity - self._capacity)
        try:
            os.posix_fallocate(fd, 0, capacity)
        except OSError:
            os.ftruncate(fd, self._size)
            raise
        self._memory = torch.frombuffer(mmap.mmap(fd, capacity), dtype=torch.uint8)
        self._capacity = capacity


def require_memory(directory: Path, nbytes: int) -> None:
    """Raise OSError (ENOSPC) where a file in ``directory`` cannot grow by so much without harm to the system."""
    spare = spare_memory(directory)
    if nbytes > spare:
        raise OSError(
            errno.ENOSPC,
            f"needs {format_size(nbytes)} more of shared memory, and {format_size(max(spare, 0))} are to spare. Give "
            'the node or container more (--shm-size), or keep less of it ("copies", "parity")',
            os.fspath(directory),
        )


def spare_memory(directory: Path) -> int:
    """The bytes that a file in shared memory may grow by: of the file system, the system, and the control group."""
    found = os.statvfs(directory)
    limits = [found.f_bavail * found.f_frsize, *_available(), *_left_in_group()]
    return min(limits) - _SPARED


def _available() -> list[int]:
    """``MemAvailable`` of proc(5)."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return [int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")]
    except OSError:
        return []


def _left_in_group(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What the control group (version 2, or 1) of this process may still take; shared memory counts there."""
    for limit, usage in (("memory.max", "memory.current"), *_OLD_GROUP):
        try:
            most, used = (root / limit).read_text().strip(), int((root / usage).read_text())
        except (OSError, ValueError):
            continue
        return [int(most) - used] if most != "max" else []
    return []


_OLD_GROUP = (("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),)
