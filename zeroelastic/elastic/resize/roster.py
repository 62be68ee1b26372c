"""What the store of a job that changes size in place knows: nodes, members, heartbeats and the world.

    nodes            how many node numbers are taken
    members          how many member numbers are taken
    node/N           the first member number of a node;     node/N/here   the local ranks that wait for a world
    ready            the nodes of which all workers wait, in that order: "node first count;"
    ended            what takes no part any more: members "8:16;", nodes "n3;" whose agent says so, and "f8:9;" where a
                     member has come to the end of the training
    beat/M           a counter that member M increments for as long as it lives
    world            the latest world, replaced by compare-and-set: each world follows exactly one other
    failed/K, meet/K the members that saw world K fail, and whether all of a world have come
    groups/K         what torch keeps there for the process groups of world K

The last two lines go when world K + 2 begins. What stays is some 100 bytes for each start of a node.

A read is one ``multi_get`` (two round trips), whatever is asked for. Clocks are never compared: a member lives if its
counter is seen to move.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from zeroelastic.errors import MembershipError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

_END_S = 2.0
_AGAIN_S = 0.1
_READY, _ENDED, _WORLD, _NONE = "ready", "ended", "world", "none"
GROUPS = "groups"


@dataclass(frozen=True, slots=True)
class World:
    """One world of a job: ``members`` are member numbers by rank.

    ``previous`` are the members of the world before, by their rank there, if their live state goes on in this world;
    where it is empty nobody's does, and the state comes from memory or disk.
    """

    number: int
    members: tuple[int, ...]
    previous: tuple[int, ...] = ()

    def to_text(self) -> str:
        """As it stands in the store."""
        return f"{self.number} {runs(self.members)} {runs(self.previous)}"

    @classmethod
    def from_text(cls, text: str) -> World | None:
        """The inverse; None where there was no world yet."""
        if text == _NONE:
            return None
        number, members, previous = text.split(" ")
        return cls(int(number), numbers(members), numbers(previous))


def runs(members: Sequence[int]) -> str:
    """Numbers as runs of consecutive ones: "0:4,7:8"; "-" for none."""
    found: list[list[int]] = []
    for member in members:
        if found and found[-1][1] == member:
            found[-1][1] += 1
        else:
            found.append([member, member + 1])
    return ",".join(f"{first}:{end}" for first, end in found) or "-"


def numbers(text: str) -> tuple[int, ...]:
    """The inverse of ``runs``."""
    if text == "-":
        return ()
    pairs = (run.split(":") for run in text.split(","))
    return tuple(member for first, end in pairs for member in range(int(first), int(end)))


@dataclass(frozen=True, slots=True)
class Node:
    """One start of the workers of an agent: ``members`` are their numbers, by local rank."""

    number: int
    members: range


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The store at one moment. ``nodes`` have all waited for a world, in this order; ``extra`` are values asked for."""

    nodes: tuple[Node, ...]
    ended: frozenset[int]
    world: World | None
    text: str
    extra: tuple[str, ...] = ()
    finished: frozenset[int] = frozenset()

    @property
    def job_has_finished(self) -> bool:
        """Whether all members of the latest world have come to the end of the training."""
        return self.world is not None and self.finished.issuperset(self.world.members)

    def newcomers(self) -> tuple[Node, ...]:
        """The nodes that wait for a world: nobody of theirs has ended or is in the world."""
        gone = self.ended.union(self.world.members if self.world is not None else ())
        return tuple(node for node in self.nodes if gone.isdisjoint(node.members))

    def nodes_of(self, members: Iterable[int]) -> dict[int, list[int]]:
        """Members by the number of their node, in their order."""
        node_of = {member: node.number for node in self.nodes for member in node.members}
        found: dict[int, list[int]] = {}
        for member in members:
            found.setdefault(node_of[member], []).append(member)
        return found

    def new_since(self, before: Snapshot | None) -> Iterator[int]:
        """The members of nodes that were not there in an earlier snapshot; none without one."""
        if before is not None:
            known = {node.number for node in before.nodes}
            yield from (member for node in self.nodes if node.number not in known for member in node.members)

    def knows(self, members: Iterable[int]) -> bool:
        """Whether all of these had waited for a world by then."""
        return {member for node in self.nodes for member in node.members}.issuperset(members)


