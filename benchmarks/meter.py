"""The cost of a piece of work for one process, from the kernel's counters: seconds, bytes, files, memory.

Bytes are ``rchar`` of /proc/self/io, whatever made the system call, plus what is resident of mapped files; memory is
the growth of the resident set to its peak; files are counted by inotify, so that opens in C++ are seen as well.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_IN_OPEN, _IN_Q_OVERFLOW, _IN_ISDIR = 0x20, 0x4000, 0x40000000
_EVENT = struct.Struct("iIII")
_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Cost:
    """What one process spent. ``mapped_bytes`` is what it saw of mapped files; ``disk_bytes`` what came from storage
    rather than from the page cache; ``extra_rss`` the peak above the start."""

    seconds: float
    cpu_seconds: float
    read_bytes: int
    mapped_bytes: int
    disk_bytes: int
    written_bytes: int
    extra_rss: int
    files: int
    busy_cpu_seconds: float

    @property
    def bytes_in(self) -> int:
        """Bytes taken from files, read and mapped."""
        return self.read_bytes + self.mapped_bytes


def others_share(costs: Sequence[Cost]) -> float:
    """The share of the processors that others used while these processes worked."""
    busy = costs[0].busy_cpu_seconds - sum(cost.cpu_seconds for cost in costs)
    return max(0.0, busy) / (costs[0].seconds * len(os.sched_getaffinity(0)))


class OpenedFiles:
    """The regular files below a directory that are opened while it exists; by whom does not matter."""

    def __init__(self, directory: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._directories: dict[int, str] = {}
        for parent, _, _ in os.walk(directory):
            watch = self._libc.inotify_add_watch(self._descriptor, os.fsencode(parent), _IN_OPEN)
            if watch < 0:
                raise OSError(ctypes.get_errno(), "inotify_add_watch", parent)
            self._directories[watch] = parent

    def take(self) -> set[str]:
        """The paths opened since the last call."""
        paths: set[str] = set()
        while True:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                return paths
            at = 0
            while at < len(data):
                watch, mask, _, length = _EVENT.unpack_from(data, at)
                name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
                at += _EVENT.size + length
                if mask & _IN_Q_OVERFLOW:
                    raise RuntimeError("inotify lost events: more files were opened than its queue holds")
                if not mask & _IN_ISDIR:
                    paths.add(os.path.join(self._directories[watch], os.fsdecode(name)))

    def close(self) -> None:
        os.close(self._descriptor)


class Meter:
    """Measures from its creation to ``stop``; counts files that are opened below ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._opened = OpenedFiles(directory)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._resident = status_bytes("VmRSS")

    def start(self) -> None:
        """Begin to count. The resident set's peak is reset here, in the whole process."""
        self._opened.take()
        self._children = _largest_child()
        Path("/proc/self/clear_refs").write_text("5")
        self._io = _io()
        self._busy = _busy_cpu_seconds()
        self._cpu = sum(os.times()[:4])
        self._began = time.perf_counter()

    def stop(self) -> Cost:
        """What was spent since ``start``; children that were waited for are included."""
        seconds = time.perf_counter() - self._began
        cpu = sum(os.times()[:4]) - self._cpu
        busy = _busy_cpu_seconds() - self._busy
        io = {name: value - self._io[name] for name, value in _io().items()}
        # The kernel keeps the largest child ever: one from before says nothing of what was measured.
        children = _largest_child() if _largest_child() > self._children else 0
        cost = Cost(
            seconds=seconds,
            cpu_seconds=cpu,
            read_bytes=io["rchar"],
            mapped_bytes=_mapped_resident(self._directory),
            disk_bytes=io["read_bytes"],
            written_bytes=io["wchar"],
            extra_rss=max(status_bytes("VmHWM"), children) - self._resident,
            files=len(self._opened.take()),
            busy_cpu_seconds=busy,
        )
        self._opened.close()
        return cost


def status_bytes(key: str) -> int:
    """A size from /proc/self/status, such as VmRSS, in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def _largest_child() -> int:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def _io() -> dict[str, int]:
    with open("/proc/self/io") as lines:
        return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def _busy_cpu_seconds() -> float:
    """Processor time that the whole machine has spent so far, idle and waiting for storage excluded."""
    with open("/proc/stat") as lines:
        user, nice, system, _, _, irq, softirq, *_ = map(int, next(lines).split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _mapped_resident(directory: Path) -> int:
    """Bytes of files below a directory that are mapped into this process and resident."""
    total, inside = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split(maxsplit=1)[0]
            if not first.endswith(":"):
                inside = str(directory) in line
            elif inside and first == "Rss:":
                total += int(line.split()[1]) * 1024
    return total


def files_below(directory: Path) -> list[Path]:
    """The regular files below a directory, sorted."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def warm_up(paths: Iterable[Path]) -> None:
    """Bring files into the page cache."""
    buffer = bytearray(_READ_BYTES)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            if not _is_cached(file.fileno()):
                while file.readinto(buffer):
                    pass


def _is_cached(descriptor: int) -> bool:
    """Whether the page cache has all of a file."""
    nbytes = os.fstat(descriptor).st_size
    if nbytes == 0:
        return True
    pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    with mmap.mmap(descriptor, nbytes, flags=mmap.MAP_PRIVATE) as memory:
        first = ctypes.c_char.from_buffer(memory)
        failed = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(nbytes), pages)
        del first
    return not failed and all(page & 1 for page in bytes(pages))


def touch_free_memory(nbytes: int) -> None:
    """Touch and release this much memory, so that what is measured next does not wait for a hypervisor.

    Where one reclaims free memory within seconds (free page reporting), the next use of it costs up to 1 s per GB:
    whichever system comes next would pay for what the one before it freed.
    """
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, nbytes, mmap.PAGESIZE):
            memory[at] = 1


def cool_down(paths: Iterable[Path]) -> None:
    """Drop files from the page cache; dirty pages are written first."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def link_tree(source: Path, view: Path) -> None:
    """Hard links to the same files in another directory: the same page cache, while opens differ by path."""
    for path in files_below(source):
        target = view / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            os.link(path, target)
