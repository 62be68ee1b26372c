"""A job at one size, as the training loop sees it: when to leave the loop, what follows, and what becomes of an error.

The world that follows has the nodes that stay and those that wait, numbered so that the fewest bytes move.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch.distributed as dist

from zeroelastic.core.movement import Recut, assign_ranks
from zeroelastic.distributed.collective import all_gather, broadcast_or_raise
from zeroelastic.elastic.events import Events
from zeroelastic.elastic.leaving import Notice
from zeroelastic.elastic.position import Position
from zeroelastic.elastic.preemption import Every, Preemption
from zeroelastic.elastic.resize.membership import LOOK_S, Membership
from zeroelastic.elastic.resize.roster import World as Members
from zeroelastic.elastic.resume import Resumed
from zeroelastic.errors import ConfigError
from zeroelastic.report import ResizeReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorldArguments:
    """The arguments of ``worlds``."""

    build: Callable[[], Any]
    directory: str | os.PathLike[str]
    data: Position | None
    saving: Every | None
    client_state: Callable[[], Mapping[str, Any]] | None
    log: str | os.PathLike[str] | None
    status: bool
    strict: bool
    fresh: bool
    required: bool
    sizes: Callable[[int], bool] | None

    def facts(self) -> dict[str, str]:
        """The arguments that have to be the same on all ranks, so that these take part in the same collectives."""
        named = {"data": type(self.data).__name__, "saving": self.saving, "client_state": self.client_state is not None}
        same = {**named, "strict": self.strict, "fresh": self.fresh, "required": self.required}
        return {f"the argument {name} of worlds()": str(value) for name, value in same.items()}


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
            time.sleep(LOOK_S)
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


class World:
    """The job at one size; a context manager that gives the engine. ``worlds`` makes it.

    ``start`` is what the job resumed from, as ``resume`` returns it: its ``tier`` is "in-place" where the state came
    from the world before. ``report`` says what that cost, None otherwise. ``data`` is the position in the data.
    ``stopped`` says whether the whole job was asked to stop, ``saves`` are the tags that were saved so far. ``changes``
    and ``failed``, after the block, say how it ended.
    """

    engine: Any
    log: Any
    _stop: Any
    changes: Changes | None

    def __init__(
        self,
        arguments: WorldArguments,
        engine: Any,
        data: Position | None,
        start: Resumed,
        log: Events,
        notice: Notice,
        changes: Changes | None,
        report: ResizeReport | None,
    ) -> None:
        self.engine, self.data, self.start, self.log, self.report = engine, data, start, log, report
        self.changes, self.failed = changes, False
        self.stopped, self.saves = False, list[str]()
        self._step = int(engine.global_steps)
        self._stop = Preemption(
            engine,
            arguments.directory,
            data=data,
            saving=arguments.saving,
            client_state=arguments.client_state,
            log=log,
            notice=notice,
            changes=changes,
        )

    def ends(self) -> bool:
        """Whether to leave the training loop: the world changes, or the job stops. Collective; after each step.

        Saves first where a save is due, as ``preemption`` does, and advances ``data``. Raises ConfigError where the
        next accumulation has begun, even if nothing changes now: its gradients would be lost in a change.
        """
        from zeroelastic.deepspeed.engine import accumulated_micro_batches

        step, taken = int(self.engine.global_steps), accumulated_micro_batches(self.engine)
        if taken and step != self._step:
            raise ConfigError(
                f"world.ends() was called {taken} micro batches after optimizer step {step}; a change of size would "
                "lose their gradients. Call it right after engine.step(), before the next micro batch."
            )
        self._step = step
        ended: bool = self._stop()
        self.stopped, self.saves = self._stop.stopped, self._stop.saves
        if ended and self.changes is not None and self.changes.goes_by_directory:
            self._stop.save(background=False)
        return ended

    def save(self, tag: str | None = None, *, background: bool | None = None) -> str:
        """Save now, as ``Preemption.save``. Collective. Returns the tag."""
        saved: str = self._stop.save(tag, background=background)
        return saved

    def state(self) -> dict[str, Any]:
        """The client state of this moment, for all members of the next world. Collective."""
        state: dict[str, Any] = self._stop.state(for_all_ranks=True)
        return state

    def release(self) -> Any:
        """The engine, which nothing here refers to any more: the caller's loop still has this object."""
        engine = self.engine
        self.engine = self._stop = self.log = self.changes = None
        return engine

    def __enter__(self) -> Any:
        self._stop.__enter__()
        return self.engine

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """End the world. An error of a collective whose peer has died goes no further: it is none of the program."""
        try:
            self._stop.__exit__(kind, value, trace)
        except Exception as error:
            if value is not None or self.changes is None or not self.changes.lost_peer(error):
                raise
            kind, value, self.failed = type(error), error, True
        if isinstance(value, Exception) and self.changes is not None:
            self.failed = self.failed or self.changes.lost_peer(value)
        self.log.__exit__(kind, value, trace)
        if self.failed and self.changes is not None:
            logger.warning("world %d has lost a member, and ends: %s", self.changes.now.number, value)
            forget_frames(value)
            self._stop.forget_memory()
        return self.failed


def forget_frames(error: BaseException | None) -> None:
    """Drop what the frames of an error refer to: while one has a process group, other ranks wait in it for this one."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
