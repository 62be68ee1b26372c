"""Segments: which run of elements of which source buffer goes where in one target rank's buffers.

Pure data in, pure data out: closed form, no I/O and no communication. Because every parameter is cut in the same
way, a target range of ``ceil(n / M)`` elements meets at most ``ceil(N / M) + 1`` neighbouring source ranks; the plan
of one rank is O(parameters + overlaps) and is built with array arithmetic only. All quantities are in elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zeroelastic.layout import Int64Array, Layout


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

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """The source ranks that hold something this rank needs, ascending."""
        return tuple(int(rank) for rank in np.unique(self.src_rank))


def match_params(src: Layout, dst: Layout) -> Int64Array:
    """Position in ``src`` of each parameter of ``dst``: shape ``(dst.num_params,)``.

    Both layouts must hold the same names and numel; anything else is a bug of the caller, who reports mismatches to
    the user first (``checkpoint.compare_params``). Raises ValueError.
    """
    index = src.index()
    try:
        order = np.array([index[param.name] for param in dst.params], dtype=np.int64)
    except KeyError as error:
        raise ValueError(f"parameter {error.args[0]!r} is not in the source layout") from None
    if not np.array_equal(src.numel[order], dst.numel):
        raise ValueError("source and target layouts disagree on the size of a parameter")
    return order


def make_plan(src: Layout, dst: Layout, rank: int) -> Plan:
    """The segments that fill ``rank`` of ``dst`` from the ranks of ``src``.

    Example::

        plan = make_plan(saved_layout, live_layout, rank=2)
        plan.source_ranks        # the files to open
    """
    order = match_params(src, dst)
    start, length = dst.owned(rank)
    owner = np.flatnonzero(length > 0)
    start, length = start[owner], length[owner]
    src_part = src.part[order[owner]]
    first = start // src_part
    last = (start + length - 1) // src_part
    pieces = last - first + 1

    row = np.repeat(np.arange(len(owner), dtype=np.int64), pieces)
    within = np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    param = owner[row]
    source = order[param]
    src_rank = first[row] + within
    begin = np.maximum(start[row], src_rank * src_part[row])
    end = np.minimum(start[row] + length[row], (src_rank + 1) * src_part[row])
    src_sub_group = src.sub_group[source]
    src_offset = src.offset[source] + begin - src_rank * src_part[row]
    dst_offset = dst.offset[param] + begin - start[row]

    by_source = np.lexsort((src_offset, src_sub_group, src_rank))
    return Plan(
        src=src,
        dst=dst,
        rank=rank,
        param=param[by_source],
        start=begin[by_source],
        length=(end - begin)[by_source],
        src_rank=src_rank[by_source],
        src_sub_group=src_sub_group[by_source],
        src_offset=src_offset[by_source],
        dst_sub_group=dst.sub_group[param][by_source],
        dst_offset=dst_offset[by_source],
    )


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
    assert (plan.dst_offset - dst.offset[plan.param] == plan.start - start[plan.param]).all(), "wrong target offset"
    assert np.array_equal(plan.dst_sub_group, dst.sub_group[plan.param]), "wrong target sub-group"
    source = match_params(src, dst)[plan.param]
    local = plan.src_offset - src.offset[source]
    assert (local >= 0).all() and (local + plan.length <= src.part[source]).all(), "a segment leaves its source part"
    assert (local + plan.src_rank * src.part[source] == plan.start).all(), "wrong source offset"
    assert np.array_equal(plan.src_sub_group, src.sub_group[source]), "wrong source sub-group"
    assert ((plan.src_rank >= 0) & (plan.src_rank < src.world_size)).all(), "no such source rank"


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
