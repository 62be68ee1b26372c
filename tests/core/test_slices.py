"""zeroelastic.core.slices and slice_plan: plans between slices agree with element numbers that are moved one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroelastic.core.layout import (
    Layout,
    Param,
    group_split_layout,
    joined_layouts,
    layout_from_sub_groups,
    with_slices,
)
from zeroelastic.core.plan import check_plan, held_plan, make_plan
from zeroelastic.core.slice_plan import check_slices
from zeroelastic.core.slices import RankSet, Strip, strips_of_box, strips_of_view

KINDS = ("whole", "dim 0", "dim 1", "dim 2", "pairs", "experts")


@dataclass(frozen=True)
class Topology:
    """Data, tensor and expert parallel sizes; experts are cut over the data parallel ranks."""

    dp: int
    tp: int
    ep: int
    family: str

    @property
    def world_size(self) -> int:
        return self.dp * self.tp


def cut(total: int, count: int, number: int) -> tuple[int, int]:
    """The begin and the size of one of ``count`` uneven parts."""
    begins = [total * i // count for i in range(count + 1)]
    return begins[number], begins[number + 1] - begins[number]


def slice_of(tensor: Param, kind: str, topology: Topology, t: int, e: int) -> tuple[tuple[int, ...], tuple[Strip, ...]]:
    """The shape and the strips of what tensor parallel rank t and expert parallel rank e have of a tensor."""
    box = [(0, size) for size in tensor.shape]
    if kind == "experts":
        box[0] = cut(tensor.shape[0], topology.ep, e)
    dim = {"dim 0": 0, "dim 1": 1, "dim 2": 2}.get(kind)
    if kind == "experts" and len(box) > 1:
        dim = 1
    if dim is not None and dim < len(box):
        box[dim] = cut(tensor.shape[dim], topology.tp, t)
    if kind == "pairs":  # two tensor parallel ranks keep the same part, as heads of keys that are too few
        box[0] = cut(tensor.shape[0], -(-topology.tp // 2), t // 2)
    shape = tuple(size for _, size in box)
    return shape, strips_of_box(tensor.shape, box)


def layout_of(tensors: list[tuple[Param, str]], topology: Topology) -> Layout:
    """The layout over all ranks: rank ``d * tp + t``."""
    layouts = []
    edp = topology.dp // topology.ep
    for t in range(topology.tp):
        for e in range(topology.ep):
            buffers: list[list[Param]] = [[], []]
            views = {}
            for tensor, kind in tensors:
                is_expert = kind == "experts"
                if e and not is_expert:
                    continue
                shape, strips = slice_of(tensor, kind, topology, t, e)
                buffers[is_expert].append(Param(tensor.name, shape))
                views[tensor.name] = (tensor, strips)
            counts = [topology.dp, edp]
            make = layout_from_sub_groups if topology.family == "param" else group_split_layout
            layout = make(buffers, topology.world_size, num_parts=counts)
            ranks = [RankSet(t, topology.tp, topology.dp), RankSet(e * topology.tp + t, topology.ep * topology.tp, edp)]
            layouts.append(with_slices(layout, ranks, views))
    return joined_layouts(layouts)


def ids(tensor: Param) -> np.ndarray:
    return np.arange(tensor.numel, dtype=np.int64).reshape(tensor.shape)


def buffers_of(tensors: list[tuple[Param, str]], topology: Topology) -> list[list[np.ndarray]]:
    """What every rank's buffers hold, made without layouts: the number of the tensor and of the element, or -1."""
    found = []
    edp = topology.dp // topology.ep
    for rank in range(topology.world_size):
        d, t = divmod(rank, topology.tp)
        e = d % topology.ep
        buffers = []
        for is_expert, parts, number in ((False, topology.dp, d), (True, edp, d // topology.ep)):
            flats = []
            for i, (tensor, kind) in enumerate(tensors):
                if (kind == "experts") != is_expert:
                    continue
                values = ids(tensor) + i * 10**6
                box = [slice(None)] * values.ndim
                if kind == "experts":
                    begin, size = cut(tensor.shape[0], topology.ep, e)
                    box[0] = slice(begin, begin + size)
                dim = {"dim 0": 0, "dim 1": 1, "dim 2": 2}.get(kind)
                dim = 1 if kind == "experts" and values.ndim > 1 else dim
                if dim is not None and dim < values.ndim:
                    begin, size = cut(tensor.shape[dim], topology.tp, t)
                    box[dim] = slice(begin, begin + size)
                if kind == "pairs":
                    begin, size = cut(tensor.shape[0], -(-topology.tp // 2), t // 2)
                    box[0] = slice(begin, begin + size)
                flats.append(values[tuple(box)].reshape(-1))
            if topology.family == "param":
                parts_of = []
                for flat in flats:
                    part = math.ceil(len(flat) / parts)
                    padded = np.full(part * parts, -1, dtype=np.int64)
                    padded[: len(flat)] = flat
                    parts_of.append(padded[number * part : (number + 1) * part])
                buffers.append(np.concatenate([np.empty(0, dtype=np.int64), *parts_of]))
            else:
                whole = np.concatenate([np.empty(0, dtype=np.int64), *flats])
                part = 2 * math.ceil(len(whole) / (2 * parts))
                padded = np.full(part * parts, -1, dtype=np.int64)
                padded[: len(whole)] = whole
                buffers.append(padded[number * part : (number + 1) * part])
        found.append(buffers)
    return found


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


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
tensor_lists = st.lists(st.tuples(shapes, st.sampled_from(KINDS)), min_size=1, max_size=5).map(
    lambda found: [(Param(f"t{i}", shape), kind) for i, (shape, kind) in enumerate(found)]
)
topologies = st.tuples(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.sampled_from(["param", "group"])
).map(lambda one: Topology(one[0] * one[2], one[1], one[2], one[3]))


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
        plan = held_plan(layout, rank)
        got = [np.full_like(buffer, -1) for buffer in have[rank]]
        run(plan.run_by_run(), have, got)
        assert all(np.array_equal(buffer, expected) for buffer, expected in zip(got, have[rank], strict=True))
        assert layout.on_rank(rank).owned_numel(rank) == sum(int((buffer >= 0).sum()) for buffer in have[rank])


@given(tensors=tensor_lists, topology=topologies)
def test_slices_of_boxes_are_what_they_say(tensors, topology):
    check_slices(layout_of(tensors, topology))


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
    windows = list(plan.windows(size))
    assert windows and all(window.num_segments <= size and window.runs is None for window in windows)
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
