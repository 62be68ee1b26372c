"""torch.save's file, byte for byte, its payload written by the native engine: laid out first, then filled.

The payload is written straight from the tensors to its places in the file (``laid_out``), by several threads, with the
archive's CRC-32 and the content digests in the same pass. Nothing is copied, but for tensors on a device, which go
through ``STAGING_BYTES`` of host memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from zeroelastic.archive import write_fully
from zeroelastic.digest import ByteArray, combine
from zeroelastic.executors import Executor, SegmentTable, UInt32Array, join_crc32, write_segments
from zeroelastic.laid_out import LaidOut, Rows, Run, digest_rows, lay_out_torch_file, naming, reserve
from zeroelastic.layout import Int64Array

STAGING_BYTES = 16 << 20
"""Host memory through which tensors on a device are written."""

_EARLY_BYTES = 4 << 20  # what is less is flushed with the rest, when the file is complete


def write_torch_file(
    obj: object,
    path: Path,
    *,
    runs: Sequence[Run] = (),
    last: Sequence[torch.Tensor] = (),
    before_last: Callable[[Sequence[int | None]], None] | None = None,
    sync: bool = False,
    executor: Executor = "auto",
) -> list[int | None]:
    """Write what ``torch.save(obj, path)`` writes, the same bytes; returns the partial digest of each run.

    The digest of a run that lies in no storage of the file, or overlaps another run, is None. When all payload but the
    storages of ``last`` is written, ``before_last`` gets the digests and may still change these tensors; a file that
    holds none of them does without. ``sync`` flushes the file to its device, which begins while it is written. Memory:
    ``STAGING_BYTES`` if a tensor is on a device, else none to speak of.

    Raises OSError naming the file (for a full disk before anything is written), ConfigError for an executor that is not
    built, UnsupportedError when this torch lays its files out in another way.

    Example::

        write_torch_file({"weight": weight}, Path("weight.pt"))
    """
    laid = lay_out_torch_file(obj, path)
    with naming(path):
        reserve(path)
        rows, is_late = laid.rows(runs, last)
        digests: list[int | None] = [None] * len(runs)
        checksums = np.zeros(len(rows.nbytes), dtype=np.uint32)
        payload = _Payload(path, laid.storages, rows, runs, digests, checksums, sync, executor)
        payload.write(np.flatnonzero(~is_late))
        if before_last is not None and is_late.any():
            before_last(digests)
        payload.write(np.flatnonzero(is_late))
        _complete(laid, rows, checksums, sync=sync)
    return digests


def _complete(laid: LaidOut, rows: Rows, checksums: UInt32Array, *, sync: bool) -> None:
    """Put the payload's checksums where they belong."""
    with open(laid.path, "r+b", buffering=0) as file:
        fd = file.fileno()
        for offset, data in laid.patches(rows, checksums, lambda nbytes, at: os.pread(fd, nbytes, at)):
            write_fully(fd, data, offset)
        if sync:
            os.fsync(fd)


@dataclass(frozen=True, slots=True)
class _Payload:
    """The rows of a file, the storages they come from, and what is found out about each while it is written.

    ``digests`` has one entry per run, ``checksums`` one per row.
    """

    path: Path
    storages: Sequence[torch.UntypedStorage]
    rows: Rows
    runs: Sequence[Run]
    digests: list[int | None]
    checksums: UInt32Array
    sync: bool
    executor: Executor

    def write(self, chosen: Int64Array) -> None:
        """Write the chosen rows: those with a digest first, which are nearly all of it, and each kind in one call."""
        on_host = np.array([_is_on_host(storage) for storage in self.storages], dtype=bool)[self.rows.storage[chosen]]
        digested = self.rows.run[chosen] >= 0
        for kind in (on_host & digested, on_host & ~digested):
            if kind.any():
                self._write_from_host(chosen[kind])
        for kind in (~on_host & digested, ~on_host & ~digested):
            if kind.any():
                self._write_staged(chosen[kind])

    def _write_from_host(self, chosen: Int64Array) -> None:
        rows = self.rows
        table = SegmentTable(
            src=rows.storage[chosen],
            src_offset=rows.src[chosen],
            dst=np.zeros(len(chosen), dtype=np.int64),
            dst_offset=rows.dst[chosen],
            nbytes=rows.nbytes[chosen],
        )
        buffers = [_bytes_of(storage) for storage in self.storages]
        self.checksums[chosen] = self._move(table, buffers, rows.run[chosen], np.zeros(len(chosen), dtype=np.int64))

    def _write_staged(self, chosen: Int64Array) -> None:
        """From tensors that the engine cannot address: piece by piece through a buffer on the host."""
        rows = self.rows
        staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        for batch in _batches(rows, chosen):
            for piece in batch:
                source = _as_bytes(self.storages[int(rows.storage[piece.row])])
                begin = int(rows.src[piece.row]) + piece.within
                staging[piece.staged : piece.staged + piece.nbytes].copy_(source[begin : begin + piece.nbytes])
            columns = np.array(batch, dtype=np.int64).T
            row, within, staged, nbytes = (np.ascontiguousarray(column) for column in columns)
            zeros = np.zeros(len(batch), dtype=np.int64)
            table = SegmentTable(zeros, staged, zeros, rows.dst[row] + within, nbytes)
            sums = self._move(table, [staging.numpy()], rows.run[row], within)
            for i, piece in enumerate(batch):
                both = np.array([self.checksums[piece.row], sums[i]], dtype=np.uint32)
                self.checksums[piece.row] = join_crc32(both, np.array([piece.within, piece.nbytes], dtype=np.int64))

    def _move(
        self, table: SegmentTable, buffers: Sequence[ByteArray], numbers: Int64Array, within: Int64Array
    ) -> UInt32Array:
        """Write rows that all belong to a digest run, ``within`` bytes into it, or all to none; returns checksums."""
        sums = np.zeros(len(table.nbytes), dtype=np.uint32)
        digest = None if numbers[0] < 0 else digest_rows(self.runs, numbers, within)
        sync = self.sync and int(table.nbytes.sum()) >= _EARLY_BYTES
        totals = write_segments(
            table,
            buffers,
            [self.path],
            digest=digest,
            crc32=sums,
            sync=sync,
            executor=self.executor,
        )
        if totals is not None:
            for number, total in zip(numbers.tolist(), totals.tolist(), strict=True):
                self.digests[number] = combine(self.digests[number] or 0, total)
        return sums


class _Piece(NamedTuple):
    row: int
    within: int
    staged: int
    nbytes: int


def _batches(rows: Rows, chosen: Int64Array) -> Iterator[list[_Piece]]:
    """The chosen rows in pieces that fill the staging buffer, each on a boundary of 8 bytes of its row and of it."""
    batch: list[_Piece] = []
    room = STAGING_BYTES
    for row in chosen.tolist():
        done, nbytes = 0, int(rows.nbytes[row])
        while done < nbytes:
            if room == 0:
                yield batch
                batch, room = [], STAGING_BYTES
            count = min(nbytes - done, room)
            batch.append(_Piece(row, done, STAGING_BYTES - room, count))
            done += count
            room -= min(-(-count // 8) * 8, room)
    if batch:
        yield batch


def _is_on_host(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cpu"


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _bytes_of(storage: torch.UntypedStorage) -> ByteArray:
    if not _is_on_host(storage) or storage.nbytes() == 0:
        return np.empty(0, dtype=np.uint8)
    return _as_bytes(storage).numpy()
