"""Segments: which run of elements of which source buffer goes where in one target rank's buffers.

Pure data in, pure data out: closed form, no I/O and no communication, between layouts of any family. Because an axis
is cut into equal parts, what a target rank owns of a parameter is on neighbouring source ranks; the plan of one rank
is O(parameters + overlaps) and is built with array arithmetic only. All quantities are in elements.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from zeroelastic.core.layout import Layout, are_whole, partition_numel
from zeroelastic.core.slice_plan import CommonRows, common_rows, cut_by_source, held_rows, slices_of_layout
from zeroelastic.core.slices import Int64Array, numbered

_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class StridedRuns:
    """How often each row of a plan is repeated: ``count`` times, each time at a distance from the time before.

    ``stride`` is the distance in the whole tensor, ``src_step`` and ``dst_step`` those in the flat buffers; 0 where
    ``count`` is 1. Each array has shape ``(num_segments,)``.
    """

    count: Int64Array
    stride: Int64Array
    src_step: Int64Array
    dst_step: Int64Array

    def take(self, rows: slice | npt.NDArray[np.bool_] | Int64Array) -> StridedRuns:
        """The runs of some of the rows."""
        return StridedRuns(self.count[rows], self.stride[rows], self.src_step[rows], self.dst_step[rows])


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows that one target rank copies; row i moves ``length[i]`` elements of one parameter.

    Invariants, established by ``make_plan`` and checked by ``check_plan``: every element that the target rank owns
    is written exactly once, and no row reaches into padding on either side. Rows are sorted by (source rank, source
    sub-group, source offset). Each array has shape ``(num_segments,)``:

    ``param`` index into the target layout's params; ``start`` position of the first element in the flattened
    whole tensor; ``src_param`` index into the source layout's params; ``src_rank``, ``src_sub_group``, ``src_offset``
    where it is in the source's flat buffers; ``dst_sub_group``, ``dst_offset`` where it goes; ``length`` how many.

    ``runs`` is None where every row is one run of elements, as between layouts without slices.
    """

    src: Layout
    dst: Layout
    rank: int
    param: Int64Array
    start: Int64Array
    length: Int64Array
    src_rank: Int64Array
    src_sub_group: Int64Array
    src_offset: Int64Array
    dst_sub_group: Int64Array
    dst_offset: Int64Array
    src_param: Int64Array
    runs: StridedRuns | None = None

    @property
    def num_segments(self) -> int:
        """Rows of the plan."""
        return len(self.length)

    @property
    def numel(self) -> Int64Array:
        """Elements of each row: shape ``(num_segments,)``."""
        return self.length if self.runs is None else self.length * self.runs.count

    def take(self, rows: slice | npt.NDArray[np.bool_] | Int64Array) -> Plan:
        """Some of the rows, of a slice without a copy; by themselves they do not cover what the rank owns."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return replace(self, **columns, runs=None if self.runs is None else self.runs.take(rows))

    def windows(self, num_runs: int) -> Iterator[Plan]:
        """All rows in plans of at most ``num_runs`` runs, for which rows are cut between runs; at least one plan."""
        if self.runs is None or self.num_segments == 0:
            for begin in range(0, max(1, self.num_segments), num_runs):
                yield self.take(slice(begin, begin + num_runs))
            return
        count = self.runs.count
        ends = np.cumsum(count)
        total = int(ends[-1])
        for begin in range(0, total, num_runs):
            end = min(begin + num_runs, total)
            first, last = np.searchsorted(ends, begin, side="right"), np.searchsorted(ends, end, side="left") + 1
            rows = np.arange(first, last)
            before = (ends - count)[rows]
            skipped = np.maximum(before, begin) - before
            yield self._from_run(rows, skipped, np.minimum(before + count[rows], end) - before - skipped)

    def run_by_run(self) -> Plan:
        """Split the rows, so that every row is one run."""
        if self.runs is None:
            return self
        row, run = numbered(np.zeros_like(self.length), self.runs.count)
        return replace(self._from_run(row, run, np.ones_like(run)), runs=None)

    def _from_run(self, row: Int64Array, run: Int64Array, count: Int64Array) -> Plan:
        """Of each of some rows the runs from ``run`` on, ``count`` of them."""
        rows = self.take(row)
        assert rows.runs is not None
        return replace(
            rows,
            start=rows.start + run * rows.runs.stride,
            src_offset=rows.src_offset + run * rows.runs.src_step,
            dst_offset=rows.dst_offset + run * rows.runs.dst_step,
            runs=replace(rows.runs, count=count),
        )

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """The source ranks that hold something this rank needs, ascending."""
        return tuple(np.flatnonzero(np.bincount(self.src_rank)).tolist())  # np.unique would import numpy.ma, 50 ms


_COLUMNS = tuple(field.name for field in fields(Plan) if field.type == "Int64Array")


def match_params(src: Layout, dst: Layout) -> Int64Array:
    """Position in ``src`` of each parameter of ``dst``: shape ``(dst.num_params,)``.

    Both layouts must hold the same names and numel; anything else is a bug of the caller, who reports mismatches to
    the user first (``param_changes.compare``). Raises ValueError.
    """
    if _same_names(src, dst):
        order = np.arange(src.num_params, dtype=np.int64)
    else:
        index = src.index()
        try:
            order = np.fromiter((index[param.name] for param in dst.params), dtype=np.int64, count=dst.num_params)
        except KeyError as error:
            raise ValueError(f"parameter {error.args[0]!r} is not in the source layout") from None
    if not np.array_equal(src.numel[order], dst.numel):
        raise ValueError("source and target layouts disagree on the size of a parameter")
    return order


def _same_names(src: Layout, dst: Layout) -> bool:
    """Whether both layouts hold the same names in the same order, as they do unless the model was changed."""
    if src.params is dst.params:
        return True
    if src.num_params != dst.num_params:
        return False
    if all(map(operator.is_, src.params, dst.params)):
        return True
    name = operator.attrgetter("name")
    return all(map(operator.eq, map(name, src.params), map(name, dst.params)))


def make_plan(src: Layout, dst: Layout, rank: int) -> Plan:
    """The segments that fill ``rank`` of ``dst`` from the ranks of ``src``.

    Example::

        plan = make_plan(saved_layout, live_layout, rank=2)
        plan.source_ranks        # the files to open

    Raises ValueError for layouts that have not the same tensors.
    """
    if not are_whole(src, dst):
        return _slice_plan(src, dst, rank, common_rows(src, dst, rank))
    order = match_params(src, dst)
    param, src_rank = _rows(src, dst, rank, order)
    # Memory: the plan itself and one chunk of what it is computed from.
    computed = ("start", "length", "src_sub_group", "src_offset", "dst_sub_group", "dst_offset")
    columns = {name: np.empty(len(param), dtype=np.int64) for name in computed}
    for at in range(0, len(param), _CHUNK):
        here = slice(at, at + _CHUNK)
        target, owner = param[here], src_rank[here]
        source = order[target]
        src_part, dst_part = src.part[source], dst.part[target]
        # Where the two parts begin, counted from the parameter's first element: below 0 where they begin before it.
        src_start, dst_start = owner * src_part - src.origin[source], rank * dst_part - dst.origin[target]
        begin = np.maximum(np.maximum(src_start, dst_start), 0)
        end = np.minimum(np.minimum(src_start + src_part, dst_start + dst_part), dst.numel[target])
        columns["start"][here], columns["length"][here] = begin, end - begin
        columns["src_sub_group"][here] = src.sub_group[source]
        columns["src_offset"][here] = src.offset[source] + begin - src_start
        columns["dst_sub_group"][here] = dst.sub_group[target]
        columns["dst_offset"][here] = dst.offset[target] + begin - dst_start
    return Plan(src, dst, rank, param=param, src_rank=src_rank, src_param=order[param], **columns, runs=None)


def identity_plan(layout: Layout, rank: int) -> Plan:
    """Everything that a rank owns, where it is: a plan from the layout to itself, in which every row is one run."""
    if layout.slices is None:
        return make_plan(layout, layout, rank)
    return _slice_plan(layout, layout, rank, held_rows(layout, rank), from_rank=rank).run_by_run()


def _slice_plan(src: Layout, dst: Layout, rank: int, rows: CommonRows, *, from_rank: int | None = None) -> Plan:
    """The plan of rows that ``rank`` of ``dst`` owns, which are cut here as the source is."""
    rows, number = cut_by_source(rows, src)
    src_rank = slices_of_layout(src).rank_of(rows.src, number)
    if from_rank is not None:
        assert (src_rank == from_rank).all(), "a rank holds only its own parts"
    src_offset = src.offset[rows.src] + rows.src_at - (number * src.part[rows.src] - src.origin[rows.src])
    mine = np.broadcast_to(dst.part_number(rank), dst.numel.shape)[rows.dst]
    dst_offset = dst.offset[rows.dst] + rows.dst_at - (mine * dst.part[rows.dst] - dst.origin[rows.dst])
    order = np.lexsort((src_offset, src.sub_group[rows.src], src_rank))
    rows = rows.take(order)
    plan = Plan(
        src=src,
        dst=dst,
        rank=rank,
        param=rows.dst,
        start=rows.start,
        length=rows.numel,
        src_rank=src_rank[order],
        src_sub_group=src.sub_group[rows.src],
        src_offset=src_offset[order],
        dst_sub_group=dst.sub_group[rows.dst],
        dst_offset=dst_offset[order],
        src_param=rows.src,
    )
    if (rows.count == 1).all():
        return plan
    return replace(plan, runs=StridedRuns(rows.count, rows.stride, rows.src_step, rows.dst_step))


def _rows(src: Layout, dst: Layout, rank: int, order: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The parameter and the source rank of each row, in the order of the rows."""
    start, length = dst.owned(rank)
    if _in_buffer_order(src, order):
        owner = np.flatnonzero(length > 0)
    else:
        owner = np.lexsort((src.in_buffer[order], src.sub_group[order]))
        owner = owner[length[owner] > 0]
    start, length = start[owner] + src.origin[order[owner]], length[owner]
    src_part = src.part[order[owner]]
    first = start // src_part
    pieces = (start + length - 1) // src_part - first + 1
    del start, length, src_part
    param = np.repeat(owner, pieces)
    src_rank = np.repeat(first - (np.cumsum(pieces) - pieces), pieces)
    del owner, first, pieces
    src_rank += np.arange(len(src_rank), dtype=np.int64)
    # Within a rank rows are in the order of its buffers already, which a stable sort keeps.
    lowest, highest = (int(src_rank.min()), int(src_rank.max())) if len(src_rank) else (0, 0)
    if lowest == highest:
        return param, src_rank
    # numpy sorts 16-bit integers in linear time.
    key = (src_rank - lowest).astype(np.uint16) if highest - lowest < 1 << 16 else src_rank
    by_rank = np.argsort(key, kind="stable")
    return param[by_rank], src_rank[by_rank]


