"""torch.save's file, byte for byte, its payload written by the native engine: laid out first, then filled.

The payload is written straight from the tensors to its places in the file (``skeleton``), by several threads, with the
archive's CRC-32 and the content digests in the same pass. Nothing is copied, but for tensors on a device, which go
through ``STAGING_BYTES`` of host memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from zeroelastic.core.digest import ByteArray
from zeroelastic.core.layout import Int64Array
from zeroelastic.executors.batches import RowChecksums
from zeroelastic.executors.dispatch import CopyTable, Executor, UInt32Array, batches, write_segments
from zeroelastic.io.atomic import name_in_errors, write_fully
from zeroelastic.torch_file.skeleton import (
    DigestRange,
    PayloadSums,
    TorchSaveSkeleton,
    as_bytes,
    reserve,
    write_skeleton,
)

STAGING_BYTES = 16 << 20
"""Host memory through which tensors on a device are written."""

_EARLY_BYTES = 4 << 20  # fewer bytes are flushed with the rest, when the file is complete


def write_torch_file(
    obj: object,
    path: Path,
    *,
    digest_ranges: Sequence[DigestRange] = (),
    last: Sequence[torch.Tensor] = (),
    before_last: Callable[[Sequence[int | None]], None] | None = None,
    sync: bool = False,
    executor: Executor = "auto",
) -> list[int | None]:
    """Write what ``torch.save(obj, path)`` writes, the same bytes; returns the partial digest of each digest_range.

    The digest of a range that lies in no storage of the file, or overlaps another, is None. When all payload but the
    storages of ``last`` is written, ``before_last`` gets the digests and may still change these tensors; a file that
    holds none of them does without. ``sync`` flushes the file to its device, which begins while it is written. Memory:
    ``STAGING_BYTES`` if a tensor is on a device, else none to speak of.

    Raises OSError naming the file (for a full disk before anything is written), ConfigError for an executor that is not
    built, UnsupportedError when this torch lays its files out in another way.

    Example::

        write_torch_file({"weight": weight}, Path("weight.pt"))
    """
    skeleton = write_skeleton(obj, path)
    with name_in_errors(path):
        reserve(path)
        segments, is_late = skeleton.segments(digest_ranges, last)
        sums = PayloadSums(segments)
        payload = _Payload(path, skeleton.storages, sums, sync, executor)
        payload.write(np.flatnonzero(~is_late))
        if before_last is not None and is_late.any():
            before_last(sums.digests)
        payload.write(np.flatnonzero(is_late))
        _complete(skeleton, sums, sync=sync)
    return sums.digests


def _complete(skeleton: TorchSaveSkeleton, sums: PayloadSums, *, sync: bool) -> None:
    """Put the payload's checksums where they belong."""
    with open(skeleton.path, "r+b", buffering=0) as file:
        fd = file.fileno()
        for offset, data in skeleton.patches(sums, lambda nbytes, at: os.pread(fd, nbytes, at)):
            write_fully(fd, data, offset)
        if sync:
            os.fsync(fd)


@dataclass(frozen=True, slots=True)
class _Payload:
    """Writes the segments of a file from the storages they come from."""

    path: Path
    storages: Sequence[torch.UntypedStorage]
    sums: PayloadSums
    sync: bool
    executor: Executor

    def write(self, chosen: Int64Array) -> None:
        """Write the chosen rows: those on the host first, nearly all of which have a digest; each kind in one call."""
        on_host = np.array([_is_on_host(storage) for storage in self.storages], dtype=bool)
        is_here = on_host[self.sums.segments.storage[chosen]]
        for rows in self.sums.kinds(chosen[is_here]):
            self._write_from_host(rows)
        for rows in self.sums.kinds(chosen[~is_here]):
            self._write_staged(rows)

    def _write_from_host(self, rows: Int64Array) -> None:
        of, zeros = self.sums.segments, np.zeros(len(rows), dtype=np.int64)
        table = CopyTable(of.storage[rows], of.src[rows], zeros, of.dst[rows], of.nbytes[rows])
        buffers = [_bytes_of(storage) for storage in self.storages]
        self.sums.checksums[rows] = self._move(table, buffers, rows)

    def _write_staged(self, chosen: Int64Array) -> None:
        """Write segments of tensors that the engine cannot address, through a buffer on the host."""
        segments = self.sums.segments
        staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        checksums = RowChecksums()
        for batch in batches(segments.nbytes[chosen], STAGING_BYTES):
            row = chosen[batch.row]
            begin = segments.src[row] + batch.start
            columns = (segments.storage[row], begin, batch.offset, batch.nbytes)
            for storage, at, offset, nbytes in zip(*(column.tolist() for column in columns), strict=True):
                staging[offset : offset + nbytes].copy_(as_bytes(self.storages[storage])[at : at + nbytes])
            zeros = np.zeros(len(row), dtype=np.int64)
            table = CopyTable(zeros, batch.offset, zeros, segments.dst[row] + batch.start, batch.nbytes)
            checksums.add(batch.row, batch.nbytes, self._move(table, [staging.numpy()], row, batch.start))
        self.sums.checksums[chosen] = checksums.joined(len(chosen))

    def _move(
        self, table: CopyTable, buffers: Sequence[ByteArray], rows: Int64Array, within: Int64Array | None = None
    ) -> UInt32Array:
        sync = self.sync and int(table.nbytes.sum()) >= _EARLY_BYTES
        write = partial(write_segments, table, buffers, [self.path], sync=sync, executor=self.executor)
        return self.sums.run(rows, write, within)


def _is_on_host(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cpu"


def _bytes_of(storage: torch.UntypedStorage) -> ByteArray:
    if not _is_on_host(storage) or storage.nbytes() == 0:
        return np.empty(0, dtype=np.uint8)
    return as_bytes(storage).numpy()