class Roster:
    """The store of a job as one process sees it, over one connection; threads may share it, as no request waits.

    ``connect`` makes the connection, again where it was lost. Raises MembershipError where the store cannot be reached.
    """

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        self._store: Any = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Connect, and make what every read reads."""
        self._call("append", _READY, "")
        self._call("append", _ENDED, "")
        self._call("compare_set", _WORLD, "", _NONE)

    def close(self) -> None:
        """Drop the connection."""
        self._store = None  # without the lock, as above

    def new_node(self) -> int:
        """The number of one start of the workers of an agent."""
        return int(self._call("add", "nodes", 1)) - 1

    def number_of(self, node: int, local_rank: int, local_world_size: int, limit_s: float) -> int:
        """The number of a worker of a node, which its local rank 0 takes for all of them."""
        key = f"node/{node}"
        if local_rank == 0:
            self._call("set", key, str(self._call("add", "members", local_world_size) - local_world_size))
        deadline = time.monotonic() + limit_s
        while not self._call("check", [key]):
            if time.monotonic() > deadline:
                raise MembershipError(f"local rank 0 of this node did not start within {limit_s:g} s. See its output.")
            time.sleep(0.05)
        return int(self._call("get", key)) + local_rank

    def wait_here(self, node: int, member: int, local_rank: int, local_world_size: int) -> None:
        """A member waits for a world from now on; the last one of its node makes the node a newcomer."""
        self._call("append", f"node/{node}/here", f"{local_rank};")
        here = self._call("get", f"node/{node}/here").decode().split(";")
        if len({rank for rank in here if rank}) == local_world_size:
            self._call("append", _READY, f"{node} {member - local_rank} {local_world_size};")

    def beat(self, member: int) -> None:
        """A member lives."""
        self._call("add", f"beat/{member}", 1)

    def end(self, members: Sequence[int]) -> None:
        """These take no part in the job any more."""
        if members:
            self._call("append", _ENDED, f"{runs(sorted(members))};")

    def try_to_end(self, entry: str) -> None:
        """Say that these of ``ended`` have ended. Raises nothing: where the store has gone, nobody needs to know."""
        if self._lock.acquire(timeout=_END_S):  # another thread may wait for an answer for good
            try:
                if self._store is not None:
                    with suppress(RuntimeError):
                        self._store.append(_ENDED, f"{entry};")
            finally:
                self._lock.release()

    def read(self, watch: Watch | None = None, members: Collection[int] = (), extra: Sequence[str] = ()) -> Snapshot:
        """Everything at once; ``watch`` notes the heartbeats of ``members``. ``extra`` keys have to exist."""
        listed = tuple(members)
        keys = [_READY, _ENDED, _WORLD, *extra, *(f"beat/{member}" for member in listed)]
        ready, ended, text, *others = (value.decode() for value in self._call("multi_get", keys))
        if watch is not None:
            watch.note(dict(zip(listed, others[len(extra) :], strict=True)))
        nodes: dict[int, Node] = {}
        for entry in ready.split(";")[:-1]:
            number, first, count = map(int, entry.split(" "))
            nodes.setdefault(number, Node(number, range(first, first + count)))
        gone, finished = set[int](), set[int]()
        for entry in ended.split(";")[:-1]:
            if entry.startswith("f"):
                finished.update(numbers(entry[1:]))
            elif not entry.startswith("n"):
                gone.update(numbers(entry))
            elif (node := nodes.get(int(entry[1:]))) is not None:
                gone.update(node.members)
        found = World.from_text(text)
        ended_all, extras = frozenset(gone | finished), tuple(others[: len(extra)])
        return Snapshot(tuple(nodes.values()), ended_all, found, text, extras, frozenset(finished))

    def follow(self, text: str, world: World) -> bool:
        """Let ``world`` follow the one of a snapshot; False where another has followed it."""
        return bool(self._call("compare_set", _WORLD, text, world.to_text()).decode() == world.to_text())

    def note_failure(self, world: int, member: int, unchanged: bool) -> str:
        """A member saw a world fail. Returns the key for ``read``, whose value ``failures_in`` reads."""
        key = f"failed/{world}"
        self._call("append", key, f"{member}{'u' if unchanged else ''};")
        return key

    def has_failed(self, world: int) -> bool:
        """Whether a member saw a world fail."""
        return bool(self._call("check", [f"failed/{world}"]))

    def meeting(self, world: World) -> str:
        """A member has come to a world. Returns the key of its state: "open", "all" when all have come, "broken"."""
        key = f"meet/{world.number}"
        self._call("compare_set", key, "", "open")
        try:
            if self._call("add", f"{key}/count", 1, tries=1) >= len(world.members):
                self._call("compare_set", key, "open", "all")
        except MembershipError:  # it may have counted: once more would stand for a member that has not come
            self.break_meeting(world)
        return key

    def break_meeting(self, world: World) -> None:
        """Not all will come to a world."""
        for state in ("", "open"):
            self._call("compare_set", f"meet/{world.number}", state, "broken")

    def keys_of_worlds(self, before: int) -> list[str]:
        """The keys of worlds below ``before``; none with an older torch, which cannot list keys."""
        if not hasattr(self._store, "list_keys"):
            return []
        return [key for key in self._call("list_keys") if 0 <= _world_of(key) < before]

    def remove(self, keys: Sequence[str]) -> None:
        """Remove keys; each is one request."""
        for key in keys:
            self._call("delete_key", key)

    def _call(self, operation: str, *arguments: Any, tries: int = 2) -> Any:
        """One request, made again over a new connection where the first is lost, unless ``tries`` is 1."""
        with self._lock:
            for left in reversed(range(tries)):
                if self._store is None:
                    self._store = self._connect()
                try:
                    return getattr(self._store, operation)(*arguments)
                except RuntimeError as error:
                    self._store = None
                    if not left:
                        raise MembershipError(
                            f"the store of the job does not answer to {operation!r}, twice: {error} Look at the "
                            "process that hosts it (--rdzv-endpoint), which the job needs until its end, and at the "
                            "network between."
                        ) from error
            raise AssertionError


def _world_of(key: str) -> int:
    """The number of the world that a key of the store is of; -1 for others."""
    what, _, rest = key.partition("/")
    number = rest.partition("/")[0]
    return int(number) if what in ("failed", "meet", GROUPS) and number.isdigit() else -1


def failures_in(value: str) -> dict[int, bool]:
    """The members that saw a world fail, and whether the live state of each is unchanged."""
    return {int(entry.rstrip("u")): entry.endswith("u") for entry in value.split(";")[:-1]}


@dataclass(slots=True)
class Watch:
    """Which members live, by heartbeats that were seen to move.

    A time between two looks counts as ``max_gap_s`` at most: when the store or this process was away, nobody's
    heartbeat could be seen.
    """

    silence_s: float
    max_gap_s: float
    clock: Callable[[], float] = time.monotonic
    _at: dict[int, float] = field(default_factory=dict)
    _values: dict[int, str] = field(default_factory=dict)
    _silent: dict[int, float] = field(default_factory=dict)
    _moved: set[int] = field(default_factory=set)

    def appeared(self, members: Iterable[int]) -> None:
        """These have said something in the store since the last look, so they lived then."""
        for member in members:
            self._moved.add(member)
            self._silent[member] = 0.0

    def note(self, beats: Mapping[int, str]) -> None:
        """The counters of members now."""
        now = self.clock()
        for member, value in beats.items():
            before = self._values.get(member)
            if before is None or before != value:
                self._silent[member] = 0.0
                if before is not None:
                    self._moved.add(member)
            else:
                self._silent[member] += min(now - self._at[member], self.max_gap_s)
            self._values[member], self._at[member] = value, now

    def silent(self, member: int, limit_s: float | None = None) -> bool:
        """Whether its heartbeat has not moved for so long; False for one that was not watched for as long."""
        return self._silent.get(member, 0.0) >= (self.silence_s if limit_s is None else limit_s)

    def lives(self, member: int) -> bool:
        """Whether its heartbeat was seen to move, and lately."""
        return member in self._moved and not self.silent(member)


def connect(host: str, port: int, limit_s: float, *, setting: str = "store_timeout") -> TCPStore:
    """Connect within ``limit_s``, of the ``--rdzv-conf`` of this name; each request may then take half of that.

    torch has a limit for connecting and for waiting for a key. A request whose answer is lost, as when the network is
    cut in two, would wait until the kernel gives the connection up, in a quarter of an hour or never. So the socket
    itself gets a limit, by SO_RCVTIMEO and SO_SNDTIMEO, at which torch raises DistNetworkError ("Socket Timeout"). It
    has none while torch makes the connection and waits for a first answer: a thread breaks the connection then.

    Raises MembershipError where no store answers.
    """
    from torch._C._distributed_c10d import TCPStore

    before = sockets_to(port).keys()
    half = timedelta(seconds=limit_s / 2)
    made = threading.Event()
    cuts = threading.Thread(target=_cut_off, args=(port, before, limit_s / 2, made), daemon=True)
    cuts.start()
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=half)  # torch tries twice
    except RuntimeError as error:
        raise MembershipError(
            f"the store of the job does not answer at {host}:{port} within {limit_s:g} s ({setting}): {error} If the "
            "job has ended, there is nothing to join. If not, look at the process that hosts the store "
            "(--rdzv-endpoint) and at the network between."
        ) from None
    finally:
        made.set()
        cuts.join()
    seconds, microseconds = divmod(int(limit_s / 2 * 1e6), 1_000_000)
    for name, descriptor in sockets_to(port).items():
        if name not in before:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, microseconds))
    return store


def _cut_off(port: int, but: Collection[str], limit_s: float, made: threading.Event) -> None:
    """Break connections to a port that were begun and not made within the limit, those of later tries included."""
    wait_s = limit_s
    while not made.wait(wait_s):
        wait_s = _AGAIN_S
        break_connections(port, [name for name in sockets_to(port) if name not in but])


def break_connections(port: int, names: Collection[str]) -> None:
    """End every wait in these connections to a port, in any thread, with an error."""
    for name, descriptor in sockets_to(port).items():
        if name in names:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def sockets_to(port: int) -> dict[str, int]:
    """The connections of this process to a port, by the kernel's name for each, with their descriptors."""
    found: dict[str, int] = {}
    for text in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{text}")
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(text))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                        found[name] = int(text)
    return found
