"""Host memory that tensors are copied to, pinned where they come from a GPU.

Pinned pages are registered with the CUDA driver: just as many as there are, and until they are freed. torch's allocator
of pinned memory rounds each block up to a power of two, and keeps what is freed.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
from contextlib import suppress
from typing import Any

import torch

logger = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of the process
_MADV_WIPEONFORK = 18
_warned = False
_pinned_bytes = 0


class Pages(mmap.mmap):
    """A mapping of which one range at a time can be pinned; it is unpinned before the mapping goes."""

    _pinned: tuple[int, int] | None = None
    _asked: tuple[int, int] | None = None
    _device = _process = 0

    def pin(self, offset: int, nbytes: int) -> bool:
        """Register a range with the driver, in place of the one before; False, logged once, where it refuses.

        The range is extended to whole pages. A driver that has refused a range is not asked for it again.
        """
        first, end = offset // mmap.PAGESIZE * mmap.PAGESIZE, -(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._asked != (first, end):
            self.unpin()
            self._asked, self._device, self._process = (first, end), torch.cuda.current_device(), os.getpid()
            if _register(self.address(first), end - first):
                self._pinned = first, end
                _count(end - first)
        return self._pinned is not None

    def unpin(self) -> None:
        """Unpin what is pinned, when no copy to it is under way any more."""
        pinned, self._pinned, self._asked = self._pinned, None, None
        if pinned is None or self._process != os.getpid():  # a forked process has no part in it
            return
        _count(pinned[0] - pinned[1])
        with torch.cuda.device(self._device):
            with suppress(RuntimeError):  # of a kernel, which somebody else reports
                torch.cuda.synchronize()
            _cudart().cudaHostUnregister(self.address(pinned[0]))

    def address(self, offset: int = 0) -> int:
        """Where a byte of the mapping is."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self, offset))

    def __del__(self) -> None:
        if not sys.is_finalizing():  # else CUDA ends, too
            self.unpin()


def host_memory(nbytes: int, *, pinned: bool = False) -> torch.Tensor:
    """Memory that begins at a page, shape ``(nbytes,)``, uint8; pinned, where the driver does so.

    It goes with the last tensor that shares it. A forked process does not have its content.
    """
    pages = Pages(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, _MADV_WIPEONFORK):  # without the second, a fork copies all that is pinned
        with suppress(OSError):
            pages.madvise(advice)
    if pinned and nbytes > 0:
        pages.pin(0, nbytes)
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]


def pinned_bytes() -> int:
    """The bytes that are pinned here at present."""
    return _pinned_bytes


def _count(nbytes: int) -> None:
    global _pinned_bytes
    _pinned_bytes += nbytes


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _register(address: int, nbytes: int) -> bool:
    global _warned
    cudart = _cudart()
    code = cudart.cudaHostRegister(address, nbytes, _PORTABLE)
    if int(code) == 0:
        return True
    # The driver keeps the error for whoever asks next. torch does after its next kernel, and raises it: of this one.
    with suppress(RuntimeError, AssertionError):
        torch.zeros(1, device="cuda")
    if not _warned:
        _warned = True
        logger.warning(
            "host memory for copies of the state is not pinned, so training waits longer for them: CUDA refused to "
            "register %d bytes (%s)",
            nbytes,
            cudart.cudaGetErrorString(code),
        )
    return False
