"""The plan between layouts of which at least one has slices: what strips of both have in common, cut as ZeRO cuts them.

Strips with gaps lie on a grid: the flattened whole tensor in lines of ``stride`` elements, on which such a strip is a
rectangle and a run at most three. What two rectangles have in common is again one, which is one row of the plan. The
ranges that ZeRO gives to a rank cut a row in at most three: the rest of a line, whole lines, the begin of a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from zeroelastic.core.layout import Layout, Param
from zeroelastic.core.slices import (
    MOST_STRIPS,
    Int64Array,
    Slices,
    Strips,
    copies_together,
    numbered,
    strip_keys,
    tensor_numbers,
    whole,
)

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CommonRows:
    """Rows in columns: ``count`` runs of ``numel`` elements each.

    Their distances are ``stride`` in the whole tensor, ``src_step`` and ``dst_step`` in the slices. ``src`` and ``dst``
    are the parameters, ``start`` is a position in the whole tensor, ``src_at`` and ``dst_at`` are those in the slices.
    """

    src: Int64Array
    dst: Int64Array
    start: Int64Array
    src_at: Int64Array
    dst_at: Int64Array
    numel: Int64Array
    count: Int64Array
    stride: Int64Array
    src_step: Int64Array
    dst_step: Int64Array

    def take(self, index: Int64Array | BoolArray) -> CommonRows:
        """Some of the rows, in the order given."""
        return CommonRows(*(getattr(self, field.name)[index] for field in fields(CommonRows)))


def slices_of_layout(layout: Layout) -> Slices:
    """The slices of a layout; of one that has none, the whole tensors."""
    return whole(layout.params, layout.world_size) if layout.slices is None else layout.slices


def common_rows(src: Layout, dst: Layout, rank: int) -> CommonRows:
    """The runs that ``rank`` of ``dst`` owns, from the parameters of ``src``; padding is in none.

    Of several copies of a strip one is taken: that of a saved rank of the same number, if there is one, else
    another one for each rank. Raises ValueError for a tensor that the source does not have, or of another size.
    """
    theirs, mine = slices_of_layout(src), slices_of_layout(dst)
    start, length = dst.owned(rank)
    own = mine.strips.take(np.flatnonzero(length[mine.strips.param] > 0))
    tensor_of = {tensor.name: i for i, tensor in enumerate(theirs.tensors)}
    try:
        number = [tensor_of[tensor.name] for tensor in mine.tensors]
    except KeyError as error:
        raise ValueError(f"parameter {error.args[0]!r} is not in the source layout") from None
    if any(theirs.tensors[i].numel != tensor.numel for i, tensor in zip(number, mine.tensors, strict=True)):
        raise ValueError("source and target layouts disagree on the size of a parameter")
    dst_tensor = np.array(number, dtype=np.int64)
    found, tensor = _distinct(theirs, rank)
    rows = _in_common(found, tensor, own, dst_tensor[own.param])
    at = np.where(length > 0, start, 0)
    return _clip(rows, rows.dst_at, rows.dst_step, at[rows.dst], (at + length)[rows.dst])[1]


def check_slices(layout: Layout) -> None:
    """Check that slices are what they are said to be: ``layout`` is that of all ranks.

    Raises ValueError that names a tensor whose strips leave it or the slice, do not make up the slice, do not make up
    the whole tensor, or overlap without being the same.
    """
    slices = slices_of_layout(layout)
    strips, tensors = slices.strips, slices.tensors
    tensor = tensor_numbers(slices)
    numel = np.array([each.numel for each in tensors], dtype=np.int64)
    runs = strips.num_runs
    for at, far, size, what in (
        (strips.start, strips.stride, numel, "tensor"),
        (strips.offset, strips.step, layout.numel, "slice"),
    ):
        good = (runs > 0) & (strips.numel > 0) & (at >= 0) & ((runs == 1) | (far >= strips.numel))
        good &= at <= size[strips.param] - strips.numel - (runs - 1) * far
        _refuse(tensors, strips.param[~good], f"has a strip that leaves its {what}")
    held = np.zeros(layout.num_params, dtype=np.int64)
    np.add.at(held, strips.param, strips.numel * runs)
    _refuse(tensors, np.flatnonzero(held != layout.numel), "has a slice that its strips do not make up")
    own = replace(strips, start=strips.offset, stride=strips.step)
    _refuse(tensors, _overlapping(own, strips.param), "has a slice in which strips overlap")
    once, of = _distinct(slices, 0)
    covered = np.zeros(len(tensors), dtype=np.int64)
    np.add.at(covered, of, once.numel * once.num_runs)
    _refuse(tensors, np.flatnonzero((tensor == np.arange(len(tensors))) & (covered != numel)), "is not held as a whole")
    _refuse(tensors, _overlapping(once, of), "has strips that overlap")


def _refuse(tensors: Sequence[Param], wrong: Int64Array, what: str) -> None:
    if len(wrong):
        raise ValueError(f"{tensors[int(wrong[0])].name} {what}")


def _overlapping(strips: Strips, tensor: Int64Array) -> Int64Array:
    """The tensors, or whatever strips are counted by, in which two strips have an element in common."""
    order = np.lexsort((strips.start, tensor))
    strips, tensor = strips.take(order), tensor[order]
    grid = _grid_of([(strips, tensor)])
    gapped = grid[tensor] < _NO_GRID
    start, end = strips.start[~gapped], (strips.start + strips.numel)[~gapped]
    of = tensor[~gapped]
    wrong: Int64Array = of[1:][(of[1:] == of[:-1]) & (start[1:] < end[:-1])]
    if not gapped.any():
        return wrong
    here = _rectangles(strips.take(np.flatnonzero(gapped)), tensor[gapped], grid)
    by_tensor = np.argsort(here.tensor, kind="stable")
    counts = np.bincount(here.tensor)
    if int((counts * counts).sum()) > 4 * MOST_STRIPS:
        raise ValueError("tensors are in more strips than can be compared")
    first = np.searchsorted(here.tensor[by_tensor], here.tensor)
    b, a = numbered(first, counts[here.tensor])
    a = by_tensor[a]
    meet = (here.line[a] < here.line[b] + here.lines[b]) & (here.line[b] < here.line[a] + here.lines[a])
    meet &= (here.column[a] < here.column[b] + here.columns[b]) & (here.column[b] < here.column[a] + here.columns[a])
    return np.concatenate((wrong, here.tensor[b[meet & (a != b)]]))


def held_rows(layout: Layout, rank: int) -> CommonRows:
    """The rows of a rank's own slices, as far as it owns them: ``src`` and ``dst`` are the same."""
    start, length = layout.owned(rank)
    strips = slices_of_layout(layout).strips
    strips = strips.take(np.flatnonzero(length[strips.param] > 0))
    p, on = strips.param, strips.offset
    rows = CommonRows(
        p, p, strips.start, on, on, strips.numel, strips.num_runs, strips.stride, strips.step, strips.step
    )
    return _clip(rows, rows.dst_at, rows.dst_step, start[p], (start + length)[p])[1]


