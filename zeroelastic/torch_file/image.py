"""A file of torch.save's in host memory, as it was at one moment, to be summed and written later.

The image is the file byte for byte: storages are copied to their places in it, and the rest is read from the file that
torch laid out. It is written from the beginning to the end, in large calls past the page cache (O_DIRECT), where the
file system supports them: no bytes are copied, and the save takes no memory from the page cache or from training.

The memory is pinned where tensors come from a GPU. Pinned pages are registered with the CUDA driver: just as many as
there are, and until they are freed. torch's allocator of pinned memory rounds each block up to a power of two, and
keeps freed blocks.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from zeroelastic.core.digest import ByteArray
from zeroelastic.core.layout import Int64Array
from zeroelastic.executors.dispatch import Executor, Ranges, sum_segments
from zeroelastic.io.atomic import name_in_errors, write_fully
from zeroelastic.io.large_pages import ask_for_large_pages
from zeroelastic.torch_file.save import DigestRange, TorchSaveSkeleton, as_bytes, reserve

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
        """Unpin the range, when no copy to it is under way any more."""
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
    ask_for_large_pages(pages.address(), len(pages))
    with suppress(OSError):  # without it, a fork copies all that is pinned
        pages.madvise(_MADV_WIPEONFORK)
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
    # The driver keeps the error, and torch would raise it after its next kernel: it is taken here.
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


_BLOCK = 4096
"""The alignment that O_DIRECT needs for addresses, offsets and lengths."""

_CALL_BYTES = 16 << 20
_THREADS = 1
_NOT_POSSIBLE = (errno.EINVAL, errno.EOPNOTSUPP)


class FileImage:
    """The image of ``skeleton`` in ``memory``, which begins at a page and has room for all of the file.

    Every storage is copied when it is made; copies from a GPU to pinned memory are complete when its current stream is.
    The tensors of ``last`` are in host memory, and ``complete`` copies them again; it digests ``digest_ranges``. One
    thread at a time.
    """

    def __init__(
        self,
        skeleton: TorchSaveSkeleton,
        memory: torch.Tensor,
        *,
        digest_ranges: Sequence[DigestRange] = (),
        last: Sequence[torch.Tensor] = (),
    ) -> None:
        assert memory.dtype == torch.uint8 and memory.data_ptr() % _BLOCK == 0 and memory.numel() >= skeleton.nbytes
        self.path = skeleton.path
        self._memory = memory[: skeleton.nbytes]
        self._payload = skeleton.payload(digest_ranges, last)
        offsets = skeleton.offsets.tolist()
        self._offsets = {storage._cdata: at for storage, at in zip(skeleton.storages, offsets, strict=True)}
        self._last = [tensor for tensor in last if _cdata(tensor) in self._offsets]
        is_pinned = skeleton.on_gpu and memory.is_pinned()
        for storage in skeleton.storages:
            self._copy(storage, is_pinned=is_pinned)
        self._skeleton = replace(skeleton, storages=())  # whose memory is free again

    def _copy(self, storage: torch.UntypedStorage, *, is_pinned: bool = False) -> None:
        source, offset = as_bytes(storage), self._offsets[storage._cdata]
        self._memory[offset : offset + source.numel()].copy_(source, non_blocking=is_pinned and source.is_cuda)

    def view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The copy of a tensor over one of the storages, with the same shape and strides; None for another tensor.

        Call it only while the tensors are alive that the image was made of.
        """
        offset = self._offsets.get(_cdata(tensor))
        if offset is None:
            return None
        at = (self._memory.storage_offset() + offset) // tensor.element_size() + tensor.storage_offset()
        copy = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return copy.set_(self._memory.untyped_storage(), at, tensor.shape, tensor.stride())

    def complete(
        self, *, before_last: Callable[[Sequence[int | None]], None] | None = None, executor: Executor = "auto"
    ) -> list[int | None]:
        """Read what was not copied, and make the checksums; returns the partial digest of each digest_range.

        Digests are None, and ``before_last`` is called, as in ``save.write_torch_file``. Raises OSError naming the
        file, and UnsupportedError when it is not laid out as expected.
        """
        image = self._memory.numpy()
        self._read_gaps(image)
        payload = self._payload

        def sum_rows(chosen: Int64Array) -> None:
            for rows in payload.kinds(chosen):
                table = Ranges(np.zeros(len(rows), dtype=np.int64), payload.dst[rows], payload.nbytes[rows])
                run = partial(sum_segments, table, [image], threads=_THREADS, executor=executor)
                payload.checksums[rows] = payload.run(rows, run)

        sum_rows(np.flatnonzero(~payload.is_late))
        if before_last is not None and self._last:
            before_last(payload.digests)
        for tensor in self._last:
            self._copy(tensor.untyped_storage())
        sum_rows(np.flatnonzero(payload.is_late))
        for offset, data in self._skeleton.patches(payload, lambda at, nbytes: image[at : at + nbytes].tobytes()):
            image[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
        return payload.digests

    @property
    def data(self) -> ByteArray:
        """The bytes of the file, shape ``(nbytes,)``; complete after ``complete``."""
        return self._memory.numpy()

    def write(self, *, sync: bool = False) -> None:
        """Write a complete image into its file, flushed to its device with ``sync``. Raises OSError naming it."""
        with name_in_errors(self.path):
            reserve(self.path)
            write_past_cache(os.fspath(self.path), self._memory.numpy(), sync=sync)

    def _read_gaps(self, image: ByteArray) -> None:
        """Read the bytes between the storages: headers, the pickle, the directory."""
        with name_in_errors(self.path), open(self.path, "rb", buffering=0) as file:
            at = 0
            begins, ends = self._skeleton.offsets, self._skeleton.offsets + self._skeleton.sizes
            for begin, end in zip([*begins.tolist(), len(image)], [*ends.tolist(), len(image)], strict=True):
                while at < begin:
                    got = os.preadv(file.fileno(), [image[at:begin].data], at)
                    if got == 0:
                        raise OSError(errno.EIO, "it has become shorter", os.fspath(self.path))
                    at += got
                at = max(at, end)


def write_past_cache(path: str, data: ByteArray, *, sync: bool) -> None:
    """Write a file that is there from its beginning, past the page cache as far as the file system allows it.

    ``data`` begins at a page. Raises OSError.
    """
    whole = len(data) // _BLOCK * _BLOCK
    done = _write_direct(path, data[:whole])
    with open(path, "r+b", buffering=0) as file:
        write_fully(file.fileno(), data[done:].data, done)
        if sync:
            os.fsync(file.fileno())


def _write_direct(path: str, data: ByteArray) -> int:
    """Write with O_DIRECT; returns the number of bytes written: fewer than all where the file system refuses it."""
    try:
        fd = os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0) | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NOT_POSSIBLE:
            return 0
        raise
    try:
        done = 0
        while done < len(data):
            try:
                put = os.pwrite(fd, data[done : done + _CALL_BYTES].data, done)
            except OSError as error:
                if error.errno in _NOT_POSSIBLE:
                    break
                raise
            done += put
            if put == 0 or put % _BLOCK:
                break
        return done
    finally:
        os.close(fd)


def _cdata(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
