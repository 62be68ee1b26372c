"""Copies of a checkpoint's files for other nodes: which rank keeps which files of which other rank.

A node is the ranks that share one memory. The nodes form a ring, in which each keeps the copy of the one before;
neighbours are in different racks as far as that is possible, so that a copy is never on the same node, and seldom in
the same rack. The copies follow from the files of all ranks and the placement alone, so that two ranks agree on the
transfers between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

Nodes = tuple[tuple[int, ...], ...]
"""The ranks of each node, ascending; the nodes by their first rank."""


def nodes_of(names: Sequence[str]) -> Nodes:
    """The nodes, from the name of each rank's node, by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    return tuple(tuple(members) for members in ranks.values())


def ring(racks: Sequence[str]) -> tuple[int, ...]:
    """Return the nodes in an order in which neighbours are in different racks, where the racks allow it.

    ``racks`` are by node. The nodes of the largest rack come first and are dealt out with the gap between them that the
    number of nodes allows (the arrangement of "no two equal neighbours" by counting).
    """
    by_rack: dict[str, list[int]] = {}
    for node, rack in enumerate(racks):
        by_rack.setdefault(rack, []).append(node)
    largest_first = sorted(by_rack.items(), key=lambda item: (-len(item[1]), item[0]))
    dealt = [node for _, members in largest_first for node in members]
    places = [*range(0, len(racks), 2), *range(1, len(racks), 2)]
    order = [0] * len(racks)
    for place, node in zip(places, dealt, strict=True):
        order[place] = node
    return tuple(order)


@dataclass(frozen=True)
class Placement:
    """Which other nodes have a copy of the files of each rank; ``copies`` counts them. ``racks`` are by node."""

    nodes: Nodes
    racks: tuple[str, ...]
    copies: int

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        found = {rank: node for node, members in enumerate(self.nodes) for rank in members}
        return tuple(found[rank] for rank in range(len(found)))

    @cached_property
    def order(self) -> tuple[int, ...]:
        return ring(self.racks)

    @property
    def num_copies(self) -> int:
        """How many copies there are: no two on one node, and none on the rank's own."""
        return min(self.copies, len(self.nodes) - 1)

    def keepers(self, rank: int) -> tuple[int, ...]:
        """The ranks, on other nodes, that keep a copy of this rank's files."""
        node = self.node_of[rank]
        at, index = self._place_of[node], self.nodes[node].index(rank)
        nodes = (self.nodes[self.order[(at + step) % len(self.order)]] for step in range(1, self.num_copies + 1))
        return tuple(members[index % len(members)] for members in nodes)

    def kept(self, rank: int) -> tuple[int, ...]:
        """The ranks of whose files this rank keeps a copy, ascending."""
        at = self._place_of[self.node_of[rank]]
        before = {self.order[(at - step) % len(self.order)] for step in range(1, self.num_copies + 1)}
        return tuple(sorted(other for node in before for other in self.nodes[node] if rank in self.keepers(other)))

    @cached_property
    def _place_of(self) -> dict[int, int]:
        """The place of each node in the ring."""
        return {node: place for place, node in enumerate(self.order)}
