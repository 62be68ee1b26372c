"""A training loop over worlds: when nodes come or leave, the job goes on at another size in the same processes.

``worlds`` builds an engine for each world. Between two of them the state goes from memory to memory, and each rank gets
only what it does not have; the content root is compared. Where a node is lost without notice, the survivors build the
next world too, and resume from the memory of the nodes or from the disk.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zeroelastic.core.movement import Recut
from zeroelastic.distributed.collective import broadcast_or_raise, collective_device
from zeroelastic.distributed.peers import JoinedPeers
from zeroelastic.elastic.events import Events
from zeroelastic.elastic.leaving import SIGNALS, Notice
from zeroelastic.elastic.position import KEY, Position, generators_of, restore_generators, unpack_position
from zeroelastic.elastic.preemption import Every
from zeroelastic.elastic.resize.membership import Membership
from zeroelastic.elastic.resize.roster import World as Members
from zeroelastic.elastic.resize.world import Changes, World, WorldArguments, forget_frames
from zeroelastic.elastic.resume import Resumed, resume
from zeroelastic.errors import ConfigError, MembershipError, StrictError, with_remedy
from zeroelastic.report import ResizeReport

if TYPE_CHECKING:
    from zeroelastic.deepspeed.resize.restore import Leaving

logger = logging.getLogger(__name__)

_IMPORTS = (
    "numpy", "setuptools", "networkx", "torch", "torch._dynamo", "torch._inductor.compile_fx",
    "torch.ao.quantization", "torch.utils.cpp_extension", "torch.utils.serialization.config", "deepspeed",
    "deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.adam", "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.bf16_optimizer", "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2", "zeroelastic.deepspeed.install.seams",
    "zeroelastic.deepspeed.install.wrappers", "zeroelastic.executors.torch_executor",
)  # fmt: skip
"""What a job imports sooner or later, as far as it is installed. Nearly all of the first ``deepspeed.initialize`` of a
process is the import of what torch's compiler needs (DeepSpeed 0.19.8, torch 2.13)."""


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
    same model and optimizer groups each time; the run's values replace theirs. ``sizes(n)`` says whether
    the job can have ``n`` ranks. ``preemption`` and ``resume`` have the other arguments too; ``log`` is the path of
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
    arguments = WorldArguments(
        build, directory, data, saving, client_state, log, status, strict, fresh, required, sizes
    )
    from zeroelastic.deepspeed.install.seams import install

    install()
    membership = Membership.of_this_process()
    notice = Notice(grace if membership is None else min(grace, membership.settings.notice), SIGNALS)
    notice.begin()
    try:
        if membership is None:
            engine, position = build_engine(arguments)
            events = Events(engine, arguments.log, status=arguments.status)
            start = _resume(arguments, engine, position, events)
            yield World(arguments, engine, position, start, events, notice, None, None)
            return
        try:
            yield from Job(arguments, membership, notice).worlds()
        finally:
            membership.leave()
    finally:
        notice.end(ignoring=notice.at is not None)  # so that none ends a process that leaves


def _resume(arguments: WorldArguments, engine: Any, data: Position | None, log: Events) -> Resumed:
    """The newest checkpoint, in memory or on disk. Collective."""
    return resume(
        engine,
        arguments.directory,
        data=data,
        strict=arguments.strict,
        fresh=arguments.fresh,
        required=arguments.required,
        log=log,
    )


def build_engine(arguments: WorldArguments) -> tuple[Any, Position | None]:
    """The engine of a world and its position in the data, as the caller builds them. Raises ConfigError."""
    made = arguments.build()
    if isinstance(made, tuple):
        if len(made) != 2:
            raise ConfigError(
                f"build() has returned {len(made)} values: return the engine alone, or the engine and a position in "
                "the data (deepspeed.initialize returns more; take its first)."
            )
        return made[0], made[1]
    return made, arguments.data


def _end(engine: Any, *, failed: bool) -> None:
    """End a world. After a failure its engine may be in any state: what it raises is logged."""
    from zeroelastic.deepspeed.process_world import end_world

    try:
        end_world(engine)
    except Exception as error:
        if not failed:
            raise
        logger.warning("while a world that has failed was ended: %s", error)


