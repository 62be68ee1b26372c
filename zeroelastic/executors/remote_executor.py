"""Sources behind object stores: their rows are fetched into bounded memory, and a host engine takes them from there.

``plan_requests`` says what to ask for: neighbouring rows in one request, long rows in several. While one batch of
answers is moved, the next is fetched. Digests, checksums, conversions and destinations are the host engine's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zeroelastic.core.digest import ByteArray, UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.executors.batches import DigestTotals, RowChecksums
from zeroelastic.executors.engine import PLAIN, HostEngine, Options
from zeroelastic.executors.progress import INTERVAL, Progress, ProgressFunction
from zeroelastic.executors.tables import (
    ByteBuffer,
    Cast,
    CopyTable,
    FileRanges,
    MemoryRanges,
    ReadResult,
    ReadTable,
    cast_itemsizes,
    check_crc32,
)
from zeroelastic.io.atomic import sync_path
from zeroelastic.io.paths import FilePath, RemotePath
from zeroelastic.io.remote import read_ranges

STAGING_BYTES = 64 << 20
"""Memory that fetched rows may take: what is under way, what is being moved, and a copy that a library makes."""

_REQUEST_BYTES = 2 << 20
_NUM_BATCHES = 3  # one under way, one being moved, one for answers that a library puts together

MAX_GAP = 64 << 10
"""Rows that are no further apart are fetched together, with what is between them."""

_MAX_REQUESTS = 1024
_GAPS_SHARE, _FREE_GAPS = 1024, 4 << 10
_CUT = 8  # rows are cut at multiples of it, so never inside an element


class RemoteEngine:
    """A host engine that also takes files behind object stores as its sources; ``staging_bytes`` bounds its memory."""

    def __init__(self, host: HostEngine, *, staging_bytes: int = STAGING_BYTES) -> None:
        self._host = host
        self._batch_bytes = staging_bytes // _NUM_BATCHES

    def read_segments(self, table: ReadTable, buffers: Sequence[ByteBuffer], options: Options = PLAIN) -> ReadResult:
        """As the host engine's. ``bytes_read`` counts what was asked for, gaps between rows included."""
        table.check([len(buffer) for buffer in buffers], digest=options.digest, cast=options.cast)
        assert options.copies is None, "only files on this machine are converted beside"
        local_bytes = 0

        def here(rows: Int64Array, options: Options) -> UInt64Array | None:
            nonlocal local_bytes
            chosen = table.rows(rows)
            result = self._host.read_segments(replace(chosen, paths=_on_disk(table.paths)), buffers, options)
            local_bytes += result.bytes_read
            return result.digests

        def fetched(batch: Requests, src: list[ByteArray], options: Options) -> UInt64Array | None:
            copies = _to_destinations(batch, table.buffer, table.buffer_offset, options.cast)
            return self._host.copy_segments(copies, src, buffers, options)

        sources = (table.paths, table.file, table.file_offset, table.nbytes)
        digests, remote_bytes = self._run(*sources, options, here, fetched)
        return ReadResult(local_bytes + remote_bytes, table.files, digests)

    def move_segments(
        self, table: CopyTable, src_paths: Sequence[FilePath], dst_paths: Sequence[Path], options: Options = PLAIN
    ) -> UInt64Array | None:
        """As the host engine's, into files on a disk."""
        table.check(len(src_paths), None, len(dst_paths), None, digest=options.digest, cast=options.cast)

        def here(rows: Int64Array, options: Options) -> UInt64Array | None:
            return self._host.move_segments(table.rows(rows), _on_disk(src_paths), dst_paths, options)

        def fetched(batch: Requests, src: list[ByteArray], options: Options) -> UInt64Array | None:
            writes = _to_destinations(batch, table.dst, table.dst_offset, options.cast)
            return self._host.write_segments(writes, src, dst_paths, options)

        digests, _ = self._run(src_paths, table.src, table.src_offset, table.nbytes, options, here, fetched)
        if options.sync:
            for number in np.unique(table.dst).tolist():
                sync_path(dst_paths[number])
        return digests

    def scan_segments(self, table: FileRanges, options: Options = PLAIN) -> UInt64Array | None:
        """As the host engine's."""
        table.check(digest=options.digest)

        def here(rows: Int64Array, options: Options) -> UInt64Array | None:
            columns = (column[rows] for column in (table.file, table.file_offset, table.nbytes))
            return self._host.scan_segments(FileRanges(_on_disk(table.paths), *columns), options)

        def fetched(batch: Requests, src: list[ByteArray], options: Options) -> UInt64Array | None:
            ranges = MemoryRanges(batch.request, batch.piece_offset, batch.piece_nbytes)
            return self._host.sum_segments(ranges, src, options)

        return self._run(table.paths, table.file, table.file_offset, table.nbytes, options, here, fetched)[0]

    def _run(
        self,
        paths: Sequence[FilePath],
        file: Int64Array,
        offset: Int64Array,
        nbytes: Int64Array,
        options: Options,
        here: Callable[[Int64Array, Options], UInt64Array | None],
        fetched: Callable[[Requests, list[ByteArray], Options], UInt64Array | None],
    ) -> tuple[UInt64Array | None, int]:
        """Call ``here`` with the rows that are on a disk, and ``fetched`` with every batch of the others and its bytes.

        Both return digests. Returns those of the operation, and the bytes that were requested.
        """
        check_crc32(options.crc32, len(nbytes))
        totals, checksums = DigestTotals(options.digest), RowChecksums()
        src_itemsize, dst_itemsize = cast_itemsizes(options.cast)

        def add(
            row: Int64Array,
            start: Int64Array | None,
            nbytes: Int64Array,
            progress: ProgressFunction | None,
            move: Callable[[Options], UInt64Array | None],
        ) -> None:
            crc32 = None if options.crc32 is None else np.zeros(len(row), dtype=np.uint32)
            digest = totals.rows(row, start)
            totals.add(row, move(replace(options, digest=digest, crc32=crc32, sync=False, progress=progress)))
            if crc32 is not None:
                checksums.add(row, nbytes // src_itemsize * dst_itemsize, crc32)

        is_remote = np.array([isinstance(path, RemotePath) for path in paths], dtype=np.bool_)[file]
        local, rows = np.flatnonzero(~is_remote), np.flatnonzero(is_remote)
        if len(local):
            add(local, None, nbytes[local], options.progress, partial(here, local))
        request_bytes = min(_REQUEST_BYTES, self._batch_bytes)
        max_gap = affordable_gap(file[rows], offset[rows], nbytes[rows])
        plan = plan_requests(file[rows], offset[rows], nbytes[rows], request_bytes=request_bytes, max_gap=max_gap)
        batches = request_batches(replace(plan, row=rows[plan.row]), self._batch_bytes)
        progress = Progress(options.progress)
        ahead = _Fetching(paths, batches[0]) if batches else None
        for i, batch in enumerate(batches):
            assert ahead is not None
            answers = [np.frombuffer(answer, dtype=np.uint8) for answer in ahead.answers(progress)]
            ahead = _Fetching(paths, batches[i + 1]) if i + 1 < len(batches) else None
            add(batch.row, batch.piece_start, batch.piece_nbytes, None, partial(fetched, batch, answers))
            del answers
            progress.add(int(batch.piece_nbytes.sum()))
        progress.finish()
        if options.crc32 is not None:
            options.crc32[:] = checksums.joined(len(nbytes))
        return totals.totals, int(plan.nbytes.sum())


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
        self._context = copy_context()  # the retries in force
        self.start()

    def run(self) -> None:
        try:
            self._answers = self._context.run(read_ranges, self._ranges)
        except BaseException as error:  # raised where the answers are waited for
            self._error = error

    def answers(self, progress: Progress) -> list[bytes]:
        """Wait for them. Raises what ``storage.read_ranges`` raises, and what a progress function does."""
        while self.is_alive():
            self.join(INTERVAL if progress.wanted else None)
            progress.add(0)
        if self._error is not None:
            raise self._error
        return self._answers


def _to_destinations(batch: Requests, dst: Int64Array, dst_offset: Int64Array, cast: Cast) -> CopyTable:
    """The pieces of a batch, from its answers to where their rows go."""
    src_itemsize, dst_itemsize = cast_itemsizes(cast)
    at = dst_offset[batch.row] + batch.piece_start // src_itemsize * dst_itemsize
    return CopyTable(batch.request, batch.piece_offset, dst[batch.row], at, batch.piece_nbytes)


def _on_disk(paths: Sequence[FilePath]) -> tuple[Path, ...]:
    """The same files by number, for a host engine; its rows name only those that are on a disk."""
    return tuple(path if isinstance(path, Path) else Path(os.devnull) for path in paths)


@dataclass(frozen=True, slots=True)
class Requests:
    """Byte ranges to ask for, and the pieces of rows in them.

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


def affordable_gap(file: Int64Array, offset: Int64Array, nbytes: Int64Array, *, max_gap: int = MAX_GAP) -> int:
    """The largest gap up to ``max_gap`` for which all that is in such gaps is little beside the rows. Pure.

    Little is a share of the rows, 1/``_GAPS_SHARE``, or ``_FREE_GAPS`` bytes. What is between the rows of one rank
    belongs to other ranks, which read it too: without this bound a run of many small parameters would read each byte
    several times. Columns as of ``plan_requests``.
    """
    order = np.lexsort((offset, file))
    order = order[nbytes[order] > 0]
    if len(order) < 2:
        return max_gap
    file, begin, end = file[order], offset[order], (offset + nbytes)[order]
    gaps = (begin[1:] - end[:-1])[file[1:] == file[:-1]]
    gaps = np.sort(gaps[(gaps > 0) & (gaps <= max_gap)])
    total = np.cumsum(gaps)
    fits = total <= max(int(nbytes.sum()) // _GAPS_SHARE, _FREE_GAPS)
    if fits.all():
        return max_gap
    first_too_many = int(gaps[int(np.argmin(fits))])
    return first_too_many - 1


def _begins_run(file: Int64Array, offset: Int64Array, end: Int64Array, max_gap: int) -> npt.NDArray[np.bool_]:
    """Which rows, sorted by (file, offset), lie further than ``max_gap`` behind all rows before them in their file."""
    begins = np.ones(len(file), dtype=np.bool_)
    bounds = np.flatnonzero(np.diff(file, prepend=-1, append=-1))
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        reached = np.maximum.accumulate(end[low : high - 1])
        begins[low + 1 : high] = offset[low + 1 : high] - reached > max_gap
    return begins


def request_batches(plan: Requests, batch_bytes: int) -> list[Requests]:
    """The requests in their order, by batches of at most ``batch_bytes``; each batch counts its requests from 0."""
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
        pieces_of = (plan.row, plan.request - some.start, plan.piece_offset, plan.piece_start, plan.piece_nbytes)
        requests = (column[some] for column in (plan.file, plan.offset, plan.nbytes))
        batches.append(Requests(*requests, *(column[of] for column in pieces_of)))
    return batches
