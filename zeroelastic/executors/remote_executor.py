"""Sources behind object stores: their rows are fetched into bounded memory, and a host engine takes them from there.

``plan_requests`` says what to ask for: neighbouring rows in one request, long runs in several. While one batch of
answers is moved, the next is under way. Digests, checksums, conversions and destinations are the host engine's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from zeroelastic.digest import ByteArray, UInt64Array
from zeroelastic.executors.crc32 import join_crc32
from zeroelastic.executors.progress import INTERVAL, Progress, ProgressFunction
from zeroelastic.executors.table import (
    ByteBuffer,
    Cast,
    DigestRows,
    FileRows,
    ReadResult,
    ReadTable,
    SegmentTable,
    UInt32Array,
    cast_itemsizes,
    check_crc32,
)
from zeroelastic.layout import Int64Array
from zeroelastic.storage import FilePath, RemotePath, read_ranges

if TYPE_CHECKING:
    from zeroelastic.executors import _HostEngine

STAGING_BYTES = 64 << 20
"""Memory that fetched rows may take: what is under way, what is being moved, and a copy that a library makes."""

MAX_GAP = 64 << 10
"""Rows that are no further apart are fetched together, with what lies between them."""

_REQUEST_BYTES = 2 << 20
_MAX_REQUESTS = 1024
_CUT = 8  # rows are cut at multiples of it, so never inside an element
_PARTS = 3  # one batch under way, one being moved, one for answers that a library puts together

_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Requests:
    """Byte ranges to ask for, and the pieces of rows that lie in them.

    Invariants: requests are sorted by (file, offset), none is longer than asked for, and those of one file do not
    overlap but for less than 8 bytes where a run was cut; the pieces of a row are the whole row, in order, each
    inside one request and cut at multiples of 8 bytes. ``piece_offset`` is from the beginning of the request,
    ``piece_start`` from the beginning of the row; pieces are sorted by request. All quantities are in bytes.
    """

    file: Int64Array
    offset: Int64Array
    nbytes: Int64Array
    row: Int64Array
    request: Int64Array
    piece_offset: Int64Array
    piece_start: Int64Array
    piece_nbytes: Int64Array


def plan_requests(
    file: Int64Array, offset: Int64Array, nbytes: Int64Array, *, request_bytes: int, max_gap: int = MAX_GAP
) -> Requests:
    """What to ask for so that every row comes: each byte once, neighbours together. Pure; rows in any order.

    Columns have shape ``(num_rows,)``; empty rows have no pieces.
    """
    assert request_bytes > 2 * _CUT
    row = np.lexsort((offset, file))
    row = row[nbytes[row] > 0]
    file, offset, nbytes = file[row], offset[row], nbytes[row]
    if len(row) == 0:
        return Requests(*([np.empty(0, dtype=np.int64)] * 8))
    run = np.cumsum(_begins_run(file, offset, offset + nbytes, max_gap)) - 1
    begins = offset[np.flatnonzero(np.diff(run, prepend=-1))]
    at = offset - begins[run]
    unit = request_bytes - _CUT
    first, last = at // unit, (at + nbytes - 1) // unit
    count = last - first + 1
    # One piece for each unit of the run that a row meets. A cut inside an element moves to where the element begins.
    which = np.repeat(np.arange(len(row)), count)
    number = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(len(which))
    start = np.where(number == first[which], 0, (number * unit - at[which]) // _CUT * _CUT)
    stop = np.where(number == last[which], nbytes[which], ((number + 1) * unit - at[which]) // _CUT * _CUT)
    kept = np.flatnonzero(stop > start)
    kept = kept[np.lexsort((number[kept], run[which[kept]]))]
    which, number, start, stop = which[kept], number[kept], start[kept], stop[kept]
    piece_run, piece_at = run[which], offset[which] + start
    new = np.ones(len(which), dtype=np.bool_)
    new[1:] = (piece_run[1:] != piece_run[:-1]) | (number[1:] != number[:-1])
    heads, request = np.flatnonzero(new), np.cumsum(new) - 1
    low = np.minimum.reduceat(piece_at, heads)
    high = np.maximum.reduceat(piece_at + stop - start, heads)
    return Requests(
        file=file[which[heads]],
        offset=low,
        nbytes=high - low,
        row=row[which],
        request=request,
        piece_offset=piece_at - low[request],
        piece_start=start,
        piece_nbytes=stop - start,
    )


def _begins_run(file: Int64Array, offset: Int64Array, end: Int64Array, max_gap: int) -> _Bools:
    """Which rows, sorted by (file, offset), lie further than ``max_gap`` behind all rows before them in their file."""
    begins = np.ones(len(file), dtype=np.bool_)
    bounds = np.flatnonzero(np.diff(file, prepend=-1, append=-1))
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        reached = np.maximum.accumulate(end[low : high - 1])
        begins[low + 1 : high] = offset[low + 1 : high] - reached > max_gap
    return begins


class RemoteEngine:
    """A host engine that also takes files behind object stores as its sources; ``staging_bytes`` bounds its memory."""

    def __init__(self, host: _HostEngine, *, staging_bytes: int = STAGING_BYTES) -> None:
        self._host = host
        self._batch_bytes = staging_bytes // _PARTS

    def read_segments(
        self,
        table: ReadTable,
        buffers: Sequence[ByteBuffer],
        digest: DigestRows | None = None,
        *,
        cast: Cast = "none",
        threads: int | None = None,
        progress: ProgressFunction | None = None,
    ) -> ReadResult:
        """As the host engine's. ``bytes_read`` counts what was asked for, gaps between rows included."""
        table.check([len(buffer) for buffer in buffers], digest=digest, cast=cast)
        totals, bytes_read = _Totals(digest), 0
        here = _local_rows(table.paths, table.file)
        if len(here):
            local = ReadTable(_on_disk(table.paths), *_taken(here, *_columns(table.segments)))
            digests = totals.rows(here)
            result = self._host.read_segments(local, buffers, digests, cast=cast, threads=threads, progress=progress)
            totals.add(here, result.digests)
            bytes_read += result.bytes_read

        def take(batch: Requests, src: list[ByteArray]) -> None:
            made = _into(batch, table.buffer, table.buffer_offset, cast)
            digests = totals.rows(batch.row, batch.piece_start)
            part = self._host.copy_segments(made, src, buffers, digest=digests, cast=cast, threads=threads)
            totals.add(batch.row, part)

        bytes_read += self._fetch(table.paths, table.file, table.file_offset, table.nbytes, take, progress)
        return ReadResult(bytes_read, table.files, totals.array())

    def copy_segments(
        self,
        table: SegmentTable,
        src: Sequence[ByteArray],
        dst: Sequence[ByteBuffer],
        *,
        digest: DigestRows | None = None,
        cast: Cast = "none",
        threads: int | None = None,
    ) -> UInt64Array | None:
        """The host engine's."""
        return self._host.copy_segments(table, src, dst, digest=digest, cast=cast, threads=threads)

    def write_segments(
        self,
        table: SegmentTable,
        src: Sequence[ByteArray],
        paths: Sequence[Path],
        *,
        digest: DigestRows | None = None,
        crc32: UInt32Array | None = None,
        cast: Cast = "none",
        sync: bool = False,
        threads: int | None = None,
        progress: ProgressFunction | None = None,
    ) -> UInt64Array | None:
        """The host engine's."""
        return self._host.write_segments(
            table, src, paths, digest=digest, crc32=crc32, cast=cast, sync=sync, threads=threads, progress=progress
        )

    def move_segments(
        self,
        table: SegmentTable,
        src_paths: Sequence[FilePath],
        dst_paths: Sequence[Path],
        *,
        digest: DigestRows | None = None,
        crc32: UInt32Array | None = None,
        cast: Cast = "none",
        sync: bool = False,
        threads: int | None = None,
        progress: ProgressFunction | None = None,
    ) -> UInt64Array | None:
        """As the host engine's, into files on a disk."""
        table.check(len(src_paths), None, len(dst_paths), None, digest=digest, cast=cast)
        check_crc32(crc32, len(table.nbytes))
        totals, checksums = _Totals(digest), _Checksums(crc32, cast)
        here = _local_rows(src_paths, table.src)
        if len(here):
            local = SegmentTable(*_taken(here, *_columns(table)))
            sums = checksums.rows(here)
            digests = totals.rows(here)
            paths = _on_disk(src_paths)
            part = self._host.move_segments(
                local, paths, dst_paths, digest=digests, crc32=sums, cast=cast, threads=threads, progress=progress
            )
            totals.add(here, part)
            checksums.add(here, table.nbytes[here], sums)

        def take(batch: Requests, src: list[ByteArray]) -> None:
            made = _into(batch, table.dst, table.dst_offset, cast)
            sums = checksums.rows(batch.row)
            digests = totals.rows(batch.row, batch.piece_start)
            part = self._host.write_segments(
                made, src, dst_paths, digest=digests, crc32=sums, cast=cast, threads=threads
            )
            totals.add(batch.row, part)
            checksums.add(batch.row, batch.piece_nbytes, sums)

        self._fetch(src_paths, table.src, table.src_offset, table.nbytes, take, progress)
        checksums.join()
        if sync:
            for number in np.unique(table.dst).tolist():
                _flush(dst_paths[number])
        return totals.array()

    def scan_segments(
        self,
        table: FileRows,
        *,
        digest: DigestRows | None = None,
        crc32: UInt32Array | None = None,
        threads: int | None = None,
        progress: ProgressFunction | None = None,
    ) -> UInt64Array | None:
        """As the host engine's, which gets each batch as a file in memory."""
        table.check(digest=digest)
        check_crc32(crc32, len(table.nbytes))
        totals, checksums = _Totals(digest), _Checksums(crc32, "none")

        def scan(rows: FileRows, row: Int64Array, start: Int64Array | None, progress: ProgressFunction | None) -> None:
            sums, digests = checksums.rows(row), totals.rows(row, start)
            part = self._host.scan_segments(rows, digest=digests, crc32=sums, threads=threads, progress=progress)
            totals.add(row, part)
            checksums.add(row, rows.nbytes, sums)

        here = _local_rows(table.paths, table.file)
        if len(here):
            local = FileRows(_on_disk(table.paths), *_taken(here, table.file, table.file_offset, table.nbytes))
            scan(local, here, None, progress)

        def take(batch: Requests, src: list[ByteArray]) -> None:
            begins = np.cumsum(batch.nbytes) - batch.nbytes
            fd = os.memfd_create("zeroelastic", os.MFD_CLOEXEC)
            try:
                with os.fdopen(fd, "wb", buffering=0, closefd=False) as file:
                    for data in src:
                        file.write(data.data)
                path = (Path(f"/proc/self/fd/{fd}"),)
                at = begins[batch.request] + batch.piece_offset
                scan(FileRows(path, np.zeros_like(at), at, batch.piece_nbytes), batch.row, batch.piece_start, None)
            finally:
                os.close(fd)

        self._fetch(table.paths, table.file, table.file_offset, table.nbytes, take, progress)
        checksums.join()
        return totals.array()

    def _fetch(
        self,
        paths: Sequence[FilePath],
        file: Int64Array,
        offset: Int64Array,
        nbytes: Int64Array,
        take: Callable[[Requests, list[ByteArray]], None],
        progress: ProgressFunction | None,
    ) -> int:
        """Hand all remote rows over, batch by batch, with the answers; returns the bytes that were asked for."""
        rows = _remote_rows(paths, file)
        plan = plan_requests(*_taken(rows, file, offset, nbytes), request_bytes=min(_REQUEST_BYTES, self._batch_bytes))
        plan = replace(plan, row=rows[plan.row])
        batches = _batches(plan, self._batch_bytes)
        told = Progress(progress)
        ahead = _Fetching(paths, batches[0]) if batches else None
        for i, batch in enumerate(batches):
            assert ahead is not None
            answers = ahead.answers(told)
            ahead = _Fetching(paths, batches[i + 1]) if i + 1 < len(batches) else None
            take(batch, [np.frombuffer(answer, dtype=np.uint8) for answer in answers])
            del answers
            told.add(int(batch.piece_nbytes.sum()))
        told.finish()
        return int(plan.nbytes.sum())


