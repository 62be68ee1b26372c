"""A training loop over worlds: when nodes come or leave, the job goes on at another size in the same processes.

``worlds`` builds an engine for each world. Between two of them the state goes from memory to memory, by ``resize``, and
each rank gets only what it does not have; the content root is compared. Where a node is lost without notice, the
survivors build the next world too, and resume from the memory of the nodes or from the disk.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from zeroelastic.core.movement import assign_ranks
from zeroelastic.distributed.collective import all_gather, broadcast_or_raise
from zeroelastic.distributed.peers import JoinedPeers
from zeroelastic.elastic.events import Events
from zeroelastic.elastic.membership import Membership
from zeroelastic.elastic.notice import SIGNALS, Notice
from zeroelastic.elastic.position import KEY, Position, unpack_position
from zeroelastic.elastic.preemption import Every, Preemption
from zeroelastic.elastic.resume import Resumed, resume
from zeroelastic.elastic.roster import World as Members
from zeroelastic.errors import ConfigError, MembershipError, StrictError
from zeroelastic.monitoring.observers import publish
from zeroelastic.report import ResizeReport
from zeroelastic.warm.preload import import_always

if TYPE_CHECKING:
    from zeroelastic.deepspeed.resize.restore import Leaving

logger = logging.getLogger(__name__)

_NOTICING_S = 0.1
"""How often it is asked whether a peer has died, once a collective has failed."""


@dataclass(frozen=True, slots=True)
class _Asked:
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


class World:
    """The job at one size; a context manager that gives the engine. ``worlds`` makes it.

    ``start`` is what the job resumed from, as ``resume`` returns it: its ``tier`` is "in-place" where the state came
    from the world before. ``report`` says what that cost, None otherwise. ``data`` is the position in the data.
    ``stopped`` says whether the whole job was asked to stop, ``saves`` are the tags that were saved so far.
    """

    engine: Any
    log: Any
    _stop: Any
    _changes: _Changes | None

    def __init__(
        self,
        asked: _Asked,
        engine: Any,
        data: Position | None,
        start: Resumed,
        log: Events,
        notice: Notice,
        changes: _Changes | None,
        report: ResizeReport | None,
    ) -> None:
        self.engine, self.data, self.start, self.log, self.report = engine, data, start, log, report
        self._changes, self._failed = changes, False
        self.stopped, self.saves = False, list[str]()
        self._stop = Preemption(
            engine,
            asked.directory,
            data=data,
            saving=asked.saving,
            client_state=asked.client_state,
            log=log,
            notice=notice,
            changes=changes,
        )

    def ends(self) -> bool:
        """Whether to leave the training loop: the world changes, or the job stops. Collective; after each step.

        Saves first where a save is due, as ``preemption`` does, and advances ``data``.
        """
        ended: bool = self._stop()
        self.stopped, self.saves = self._stop.stopped, self._stop.saves
        if ended and self._changes is not None and self._changes.goes_by_directory:
            self._stop.save(background=False)
        return ended

    def save(self, tag: str | None = None, *, background: bool | None = None) -> str:
        """Save now, as ``Preemption.save``. Collective. Returns the tag."""
        saved: str = self._stop.save(tag, background=background)
        return saved

    def _release(self) -> Any:
        """The engine, which nothing here refers to any more: the caller's loop still has this object."""
        engine = self.engine
        self.engine = self._stop = self.log = self._changes = None
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
            if value is not None or self._changes is None or not self._changes.lost_peer(error):
                raise
            kind, value, self._failed = type(error), error, True
        if isinstance(value, Exception) and self._changes is not None:
            self._failed = self._failed or self._changes.lost_peer(value)
        self.log.__exit__(kind, value, trace)
        if self._failed and self._changes is not None:
            logger.warning("world %d has lost a member, and ends: %s", self._changes.now.number, value)
            _forget_frames(value)
            self._stop.forget_memory()
        return self._failed


class _Watch:
    """Ends the wait for a member that dies while a world begins.

    To form a process group, ranks wait for each other in the store until the timeout of collectives, in C++
    (``ProcessGroupGloo``) and in Python (``_store_based_barrier``, torch 2.13). So the connection is broken.
    """

    def __init__(self, membership: Membership, now: Members) -> None:
        self._membership = membership
        self._others = [member for member in now.members if member != membership.number]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeroelastic-worlds", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(_NOTICING_S):
            if self._membership.died(self._others):
                self._membership.cut_off()
                return

    def end(self) -> None:
        """Break nothing from here on."""
        self._ended.set()
        self._thread.join()


