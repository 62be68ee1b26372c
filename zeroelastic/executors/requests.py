"""What to ask an object store for: neighbouring rows in one request, long rows in several. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zeroelastic.core.layout import Int64Array

MAX_GAP = 64 << 10
"""Rows that are no further apart are fetched together, with what lies between them."""

_MAX_REQUESTS = 1024
_GAPS_SHARE, _FREE_GAPS = 1024, 4 << 10
_CUT = 8  # rows are cut at multiples of it, so never inside an element


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
    """The largest gap up to ``max_gap`` for which all that lies in such gaps is little beside the rows. Pure.

    Little is a share of the rows, 1/``_GAPS_SHARE``, or ``_FREE_GAPS`` bytes. What lies between the rows of one rank
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