def cut_by_source(rows: CommonRows, src: Layout) -> tuple[CommonRows, Int64Array]:
    """The rows cut where the parts of source ranks end, and the number of each row's part."""
    part, origin = src.part[rows.src], src.origin[rows.src]
    begin = rows.src_at + origin
    first, last = begin // part, (begin + (rows.count - 1) * rows.src_step + rows.numel - 1) // part
    which, number = numbered(first, last - first + 1)
    rows = rows.take(which)
    low = number * src.part[rows.src] - src.origin[rows.src]
    index, pieces = _clip(rows, rows.src_at, rows.src_step, low, low + src.part[rows.src])
    return pieces, number[index]


def _distinct(slices: Slices, rank: int) -> tuple[Strips, Int64Array]:
    """Each strip of the tensors once, sorted by tensor and place, and the number of the tensor of each."""
    strips, key = slices.strips, strip_keys(slices)
    near = (slices.part_number(rank) < slices.num_parts)[strips.param]
    order, first, copies = copies_together(key, strips.param, ~near)
    chosen = order[first + np.where(near[order[first]], 0, rank % copies)]
    return strips.take(chosen), key[-1, chosen]


def _in_common(src: Strips, src_tensor: Int64Array, dst: Strips, dst_tensor: Int64Array) -> CommonRows:
    """The runs that strips of two sides have in common; ``src`` is sorted by tensor and place, and has no copies."""
    grid = _grid_of([(src, src_tensor), (dst, dst_tensor)])
    lines = grid < _NO_GRID
    plain = _runs_in_common(*_of(src, src_tensor, ~lines), *_of(dst, dst_tensor, ~lines))
    if not lines.any():
        return plain
    gapped = _rectangles_in_common(*_of(src, src_tensor, lines), *_of(dst, dst_tensor, lines), grid)
    return _concatenated(plain, gapped)


