"""zeroelastic.core.layout: agrees with a model of DeepSpeed's arithmetic in plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroelastic.core.layout import (
    Param,
    group_split_layout,
    layout_from_sub_groups,
    original_order,
    pack_sub_groups,
    param_alignment_gaps,
    partition_numel,
    round_robin_order,
    unpacked_layout,
)

numels = st.one_of(st.sampled_from([0, 1, 2, 3, 5]), st.integers(0, 4000))
groups_of_params = st.lists(st.lists(numels, max_size=8), max_size=4).map(
    lambda groups: [[Param(f"g{g}.p{i}", (numel,)) for i, numel in enumerate(group)] for g, group in enumerate(groups)]
)
world_sizes = st.integers(1, 20)


def owned_by_counting(numel: int, world_size: int, rank: int) -> list[int]:
    """The elements of one rank, found by dealing them out one at a time in runs of the padded part."""
    part = math.ceil(numel / world_size) if numel else 0
    return [element for element in range(numel) if element // part == rank] if part else []


def packed_by_hand(numels_of_group: list[int], world_size: int, sub_group_size: int | None) -> list[list[int]]:
    """DeepSpeed's greedy packing of one group, as positions: append, close once full, whole group when it fits."""
    positions = [i for i, numel in enumerate(numels_of_group) if numel > 0]
    per_rank = {i: -(-numels_of_group[i] // world_size) for i in positions}
    if not positions:
        return []
    if sub_group_size is None or sum(per_rank.values()) <= sub_group_size:
        return [positions]
    packed: list[list[int]] = [[]]
    for i in positions:
        if sum(per_rank[j] for j in packed[-1]) >= sub_group_size and packed[-1]:
            packed.append([])
        packed[-1].append(i)
    return packed


def test_a_part_is_exact_where_floats_are_not():
    assert partition_numel(2**60 + 1, 2) == 2**59 + 1


def test_numel_of_shapes():
    assert Param("scalar", ()).numel == 1
    assert Param("empty", (3, 0)).numel == 0
    assert Param("matrix", (3, 4)).numel == 12


@given(numel=numels, world_size=world_sizes)
def test_ranks_own_what_counting_says(numel, world_size):
    layout = unpacked_layout([Param("p", (numel,))], world_size)
    for rank in range(world_size):
        start, length = layout.owned(rank)
        want = owned_by_counting(numel, world_size, rank)
        assert list(range(int(start[0]), int(start[0] + length[0]))) == want
        assert layout.owned_numel(rank) == len(want)


@given(groups=groups_of_params, world_size=world_sizes)
def test_padded_parts_lie_end_to_end(groups, world_size):
    layout = layout_from_sub_groups(groups, world_size)
    assert layout.params == tuple(param for group in groups for param in group)
    assert layout.num_sub_groups == len(groups)
    rows = iter(zip(layout.sub_group.tolist(), layout.offset.tolist(), layout.numel.tolist(), strict=True))
    for i, group in enumerate(groups):
        offset = 0
        for param in group:
            assert next(rows) == (i, offset, param.numel)
            offset += math.ceil(param.numel / world_size)
        assert layout.sub_group_numel[i] == offset
    assert next(rows, None) is None


@given(
    groups=groups_of_params,
    world_size=world_sizes,
    family=st.sampled_from([layout_from_sub_groups, group_split_layout]),
)
def test_all_ranks_together_own_every_element_once(groups, world_size, family):
    layout = family(groups, world_size)
    ends = np.zeros(layout.num_params, dtype=np.int64)
    for rank in range(world_size):
        start, length = layout.owned(rank)
        assert (start == ends).all() and (length >= 0).all() and (length <= layout.part).all()
        ends = start + length
    assert (ends == layout.numel).all()


@given(groups=groups_of_params, world_size=world_sizes, sub_group_size=st.one_of(st.none(), st.integers(1, 5000)))
def test_packing_is_the_greedy_one(groups, world_size, sub_group_size):
    packed = pack_sub_groups(groups, world_size=world_size, sub_group_size=sub_group_size)
    want = [
        [group[i] for i in positions]
        for group in groups
        for positions in packed_by_hand([param.numel for param in group], world_size, sub_group_size)
    ]
    assert packed == want


def params_of(*numels_of_params):
    return [Param(f"p{i}", (numel,)) for i, numel in enumerate(numels_of_params)]


def test_unpacked_parameters_are_buffers_of_their_own():
    layout = unpacked_layout(params_of(5, 0, 1), 2)
    assert layout.sub_group.tolist() == [0, 1, 2] and layout.offset.tolist() == [0, 0, 0]
    assert layout.sub_group_numel.tolist() == [3, 0, 1]


def test_the_index_names_positions():
    assert unpacked_layout(params_of(5, 3), 2).index() == {"p0": 0, "p1": 1}


def test_bad_input_is_refused_by_name():
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        layout_from_sub_groups([params_of(1)], 0)
    with pytest.raises(ValueError, match="more than one place: p0, p1"):
        layout_from_sub_groups([params_of(1, 2, 3), params_of(4, 5)], 1)


def names(params):
    return [param.name for param in params]


@given(groups=groups_of_params, world_size=world_sizes, data=st.data())
def test_a_group_split_is_what_flattening_and_cutting_gives(groups, world_size, data):
    gaps = [[data.draw(st.integers(0, 9)) for _ in group] for group in groups]
    layout = group_split_layout(groups, world_size, gaps)
    position = 0
    for g, (group, gap_of_param) in enumerate(zip(groups, gaps, strict=True)):
        flat = [
            place
            for param, gap in zip(group, gap_of_param, strict=True)
            for place in [*((param.name, i) for i in range(param.numel)), *[None] * gap]
        ]
        flat += [None] * (-len(flat) % (2 * world_size))
        part = len(flat) // world_size
        assert layout.sub_group_numel[g] == part
        found: list[object] = [None] * len(flat)
        for param in (param for param in group if param.numel > 0):
            assert layout.params[position] == param and layout.sub_group[position] == g
            for rank in range(world_size):
                start, length = (int(column[position]) for column in layout.owned(rank))
                at = rank * part + int(layout.buffer_offset(rank)[position])
                if length:
                    found[at : at + length] = [(param.name, i) for i in range(start, start + length)]
            position += 1
        assert found == flat


def test_round_robin_deals_parameters_to_the_ranks():
    params = params_of(1, 2, 3, 4, 5)
    assert names(round_robin_order(params, 2)) == ["p0", "p2", "p4", "p1", "p3"]
    assert names(round_robin_order(params, 3)) == ["p0", "p3", "p1", "p4", "p2"]
    assert round_robin_order(params, 1) == params and round_robin_order([], 4) == []


@given(numels_of_params=st.lists(numels, max_size=30), world_size=world_sizes)
def test_the_original_order_is_found_again(numels_of_params, world_size):
    params = params_of(*numels_of_params)
    assert original_order(round_robin_order(params, world_size), world_size) == params


def test_parameters_are_aligned_to_16_bytes():
    assert param_alignment_gaps(params_of(3, 8, 1, 5), itemsize=2) == [5, 0, 7, 0]
    assert param_alignment_gaps(params_of(3, 5), itemsize=4) == [1, 0]
    assert param_alignment_gaps([], itemsize=2) == []


def test_gaps_have_to_fit_the_parameters():
    with pytest.raises(ValueError, match="not one for each parameter"):
        group_split_layout([params_of(1, 2)], 2, [[0]])
    with pytest.raises(ValueError, match="negative"):
        group_split_layout([params_of(1, 2)], 2, [[0, -1]])