def _forget_frames(error: BaseException | None) -> None:
    """Drop what the frames of an error refer to: while one has a process group, other ranks wait in it for this one."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _Changes:
    """What follows the world of now: asked for by its ``Preemption`` between two steps."""

    def __init__(
        self, membership: Membership, now: Members, sizes: Callable[[int], bool] | None, *, moves: bool = True
    ) -> None:
        """``moves`` says whether the state can go from memory to memory; otherwise by way of the directory."""
        self.membership, self.now, self.moves = membership, now, moves
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
        world = Members(self.now.number + 1, _by_rank(members, stay, newcomers), members if self.moves else ())
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
            time.sleep(_NOTICING_S)
        named = ", ".join(map(str, dead))
        logger.warning("world %d has failed%s", self.now.number, f": members {named} are gone" if named else "")
        return True


def _by_rank(members: Sequence[int], stay: Sequence[int], newcomers: Sequence[int]) -> tuple[int, ...]:
    """The members of the next world by rank: those that stay where they have most of what they will own."""
    size = len(stay) + len(newcomers)
    old_ranks = {member: rank for rank, member in enumerate(members)}
    chosen = assign_ranks(len(members), size, [old_ranks[member] for member in stay])
    places: list[int | None] = [None] * size
    for member in stay:
        places[chosen[old_ranks[member]]] = member
    rest = iter(newcomers)
    return tuple(next(rest) if place is None else place for place in places)


def worlds(
    build: Callable[[], Any],
    directory: str | os.PathLike[str],
    *,
    data: Position | None = None,
    saving: Every | None = None,
    grace: float = 30.0,
    client_state: Callable[[], Mapping[str, Any]] | None = None,
    log: str | os.PathLike[str] | None = None,
    status: bool = False,
    strict: bool = True,
    fresh: bool = False,
    required: bool = False,
    sizes: Callable[[int], bool] | None = None,
) -> Iterator[World]:
    """The job at one size after another, each with an engine that ``build`` makes for it::

        for world in worlds(build, "ckpt", data=sampler, saving=every(seconds=600)):
            with world as engine:
                for batch in batches(sampler, engine):
                    engine.backward(engine(batch))
                    engine.step()
                    if world.ends():
                        break

    ``build()`` is called in each world, when ``torch.distributed`` is there: it makes the model and returns what
    ``deepspeed.initialize`` returns first, or that and a position in the data which fits this world. It must build the
    same model and optimizer groups each time; their values are replaced by those of the run. ``sizes(n)`` says whether
    the job can have ``n`` ranks. The other arguments are those of ``preemption`` and ``resume``; ``log`` is the path of
    an event log.

    Under torchrun with ``--rdzv-backend=zeroelastic-in-place``, worlds change in the same processes: a node that comes
    is taken in between two steps, one that is asked to leave (SIGTERM) hands its state to the others. When all nodes
    are asked to leave, the job saves and stops, as with ``preemption``. Elsewhere there is one world, which begins with
    ``resume``. The loop ends when the training loop of a world ends by itself, when the job stops, and in a process
    that leaves.

    Raises what ``build`` and ``resume`` raise, StrictError for another global batch in the next world where ``strict``,
    DigestMismatchError where the state has changed on its way, and MembershipError where the job goes on without this
    process.
    """
    asked = _Asked(build, directory, data, saving, client_state, log, status, strict, fresh, required, sizes)
    membership = Membership.of_this_process()
    with _noticing(Notice(grace if membership is None else min(grace, membership.settings.notice), SIGNALS)) as notice:
        if membership is None:
            yield _only_world(asked, notice)
            return
        try:
            yield from _Job(asked, membership, notice).worlds()
        finally:
            membership.leave()


class _noticing:
    """Signals are noted from the first world to the end of the last one, and ignored while a process leaves."""

    def __init__(self, notice: Notice) -> None:
        self._notice = notice

    def __enter__(self) -> Notice:
        self._notice.begin()
        return self._notice

    def __exit__(self, *_: object) -> None:
        self._notice.end(ignoring=self._notice.at is not None)


def _only_world(asked: _Asked, notice: Notice) -> World:
    """The one world of a job whose size does not change."""
    engine, data = _built(asked)
    log = Events(engine, asked.log, status=asked.status)
    start = resume(
        engine,
        asked.directory,
        data=data,
        strict=asked.strict,
        fresh=asked.fresh,
        required=asked.required,
        log=log,
    )
    return World(asked, engine, data, start, log, notice, None, None)


def _built(asked: _Asked) -> tuple[Any, Position | None]:
    made = asked.build()
    if isinstance(made, tuple):
        if len(made) != 2:
            raise ConfigError(
                f"build() has returned {len(made)} values: return the engine alone, or the engine and a position in "
                "the data (deepspeed.initialize returns more; take its first)."
            )
        return made[0], made[1]
    return made, asked.data


def _end(engine: Any, *, failed: bool) -> None:
    """End a world. After a failure its engine may be in any state: what it raises is logged."""
    from zeroelastic.deepspeed.process_world import end_world

    try:
        end_world(engine)
    except Exception as error:
        if not failed:
            raise
        logger.warning("while a world that has failed was ended: %s", error)


class _Job:
    """The worlds of a job in which this process is a member."""

    def __init__(self, asked: _Asked, membership: Membership, notice: Notice) -> None:
        self._asked, self._membership, self._notice = asked, membership, notice
        self._leaving: Leaving | None = None
        self._ended_at = time.monotonic()
        self._limit = timedelta(seconds=membership.settings.failure_timeout)
        self._saves: list[str] = []
        self._has_begun = False

    def worlds(self) -> Iterator[World]:
        from zeroelastic.deepspeed.install.seams import install
        from zeroelastic.deepspeed.resize.restore import leave_world

        install()
        import_always()  # before this process is ready to be taken in: nobody waits for it
        now = self._membership.first()
        while True:
            world = self._begun(now)
            if world is None:
                next_world = self._next_after_failure(now, unchanged=self._leaving is not None)
                if next_world is None:
                    return
                now = next_world
                continue
            self._leaving = None
            yield world
            changes = world._changes
            assert changes is not None
            self._ended_at = time.monotonic()
            following = changes.following
            if following is None and not world._failed:
                return
            failed = world._failed
            if following is not None and following.previous and not failed:
                try:
                    self._leaving = leave_world(world.engine, world._stop.state())
                except (RuntimeError, OSError, EOFError) as error:
                    if not changes.lost_peer(error):
                        raise
                    _forget_frames(error)
                    failed = True
            engine = world._release()
            del world, changes
            _end(engine, failed=failed)
            del engine
            leaves = following is not None and self._membership.number not in following.members
            if leaves and following is not None and not failed:
                self._serve(following)
            if leaves:
                return
            now = now if following is None else following
            if failed:
                next_world = self._next_after_failure(now, unchanged=False)
                if next_world is None:
                    return
                now = next_world

    def _begun(self, now: Members) -> World | None:
        """The world, begun; None where a member of it, or of the one before, was lost on the way."""
        from zeroelastic.deepspeed.process_world import begin_world

        if self._leaving is None and self._membership.number in now.previous:  # it failed before its state was kept
            self._membership.cannot_meet(now)
            return None
        if not self._membership.meet(now):
            return None
        changes = _Changes(self._membership, now, self._asked.sizes)
        rank, size = now.members.index(self._membership.number), len(now.members)
        engine = None
        watch = _Watch(self._membership, now)
        try:
            begin_world(self._membership.store_of(now), rank=rank, world_size=size, timeout=None)
            formed = time.monotonic()
            engine, data = _built(self._asked)
            in_place = self._has_begun or bool(now.previous)
            log = Events(engine, self._asked.log, status=self._asked.status, formed_at=formed if in_place else None)
            self._has_begun = True
            report: ResizeReport | None = None
            if now.previous:
                start, report = self._moved(now, engine, data, formed)
                log.resumed(start, seconds=report.move_seconds, resize=report)
            else:
                start = resume(
                    engine,
                    self._asked.directory,
                    data=data,
                    strict=self._asked.strict,
                    fresh=self._asked.fresh,
                    required=self._asked.required,
                    log=log,
                )
            watch.end()
        except (RuntimeError, OSError, EOFError) as error:
            watch.end()
            if not changes.lost_peer(error, with_previous=True):
                raise
            logger.warning("world %d has lost a member before it began: %s", now.number, error)
            _forget_frames(error)
            _end(engine, failed=True)
            return None
        changes.moves = self._moves(engine)
        return World(self._asked, engine, data, start, log, self._notice, changes, report)

    def _moves(self, engine: Any) -> bool:
        """Whether the state of an engine can go from memory to memory; if not, rank 0 says why. Collective."""
        from zeroelastic.deepspeed.resize.restore import why_fixed

        why = broadcast_or_raise(lambda: why_fixed(engine))
        if why is not None and dist.get_rank() == 0:
            logger.warning("%s: a change of size goes by way of a save to %s", why, self._asked.directory)
        return why is None

    def _next_after_failure(self, now: Members, *, unchanged: bool) -> Members | None:
        """The world that follows one that has failed; None for a process that was asked to leave anyway."""
        following = self._membership.after_failure(now, unchanged=unchanged)
        if not following.previous:
            self._leaving = None
        if self._membership.number not in following.members:
            if self._notice.at is not None:
                return None
            raise MembershipError(
                f"world {following.number} goes on without this process, whose node has lost a worker. It ends, and "
                "torchrun starts the workers of the node again."
            )
        return following

    def _peers(self, now: Members) -> tuple[JoinedPeers, list[int]]:
        """All members of two worlds, the new one's first, and the peer that each old rank is. Collective."""
        joined = [*now.members, *(member for member in now.previous if member not in now.members)]
        from torch._C._distributed_c10d import PrefixStore

        store = PrefixStore("moved", self._membership.store_of(now))
        peers = JoinedPeers(store, joined.index(self._membership.number), len(joined), timeout=self._limit)
        return peers, [joined.index(member) for member in now.previous]

    def _serve(self, following: Members) -> None:
        """Send what the others need, and wait until they have it."""
        from zeroelastic.deepspeed.resize.restore import serve

        if self._leaving is None:
            return
        try:
            peers, peer_of = self._peers(following)
            peers.broadcast(self._leaving.state if peers.rank == peer_of[0] else None, peer_of[0])
            serve(self._leaving, peers, peer_of)
            peers.all_gather(None)
            step = self._leaving.state.module_states["global_steps"]
            logger.info("left at step %d: the others have the state of this process", step)
        except RuntimeError as error:
            logger.warning("left, while the others changed to world %d: %s", following.number, error)
        self._leaving = None

    def _moved(self, now: Members, engine: Any, data: Position | None, formed: float) -> tuple[Resumed, ResizeReport]:
        """Fill the engine with the state of the world before. Collective."""
        from zeroelastic.deepspeed.resize.restore import join_world

        built = time.monotonic()
        peers, peer_of = self._peers(now)
        own = None if self._leaving is None else self._leaving.state
        state = peers.broadcast(own if peers.rank == peer_of[0] else None, peer_of[0])
        if self._asked.strict and state.train_batch_size != engine.train_batch_size():
            raise StrictError(
                f"the global batch was {state.train_batch_size} and is {engine.train_batch_size()} in the next world: "
                "build() has to keep it (elastic.batch_plan gives the micro batch), or pass strict=False."
            )
        joined = join_world(engine, self._leaving, state, peers, peer_of)
        client_state = dict(state.client_state)
        entry = client_state.pop(KEY, None)
        identity = f"{joined.root} {engine.global_steps}"
        notes = unpack_position(entry, data, engine.device, identity=identity, strict=False)
        teardown = max(formed - self._ended_at, 0.0) if self._leaving is not None else 0.0
        costs = [cost for cost in peers.all_gather((joined.moved, teardown)) if cost is not None]
        done = time.monotonic()
        report = ResizeReport(
            step=int(engine.global_steps),
            saved_world_size=len(now.previous),
            world_size=len(now.members),
            root=joined.root if joined.compared else None,
            bytes_kept=sum(moved.kept for moved, _ in costs),
            bytes_moved=sum(moved.received for moved, _ in costs),
            teardown_seconds=max(seconds for _, seconds in costs),
            engine_seconds=built - formed,
            move_seconds=done - built,
        )
        engine.zeroelastic_resize = report
        if dist.get_rank() == 0:
            logger.info("%s", report.text())
            publish(report, engine)
        return Resumed(None, report.step, client_state, None, (), notes, "in-place"), report
