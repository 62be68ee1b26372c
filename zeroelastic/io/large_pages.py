"""Pages of 2 MiB for new memory, if they come faster here than pages of 4 KiB.

Usually they do: the system gives and clears 512 small pages in one go. A virtual machine that hands free memory back to
its host (free page reporting) has handed back the large pages first, and a machine whose memory is fragmented has to
make them: there, new memory comes several times faster in small pages.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import time
from contextlib import suppress

VARIABLE = "ZEROELASTIC_LARGE_PAGES"
"""An environment variable: 1 or 0 decides about large pages, and nothing is measured."""

LARGE_PAGE = 2 << 20
_SMALL_PAGE = 4096
_MADV_NOHUGEPAGE = 15
_MEASURED = 4 * LARGE_PAGE


@functools.cache
def large_pages_pay() -> bool:
    """Whether pages of 2 MiB come faster than those of 4 KiB; the first call of a process measures for milliseconds."""
    chosen = os.environ.get(VARIABLE)
    if chosen in ("0", "1"):
        return chosen == "1"
    return seconds_for_memory(mmap.MADV_HUGEPAGE) <= seconds_for_memory(_MADV_NOHUGEPAGE)


def seconds_for_memory(advice: int) -> float:
    """Return how long the system takes to give 8 MiB of new memory under this advice of ``madvise``."""
    pages = mmap.mmap(-1, _MEASURED + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % LARGE_PAGE
    memory = memoryview(pages)[begin : begin + _MEASURED : _SMALL_PAGE]
    ones = b"\1" * len(memory)
    with suppress(OSError):  # a system without large pages gives small ones
        pages.madvise(advice)
    began = time.perf_counter()
    memory[:] = ones
    return time.perf_counter() - began


def ask_for_large_pages(address: int, nbytes: int) -> None:
    """Ask for large pages in new memory, if they pay. Whole pages only: it takes no more memory than it needs."""
    begin, end = -(-address // LARGE_PAGE) * LARGE_PAGE, (address + nbytes) // LARGE_PAGE * LARGE_PAGE
    if begin < end and large_pages_pay():
        advise(begin, end - begin, mmap.MADV_HUGEPAGE)


def advise(address: int, nbytes: int, advice: int) -> None:
    """Call ``madvise``; if the system refuses, nothing is lost."""
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function(address, nbytes, advice)
