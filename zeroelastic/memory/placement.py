"""Which node keeps what for which other: a ring of nodes for copies, groups of nodes for parity. Pure.

A node is the ranks that share one memory. Neighbours in the ring are in different racks as far as that is possible, so
that a copy is never on the same node, and seldom in the same rack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

Nodes = tuple[tuple[int, ...], ...]
"""The ranks of each node, ascending; the nodes by their first rank."""


def nodes_of(names: Sequence[str]) -> Nodes:
    """The nodes, from the name of each rank's node, by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    return tuple(tuple(members) for members in ranks.values())


def ring(racks: Sequence[str]) -> tuple[int, ...]:
    """The nodes in an order in which neighbours are in different racks, where the racks allow it.

    ``racks`` are by node. The nodes of the largest rack come first and are dealt out with the gap between them that
    the number of nodes allows (the arrangement of "no two alike adjacent" by counting).
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
    """Where the files of each rank lie besides on its own node.

    ``copies`` counts the other nodes that have a copy; with ``parity`` there are no copies, but sets of ranks on
    different nodes that share one XOR. ``racks`` are by node.
    """

    nodes: Nodes
    racks: tuple[str, ...]
    copies: int
    parity: int | None = None

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """The node of each rank."""
        found = {rank: node for node, members in enumerate(self.nodes) for rank in members}
        return tuple(found[rank] for rank in range(len(found)))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The ring of nodes."""
        return ring(self.racks)

    @property
    def num_copies(self) -> int:
        """How many copies there are: no two on one node, and none on the rank's own."""
        return 0 if self.parity is not None else min(self.copies, len(self.nodes) - 1)

    def keepers(self, rank: int) -> tuple[int, ...]:
        """The ranks, on other nodes, that keep a copy of this rank's files."""
        if self.parity is None:
            return self._next(rank, self.num_copies)
        return self._next(rank, 1) if len(self.nodes) > 1 and len(self.set_of(rank)) < 2 else ()

    def kept(self, rank: int) -> tuple[int, ...]:
        """The ranks of whose files this rank keeps a copy, ascending."""
        at, num_before = self._place_of[self.node_of[rank]], self.num_copies if self.parity is None else 1
        before = {self.order[(at - step) % len(self.order)] for step in range(1, num_before + 1)}
        return tuple(sorted(other for node in before for other in self.nodes[node] if rank in self.keepers(other)))

    @cached_property
    def _place_of(self) -> dict[int, int]:
        """The place of each node in the ring."""
        return {node: place for place, node in enumerate(self.order)}

    def _next(self, rank: int, count: int) -> tuple[int, ...]:
        node = self.node_of[rank]
        at, index = self._place_of[node], self.nodes[node].index(rank)
        nodes = (self.nodes[self.order[(at + step) % len(self.order)]] for step in range(1, count + 1))
        return tuple(members[index % len(members)] for members in nodes)

    @cached_property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks, one of each node of a group, that share an XOR; ranks that are alone are in none."""
        if self.parity is None:
            return ()
        found = []
        for group in _groups(self.order, self.parity):
            for index in range(max(len(self.nodes[node]) for node in group)):
                members = tuple(self.nodes[node][index] for node in group if index < len(self.nodes[node]))
                if len(members) > 1:
                    found.append(members)
        return tuple(found)

    def set_of(self, rank: int) -> tuple[int, ...]:
        """The set of a rank; empty where it is in none."""
        return self._set_of.get(rank, ())

    @cached_property
    def _set_of(self) -> dict[int, tuple[int, ...]]:
        return {rank: members for members in self.sets for rank in members}


def _groups(order: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """The ring cut into groups of at most ``size`` nodes, as equal as possible; of two nodes at least."""
    number = -(-len(order) // size)
    while number > 1 and len(order) // number < 2:
        number -= 1
    ends = [len(order) * i // number for i in range(number + 1)]
    return tuple(tuple(order[begin:end]) for begin, end in pairwise(ends))
