"""Which world follows: at 16,384 ranks as at 8, members get the ranks at which the fewest bytes move."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from zeroelastic.core.layout import Layout, Param, group_split_layout, layout_from_sub_groups, unpacked_layout
from zeroelastic.core.movement import Recut, least_moved, moved_elements
from zeroelastic.elastic.resize.roster import World as Members
from zeroelastic.elastic.resize.world import Changes

PER_NODE = 8
HIDDEN = 12_288
SHAPES = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN,), (3 * HIDDEN,), (4 * HIDDEN,))
STAGES: dict[str, Callable[[list[list[Param]], int], Layout]] = {
    "stage 3": layout_from_sub_groups,
    "stages 1 and 2": group_split_layout,
}


def gpt(layers: int) -> list[list[Param]]:
    """Two optimizer groups: matrices and vectors."""
    params = [Param(f"h.{i}.{n}", shape) for i in range(layers) for n, shape in enumerate(SHAPES)]
    return [[param for param in params if len(param.shape) == dims] for dims in (2, 1)]


class Store:
    """What ``Changes`` asks of a membership, without a store."""

    min_nodes = 1

    def __init__(self, waiting: Sequence[int] = ()) -> None:
        self._waiting = tuple(waiting)
        self.decided: list[Members] = []

    def waiting(self, leaving: Sequence[int] = ()) -> tuple[int, ...]:
        return self._waiting

    def decide(self, world: Members) -> None:
        self.decided.append(world)


def decided(
    monkeypatch: pytest.MonkeyPatch, old: int, leaving: set[int], newcomers: int, recuts: Any
) -> tuple[Members, dict[int, int], float]:
    """The world that follows one of ``old`` ranks, the new rank of each that stays by its old one, and the seconds."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(PER_NODE))
    store: Any = Store(range(old, old + newcomers))
    changes = Changes(store, Members(0, tuple(range(old))), None)
    changes.recuts = recuts
    began = time.process_time()
    world = changes._decide([rank // PER_NODE for rank in range(old)], leaving)
    seconds = time.process_time() - began
    assert world is not None and store.decided == [world] and sorted(world.members) == sorted(set(world.members))
    return world, {member: rank for rank, member in enumerate(world.members) if member < old}, seconds


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("leaving", "newcomers"), [({0}, 0), ({1000}, 0), ({5, 70, 2000}, 8), (set(), 16)])
def test_a_change_at_16384_ranks_moves_at_most_1_05_of_the_minimum(
    monkeypatch: pytest.MonkeyPatch, stage: str, leaving: set[int], newcomers: int
) -> None:
    old, groups = 16_384, gpt(layers=12)
    before = STAGES[stage](groups, old)

    def recuts(size: int) -> list[Recut]:
        return [Recut(before, STAGES[stage](groups, size), 12)]

    world, ranks, _ = decided(monkeypatch, old, leaving, newcomers, recuts)
    size = old - PER_NODE * len(leaving) + newcomers
    assert len(world.members) == size and world.previous == tuple(range(old))
    after = recuts(size)[0].new
    assert moved_elements(before, after, ranks) <= 1.05 * least_moved(before, after, list(ranks))


def test_where_most_of_the_model_is_frozen_its_movement_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    old, size = 16_384, 16_376
    base = [param for group in gpt(layers=12) for param in group]
    adapters = [[Param(f"adapter.{i}", (16, HIDDEN)) for i in range(24)]]
    trained = Recut(layout_from_sub_groups(adapters, old), layout_from_sub_groups(adapters, size), 12)
    frozen = Recut(unpacked_layout(base, old), unpacked_layout(base, size), 2)
    _, ranks, _ = decided(monkeypatch, old, {7}, 0, lambda size: [trained, frozen])
    moved = sum(recut.element_bytes * moved_elements(recut.old, recut.new, ranks) for recut in (trained, frozen))
    least = sum(recut.element_bytes * least_moved(recut.old, recut.new, list(ranks)) for recut in (trained, frozen))
    assert moved <= 1.05 * least


@pytest.mark.extended
def test_a_million_parameters_on_16384_ranks_take_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = gpt(layers=1_000_000 // len(SHAPES))
    before = layout_from_sub_groups(groups, 16_384)
    *_, seconds = decided(
        monkeypatch, 16_384, {9}, 0, lambda size: [Recut(before, layout_from_sub_groups(groups, size), 12)]
    )
    assert seconds < 6.0  # 0.9 s on a quiet machine


def test_without_layouts_the_state_goes_by_the_directory_and_ranks_count_as_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, ranks, _ = decided(monkeypatch, 16, {0}, 0, None)
    assert world.previous == () and sorted(ranks) == list(range(8, 16))