def _in_buffer_order(src: Layout, order: Int64Array) -> bool:
    """Whether the source's parameters, in the target's order, follow each other in its buffers."""
    sub_group, offset = src.sub_group[order], src.in_buffer[order]
    follows = (sub_group[1:] == sub_group[:-1]) & (offset[1:] >= offset[:-1])
    return bool((follows | (sub_group[1:] > sub_group[:-1])).all())


def check_plan(plan: Plan) -> None:
    """Assert the invariants of a plan, independently of how it was made; a failure is a bug of ours.

    Cost: one sort of the rows. Raises AssertionError.
    """
    dst, src = plan.dst, plan.src
    assert (plan.length > 0).all(), "a segment is empty"
    if not are_whole(src, dst):
        _check_slice_plan(plan)
        return
    start, owned = dst.owned(plan.rank)
    got = np.zeros(dst.num_params, dtype=np.int64)
    np.add.at(got, plan.param, plan.length)
    assert np.array_equal(got, owned), "the plan does not cover what the rank owns"
    order = np.lexsort((plan.start, plan.param))
    param, begin, end = plan.param[order], plan.start[order], (plan.start + plan.length)[order]
    same = param[1:] == param[:-1]
    assert (begin[1:][same] == end[:-1][same]).all(), "segments of a parameter overlap or leave a gap"
    assert (plan.start >= start[plan.param]).all(), "a segment begins before the owned range"
    assert (plan.start + plan.length <= (start + owned)[plan.param]).all(), "a segment ends behind the owned range"
    within = plan.dst_offset - dst.buffer_offset(plan.rank)[plan.param]
    assert (within == plan.start - start[plan.param]).all(), "wrong target offset"
    assert np.array_equal(plan.dst_sub_group, dst.sub_group[plan.param]), "wrong target sub-group"
    source = match_params(src, dst)[plan.param]
    assert np.array_equal(plan.src_param, source), "wrong source parameter"
    local = plan.src_offset - src.offset[source]
    assert (local >= 0).all() and (local + plan.length <= src.part[source]).all(), "a segment leaves its source part"
    on_axis = local + plan.src_rank * src.part[source]
    assert (on_axis == plan.start + src.origin[source]).all(), "wrong source offset"
    assert np.array_equal(plan.src_sub_group, src.sub_group[source]), "wrong source sub-group"
    assert ((plan.src_rank >= 0) & (plan.src_rank < src.world_size)).all(), "no such source rank"


