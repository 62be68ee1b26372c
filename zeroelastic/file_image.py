"""A file of torch.save's in host memory, as it was at one moment, to be summed and written later.

The image is the file byte for byte: storages are copied to their places in it, and the rest is read from the file that
torch laid out. So it is written from the beginning to the end, in large calls past the page cache (O_DIRECT), where the
file system takes them: the processor copies nothing, and neither what the page cache holds nor the memory that training
allocates has to give way.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch

from zeroelastic.archive import write_fully
from zeroelastic.digest import ByteArray, combine
from zeroelastic.executors import DigestRows, Executor, MemoryRows, sum_segments
from zeroelastic.laid_out import LaidOut, Run, digest_rows, naming, reserve
from zeroelastic.layout import Int64Array

_BLOCK = 4096
"""What O_DIRECT asks of addresses, offsets and lengths on the devices that there are."""

_CALL_BYTES = 16 << 20
_THREADS = 1
_NOT_POSSIBLE = (errno.EINVAL, errno.EOPNOTSUPP)


class FileImage:
    """The image of ``laid`` in ``memory``, which comes from ``host_memory`` and has room for all of the file.

    Every storage is copied when it is made; copies from a GPU are complete when its current stream is. The tensors of
    ``last`` are taken again by ``complete``; they are in host memory. ``runs`` are digested by ``complete``. One thread
    at a time.
    """

    def __init__(
        self, laid: LaidOut, memory: torch.Tensor, *, runs: Sequence[Run] = (), last: Sequence[torch.Tensor] = ()
    ) -> None:
        assert memory.dtype == torch.uint8 and memory.data_ptr() % _BLOCK == 0 and memory.numel() >= laid.nbytes
        self.path = laid.path
        self._memory = memory[: laid.nbytes]
        self._num_runs = len(runs)
        self._rows, self._is_late = laid.rows(runs, last)
        self._digest_rows = _digest_rows(runs, self._rows.run)
        self._place = {storage._cdata: place for storage, place in zip(laid.storages, laid.places, strict=True)}
        self._last = [
            (tensor, self._place[cdata].offset) for tensor in last if (cdata := _cdata(tensor)) in self._place
        ]
        for storage, place in zip(laid.storages, laid.places, strict=True):
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._memory[place.offset : place.offset + place.nbytes].copy_(source, non_blocking=source.is_cuda)
        self._laid = laid.without_storages()

    def view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The copy of a tensor over one of the storages, with the same shape and strides; None for another tensor.

        To be asked as long as the tensors are alive of which the image was made.
        """
        place = self._place.get(_cdata(tensor))
        if place is None:
            return None
        at = (self._memory.storage_offset() + place.offset) // tensor.element_size() + tensor.storage_offset()
        copy = torch.empty(0, dtype=tensor.dtype)
        return copy.set_(self._memory.untyped_storage(), at, tensor.shape, tensor.stride())

    def complete(
        self, *, before_last: Callable[[Sequence[int | None]], None] | None = None, executor: Executor = "auto"
    ) -> list[int | None]:
        """Read what was not copied, and make the checksums; returns the partial digest of each run.

        Digests are None, and ``before_last`` is called, as in ``writer.write_torch_file``. Raises OSError naming the
        file, and UnsupportedError when it is not laid out as expected.
        """
        image = self._memory.numpy()
        self._read_gaps(image)
        digests: list[int | None] = [None] * self._num_runs
        checksums = np.zeros(len(self._rows.nbytes), dtype=np.uint32)

        def sum_rows(chosen: Int64Array) -> None:
            digested = self._rows.run[chosen] >= 0
            for part in (chosen[digested], chosen[~digested]):
                if not len(part):
                    continue
                rows = MemoryRows(np.zeros(len(part), dtype=np.int64), self._rows.dst[part], self._rows.nbytes[part])
                numbers = self._rows.run[part]
                digest = None if numbers[0] < 0 else _of_rows(self._digest_rows, part)
                sums = np.zeros(len(part), dtype=np.uint32)
                totals = sum_segments(rows, [image], digest=digest, crc32=sums, threads=_THREADS, executor=executor)
                checksums[part] = sums
                if totals is not None:
                    for number, total in zip(numbers.tolist(), totals.tolist(), strict=True):
                        digests[number] = combine(digests[number] or 0, total)

        sum_rows(np.flatnonzero(~self._is_late))
        if before_last is not None and self._last:
            before_last(digests)
        for tensor, offset in self._last:
            source = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._memory[offset : offset + source.numel()].copy_(source)
        sum_rows(np.flatnonzero(self._is_late))
        for offset, data in self._laid.patches(self._rows, checksums, lambda n, at: image[at : at + n].tobytes()):
            image[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
        return digests

    def write(self, *, sync: bool = False) -> None:
        """Write a complete image into its file, flushed to its device with ``sync``. Raises OSError naming it."""
        with naming(self.path):
            reserve(self.path)
            write_past_cache(os.fspath(self.path), self._memory.numpy(), sync=sync)

    def _read_gaps(self, image: ByteArray) -> None:
        """What lies between the storages: headers, what is pickled, the directory."""
        with naming(self.path), open(self.path, "rb", buffering=0) as file:
            at = 0
            ends = [(place.offset, place.offset + place.nbytes) for place in self._laid.places]
            for begin, end in (*ends, (self._laid.nbytes, self._laid.nbytes)):
                while at < begin:
                    got = os.preadv(file.fileno(), [image[at:begin].data], at)
                    if got == 0:
                        raise OSError(errno.EIO, "it has become shorter", os.fspath(self.path))
                    at += got
                at = max(at, end)


def host_memory(nbytes: int) -> torch.Tensor:
    """Bytes that begin at a page, pinned where a GPU is used."""
    if torch.cuda.is_available():
        pinned = torch.empty(nbytes + _BLOCK, dtype=torch.uint8, pin_memory=True)
        return pinned[-pinned.data_ptr() % _BLOCK :][:nbytes]
    return torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=torch.uint8)[:nbytes]


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
    """The bytes that were written so; fewer than all where that is not possible, or no longer."""
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


def _digest_rows(runs: Sequence[Run], numbers: Int64Array) -> DigestRows:
    """Of all rows; those that belong to no run have numbers without meaning."""
    if not runs:
        runs = [Run(torch.empty(0, dtype=torch.uint8), 0, 0)]
    return digest_rows(runs, np.maximum(numbers, 0), np.zeros(len(numbers), dtype=np.int64))


def _of_rows(rows: DigestRows, chosen: Int64Array) -> DigestRows:
    return DigestRows(
        seeds=rows.seeds[chosen],
        stream=np.arange(len(chosen), dtype=np.int64),
        start=rows.start[chosen],
        itemsize=rows.itemsize[chosen],
    )
