"""The reference executor: preadv of whole file runs, scattered straight into their destinations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zeroelastic.digest import UInt64Array, combine
from zeroelastic.digest import digest_range_reference as digest_range  # this is what other executors are held to
from zeroelastic.errors import CheckpointError, MissingFileError
from zeroelastic.executors.table import ByteBuffer, DigestRows, ReadResult, ReadTable
from zeroelastic.plan import coalesce

_MAX_VECTORS = 1024  # IOV_MAX on Linux
_MAX_CALL_BYTES = 256 << 20


def read_segments(table: ReadTable, buffers: Sequence[ByteBuffer], digest: DigestRows | None) -> ReadResult:
    """Fill the buffers with as few calls as the file's runs allow; no staging, no byte read twice.

    Raises MissingFileError or CheckpointError with the file and the offset at which it failed.
    """
    file, file_offset, buffer, buffer_offset, nbytes = coalesce(
        table.file, table.file_offset, table.buffer, table.buffer_offset, table.nbytes
    )
    files: list[Path] = []
    total = 0
    for number in np.unique(file):
        path = table.paths[int(number)]
        files.append(path)
        rows = np.flatnonzero(file == number)
        views = [
            memoryview(buffers[b])[o : o + n]
            for b, o, n in zip(buffer[rows].tolist(), buffer_offset[rows].tolist(), nbytes[rows].tolist(), strict=True)
        ]
        total += _read_file(path, file_offset[rows].tolist(), views)
    return ReadResult(total, tuple(files), None if digest is None else _digest_rows(table, buffers, digest))


def _read_file(path: Path, offsets: list[int], views: list[memoryview]) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file. The checkpoint is incomplete.") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}.") from None
    try:
        first = 0
        total = 0
        while first < len(views):
            last = first
            run = 0
            while (
                last < len(views)
                and last - first < _MAX_VECTORS
                and offsets[last] == offsets[first] + run
                and (run == 0 or run + len(views[last]) <= _MAX_CALL_BYTES)
            ):
                run += len(views[last])
                last += 1
            _read_run(fd, path, offsets[first], views[first:last])
            total += run
            first = last
        return total
    finally:
        os.close(fd)


def _read_run(fd: int, path: Path, offset: int, views: list[memoryview]) -> None:
    views = [view for view in views if len(view)]
    while views:
        try:
            got = os.preadv(fd, views, offset)
        except OSError as error:
            raise CheckpointError(f"{path}: reading at byte {offset} failed: {error.strerror}.") from None
        if got == 0:
            raise CheckpointError(f"{path}: ends at byte {offset}. The file is truncated.")
        offset += got
        while got:
            if got >= len(views[0]):
                got -= len(views.pop(0))
            else:
                views[0] = views[0][got:]
                got = 0


def _digest_rows(table: ReadTable, buffers: Sequence[ByteBuffer], digest: DigestRows) -> UInt64Array:
    totals = [0] * len(digest.seeds)
    for i in range(len(table.nbytes)):
        offset = int(table.buffer_offset[i])
        data = buffers[int(table.buffer[i])][offset : offset + int(table.nbytes[i])]
        stream = int(digest.stream[i])
        part = digest_range(data, int(digest.itemsize[i]), seed=int(digest.seeds[stream]), start=int(digest.start[i]))
        totals[stream] = combine(totals[stream], part)
    return np.array(totals, dtype=np.uint64)