def _check_slice_plan(plan: Plan) -> None:
    """``check_plan`` between layouts with slices, without expanding rows: cost as there."""
    dst, src = plan.dst, plan.src
    got = np.zeros(dst.num_params, dtype=np.int64)
    np.add.at(got, plan.param, plan.numel)
    assert np.array_equal(got, dst.owned(plan.rank)[1]), "the plan does not cover what the rank owns"
    count = np.ones_like(plan.length) if plan.runs is None else plan.runs.count
    zero = np.zeros_like(plan.length)
    steps = (zero, zero) if plan.runs is None else (plan.runs.src_step, plan.runs.dst_step)
    places = [
        (src, plan.src_rank, plan.src_param, plan.src_offset, steps[0]),
        (dst, np.full_like(plan.length, plan.rank), plan.param, plan.dst_offset, steps[1]),
    ]
    for layout, rank, param, offset, step in places:
        slices = slices_of_layout(layout)
        number, rest = np.divmod(rank - slices.first_rank[param], slices.rank_step[param])
        inside = (rest == 0) & (number >= 0) & (number < slices.num_parts[param])
        assert inside.all(), "a segment is of a rank that does not share the parameter"
        part = layout.part[param]
        begin = offset - layout.offset[param] + number * part - layout.origin[param]
        end = begin + (count - 1) * step + plan.length
        low, high = number * part - layout.origin[param], (number + 1) * part - layout.origin[param]
        inside = (begin >= np.maximum(low, 0)) & (end <= np.minimum(high, layout.numel[param]))
        assert inside.all(), "a segment leaves its part"
    assert np.array_equal(plan.dst_sub_group, dst.sub_group[plan.param]), "wrong target sub-group"
    assert np.array_equal(plan.src_sub_group, src.sub_group[plan.src_param]), "wrong source sub-group"


