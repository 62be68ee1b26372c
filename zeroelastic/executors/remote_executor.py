"""Sources behind object stores: their rows are fetched into bounded memory, and a host engine takes them from there.

``plan_requests`` says what to ask for: neighbouring rows in one request, long rows in several. While one batch of
answers is moved, the next is fetched. Digests, checksums, conversions and destinations are the host engine's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zeroelastic.core.digest import ByteArray
from zeroelastic.core.layout import Int64Array
from zeroelastic.core.slices import numbered
from zeroelastic.executors.batches import PieceTotals
from zeroelastic.executors.tables import (
    PROGRESS_INTERVAL_S,
    Cast,
    CopyTable,
    Endpoints,
    HostEngine,
    Moved,
    MoveOptions,
    Progress,
    Ranges,
    Table,
    cast_itemsizes,
    check_rows,
)
from zeroelastic.io.paths import FilePath, local_path, remote_path
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

    def __call__(self, table: Table, options: MoveOptions, *, sides: Endpoints[ByteArray]) -> Moved:
        """Run a table as the host engine does, from files. Bytes that are read count all requests, gaps included."""
        src_paths = sides.src_paths
        assert src_paths is not None, "the sources are files"
        assert options.copies is None, "only files on this machine are converted beside"
        check_rows(table, options, sides)
        totals = PieceTotals(replace(options, progress=None))
        progress = Progress(options.progress)
        is_remote = np.array([local_path(path) is None for path in src_paths], dtype=np.bool_)[table.src]
        local, rows = np.flatnonzero(~is_remote), np.flatnonzero(is_remote)
        num_read = 0
        if len(local):
            # The same files by number: the rows name only those that are on a disk.
            files = tuple(local_path(path) or Path(os.devnull) for path in src_paths)
            here, on_disk = table.rows(local), replace(sides, src_paths=files)
            num_read = totals.run(
                lambda some: self._host(here, replace(some, progress=options.progress), sides=on_disk),
                local,
                None,
                here.nbytes,
            )
        file, offset, nbytes = table.src[rows], table.src_offset[rows], table.nbytes[rows]
        request_bytes = min(_REQUEST_BYTES, self._batch_bytes)
        plan = plan_requests(
            file, offset, nbytes, request_bytes=request_bytes, max_gap=affordable_gap(file, offset, nbytes)
        )
        batches = request_batches(replace(plan, row=rows[plan.row]), self._batch_bytes)
        ahead = _Fetching(src_paths, batches[0]) if batches else None
        for i, batch in enumerate(batches):
            assert ahead is not None
            answers = [np.frombuffer(answer, dtype=np.uint8) for answer in ahead.answers(progress)]
            ahead = _Fetching(src_paths, batches[i + 1]) if i + 1 < len(batches) else None
            arrived = replace(sides, src_paths=None, src=answers)
            move = partial(self._host, _from_answers(batch, table, options.cast), sides=arrived)
            totals.run(move, batch.row, batch.piece_start, batch.piece_nbytes)
            del answers, arrived, move
            progress.add(int(batch.piece_nbytes.sum()))
        progress.finish()
        return totals.finish(), num_read + int(plan.nbytes.sum())


class _Fetching(threading.Thread):
    """A batch of requests under way; a daemon, so that an interrupted program does not wait for it."""

    def __init__(self, paths: Sequence[FilePath], batch: Requests) -> None:
        super().__init__(daemon=True)
        columns = zip(*(c.tolist() for c in (batch.file, batch.offset, batch.nbytes)), strict=True)
        self._ranges = [(remote_path(paths[number]), offset, nbytes) for number, offset, nbytes in columns]
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
            self.join(PROGRESS_INTERVAL_S if progress.wanted else None)
            progress.add(0)
        if self._error is not None:
            raise self._error
        return self._answers


def _from_answers(batch: Requests, table: Table, cast: Cast) -> Table:
    """The pieces of a batch in its answers, and where their rows go."""
    if not isinstance(table, CopyTable):
        return Ranges(batch.request, batch.piece_offset, batch.piece_nbytes)
    src_itemsize, dst_itemsize = cast_itemsizes(cast)
    at = table.dst_offset[batch.row] + batch.piece_start // src_itemsize * dst_itemsize
    return CopyTable(batch.request, batch.piece_offset, table.dst[batch.row], at, batch.piece_nbytes)


@dataclass(frozen=True, slots=True)
class Requests:
    """Byte ranges to ask for, and the pieces of rows in them.

    Invariants: requests are sorted by (file, offset), none is longer than asked for, and requests of one file do not
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
    """Plan requests that bring every row: each byte once, neighbours together. Pure; rows in any order.

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
    which, number = numbered(first, count)
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


def affordable_gap(file: Int64Array, offset: Int64Array, nbytes: Int64Array) -> int:
    """The largest gap up to ``MAX_GAP`` for which all that is in such gaps is little compared with the rows. Pure.

    Little is a share of the rows, 1/``_GAPS_SHARE``, or ``_FREE_GAPS`` bytes. What is between the rows of one rank
    belongs to other ranks, which read it too: without this bound a run of many small parameters would read each byte
    several times. Columns as of ``plan_requests``.
    """
    order = np.lexsort((offset, file))
    order = order[nbytes[order] > 0]
    if len(order) < 2:
        return MAX_GAP
    file, begin, end = file[order], offset[order], (offset + nbytes)[order]
    gaps = (begin[1:] - end[:-1])[file[1:] == file[:-1]]
    gaps = np.sort(gaps[(gaps > 0) & (gaps <= MAX_GAP)])
    total = np.cumsum(gaps)
    fits = total <= max(int(nbytes.sum()) // _GAPS_SHARE, _FREE_GAPS)
    if fits.all():
        return MAX_GAP
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
