"""torch.save's file, byte for byte, its payload written by the native engine: laid out first, then filled.

The payload is written straight from the tensors to its places in the file (``skeleton``), by several threads, with the
archive's CRC-32 and the content digests in the same pass. Nothing is copied, but for tensors on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from zeroelastic.core.layout import Int64Array
from zeroelastic.executors.dispatch import CopyTable, Executor, host_executor, write_segments
from zeroelastic.io.atomic import name_in_errors, write_fully
from zeroelastic.torch_file.skeleton import (
    DigestRange,
    PayloadSums,
    TorchSaveSkeleton,
    as_bytes,
    reserve,
    write_skeleton,
)

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

    The digest of a range that is in no storage of the file, or overlaps another, is None. When all payload but the
    storages of ``last`` is written, ``before_last`` gets the digests and may still change these tensors; a file that
    holds none of them does without. ``sync`` flushes the file to its device, which begins while it is written. Memory:
    none to speak of, but 48 MiB of pinned memory that the process keeps where a tensor is on a GPU; with ``sync``, what
    is there goes past the page cache of ext4 and XFS.

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
        """Write the chosen rows, device by device, each kind in one call: those with a digest, and those without."""
        contents = [as_bytes(storage) for storage in self.storages]
        for device in dict.fromkeys(content.device for content in contents):
            is_there = np.array([content.device == device for content in contents], dtype=bool)
            there = chosen[is_there[self.sums.segments.storage[chosen]]]
            executor = host_executor(self.executor) if device.type == "cpu" else self.executor
            for rows in self.sums.kinds(there) if len(there) else ():
                self._write(rows, contents, executor)

    def _write(self, rows: Int64Array, contents: Sequence[torch.Tensor], executor: Executor) -> None:
        of, zeros = self.sums.segments, np.zeros(len(rows), dtype=np.int64)
        numbers, src = np.unique(of.storage[rows], return_inverse=True)
        table = CopyTable(src.reshape(-1), of.src[rows], zeros, of.dst[rows], of.nbytes[rows])
        buffers = [contents[number] for number in numbers.tolist()]
        sync = self.sync and int(table.nbytes.sum()) >= _EARLY_BYTES
        write = partial(write_segments, table, buffers, [self.path], sync=sync, executor=executor)
        self.sums.checksums[rows] = self.sums.run(rows, write)