def _batches(plan: Requests, batch_bytes: int) -> list[Requests]:
    """The requests in their order, as many at a time as the staging holds; each batch counts its requests from 0."""
    bounds, held = [0], 0
    for i, nbytes in enumerate(plan.nbytes.tolist()):
        if i > bounds[-1] and (held + nbytes > batch_bytes or i - bounds[-1] >= _MAX_REQUESTS):
            bounds.append(i)
            held = 0
        held += nbytes
    bounds.append(len(plan.nbytes))
    pieces = np.searchsorted(plan.request, bounds)
    batches: list[Requests] = []
    for i in range(len(bounds) - 1):
        some, of = slice(bounds[i], bounds[i + 1]), slice(pieces[i], pieces[i + 1])
        if some.start == some.stop:
            continue
        batches.append(
            Requests(
                plan.file[some],
                plan.offset[some],
                plan.nbytes[some],
                plan.row[of],
                plan.request[of] - some.start,
                plan.piece_offset[of],
                plan.piece_start[of],
                plan.piece_nbytes[of],
            )
        )
    return batches


class _Fetching(threading.Thread):
    """A batch of requests under way; a daemon, so that an interrupted program does not wait for it."""

    def __init__(self, paths: Sequence[FilePath], batch: Requests) -> None:
        super().__init__(daemon=True)
        self._ranges: list[tuple[RemotePath, int, int]] = []
        for number, offset, nbytes in zip(*(c.tolist() for c in (batch.file, batch.offset, batch.nbytes)), strict=True):
            path = paths[number]
            assert isinstance(path, RemotePath)
            self._ranges.append((path, offset, nbytes))
        self._answers: list[bytes] = []
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._answers = read_ranges(self._ranges)
        except BaseException as error:  # raised where the answers are waited for
            self._error = error

    def answers(self, told: Progress) -> list[bytes]:
        """Wait for them. Raises what ``storage.read_ranges`` raises, and what a progress function does."""
        while self.is_alive():
            self.join(INTERVAL if told.wanted else None)
            told.add(0)
        if self._error is not None:
            raise self._error
        return self._answers