_NO_GRID = int(np.iinfo(np.int64).max)


def _grid_of(sides: Sequence[tuple[Strips, Int64Array]]) -> Int64Array:
    """The length of the lines of each tensor's grid; ``_NO_GRID`` where all strips are one run."""
    count = max(int(tensor.max(initial=-1)) for _, tensor in sides) + 1
    grid = np.full(count, _NO_GRID, dtype=np.int64)
    for strips, tensor in sides:
        far = strips.num_runs > 1
        np.minimum.at(grid, tensor[far], strips.stride[far])
    return grid


def _of(strips: Strips, tensor: Int64Array, chosen: BoolArray) -> tuple[Strips, Int64Array]:
    index = np.flatnonzero(chosen[tensor])
    return strips.take(index), tensor[index]


def _runs_in_common(src: Strips, src_tensor: Int64Array, dst: Strips, dst_tensor: Int64Array) -> CommonRows:
    """Of strips that are one run each."""
    count = int(max(src_tensor.max(initial=-1), dst_tensor.max(initial=-1))) + 1
    ends = np.zeros(count, dtype=np.int64)
    np.maximum.at(ends, src_tensor, src.start + src.numel)
    np.maximum.at(ends, dst_tensor, dst.start + dst.numel)
    base = np.cumsum(ends) - ends
    begin, want = base[src_tensor] + src.start, base[dst_tensor] + dst.start
    first = np.searchsorted(begin + src.numel, want, side="right")
    last = np.searchsorted(begin, want + dst.numel, side="left")
    d, s = numbered(first, np.maximum(last - first, 0))
    start = np.maximum(src.start[s], dst.start[d])
    numel = np.minimum(src.start[s] + src.numel[s], dst.start[d] + dst.numel[d]) - start
    one, zero = np.ones_like(start), np.zeros_like(start)
    rows = CommonRows(
        src.param[s],
        dst.param[d],
        start,
        start - src.start[s] + src.offset[s],
        start - dst.start[d] + dst.offset[d],
        numel,
        one,
        zero,
        zero,
        zero,
    )
    return rows.take(numel > 0)


@dataclass(frozen=True, slots=True)
class _Rectangles:
    """Rectangles of the grid of each tensor: ``lines`` from ``line`` on, ``columns`` from ``column`` on.

    The first element is at ``at`` of the slice, and the next line ``step`` behind it.
    """

    param: Int64Array
    tensor: Int64Array
    line: Int64Array
    lines: Int64Array
    column: Int64Array
    columns: Int64Array
    at: Int64Array
    step: Int64Array


def _rectangles_in_common(
    src: Strips, src_tensor: Int64Array, dst: Strips, dst_tensor: Int64Array, grid: Int64Array
) -> CommonRows:
    a, b = _rectangles(src, src_tensor, grid), _rectangles(dst, dst_tensor, grid)
    order = np.argsort(a.tensor, kind="stable")
    first = np.searchsorted(a.tensor[order], b.tensor, side="left")
    last = np.searchsorted(a.tensor[order], b.tensor, side="right")
    d, s = numbered(first, last - first)
    s = order[s]
    line, column = np.maximum(a.line[s], b.line[d]), np.maximum(a.column[s], b.column[d])
    count = np.minimum(a.line[s] + a.lines[s], b.line[d] + b.lines[d]) - line
    numel = np.minimum(a.column[s] + a.columns[s], b.column[d] + b.columns[d]) - column
    width = grid[b.tensor[d]]
    rows = CommonRows(
        a.param[s],
        b.param[d],
        line * width + column,
        a.at[s] + (line - a.line[s]) * a.step[s] + column - a.column[s],
        b.at[d] + (line - b.line[d]) * b.step[d] + column - b.column[d],
        numel,
        count,
        width,
        a.step[s],
        b.step[d],
    )
    return _merged(rows.take((numel > 0) & (count > 0)))


