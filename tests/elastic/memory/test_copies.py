"""zeroelastic.elastic.memory.save: no copy on its own node, every rank protected, racks apart where they can be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zeroelastic.elastic.memory.save import Placement, nodes_of, ring


def placed(ranks_per_node: list[int], *, racks: list[str] | None = None, copies: int = 1):
    names = [f"node{node}" for node, count in enumerate(ranks_per_node) for _ in range(count)]
    return Placement(nodes_of(names), tuple(racks or [""] * len(ranks_per_node)), copies)


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=9)


def test_ranks_of_one_name_are_one_node() -> None:
    assert nodes_of(["a", "b", "a", "c"]) == ((0, 2), (1,), (3,))


@given(shapes, st.integers(0, 4))
def test_copies_are_on_other_nodes_and_no_two_on_one(shape: list[int], copies: int) -> None:
    placement = placed(shape, copies=copies)
    for rank, own in enumerate(placement.node_of):
        nodes = [placement.node_of[keeper] for keeper in placement.keepers(rank)]
        assert own not in nodes
        assert len(set(nodes)) == len(nodes) == min(copies, len(shape) - 1)


@given(shapes, st.integers(0, 3))
def test_what_is_kept_is_what_keepers_keep(shape: list[int], copies: int) -> None:
    placement = placed(shape, copies=copies)
    ranks = range(len(placement.node_of))
    assert {(rank, keeper) for rank in ranks for keeper in placement.keepers(rank)} == {
        (kept, rank) for rank in ranks for kept in placement.kept(rank)
    }


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=12))
def test_neighbours_are_in_different_racks_where_no_rack_has_more_than_half(racks: list[str]) -> None:
    order = ring(racks)
    assert sorted(order) == list(range(len(racks)))
    most = max(map(racks.count, racks))
    pairs = list(zip(order, [*order[1:], order[0]], strict=True))
    alike = sum(racks[a] == racks[b] for a, b in pairs)
    if most * 2 <= len(racks):
        assert alike <= (len(racks) % 2)  # a ring of an odd length may have to close on one rack
    else:
        assert alike <= 2 * most - len(racks) + 1
