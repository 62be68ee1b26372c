"""Which world follows: nodes that leave and come, and members at the ranks at which the fewest bytes move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from movements import least_moved, moved_elements

from zeroelastic.core.layout import Param, layout_from_sub_groups
from zeroelastic.core.movement import Recut
from zeroelastic.elastic.resize.roster import World as Members
from zeroelastic.elastic.resize.world import Changes

PER_NODE = 8
GROUPS = [[Param(f"h.{i}", (3 * 1024, 1024)) for i in range(12)], [Param(f"bias.{i}", (1024,)) for i in range(12)]]


class Store:
    """What ``Changes`` asks of a membership, without a store."""

    min_nodes = 1

    def __init__(self, waiting: Sequence[int]) -> None:
        self._waiting = tuple(waiting)
        self.decided: list[Members] = []

    def waiting(self, leaving: Sequence[int] = ()) -> tuple[int, ...]:
        return self._waiting

    def decide(self, world: Members) -> None:
        self.decided.append(world)


def decided(old: int, leaving: set[int], newcomers: int, recuts: Any) -> Members:
    """The world that follows one of ``old`` ranks; nodes leave, and members come."""
    store: Any = Store(range(old, old + newcomers))
    changes = Changes(store, Members(0, tuple(range(old))), None)
    changes.recuts = recuts
    world = changes._decide([rank // PER_NODE for rank in range(old)], leaving)
    assert world is not None and store.decided == [world]
    return world


@pytest.mark.parametrize(("leaving", "newcomers"), [({0}, 0), ({100}, 0), ({5, 70, 127}, 8), (set(), 16)])
def test_members_get_the_ranks_at_which_the_fewest_bytes_move(
    monkeypatch: pytest.MonkeyPatch, leaving: set[int], newcomers: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(PER_NODE))
    old, before = 1024, layout_from_sub_groups(GROUPS, 1024)

    def recuts(size: int) -> list[Recut]:
        return [Recut(before, layout_from_sub_groups(GROUPS, size), 12)]

    world = decided(old, leaving, newcomers, recuts)
    assert sorted(world.members) == [m for m in range(old + newcomers) if m >= old or m // PER_NODE not in leaving]
    assert world.previous == tuple(range(old))
    ranks = {member: rank for rank, member in enumerate(world.members) if member < old}
    after = recuts(len(world.members))[0].new
    assert moved_elements(before, after, ranks) <= 1.05 * least_moved(before, after, list(ranks))


def test_without_layouts_the_state_goes_by_the_directory_and_ranks_count_as_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(PER_NODE))
    world = decided(16, {0}, 0, None)
    assert world.previous == () and sorted(world.members) == list(range(8, 16))
