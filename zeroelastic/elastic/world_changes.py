"""Which world follows: without the nodes that leave, with those that wait, and so that the fewest bytes move."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from zeroelastic.core.movement import Recut, assign_ranks
from zeroelastic.distributed.collective import all_gather, broadcast_or_raise
from zeroelastic.elastic.membership import Membership
from zeroelastic.elastic.roster import World as Members

NOTICING_S = 0.1
"""How often it is asked whether a peer has died, once a collective has failed."""

logger = logging.getLogger(__name__)


class Changes:
    """What follows the world of now: asked for by its ``Preemption`` between two steps."""

    recuts: Callable[[int], Sequence[Recut]] | None = None
    """How the state would be cut on so many ranks, where it can go from memory to memory; else by the directory."""

    def __init__(self, membership: Membership, now: Members, sizes: Callable[[int], bool] | None) -> None:
        self.membership, self.now = membership, now
        self.following: Members | None = None
        self._sizes, self._per_node = sizes, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._seen: tuple[int, ...] = ()
        self._seen_at = 0.0

    def due(self) -> bool:
        """Whether newcomers wait, and no more have come for ``last_call_timeout``. On rank 0; no request."""
        if dist.get_rank() != 0:
            return False
        waiting = self._fitting(self.now.members, self.membership.waiting())
        if waiting != self._seen:
            self._seen, self._seen_at = waiting, time.monotonic()
        return bool(waiting) and time.monotonic() - self._seen_at >= self.membership.settings.last_call_timeout

    def change(self, *, leaves: bool) -> bool:
        """Decide the next world: without the nodes that leave, with those that wait. Collective.

        False where the job has to stop: too few nodes would be left, or all leave.
        """
        notices = all_gather((self.membership.node, leaves))
        leaving = {node for node, asked in notices if asked}
        nodes = [node for node, _ in notices]
        self.following = broadcast_or_raise(lambda: self._decide(nodes, leaving))
        return self.following is not None

    def _decide(self, nodes: Sequence[int], leaving: set[int]) -> Members | None:
        members = self.now.members
        stay = [member for member, node in zip(members, nodes, strict=True) if node not in leaving]
        gone = [member for member in members if member not in stay]
        newcomers = self._fitting(stay, self.membership.waiting(gone))
        num_nodes = len(set(nodes) - leaving) + len(newcomers) // self._per_node
        if (not gone and not newcomers) or not stay or num_nodes < self.membership.min_nodes:
            return None
        size = len(stay) + len(newcomers)
        if self._sizes is not None and not self._sizes(size):
            logger.error("%d ranks are left, which is none of the sizes of this job: it stops", size)
            return None
        recuts = () if self.recuts is None else self.recuts(size)
        previous = () if self.recuts is None else members
        world = Members(self.now.number + 1, by_rank(members, stay, newcomers, recuts), previous)
        self.membership.decide(world)
        return world

    def _fitting(self, stay: Sequence[int], waiting: Sequence[int]) -> tuple[int, ...]:
        """The newcomers with whom the number of ranks is one that the job can have: as many nodes as possible."""
        if self._sizes is None:
            return tuple(waiting)
        sizes = range(len(waiting), 0, -self._per_node)
        return next((tuple(waiting[:n]) for n in sizes if self._sizes(len(stay) + n)), ())

    @property
    def goes_by_directory(self) -> bool:
        """Whether the next world resumes from a checkpoint that this one has to save."""
        return self.following is not None and not self.following.previous

    def lost_peer(self, error: Exception, *, with_previous: bool = False) -> bool:
        """Whether a member of this world, or of the one before, has died: what an error of a collective looks like."""
        if not isinstance(error, (RuntimeError, OSError, EOFError)):
            return False
        members = {*self.now.members, *(self.now.previous if with_previous else ())}
        others = sorted(members - {self.membership.number})
        deadline = time.monotonic() + self.membership.settings.heartbeat_timeout + 2.0
        while not (dead := self.membership.died(others)) and not self.membership.has_failed(self.now):
            if time.monotonic() > deadline:
                return False
            time.sleep(NOTICING_S)
        named = ", ".join(map(str, dead))
        logger.warning("world %d has failed%s", self.now.number, f": members {named} are gone" if named else "")
        return True


def by_rank(
    members: Sequence[int], stay: Sequence[int], newcomers: Sequence[int], recuts: Sequence[Recut] = ()
) -> tuple[int, ...]:
    """The members of the next world by rank: those that stay where they have most of what they will own.

    Without layouts (``recuts``) each rank counts as having an equal part.
    """
    size = len(stay) + len(newcomers)
    old_ranks = {member: rank for rank, member in enumerate(members)}
    chosen = assign_ranks(len(members), size, [old_ranks[member] for member in stay], recuts)
    places: list[int | None] = [None] * size
    for member in stay:
        places[chosen[old_ranks[member]]] = member
    rest = iter(newcomers)
    return tuple(next(rest) if place is None else place for place in places)