def _rectangles(strips: Strips, tensor: Int64Array, grid: Int64Array) -> _Rectangles:
    width = grid[tensor]
    far = (strips.num_runs > 1) & (strips.stride == width) & (strips.start % width + strips.numel <= width)
    runs, of_run = _single_runs(strips, ~far)
    tensor_of = tensor[of_run]
    wide = grid[tensor_of]
    line, column = np.divmod(runs.start, wide)
    end_line, end_column = np.divmod(runs.start + runs.numel, wide)
    within = line == end_line
    head = within | (column > 0)
    body = end_line - line - (column > 0)
    none = np.zeros_like(line)
    rest = np.where(within, runs.numel, wide - column)
    before = np.where(column > 0, wide - column, 0)
    on_line, on_column = np.divmod(strips.start, width)
    tail = runs.offset + runs.numel - end_column
    below = line + (column > 0)
    pieces = [
        (far, (strips.param, tensor, on_line, strips.num_runs, on_column, strips.numel, strips.offset, strips.step)),
        (head, (runs.param, tensor_of, line, none + 1, column, rest, runs.offset, wide)),
        (~within & (body > 0), (runs.param, tensor_of, below, body, none, wide, runs.offset + before, wide)),
        (~within & (end_column > 0), (runs.param, tensor_of, end_line, none + 1, none, end_column, tail, wide)),
    ]
    chosen = ([column[some] for column in columns] for some, columns in pieces)
    return _Rectangles(*map(np.concatenate, zip(*chosen, strict=True)))


def _single_runs(strips: Strips, chosen: BoolArray) -> tuple[Strips, Int64Array]:
    """The runs of some strips, each a strip by itself, and the strip that each is of."""
    index = np.flatnonzero(chosen)
    if int(strips.num_runs[index].sum()) > MOST_STRIPS:
        raise ValueError(f"tensors are sliced in ways that have nothing in common but more than {MOST_STRIPS} runs")
    position, run = numbered(np.zeros_like(index), strips.num_runs[index])
    which = index[position]
    one, zero = np.ones_like(which), np.zeros_like(which)
    start, offset = strips.start[which] + run * strips.stride[which], strips.offset[which] + run * strips.step[which]
    return Strips(strips.param[which], start, offset, strips.numel[which], one, zero, zero), which


def _merged(rows: CommonRows) -> CommonRows:
    """Rows whose runs follow each other without a gap on all sides are one run."""
    dense = (rows.stride == rows.numel) & (rows.src_step == rows.numel) & (rows.dst_step == rows.numel)
    single = dense | (rows.count == 1)
    zeroed = [np.where(single, 0, column) for column in (rows.stride, rows.src_step, rows.dst_step)]
    numel, count = np.where(dense, rows.numel * rows.count, rows.numel), np.where(single, 1, rows.count)
    return CommonRows(rows.src, rows.dst, rows.start, rows.src_at, rows.dst_at, numel, count, *zeroed)


def _clip(
    rows: CommonRows, at: Int64Array, step: Int64Array, low: Int64Array, high: Int64Array
) -> tuple[Int64Array, CommonRows]:
    """The part of the rows between ``low`` and ``high``, where run i of a row begins at ``at + i * step``.

    Also which row each piece is of.
    """
    step = np.where(rows.count == 1, rows.numel, step)
    low, high = np.maximum(low, at), np.minimum(high, at + (rows.count - 1) * step + rows.numel)
    first = np.clip(-((at - low) // step), 0, rows.count)  # the first run that does not begin before
    last = np.clip((high - rows.numel - at) // step + 1, first, rows.count)  # behind the last one that ends inside
    one = np.ones_like(first)
    index: list[Int64Array] = []
    pieces: list[CommonRows] = []
    for run, count in ((first - 1, one), (first, last - first), (last, one)):
        begin = at + run * step
        cut = np.maximum(low - begin, 0)
        numel = np.minimum(begin + rows.numel, high) - begin - cut
        found = np.flatnonzero((numel > 0) & (run >= 0) & (run < rows.count) & (count > 0))
        index.append(found)
        start, src_at, dst_at = (
            place + run * distance + cut
            for place, distance in (
                (rows.start, rows.stride),
                (rows.src_at, rows.src_step),
                (rows.dst_at, rows.dst_step),
            )
        )
        columns = rows.src, rows.dst, start, src_at, dst_at, numel, count, rows.stride, rows.src_step, rows.dst_step
        pieces.append(CommonRows(*(column[found] for column in columns)))
    return np.concatenate(index), _merged(_concatenated(*pieces))


def _concatenated(*parts: CommonRows) -> CommonRows:
    return CommonRows(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(CommonRows)))
