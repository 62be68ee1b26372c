"""zeroelastic.core.slices and slice_plan: plans between slices agree with element numbers that are moved one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sliced import Topology, buffers_of, ids, layout_of, shapes, tensor_lists, topologies

from zeroelastic.core.digest import stream_of, streams_of
from zeroelastic.core.layout import Param, layout_from_sub_groups, with_slices
from zeroelastic.core.plan import check_plan, identity_plan, make_plan
from zeroelastic.core.slice_plan import check_slices
from zeroelastic.core.slices import (
    RankSet,
    Strip,
    first_copies,
    places_in_slices,
    slices_of,
    strips_of_runs,
    strips_of_view,
)


def run(plan, source, target) -> None:
    """Move the elements of a plan one row at a time."""
    for row in range(plan.num_segments):
        src, at = source[int(plan.src_rank[row])][int(plan.src_sub_group[row])], int(plan.src_offset[row])
        length, to = int(plan.length[row]), int(plan.dst_offset[row])
        into = target[int(plan.dst_sub_group[row])]
        assert (into[to : to + length] == -1).all(), "an element is written twice"
        into[to : to + length] = src[at : at + length]
        first = int(plan.start[row])
        assert (src[at : at + length] % 10**6 == np.arange(first, first + length)).all(), "start is not the place"


@given(tensors=tensor_lists, source=topologies, target=topologies)
def test_any_topology_to_any_other_moves_each_element_to_its_place(tensors, source, target):
    src, dst = layout_of(tensors, source), layout_of(tensors, target)
    have, want = buffers_of(tensors, source), buffers_of(tensors, target)
    for rank in range(target.world_size):
        mine = dst.on_rank(rank)
        plan = make_plan(src, mine, rank)
        check_plan(plan)
        got = [np.full_like(buffer, -1) for buffer in want[rank]]
        run(plan.run_by_run(), have, got)
        for buffer, expected in zip(got, want[rank], strict=True):
            assert np.array_equal(buffer, expected)


@given(tensors=tensor_lists, topology=topologies)
def test_what_a_rank_holds_is_its_own_and_all_of_it(tensors, topology):
    layout, have = layout_of(tensors, topology), buffers_of(tensors, topology)
    for rank in range(topology.world_size):
        plan = identity_plan(layout, rank)
        got = [np.full_like(buffer, -1) for buffer in have[rank]]
        run(plan.run_by_run(), have, got)
        assert all(np.array_equal(buffer, expected) for buffer, expected in zip(got, have[rank], strict=True))
        assert layout.on_rank(rank).owned_numel(rank) == sum(int((buffer >= 0).sum()) for buffer in have[rank])


@given(tensors=tensor_lists, topology=topologies)
def test_slices_of_boxes_are_what_they_say(tensors, topology):
    check_slices(layout_of(tensors, topology))


@given(tensors=tensor_lists, source=topologies, target=topologies)
def test_places_of_whole_tensors_are_found_in_strips_and_slices(tensors, source, target):
    src, dst = layout_of(tensors, source), layout_of(tensors, target)
    for rank in range(target.world_size):
        mine = dst.on_rank(rank)
        rows = make_plan(src, mine, rank).run_by_run()
        strip = strips_of_runs(mine.slices, rows.param, rows.start)
        at = places_in_slices(mine.slices, strip, rows.start)
        assert np.array_equal(mine.slices.strips.param[strip], rows.param)
        begin = mine.buffer_offset(rank)[rows.param] - mine.owned(rank)[0][rows.param]
        assert np.array_equal(begin + at, rows.dst_offset)
        starts = {stream_of(mine, number, "k") for number in strip.tolist()}
        assert starts <= {stream for group in range(mine.num_sub_groups) for stream in streams_of(mine, group, "k")}


WRONG = {
    "leaves its tensor": [Strip(8, 0, 4), Strip(0, 4, 4)],
    "leaves its slice": [Strip(0, 0, 4), Strip(4, 6, 4)],
    "do not make up": [Strip(0, 0, 4)],
    "in which strips overlap": [Strip(0, 0, 4), Strip(4, 2, 4)],
    "is not held as a whole": [Strip(0, 0, 2, 2, 4, 2), Strip(0, 4, 2, 2, 4, 2)],
    "has strips that overlap": [Strip(0, 0, 2, 2, 4, 2), Strip(2, 4, 1), Strip(5, 5, 3)],
}


@pytest.mark.parametrize("what", WRONG)
def test_slices_that_are_not_what_they_say_are_refused(what):
    tensor = Param("w", (2, 5)) if what == "leaves its tensor" else Param("w", (2, 4))
    layout = layout_from_sub_groups([[Param("w", (8,))]], 1)
    with pytest.raises(ValueError, match=what):
        check_slices(with_slices(layout, [RankSet(0, 1, 1)], {"w": (tensor, WRONG[what])}))


@given(tensors=tensor_lists, source=topologies, target=topologies, size=st.integers(1, 7))
def test_windows_have_all_runs_once(tensors, source, target, size):
    plan = make_plan(layout_of(tensors, source), layout_of(tensors, target).on_rank(0), 0)
    whole, names = plan.run_by_run(), ("param", "start", "length", "src_rank", "src_offset", "dst_offset", "src_param")
    windows = [window.run_by_run() for window in plan.windows(size)]
    assert windows and all(window.num_segments <= size for window in windows)
    for name in names:
        joined = np.concatenate([getattr(window, name) for window in windows])
        assert np.array_equal(joined, getattr(whole, name))


@given(tensors=tensor_lists, topology=topologies)
def test_the_same_topology_reads_a_rank_s_own_file_alone(tensors, topology):
    layout = layout_of(tensors, topology)
    for rank in range(topology.world_size):
        assert set(make_plan(layout, layout.on_rank(rank), rank).source_ranks) <= {rank}


def test_columns_are_one_row_of_the_plan():
    tensor = Param("down", (4096, 8192))
    src, dst = (layout_of([(tensor, "dim 1")], Topology(1, tp, 1, "param")) for tp in (8, 4))
    plan = make_plan(src, dst.on_rank(1), 1)
    assert plan.num_segments == 2 and plan.source_ranks == (2, 3)
    assert plan.runs is not None and plan.runs.count.tolist() == [4096, 4096]
    assert plan.length.tolist() == [1024, 1024] and plan.runs.dst_step.tolist() == [2048, 2048]


def test_copies_are_read_from_all_holders():
    tensor = Param("norm", (64,))
    src = layout_of([(tensor, "whole")], Topology(1, 8, 1, "param"))
    dst = layout_of([(tensor, "whole")], Topology(1, 4, 1, "param"))
    assert [make_plan(src, dst.on_rank(rank), rank).source_ranks for rank in range(4)] == [(0,), (1,), (2,), (3,)]
    dst = layout_of([(tensor, "whole")], Topology(16, 1, 1, "param"))
    assert {make_plan(src, dst.on_rank(rank), rank).source_ranks for rank in range(16)} == {(t,) for t in range(8)}


@given(shape=shapes, data=st.data())
def test_strips_of_a_view_are_its_elements(shape, data):
    """Views of a tensor whose dimensions are cut, in a slice whose dimensions are cut again."""
    box, inner = [], []
    for size in shape:
        begin = data.draw(st.integers(0, size - 1))
        box.append((begin, data.draw(st.integers(1, size - begin))))
        inner.append((data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))))
    local = [before + size + behind for (_, size), (before, behind) in zip(box, inner, strict=True)]
    whole, part = ids(Param("w", tuple(shape))), ids(Param("p", tuple(local)))
    sizes = [size for _, size in box]
    strides, steps = ([s // a.itemsize for s in a.strides] for a in (whole, part))
    start, offset = whole[tuple(b for b, _ in box)], part[tuple(b for b, _ in inner)]
    strips = strips_of_view(sizes, int(start), strides, int(offset), steps)
    pairs = [
        (strip.start + i * strip.stride + j, strip.offset + i * strip.step + j)
        for strip in strips
        for i in range(strip.num_runs)
        for j in range(strip.numel)
    ]
    want = zip(
        whole[tuple(slice(b, b + s) for b, s in box)].reshape(-1).tolist(),
        part[tuple(slice(b, b + s) for (b, _), s in zip(inner, sizes, strict=True))].reshape(-1).tolist(),
        strict=True,
    )
    assert sorted(pairs) == sorted(want)


def test_a_tensor_that_the_source_lacks_or_has_in_another_size_is_refused():
    topology = Topology(2, 2, 1, "param")
    src = layout_of([(Param("a", (4,)), "whole")], topology)
    for name, shape, message in (("b", (4,), "'b' is not in the source"), ("a", (5,), "disagree on the size")):
        with pytest.raises(ValueError, match=message):
            make_plan(src, layout_of([(Param(name, shape), "whole")], topology), 0)


@given(tensors=tensor_lists, topology=topologies)
def test_runs_are_of_the_strips_that_have_their_elements(tensors, topology):
    layout = layout_of(tensors, topology)
    strips = layout.slices.strips
    elements = [
        {
            int(strips.start[s] + run * strips.stride[s] + i)
            for run in range(strips.num_runs[s])
            for i in range(strips.numel[s])
        }
        for s in range(len(strips))
    ]
    for rank in range(topology.world_size):
        plan = identity_plan(layout, rank)
        found = strips_of_runs(layout.slices, plan.param, plan.start)
        for row, strip in enumerate(found.tolist()):
            start, length = int(plan.start[row]), int(plan.length[row])
            assert strips.param[strip] == plan.param[row]
            assert elements[strip] >= {*range(start, start + length)}
    first = first_copies(layout.slices)
    names = [layout.slices.tensors[p].name for p in strips.param.tolist()]
    for strip, other in enumerate(first.tolist()):
        same = [s for s in range(len(strips)) if (names[s], elements[s]) == (names[strip], elements[strip])]
        assert other == min(same)


def test_a_slice_of_several_gapped_strips():
    tensor = Param("qkv", (4, 12))
    strips = (Strip(0, 0, 2, 4, 12, 4), Strip(6, 2, 2, 4, 12, 4))
    slices = slices_of([tensor], [RankSet(0, 1, 1)], [strips])
    zero = np.zeros(8, dtype=np.int64)
    start = np.array([0, 6, 12, 18, 25, 31, 37, 43])
    assert strips_of_runs(slices, zero, start).tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