def coalesce(
    src: Int64Array, src_offset: Int64Array, dst: Int64Array, dst_offset: Int64Array, length: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array, Int64Array]:
    """Merge neighbouring rows that are contiguous in both source and destination; the rows must be sorted by source.

    All arrays have shape ``(num_rows,)`` and share one unit (elements or bytes). Returns the same five columns with
    at most as many rows, moving exactly the same data.
    """
    if len(length) == 0:
        return src, src_offset, dst, dst_offset, length
    joined = (
        (src[1:] == src[:-1])
        & (dst[1:] == dst[:-1])
        & (src_offset[1:] == (src_offset + length)[:-1])
        & (dst_offset[1:] == (dst_offset + length)[:-1])
    )
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    return src[first], src_offset[first], dst[first], dst_offset[first], np.add.reduceat(length, first)


def source_ranks(numels: Iterable[int], *, saved_world_size: int, world_size: int, rank: int) -> tuple[int, ...]:
    """The saved ranks that hold elements of what ``rank`` of ``world_size`` owns, from parameter sizes alone.

    Closed form; empty when the rank owns nothing.
    """
    numel = np.array([n for n in numels if n > 0], dtype=np.int64)
    part = partition_numel(numel, world_size)
    start = np.minimum(part * rank, numel)
    end = np.minimum(part * (rank + 1), numel)
    owner = end > start
    saved_part = partition_numel(numel[owner], saved_world_size)
    first, last = start[owner] // saved_part, (end[owner] - 1) // saved_part
    marks = np.zeros(saved_world_size + 1, dtype=np.int64)
    np.add.at(marks, first, 1)
    np.add.at(marks, last + 1, -1)
    return tuple(np.flatnonzero(np.cumsum(marks)[:-1] > 0).tolist())
