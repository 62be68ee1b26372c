"""Who is in the world of a job that changes size in place: the members agree over the job's store, without DeepSpeed.

A member is a worker process. Nodes are admitted whole: a newcomer is a node of which all workers wait in ``first``. The
first world is formed by the lowest member that lives; a running world is changed by its rank 0 (``waiting``,
``decide``); the survivors of a world that failed agree on the next (``after_failure``). Each world follows exactly one
other, by compare-and-set in the store, and every wait has a limit.

A step costs no request: each member has a thread that tells the store twice a second that it lives (one request), and
that of rank 0 looks for newcomers then (one read, whose answer grows by some bytes for each node). A member holds two
connections, one of them for its process groups: torch looks up the name of the host for each that it makes.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from zeroelastic.elastic.resize.roster import (
    GROUPS,
    Node,
    Roster,
    Snapshot,
    Watch,
    World,
    break_connections,
    connect,
    failures_in,
    runs,
    sockets_to,
)
from zeroelastic.errors import ConfigError, MembershipError
from zeroelastic.in_place import VARIABLE, InPlace, note_joined

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""How often a member that waits looks at the store, or at who has died."""
_MEMBERS_PERLOOK_S = 20_000
"""How many members may look within a second: where more wait, each looks more rarely."""
_CLOSE_S = 5.0
_REMOVED_AT_ONCE = 1000
"""How many keys of ended worlds rank 0 removes at one heartbeat; each is one request."""

_of_this_process: Membership | None = None


