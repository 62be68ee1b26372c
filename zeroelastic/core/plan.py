"""Segments: which run of elements of which source buffer goes where in one target rank's buffers.

Pure data in, pure data out: closed form, no I/O and no communication, between layouts of any family. Because an axis
is cut into equal parts, what a target rank owns of a parameter is on neighbouring source ranks; the plan of one rank
is O(parameters + overlaps) and is built with array arithmetic only. All quantities are in elements.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from zeroelastic.core.layout import Int64Array, Layout, partition_numel

_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Plan:
    """What one target rank copies; row i moves ``length[i]`` elements of one parameter.

    Invariants, established by ``make_plan`` and checked by ``check_plan``: every element that the target rank owns
    is written exactly once, and no row reaches into padding on either side. Rows are sorted by (source rank, source
    sub-group, source offset). Each array has shape ``(num_segments,)``:

    ``param`` index into the target layout's params; ``start`` position of the first element in the flattened
    parameter; ``src_rank``, ``src_sub_group``, ``src_offset`` where it is in the source's flat buffers;
    ``dst_sub_group``, ``dst_offset`` where it goes; ``length`` how many.
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

    @property
    def num_segments(self) -> int:
        """Rows of the plan."""
        return len(self.length)

    def take(self, rows: slice | npt.NDArray[np.bool_]) -> Plan:
        """Some of the rows, of a slice without a copy; by themselves they do not cover what the rank owns."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return replace(self, **columns)

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """The source ranks that hold something this rank needs, ascending."""
        return tuple(np.flatnonzero(np.bincount(self.src_rank)).tolist())  # np.unique would import numpy.ma, 50 ms


_COLUMNS = ("param", "start", "length", "src_rank", "src_sub_group", "src_offset", "dst_sub_group", "dst_offset")


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
    """
    order = match_params(src, dst)
    param, src_rank = _rows(src, dst, rank, order)
    # Memory: the plan itself and one chunk of what it is computed from.
    columns = [np.empty(len(param), dtype=np.int64) for _ in range(6)]
    for at in range(0, len(param), _CHUNK):
        here = slice(at, at + _CHUNK)
        target, owner = param[here], src_rank[here]
        source = order[target]
        src_part, dst_part = src.part[source], dst.part[target]
        # Where the two parts begin, counted from the parameter's first element: below 0 where they begin before it.
        src_start, dst_start = owner * src_part - src.origin[source], rank * dst_part - dst.origin[target]
        begin = np.maximum(np.maximum(src_start, dst_start), 0)
        start, length, src_sub_group, src_offset, dst_sub_group, dst_offset = (column[here] for column in columns)
        start[:] = begin
        length[:] = np.minimum(np.minimum(src_start + src_part, dst_start + dst_part), dst.numel[target]) - begin
        src_sub_group[:] = src.sub_group[source]
        src_offset[:] = src.offset[source] + begin - src_start
        dst_sub_group[:] = dst.sub_group[target]
        dst_offset[:] = dst.offset[target] + begin - dst_start
    start, length, src_sub_group, src_offset, dst_sub_group, dst_offset = columns
    return Plan(
        src=src,
        dst=dst,
        rank=rank,
        param=param,
        start=start,
        length=length,
        src_rank=src_rank,
        src_sub_group=src_sub_group,
        src_offset=src_offset,
        dst_sub_group=dst_sub_group,
        dst_offset=dst_offset,
    )


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
    local = plan.src_offset - src.offset[source]
    assert (local >= 0).all() and (local + plan.length <= src.part[source]).all(), "a segment leaves its source part"
    on_axis = local + plan.src_rank * src.part[source]
    assert (on_axis == plan.start + src.origin[source]).all(), "wrong source offset"
    assert np.array_equal(plan.src_sub_group, src.sub_group[source]), "wrong source sub-group"
    assert ((plan.src_rank >= 0) & (plan.src_rank < src.world_size)).all(), "no such source rank"


def overlaps(
    src: Layout, dst: Layout, params: Int64Array, order: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """What all target ranks together copy of some parameters of ``dst``, none of them without elements.

    ``order`` is ``match_params(src, dst)``. Four parallel columns: position in ``params``, target rank, source rank,
    elements. These are the rows of ``make_plan`` for every rank, in another order.
    """
    source_of = order[params]
    numel, dst_part, dst_origin = dst.numel[params], dst.part[params], dst.origin[params]
    src_part, src_origin = src.part[source_of], src.origin[source_of]
    first = dst_origin // dst_part
    which, target = _counted(first, (dst_origin + numel - 1) // dst_part - first + 1)
    begin = np.maximum(target * dst_part[which] - dst_origin[which], 0)
    end = np.minimum((target + 1) * dst_part[which] - dst_origin[which], numel[which])
    first = (begin + src_origin[which]) // src_part[which]
    row, source = _counted(first, (end - 1 + src_origin[which]) // src_part[which] - first + 1)
    which = which[row]
    start = source * src_part[which] - src_origin[which]
    length = np.minimum(end[row], start + src_part[which]) - np.maximum(begin[row], start)
    return which, target[row], source, length


def _counted(first: Int64Array, count: Int64Array) -> tuple[Int64Array, Int64Array]:
    """For each i, the numbers from ``first[i]`` on, ``count[i]`` of them: the positions i, and the numbers."""
    position = np.repeat(np.arange(len(first)), count)
    return position, first[position] + np.arange(len(position)) - np.repeat(np.cumsum(count) - count, count)


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