class _Totals:
    """The digests of a call, added up over parts of it; nothing where none are asked for."""

    def __init__(self, digest: DigestRows | None) -> None:
        self._digest = digest
        self._totals = None if digest is None else np.zeros(len(digest.seeds), dtype=np.uint64)

    def rows(self, row: Int64Array, start: Int64Array | None = None) -> DigestRows | None:
        """What rows add to their digests, or pieces of rows that begin ``start`` bytes into each."""
        if self._digest is None:
            return None
        streams, stream = np.unique(self._digest.stream[row], return_inverse=True)
        first, itemsize = self._digest.start[row], self._digest.itemsize[row]
        if start is not None:
            first = first + start // itemsize
        return DigestRows(self._digest.seeds[streams], stream.reshape(-1), first, itemsize)

    def add(self, row: Int64Array, part: UInt64Array | None) -> None:
        """Add what ``rows`` of the same rows came to."""
        if self._digest is not None and self._totals is not None and part is not None:
            self._totals[np.unique(self._digest.stream[row])] += part  # modulo 2**64

    def array(self) -> UInt64Array | None:
        return self._totals


class _Checksums:
    """The CRC-32 of each row, put together from pieces; nothing where none are asked for."""

    def __init__(self, crc32: UInt32Array | None, cast: Cast) -> None:
        self._crc32 = crc32
        self._src_itemsize, self._dst_itemsize = cast_itemsizes(cast)
        self._pieces: list[tuple[Int64Array, Int64Array, UInt32Array]] = []

    def rows(self, row: Int64Array) -> UInt32Array | None:
        """A place for the checksums of rows, or of pieces of them."""
        return None if self._crc32 is None else np.zeros(len(row), dtype=np.uint32)

    def add(self, row: Int64Array, nbytes: Int64Array, sums: UInt32Array | None) -> None:
        """Take the checksums of pieces, those of one row in their order, with their sizes before a conversion."""
        if sums is not None:
            self._pieces.append((row, nbytes // self._src_itemsize * self._dst_itemsize, sums))

    def join(self) -> None:
        """Fill in the checksum of each row."""
        if self._crc32 is None:
            return
        self._crc32[:] = 0
        if not self._pieces:
            return
        row, nbytes, sums = (np.concatenate(column) for column in zip(*self._pieces, strict=True))
        order = np.argsort(row, kind="stable")
        row, nbytes, sums = row[order], nbytes[order], sums[order]
        first = np.flatnonzero(np.diff(row, prepend=-1))
        count = np.diff(first, append=len(row))
        self._crc32[row[first]] = sums[first]
        for at, num in zip(first[count > 1].tolist(), count[count > 1].tolist(), strict=True):
            self._crc32[row[at]] = join_crc32(sums[at : at + num], nbytes[at : at + num])


def _into(batch: Requests, dst: Int64Array, dst_offset: Int64Array, cast: Cast) -> SegmentTable:
    """The pieces of a batch, from its answers to where their rows go."""
    src_itemsize, dst_itemsize = cast_itemsizes(cast)
    at = dst_offset[batch.row] + batch.piece_start // src_itemsize * dst_itemsize
    return SegmentTable(batch.request, batch.piece_offset, dst[batch.row], at, batch.piece_nbytes)


def _columns(table: SegmentTable) -> tuple[Int64Array, ...]:
    return table.src, table.src_offset, table.dst, table.dst_offset, table.nbytes


def _taken(rows: Int64Array, *columns: Int64Array) -> Iterator[Int64Array]:
    return (column[rows] for column in columns)


def _local_rows(paths: Sequence[FilePath], file: Int64Array) -> Int64Array:
    return np.flatnonzero(~_is_remote(paths)[file])


def _remote_rows(paths: Sequence[FilePath], file: Int64Array) -> Int64Array:
    return np.flatnonzero(_is_remote(paths)[file])


def _is_remote(paths: Sequence[FilePath]) -> _Bools:
    return np.array([isinstance(path, RemotePath) for path in paths], dtype=np.bool_)


def _on_disk(paths: Sequence[FilePath]) -> tuple[Path, ...]:
    """The same files by number; no row of a host engine's names the ones that are not on a disk."""
    return tuple(path if isinstance(path, Path) else Path(os.devnull) for path in paths)


def _flush(path: Path) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