class Membership:
    """This process as a member of its job: ``number`` is its number for good, ``node`` the number of its node.

    Every method but ``waiting`` and ``died`` raises MembershipError where the store cannot be reached: a request within
    half of ``store_timeout``, or a new connection and another one after it. One thread calls them.
    """

    def __init__(self, settings: InPlace, local_rank: int = 0, local_world_size: int = 1) -> None:
        self.settings = settings
        self.node, self.min_nodes, self.max_nodes = settings.node, settings.min_nodes, settings.max_nodes
        self._local_rank, self._local_world_size = local_rank, local_world_size
        self._world: World | None = None
        self._groups: Store | None = None
        self._sockets = frozenset[str]()
        self._roster = Roster(self._connect)
        self._roster.open()
        self.number = self._roster.number_of(self.node, local_rank, local_world_size, settings.join_timeout)
        self._roster.beat(self.number)
        # What the heartbeat has seen, for ``waiting`` and ``died``: it looks from the first call of either on.
        self._looks, self._asked = False, frozenset[int]()
        self._seen: Snapshot | None = None
        self._watched, self._answered = self._watch(), time.monotonic()
        self._ended_worlds, self._stopped = 0, threading.Event()
        self._heartbeat = threading.Thread(target=self._beat, name="zeroelastic-membership", daemon=True)
        self._heartbeat.start()
        # For errors of the script: a thread in a request would end the process by SIGABRT when the interpreter ends.
        atexit.register(self.leave)

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str] = os.environ) -> Membership | None:
        """That of this process, always the same; None where it is no worker of a job that changes size in place.

        Connects to the store, takes a number and starts the heartbeat. Raises ConfigError for variables that no agent
        has set, and MembershipError.
        """
        global _of_this_process
        settings = InPlace.from_environment(environment)
        if settings is None:
            return None
        if _of_this_process is None:
            try:
                local = int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"])
            except (KeyError, ValueError) as error:
                raise ConfigError(
                    f"{VARIABLE} is set, and LOCAL_RANK and LOCAL_WORLD_SIZE are not: start the script by torchrun."
                ) from error
            _of_this_process = cls(settings, *local)
        return _of_this_process

    def first(self) -> World:
        """The first world that this member is in: a world that is formed now, or a running one that has taken it in.

        Blocks until then; raises MembershipError after ``join_timeout``. A world is formed where none runs: when the
        nodes that wait are ``max_nodes``, or at least ``min_nodes`` and no more came for ``last_call_timeout``.
        """
        if self._world is not None:
            return self._world
        self._roster.wait_here(self.node, self.number, self._local_rank, self._local_world_size)
        deadline = time.monotonic() + self.settings.join_timeout
        watch, watched = self._watch(), set[int]()
        num_lived, since = 0, time.monotonic()
        now: Snapshot | None = None
        while True:
            before, now = now, self._roster.read(watch, watched)
            watch.appeared(now.new_since(before))
            if now.world is not None and self.number in now.world.members:
                return self._enter(now.world)
            if now.job_has_finished:
                raise MembershipError(
                    "the job has finished: all members of its last world have come to the end of their training. To "
                    "run it again, give another --rdzv-id."
                )
            if self.number in now.ended:
                raise MembershipError("the job went on without this process, which it took for dead. Start it again.")
            nodes = now.newcomers()
            first = next((i for i, node in enumerate(nodes) if not any(map(watch.silent, node.members))), -1)
            leads = first >= 0 and nodes[first].members[0] == self.number
            watched = self._others(nodes if leads else nodes[: first + 1], now.world if leads else None, now.ended)
            lived = [node for node in nodes if self._all_live(node, watch)]
            if len(lived) != num_lived:
                num_lived, since = len(lived), time.monotonic()
            waited = time.monotonic() - since >= self.settings.last_call_timeout
            enough = num_lived >= self.max_nodes or (num_lived >= self.min_nodes and waited)
            if leads and enough and not self._runs(now, watch):
                members = [member for node in lived[: self.max_nodes] for member in node.members]
                self._follow(now, members)
                continue
            if time.monotonic() > deadline:
                raise MembershipError(
                    f"no world that this worker is in was formed within {self.settings.join_timeout:g} s "
                    f"(join_timeout): {len(nodes)} nodes wait, --nnodes is {self.min_nodes}:{self.max_nodes}."
                )
            self._pause(now)

    def waiting(self, leaving: Collection[int] = ()) -> tuple[int, ...]:
        """Newcomers that the running world can take in: of whole nodes, alive, oldest first. For its rank 0.

        As many as ``max_nodes`` allows when ``leaving`` have left. Without a request: the answer is that of the last
        look, a heartbeat ago at most; the first call starts looking. Raises MembershipError where the store has not
        answered for ``store_timeout``, or has a world that followed without this one: the job must not go on twice.
        """
        world, self._looks = self._current(), True
        away = time.monotonic() - self._answered
        if away > self.settings.store_timeout:
            raise MembershipError(
                f"the store of the job has not answered for {away:.0f} s (store_timeout). Other nodes may take this "
                "one for dead and go on without it, so it stops."
            )
        now = self._seen
        if now is None or not now.knows(world.members):
            return ()
        if now.world is not None and now.world.number > world.number:
            raise MembershipError(f"world {now.world.number} has followed without this process, so it stops.")
        stay = set(world.members).difference(leaving)
        free = self.max_nodes - len(now.nodes_of(stay))
        nodes = [node for node in now.newcomers() if stay.isdisjoint(node.members)]
        nodes = [node for node in nodes if all(map(self._watched.lives, node.members))]
        return tuple(member for node in nodes[: max(0, free)] for member in node.members)

    def decide(self, world: World) -> None:
        """Let ``world`` follow the running one; newcomers in it are released by this. For rank 0 of the running world.

        Members of the running world that are not in it have left. Raises MembershipError where another world has
        followed meanwhile, and ValueError where ``world`` is not the next one.
        """
        now = self._roster.read()
        current = self._current()
        if world.number != current.number + 1:
            raise ValueError(f"world {world.number} cannot follow world {current.number}")
        if now.world != current or not self._follow(now, world.members, world.previous):
            raise MembershipError(f"world {current.number} is not the latest any more: the job went on without it.")
        self._world = world

    def meet(self, world: World) -> bool:
        """Whether all members of a world have come to it, before they form process groups. Collective over the world.

        False where one of them died first, or did not come within ``failure_timeout``: call ``after_failure``.
        """
        self._enter(world)
        key = self._roster.meeting(world)
        first = self.number == world.members[0]
        watch, watched = self._watch(), [m for m in (world.members if first else world.members[:1]) if m != self.number]
        deadline = time.monotonic() + self.settings.failure_timeout
        while True:
            now = self._roster.read(watch, watched, [key])
            if now.extra[0] != "open":
                if first and now.extra[0] == "all":
                    # All have come to this world. So nobody is left in one before the last, and none that left it still
                    # sends its state; a member that was stopped since then is in no world any more, and ends.
                    self._ended_worlds = max(world.number - 1, 0)
                return now.extra[0] == "all"
            lost = any(member in now.ended or watch.silent(member) for member in watched)
            if lost or now.world != world or time.monotonic() > deadline:
                self._roster.break_meeting(world)
                continue
            self._pause(now)

    def cannot_meet(self, world: World) -> None:
        """Say that this member cannot begin a world, so that nobody waits for it in ``meet``."""
        self._enter(world)
        self._roster.break_meeting(world)

    def store_of(self, world: World, timeout_s: float | None = None) -> Store:
        """A store for the process groups of a world, over a connection that worlds share until one of them fails.

        ``timeout_s`` is how long its requests wait, by default ``failure_timeout``.
        """
        from torch._C._distributed_c10d import PrefixStore

        self._enter(world)
        if self._groups is None:
            before = sockets_to(self.settings.port)
            self._groups = self._connect()
            self._sockets = frozenset(sockets_to(self.settings.port).keys() - before.keys())
        self._groups.set_timeout(timedelta(seconds=self.settings.failure_timeout if timeout_s is None else timeout_s))
        return PrefixStore(f"{GROUPS}/{world.number}", self._groups)

    @contextmanager
    def breaking_waits(self, world: World) -> Iterator[None]:
        """Within this context, a wait in ``store_of`` fails when another member of the world dies.

        To form a process group, ranks wait for each other in the store until the timeout of collectives, in C++
        (``ProcessGroupGloo``) and in Python (``_store_based_barrier``, torch 2.13). So the connection is broken.
        """
        others, ended = [member for member in world.members if member != self.number], threading.Event()

        def watch() -> None:
            while not ended.wait(LOOK_S):
                if self.died(others):
                    break_connections(self.settings.port, self._sockets)
                    return

        watching = threading.Thread(target=watch, name="zeroelastic-worlds", daemon=True)
        watching.start()
        try:
            yield
        finally:
            ended.set()
            watching.join()

    def died(self, members: Collection[int]) -> tuple[int, ...]:
        """Those that have ended, or whose heartbeat has stopped for ``heartbeat_timeout``.

        Without a request: they are watched from the first call on, so ask again.
        """
        self._looks, self._asked = True, self._asked.union(members)
        ended = frozenset[int]() if self._seen is None else self._seen.ended
        return tuple(member for member in members if member in ended or self._watched.silent(member))

    def has_failed(self, world: World) -> bool:
        """Whether a member has said that a world failed, in ``after_failure``."""
        return self._roster.has_failed(world.number)

    def after_failure(self, world: World, *, unchanged: bool = False) -> World:
        """The world that follows one whose collectives have failed: its survivors call this, and all get the same.

        They wait until every other member has called it, has ended or is silent for ``heartbeat_timeout``, for at most
        ``failure_timeout``. Nodes that have lost a worker are left out, because torchrun starts them again; newcomers
        that wait already are taken in, and waited for where fewer than ``min_nodes`` are left, for at most
        ``join_timeout``. A member that is not in the world that is returned has to end, with an error if it wants to be
        started again by torchrun, as a newcomer.

        ``unchanged`` says that this member still has the live state of ``world.previous``, because the world had not
        begun. Where all of these say so and go on, they are ``previous`` of the new world too; otherwise nobody is.
        """
        self._groups = None  # somebody may still wait there
        key = self._roster.note_failure(world.number, self.number, unchanged)
        began = time.monotonic()
        watch, watched = self._watch(), set[int]()
        while True:
            now = self._roster.read(watch, watched, [key])
            if now.world is not None and now.world.number > world.number:
                return self._enter(now.world)
            here = failures_in(now.extra[0])
            passed = time.monotonic() - began
            known = self.died([member for member in world.members if member != self.number])
            lost = {member for member in world.members if member in now.ended or watch.silent(member)}.union(known)
            leader = next((member for member in world.members if member in here and member not in lost), self.number)
            if leader == self.number:
                nodes = now.newcomers()
                watched = self._others(nodes, world, now.ended)
                whole = {
                    number: members
                    for number, members in now.nodes_of(world.members).items()
                    if lost.isdisjoint(members)
                }
                survivors = {m for members in whole.values() if here.keys() >= set(members) for m in members}
                absent = {m for members in whole.values() for m in members} - survivors
                num_nodes = len(now.nodes_of(survivors))
                lived = [node for node in nodes if self._all_live(node, watch)][: self.max_nodes - num_nodes]
                decided = not absent or passed > self.settings.failure_timeout
                if decided and not survivors:
                    raise MembershipError(
                        f"no node of world {world.number} is whole any more, and this one has lost a worker. End with "
                        "an error: torchrun starts the workers of this node again."
                    )
                if decided and self.min_nodes <= num_nodes + len(lived):
                    members = [member for member in world.members if member in survivors]
                    goes_on = world.previous and all(here.get(m, False) and m in survivors for m in world.previous)
                    members += [member for node in lived for member in node.members]
                    self._follow(now, members, world.previous if goes_on else ())
                    continue
            else:
                watched = {leader}
            if passed > 2 * self.settings.failure_timeout + self.settings.join_timeout:
                raise MembershipError(
                    f"no world followed world {world.number}, which failed, within {passed:.0f} s: fewer than "
                    f"{self.min_nodes} nodes are left (--nnodes={self.min_nodes}:{self.max_nodes})."
                )
            self._pause(now)

    def leave(self, *, finished: bool = False) -> None:
        """Say in the store that this process takes no part any more; then as ``close``. Raises nothing.

        ``finished`` says that the training has come to its end: where all of a world say so, the job has finished, and
        a process that comes later does not begin it again.
        """
        self._roster.try_to_end(("f" if finished else "") + runs((self.number,)))
        self.close()

    def close(self) -> None:
        """End the heartbeat, by which the others take this process for dead, and the connections."""
        global _of_this_process
        atexit.unregister(self.leave)
        self._stopped.set()
        if self._heartbeat is not threading.current_thread():
            self._heartbeat.join(_CLOSE_S)
        self._roster.close()
        self._groups = None
        if _of_this_process is self:
            _of_this_process = None

    def _beat(self) -> None:
        """Renew the heartbeat until this member is closed; read the others', and remove the keys of ended worlds."""
        keys: list[str] = []
        while not self._stopped.wait(self.settings.heartbeat_interval):
            began = time.monotonic()
            try:
                self._roster.beat(self.number)
                if self._looks:
                    before = self._seen
                    newcomers = () if before is None else before.newcomers()
                    watched = self._asked.union(*(node.members for node in newcomers))
                    now = self._roster.read(self._watched, watched)
                    self._watched.appeared(now.new_since(before))
                    self._seen = now
                if ended := self._ended_worlds:
                    self._ended_worlds = 0
                    keys = self._roster.keys_of_worlds(ended)
                self._roster.remove(keys[-_REMOVED_AT_ONCE:])
                del keys[-_REMOVED_AT_ONCE:]
                self._answered = began
            except MembershipError as error:
                logger.warning("%s", error)

    def _connect(self) -> Store:
        from torch._C._distributed_c10d import PrefixStore

        settings = self.settings
        store = connect(settings.host, settings.port, settings.store_timeout)
        return PrefixStore(f"zeroelastic/{settings.job}/job", store)

    def _current(self) -> World:
        if self._world is None:
            raise MembershipError("this process is in no world yet: call first() before.")
        return self._world

    def _enter(self, world: World) -> World:
        self._world = world
        note_joined()
        return world

    def _watch(self) -> Watch:
        return Watch(self.settings.heartbeat_timeout, max(1.0, 2 * self.settings.heartbeat_interval))

    def _others(self, nodes: Sequence[Node], world: World | None, ended: Collection[int]) -> set[int]:
        """The members of these nodes and of the world to watch: all that have not ended, but this one."""
        found = {member for node in nodes for member in node.members}
        found.update(() if world is None else world.members)
        return found.difference(ended, [self.number])

    def _all_live(self, node: Node, watch: Watch) -> bool:
        return all(member == self.number or watch.lives(member) for member in node.members)

    def _runs(self, now: Snapshot, watch: Watch) -> bool:
        """Whether anybody of the world may go on: a member without the store does for ``store_timeout``."""
        limit = self.settings.store_timeout + self.settings.heartbeat_timeout
        members = () if now.world is None else now.world.members
        return any(member not in now.ended and not watch.silent(member, limit) for member in members)

    def _follow(self, now: Snapshot, members: Sequence[int], previous: Sequence[int] = ()) -> bool:
        """Let a world of these follow that of a snapshot; who is in it no more has ended. False: another has."""
        number = 0 if now.world is None else now.world.number + 1
        world = World(number, tuple(members), tuple(previous))
        if not self._roster.follow(now.text, world):
            return False
        before = () if now.world is None else now.world.members
        self._roster.end(sorted(set(before).difference(members, now.ended)))
        return True

    def _pause(self, now: Snapshot) -> None:
        time.sleep(max(LOOK_S, sum(len(node.members) for node in now.nodes) / _MEMBERS_PERLOOK_S))
