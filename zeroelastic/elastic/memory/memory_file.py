"""Files in shared memory whose pages are used again: a new page costs as much time as two copies of it.

A file grows where it has to and is never written beyond what the system has to spare: a write to a page that the system
cannot give ends the process with SIGBUS, and memory that is not there ends somebody's process.

Pages are of 2 MiB where the system has such, for a read of them takes half the time of one of 4 KiB pages. Linux makes
them in any file of shared memory when a process asks for it (``MADV_COLLAPSE``, since 6.1), whatever the settings of
its mount are.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import torch

from zeroelastic.byte_sizes import format_size
from zeroelastic.deepspeed.save.shard_writer import HostMemory
from zeroelastic.io.atomic import name_in_errors
from zeroelastic.io.large_pages import LARGE_PAGE, advise, large_pages_pay
from zeroelastic.torch_file.image import Pages

_SLACK = 64 << 10
_PAGE = mmap.PAGESIZE
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_SPARED = 256 << 20
"""Memory that is left to the rest of the system."""


class MemoryFile:
    """A file at ``path``, made when it is first needed; ``take`` maps it. One thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._memory: torch.Tensor | None = None
        self._pages: Pages | None = None
        self._mapped: os.stat_result | None = None
        self._capacity = self._size = 0

    def take(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """Return the file's bytes, shape ``(nbytes,)``, uint8, from the beginning of a page; it has just this size.

        Their content has no meaning. ``pinned`` registers them with the CUDA driver, where it does so. Raises OSError
        naming the file where the memory is not there.
        """
        if self._pages is not None and not (pinned and _num_pages(nbytes) == _num_pages(self._size)):
            self._pages.unpin()  # a GPU would go on to write to pages that are no longer the file's
        with name_in_errors(self.path):
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                found = os.fstat(fd)
                if self._mapped is None or not os.path.samestat(self._mapped, found):  # new, or somebody removed it
                    if self._pages is not None:
                        self._pages.unpin()
                    self._memory, self._mapped, self._capacity, self._size = None, found, 0, 0
                if self._memory is None or self._capacity < nbytes:
                    self._grow(fd, nbytes)
                elif nbytes > self._size:
                    os.posix_fallocate(fd, 0, nbytes)  # pages that a smaller size has freed
                os.ftruncate(fd, nbytes)
            finally:
                os.close(fd)
        self._size = nbytes
        assert self._memory is not None and self._pages is not None
        if pinned:
            self._pages.pin(self._memory.data_ptr() - self._pages.address(), nbytes)
        return self._memory[:nbytes]

    def _grow(self, fd: int, nbytes: int) -> None:
        capacity = -(-(nbytes + nbytes // 64 + _SLACK) // _PAGE) * _PAGE  # what is pickled may grow a little
        require_memory(self.path.parent, capacity - self._capacity)
        pages, memory = _map(fd, capacity)
        try:
            os.ftruncate(fd, max(self._size, nbytes))
            _use_large_pages(fd, memory, self._size, nbytes)
            os.posix_fallocate(fd, 0, capacity)
        except OSError:
            os.ftruncate(fd, self._size)
            raise
        self._memory, self._pages = torch.frombuffer(memory, dtype=torch.uint8), pages
        self._capacity = capacity


class Slot(HostMemory):
    """The memory of one checkpoint that this rank fills: its own files and what it keeps for others, in ``directory``.

    The files are used again in the order in which they are taken.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self._files: list[MemoryFile] = []
        self._num_taken = self._num_linked = 0

    def begin(self) -> None:
        """Begin a checkpoint: nothing refers to the last one in this slot any more."""
        self._num_taken = self._num_linked = 0

    def take(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """The memory of the next file, as ``MemoryFile.take``."""
        if self._num_taken == len(self._files):
            self._files.append(MemoryFile(self.directory / str(self._num_taken)))
        self._num_taken += 1
        return self._files[self._num_taken - 1].take(nbytes, pinned=pinned)

    def link(self, path: Path) -> None:
        """Let the next of the files that were taken be at ``path``, too. Raises OSError."""
        os.link(self._files[self._num_linked].path, path)
        self._num_linked += 1

    def trim(self) -> None:
        """Free the memory of the files that were not taken."""
        for file in self._files[self._num_taken :]:
            file.path.unlink(missing_ok=True)
        del self._files[self._num_taken :]


def _num_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE)


def _map(fd: int, nbytes: int) -> tuple[Pages, memoryview]:
    """Map the file's first ``nbytes`` bytes at an address where pages of 2 MiB may begin."""
    room = Pages(-1, nbytes + LARGE_PAGE)  # it takes addresses, no memory, and gives them back when it is dropped
    first = room.address()
    skipped = -first % LARGE_PAGE
    map_file = ctypes.CDLL(None, use_errno=True).mmap
    map_file.restype = ctypes.c_void_p
    map_file.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = map_file(first + skipped, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if address != first + skipped:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return room, memoryview(room)[skipped : skipped + nbytes]


def _use_large_pages(fd: int, memory: memoryview, begin: int, end: int) -> None:
    """Use pages of 2 MiB between two sizes of the file, if they pay and as far as the system has them.

    A page is made of the pages in its place, of which there must be one.
    """
    first, last = -(-begin // LARGE_PAGE), end // LARGE_PAGE
    if first >= last or not large_pages_pay():
        return
    for number in range(first, last):
        os.pwrite(fd, b"\0", number * LARGE_PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    advise(address + first * LARGE_PAGE, (last - first) * LARGE_PAGE, _MADV_COLLAPSE)


def require_memory(directory: Path, nbytes: int) -> None:
    """Raise OSError (ENOSPC) where a file in ``directory`` cannot grow by so much without harm to the system."""
    spare = spare_memory(directory)
    if nbytes > spare:
        raise OSError(
            errno.ENOSPC,
            f"needs {format_size(nbytes)} more of shared memory, and {format_size(max(spare, 0))} are to spare. Give "
            'the node or container more (--shm-size), or keep fewer copies ("copies")',
            os.fspath(directory),
        )


def spare_memory(directory: Path) -> int:
    """Return the bytes that a file in shared memory may grow by: of file system, system, and control group."""
    found = os.statvfs(directory)
    limits = [found.f_bavail * found.f_frsize, *_available(), *_left_in_group()]
    return min(limits) - _SPARED


def _available() -> list[int]:
    """Return ``MemAvailable`` of proc(5)."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return [int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")]
    except OSError:
        return []


def _left_in_group(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Return the bytes that this process's control group (version 2, or 1) may still take, shared memory included."""
    for limit, usage in (("memory.max", "memory.current"), *_OLD_GROUP):
        try:
            most, used = (root / limit).read_text().strip(), int((root / usage).read_text())
        except (OSError, ValueError):
            continue
        return [int(most) - used] if most != "max" else []
    return []


_OLD_GROUP = (("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),)