class _Beginning:
    """The position and the generators with which this process began; a world that resumes begins with them again.

    Where such a world finds no checkpoint, the run begins anew, and nothing of a world that has failed may be left.
    """

    def __init__(self) -> None:
        self._generators: Mapping[str, Any] | None = None
        self._data: Position | None = None
        self._position: dict[str, Any] = {}

    def restore_generators(self) -> None:
        """Before an engine is built. ``torch.distributed`` is there."""
        device = torch.device(collective_device().type, int(os.environ.get("LOCAL_RANK", "0")))
        if self._generators is None:
            self._generators = generators_of(device)
        else:
            restore_generators(self._generators, device)

    def restore_position(self, data: Position | None) -> None:
        """Before ``resume``. A position that ``build`` has made anew stays where it is."""
        if data is not None and data is self._data:
            data.load_state_dict(copy.deepcopy(self._position))
        elif data is not None:
            self._data, self._position = data, copy.deepcopy(data.state_dict())


class Job:
    """The worlds of a job in which this process is a member."""

    def __init__(self, arguments: WorldArguments, membership: Membership, notice: Notice) -> None:
        self._arguments, self._membership, self._notice = arguments, membership, notice
        self._leaving: Leaving | None = None
        """The state of the world before, from its end until the next one has begun."""
        self._ended_at = time.monotonic()
        self._limit = timedelta(seconds=membership.settings.failure_timeout)
        self._has_begun = False
        self._beginning = _Beginning()

    def worlds(self) -> Iterator[World]:
        """Each world in which the caller's loop runs, until this process leaves or the job ends."""
        for name in _IMPORTS:  # before this process is ready to be taken in: nobody waits for it
            with suppress(ImportError):
                import_module(name)
        members: Members | None = self._membership.first()
        while members is not None:
            world = self._form(members)
            if world is None:
                members = self._recover(members)
            else:
                yield world
                members = self._after_training(world)

    def _after_training(self, world: World) -> Members | None:
        """The world that follows, after the caller's loop over one has ended in whatever way; None for this process."""
        from zeroelastic.deepspeed.process_world import end_groups_at_exit
        from zeroelastic.deepspeed.resize.restore import leave_world

        changes = world.changes
        assert changes is not None
        now, following, failed = changes.now, changes.following, world.failed
        self._ended_at = time.monotonic()
        if following is None and not failed:
            end_groups_at_exit()  # the script may still use the engine
            if not world.stopped:
                self._membership.leave(finished=True)
            return None
        if following is not None and following.previous and not failed:
            try:
                self._leaving = leave_world(world.engine, world.state())
            except (RuntimeError, OSError, EOFError) as error:
                if not changes.lost_peer(error):
                    raise
                forget_frames(error)
                failed = True
        del changes  # it refers to the engine
        _end(world.release(), failed=failed)
        if following is not None and self._membership.number not in following.members:
            if not failed:
                self._hand_over(following)
            return None
        members = now if following is None else following
        return self._recover(members) if failed else members

    def _form(self, now: Members) -> World | None:
        """Form a world, build its engine and fill it; None where a member of it, or of the last, was lost."""
        from zeroelastic.deepspeed.agreement import OtherRanksRefusedError, same_on_all_ranks
        from zeroelastic.deepspeed.engine_state import changing
        from zeroelastic.deepspeed.process_world import begin_world, only_new_garbage

        if self._leaving is None and self._membership.number in now.previous:  # it failed before its state was kept
            self._membership.cannot_meet(now)
            return None
        if not self._membership.meet(now):
            return None
        changes = Changes(self._membership, now, self._arguments.sizes)
        rank, size = now.members.index(self._membership.number), len(now.members)
        engine = None
        try:
            with self._membership.breaking_waits(now):
                begin_world(self._membership.store_of(now), rank=rank, world_size=size, timeout=None)
                formed = time.monotonic()
                if not now.previous or not self._has_begun:
                    self._beginning.restore_generators()
                # DeepSpeed collects garbage while it builds
                with only_new_garbage(), same_on_all_ranks(self._arguments.facts(), trained=self._has_begun):
                    engine, data = build_engine(self._arguments)
                if not now.previous or not self._has_begun:
                    self._beginning.restore_position(data)
                in_place = self._has_begun or bool(now.previous)
                log = Events(
                    engine, self._arguments.log, status=self._arguments.status, formed_at=formed if in_place else None
                )
                self._has_begun = True
                report: ResizeReport | None = None
                if now.previous:
                    with with_remedy(), changing(engine):
                        start, report = self._moved(now, engine, data, formed)
                    log.resumed(start, seconds=report.move_seconds, resize=report)
                else:
                    start = _resume(self._arguments, engine, data, log)
        except (RuntimeError, OSError, EOFError) as error:
            refused = isinstance(error, OtherRanksRefusedError)
            if not refused and not changes.lost_peer(error, with_previous=True):
                raise
            logger.warning("world %d ends before it has begun: %s", now.number, error)
            forget_frames(error)
            _end(engine, failed=True)
            return None
        changes.recuts = self._recuts(engine)
        self._leaving = None
        return World(self._arguments, engine, data, start, log, self._notice, changes, report)

    def _recuts(self, engine: Any) -> Callable[[int], Sequence[Recut]] | None:
        """How the state of an engine is cut at other sizes; None where it cannot move, with a warning. Collective."""
        from zeroelastic.deepspeed.resize.restore import recuts_of, why_fixed

        why = broadcast_or_raise(lambda: why_fixed(engine))
        if why is None:
            return partial(recuts_of, engine)
        if dist.get_rank() == 0:
            logger.warning("%s: a change of size goes by way of a save to %s", why, self._arguments.directory)
        return None

    def _recover(self, now: Members) -> Members | None:
        """Agree with the other survivors on the world that follows one that has failed; None for this process.

        A process that still has the state of the world before says so: the failed one had not begun.
        """
        following = self._membership.after_failure(now, unchanged=self._leaving is not None)
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
        joined = list(dict.fromkeys([*now.members, *now.previous]))
        from torch._C._distributed_c10d import PrefixStore

        store = PrefixStore("moved", self._membership.store_of(now))
        peers = JoinedPeers(store, joined.index(self._membership.number), len(joined), timeout=self._limit)
        place = {member: number for number, member in enumerate(joined)}
        return peers, [place[member] for member in now.previous]

    def _hand_over(self, following: Members) -> None:
        """Send what the others need, and wait until they have it; nothing where they resume from the directory."""
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
        if self._arguments.strict and state.train_batch_size != engine.train_batch_size():
            raise StrictError(
                f"the global batch was {state.train_batch_size} and is {engine.train_batch_size()} in the next world: "
                "build() has to keep it (elastic.batch_plan gives the micro batch), or pass strict=False."
            )
        joined = join_world(engine, self._leaving, state, peers, peer_of)
        client_state = dict((state if own is None else own).client_state)
        client_state.pop(KEY, None)
        entry = state.client_state.get(KEY)
        identity = f"{joined.root} {engine.global_steps}"
        notes = unpack_position(entry, data, engine.device, identity=identity, strict=False)
        teardown = max(formed - self._ended_at, 0.0) if self._leaving is not None else 0.0
        costs = [cost for cost in peers.all_gather((joined.moved, teardown)) if cost is not None]
        done = time.monotonic()
        report = ResizeReport(
            step=int(engine.global_steps),
            saved_world_size=len(now.previous),
            world_size=len(now.members),
            root=joined.root,
            bytes_kept=sum(moved.kept for moved, _ in costs),
            bytes_moved=sum(moved.received for moved, _ in costs),
            teardown_seconds=max(seconds for _, seconds in costs),
            engine_seconds=built - formed,
            move_seconds=done - built,
        )
        engine.zeroelastic_resize = report
        if dist.get_rank() == 0:
            logger.info("%s", report.text())
        return Resumed(None, report.step, client_state, None, (), notes, "in-place"), report
