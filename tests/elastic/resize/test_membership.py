"""Who is in the world of a job that changes size in place: all agree, whichever of them dies, and none waits for good.

Members are threads of this process that share a real store. One that "dies" stops at a request of its own choice to the
store, and its heartbeat with it, as SIGKILL would end a process there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import warm_python
from hypothesis import given
from hypothesis import strategies as st

from zeroelastic.elastic.resize.membership import Membership
from zeroelastic.elastic.resize.roster import Roster, Watch, World, failures_in, numbers, runs
from zeroelastic.errors import ConfigError, MembershipError
from zeroelastic.in_place import VARIABLE, InPlace

LIMIT_S = 40.0
"""Of every wait of a test; a hang is a failure."""
QUICK = {
    "join_timeout": 20.0,
    "last_call_timeout": 0.3,
    "heartbeat_interval": 0.1,
    "heartbeat_timeout": 0.8,
    "failure_timeout": 6.0,
    "store_timeout": 4.0,
}
_jobs = count()


class Killed(Exception):
    """The process has ended here."""


class Member(Membership):
    """One that shares a connection with the others, since torch looks up the host for each that it makes."""

    def _connect(self) -> Any:
        return dist.PrefixStore(self.settings.job, SHARED[self.settings.port])


SHARED: dict[int, Any] = {}
"""Stores by port."""


class Job:
    """A job on a store; ``start`` is a worker of a node."""

    def __init__(self, port: int, nodes: tuple[int, int] = (1, 4), per_node: int = 1, **settings: float) -> None:
        self.settings = InPlace("127.0.0.1", port, f"job{next(_jobs)}", 0, *nodes, **{**QUICK, **settings})
        self.per_node = per_node
        self.members: list[Membership] = []

    def start(self, node: int, local_rank: int = 0) -> Membership:
        settings = InPlace(**{**asdict(self.settings), "node": node})
        self.members.append(Member(settings, local_rank, self.per_node))
        return self.members[-1]

    def first(self, num: int, begin: int = 0) -> tuple[list[Membership], World]:
        """A world of nodes that start now."""
        members = [self.start(begin + node, rank) for node in range(num) for rank in range(self.per_node)]
        worlds = together([member.first for member in members])
        assert len(set(worlds)) == 1
        return by_rank(members, worlds[0]), worlds[0]

    def roster(self) -> Roster:
        found = Roster(self.members[0]._connect)
        found.open()
        return found

    def close(self) -> None:
        for member in self.members:
            member.close()


def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
    """Run it in a thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments, **named))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def together(functions: list[Callable[[], Any]]) -> list[Any]:
    return [future.result(LIMIT_S) for future in [call(function) for function in functions]]


def each(play: Callable[[int], None], numbers: Iterable[int]) -> None:
    """The same game with each number, some at a time: most of a game is waiting."""
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(play, numbers))


def by_rank(members: list[Membership], world: World) -> list[Membership]:
    found = {member.number: member for member in members}
    return [found[number] for number in world.members if number in found]


def kill(*members: Membership) -> None:
    """As SIGKILL: the heartbeat stops, and no word is left."""
    for member in members:
        member.close()


def kill_at(member: Membership, request: int) -> None:
    """Let the member end at this of its requests to the store from now on."""
    original, left = member._roster._call, [request]

    def killed(operation: str, *arguments: Any, **named: Any) -> Any:
        if threading.current_thread() is member._heartbeat:
            return original(operation, *arguments, **named)
        left[0] -= 1
        if left[0] < 0:
            member._stopped.set()
            member._heartbeat.join()
            raise Killed
        return original(operation, *arguments, **named)

    member._roster._call = killed  # type: ignore[method-assign]


def until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    SHARED[store.port] = store
    yield store.port
    del SHARED[store.port]


@pytest.fixture
def new_job(port: int) -> Iterator[Callable[..., Job]]:
    """Makes a job, and ends it."""
    made: list[Job] = []

    def make(*nodes: tuple[int, int], **settings: Any) -> Job:
        made.append(Job(port, *nodes, **settings))
        return made[-1]

    yield make
    for job in made:
        job.close()


@pytest.fixture
def job(new_job: Callable[..., Job]) -> Job:
    return new_job()


def test_the_first_world_does_not_wait_once_all_nodes_are_there(new_job: Callable[..., Job]) -> None:
    job = new_job((1, 3), last_call_timeout=LIMIT_S)
    members, world = job.first(3)
    assert world == World(0, tuple(member.number for member in members))


def test_the_first_world_waits_for_the_least_number_and_then_for_a_last_call(new_job: Callable[..., Job]) -> None:
    job = new_job((2, 4), last_call_timeout=0.8)
    one = call(job.start(0).first)
    time.sleep(1.2)
    assert not one.done()
    began = time.monotonic()
    two = call(job.start(1).first)
    time.sleep(0.4)
    three = call(job.start(2).first)
    worlds = [future.result(LIMIT_S) for future in (one, two, three)]
    assert len(set(worlds)) == 1 and len(worlds[0].members) == 3
    assert time.monotonic() - began >= 0.4 + 0.8


def test_nodes_are_admitted_whole(new_job: Callable[..., Job]) -> None:
    job = new_job((1, 2), per_node=2)
    (members, world) = job.first(1)
    assert [member.node for member in members] == [0, 0]
    half = call(job.start(1, 0).first)
    assert members[0].waiting() == ()
    time.sleep(1.0)
    assert members[0].waiting() == () and not half.done()
    other = call(job.start(1, 1).first)
    newcomers = until(members[0].waiting)
    assert newcomers == (2, 3)
    members[0].decide(World(1, (*world.members, *newcomers), world.members))
    assert half.result(LIMIT_S) == other.result(LIMIT_S) == World(1, (0, 1, 2, 3), (0, 1))


def test_a_running_world_takes_in_as_many_nodes_as_there_is_room_for_oldest_first(new_job: Callable[..., Job]) -> None:
    job = new_job((1, 2))
    members, world = job.first(1)
    futures = []
    members[0].waiting()
    for node in (1, 2):
        futures.append(call(job.start(node).first))
        time.sleep(0.3)
    assert until(members[0].waiting) == (1,)
    assert until(lambda: members[0].waiting(leaving=world.members)) == (1, 2)
    members[0].decide(World(1, (0, 1), (0,)))
    assert futures[0].result(LIMIT_S).number == 1
    assert members[0].waiting() == () and not futures[1].done()  # a spare
    assert all(together([lambda m=m: m.meet(World(1, (0, 1), (0,))) for m in job.members[:2]]))
    job.members[0].decide(World(2, (1, 2), (0, 1)))  # the first node leaves, the spare takes its place
    assert futures[1].result(LIMIT_S) == World(2, (1, 2), (0, 1))


def test_a_newcomer_that_dies_while_it_waits_is_not_offered(job: Job) -> None:
    members, _ = job.first(1)
    newcomer = job.start(1)
    members[0].waiting()
    kill_at(newcomer, 6)
    with suppress(Killed):
        newcomer.first()
    until(lambda: not members[0].waiting())
    time.sleep(1.5)
    assert members[0].waiting() == ()


def test_one_that_has_left_is_no_newcomer(job: Job) -> None:
    members, world = job.first(2)
    members[0].decide(World(1, world.members[:1], world.members))
    until(lambda: members[0].died(world.members) == world.members[1:])  # before it says so itself
    assert members[0].waiting() == ()
    members[1].leave()
    time.sleep(0.5)
    assert members[0].waiting() == ()


def test_a_world_that_another_has_followed_cannot_decide(job: Job) -> None:
    members, world = job.first(2)
    members[0].waiting()
    members[1].decide(World(1, (members[1].number,), (members[1].number,)))
    with pytest.raises(MembershipError, match="not the latest any more"):
        members[0].decide(World(1, world.members))
    with pytest.raises(MembershipError, match="has followed without this process"):
        until(lambda: members[0].waiting() and None)
    with pytest.raises(ValueError, match="cannot follow"):
        members[0].decide(World(7, world.members))


@pytest.mark.parametrize("dead", [(0,), (2,), (0, 3)])
def test_the_survivors_of_a_world_agree_on_the_next(job: Job, dead: tuple[int, ...]) -> None:
    members, world = job.first(4)
    survivors = [member for rank, member in enumerate(members) if rank not in dead]
    assert not survivors[-1].has_failed(world)
    kill(*(members[rank] for rank in dead))
    worlds = together([lambda m=m: m.after_failure(world) for m in survivors])
    assert set(worlds) == {World(1, tuple(member.number for member in survivors))}
    assert survivors[-1].has_failed(world) and not survivors[-1].has_failed(worlds[0])
    assert together([lambda m=m: m.meet(worlds[0]) for m in survivors]) == [True] * len(survivors)


def test_those_whose_agent_says_that_they_have_ended_are_not_waited_for(new_job: Callable[..., Job]) -> None:
    job = new_job(heartbeat_timeout=LIMIT_S, failure_timeout=LIMIT_S)
    members, world = job.first(3)
    job.roster().try_to_end(f"n{members[1].node}")
    worlds = together([lambda m=m: m.after_failure(world) for m in (members[0], members[2])])
    assert set(worlds) == {World(1, (members[0].number, members[2].number))}


def test_a_node_that_has_lost_a_worker_is_left_out_whole(new_job: Callable[..., Job]) -> None:
    job = new_job(per_node=2)
    members, world = job.first(2)
    kill(members[3])
    worlds = together([lambda m=m: m.after_failure(world) for m in members[:3]])
    assert set(worlds) == {World(1, world.members[:2])}
    with pytest.raises(MembershipError, match="went on without this process"):
        members[2]._world = None
        members[2].first()


def test_a_worker_whose_node_has_lost_another_does_not_wait_for_nobody(new_job: Callable[..., Job]) -> None:
    job = new_job(per_node=2)
    members, world = job.first(1)
    kill(members[0])
    with pytest.raises(MembershipError, match="torchrun starts the workers of this node again"):
        members[1].after_failure(world)


def test_one_that_lives_and_does_not_come_is_waited_for_until_the_limit(new_job: Callable[..., Job]) -> None:
    job = new_job(failure_timeout=1.5)
    members, world = job.first(3)
    began = time.monotonic()
    worlds = together([lambda m=m: m.after_failure(world) for m in members[:2]])
    assert set(worlds) == {World(1, world.members[:2])} and time.monotonic() - began >= 1.5
    assert members[2].after_failure(world) == worlds[0]  # it learns that it is out


def test_survivors_take_in_newcomers_and_wait_for_them_where_they_are_too_few(new_job: Callable[..., Job]) -> None:
    job = new_job((2, 4))
    members, world = job.first(2)
    kill(members[1])
    going_on = call(members[0].after_failure, world)
    time.sleep(1.5)
    assert not going_on.done()
    newcomer = job.start(2)
    expected = World(1, (members[0].number, newcomer.number))
    assert call(newcomer.first).result(LIMIT_S) == going_on.result(LIMIT_S) == expected


@pytest.mark.extended
def test_those_that_stay_too_few_give_up_at_the_limit(new_job: Callable[..., Job]) -> None:
    job = new_job((2, 4), join_timeout=1.0, failure_timeout=1.2)
    members, world = job.first(2)
    kill(members[1])
    with pytest.raises(MembershipError, match="fewer than 2 nodes are left"):
        members[0].after_failure(world)
    with pytest.raises(MembershipError, match=r"within 1 s \(join_timeout\): 1 nodes wait, --nnodes is 2:4"):
        new_job((2, 4), join_timeout=1.0).start(0).first()


def test_live_state_goes_on_when_a_newcomer_dies_before_its_world_begins(job: Job) -> None:
    members, world = job.first(2)
    newcomer = job.start(2)
    taken = call(newcomer.first)
    more = until(members[0].waiting)
    decided = World(1, (*world.members, *more), world.members)
    members[0].decide(decided)
    taken.result(LIMIT_S)
    kill(newcomer)
    assert together([lambda m=m: m.meet(decided) for m in members]) == [False, False]
    worlds = together([lambda m=m: m.after_failure(decided, unchanged=True) for m in members])
    assert set(worlds) == {World(2, world.members, world.members)}


def test_a_count_whose_answer_is_lost_does_not_stand_for_a_member_that_has_not_come(job: Job) -> None:
    class CountsAndFails:
        """A store that counts, and whose answer to that is lost once."""

        def __init__(self, store: Any) -> None:
            self.store, self.failed = store, False

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        def add(self, key: str, amount: int) -> Any:
            counted = self.store.add(key, amount)
            if key.endswith("/count") and not self.failed:
                self.failed = True
                raise RuntimeError("Socket Timeout")
            return counted

    (first, second), world = job.first(2)
    store = CountsAndFails(first._connect())
    first._connect = lambda: store  # type: ignore[method-assign]
    first._roster._connect, first._roster._store = first._connect, None
    assert not first.meet(world)
    assert store.failed and not second.meet(world)
    following = together([lambda m=m: m.after_failure(world) for m in (first, second)])
    assert following[0] == following[1] and together([lambda m=m: m.meet(following[0]) for m in (first, second)]) == [
        True,
        True,
    ]


def test_live_state_does_not_go_on_where_one_of_its_ranks_is_lost_or_has_changed(job: Job) -> None:
    members, world = job.first(3)
    decided = World(1, world.members, world.members)
    members[0].decide(decided)
    calls = [lambda m=m: m.after_failure(decided, unchanged=m is not members[1]) for m in members]
    assert set(together(calls)) == {World(2, world.members)}


def test_when_a_whole_world_has_ended_those_that_wait_form_the_next(job: Job) -> None:
    members, _ = job.first(2)
    newcomer = call(job.start(2).first)
    time.sleep(0.5)
    assert not newcomer.done()
    for member in members:
        member.leave()
    assert newcomer.result(LIMIT_S) == World(1, (2,))


def test_a_world_that_was_killed_is_followed_only_when_it_would_have_stopped_by_itself(job: Job) -> None:
    """Until then its members could be alive and cut off from the store."""
    members, _ = job.first(2)
    kill(*members)
    began = time.monotonic()
    assert call(job.start(2).first).result(LIMIT_S) == World(1, (2,))
    assert time.monotonic() - began >= QUICK["store_timeout"] + QUICK["heartbeat_timeout"] - 0.2


@pytest.mark.extended
def test_a_running_world_stops_where_the_store_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    settings = InPlace("127.0.0.1", store.port, "job", 0, 1, 1, **{**QUICK, "store_timeout": 1.0})
    members = [Membership(settings)]
    members[0].first()
    assert members[0].waiting() == ()
    del store
    time.sleep(0.3)
    assert members[0].waiting() == ()  # not yet
    with pytest.raises(MembershipError, match="has not answered for"):
        until(lambda: members[0].waiting() and None)
    with pytest.raises(MembershipError, match="the store of the job does not answer"):
        members[0].after_failure(World(0, (0,)))
    assert "does not answer" in caplog.text
    began = time.monotonic()
    members[0].leave()
    assert time.monotonic() - began < 10.0


@pytest.fixture
def stopped() -> Iterator[Callable[[], tuple[int, int]]]:
    """A store in a process of its own that can be stopped, as if the network were cut: its port and process id."""
    processes: list[subprocess.Popen[str]] = []

    def start() -> tuple[int, int]:
        program = (
            "import os, time; from torch.distributed import TCPStore; "
            "s = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
            "print(s.port, os.getpid(), flush=True); time.sleep(200)"
        )
        processes.append(subprocess.Popen([warm_python.executable(), "-c", program], stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout is not None
        port, pid = map(int, processes[-1].stdout.readline().split())
        return port, pid

    yield start
    for process in processes:
        with process:
            process.kill()


@pytest.mark.extended
def test_every_request_has_a_limit_where_the_network_is_cut(stopped: Callable[[], tuple[int, int]]) -> None:
    port, pid = stopped()
    settings = InPlace("127.0.0.1", port, "job", 0, 1, 1, **{**QUICK, "store_timeout": 2.0})
    member = Membership(settings)
    world = member.first()
    groups = member.store_of(world, timeout_s=2.0)
    groups.set("key", "value")
    stop(pid)
    try:
        assert seconds_of_a_failure(lambda: groups.add("count", 1)) < 4.0
        assert seconds_of_a_failure(lambda: member.has_failed(world), "the store of the job") < 10.0
        assert seconds_of_a_failure(lambda: member.after_failure(world), "the store of the job") < 10.0
    finally:
        os.kill(pid, signal.SIGCONT)
    assert member.has_failed(world) in (True, False)  # it goes on over another connection
    member.leave()


def stop(pid: int) -> None:
    """Stop a process; when this returns, none of its threads runs any more, which takes a moment after the signal."""
    os.kill(pid, signal.SIGSTOP)
    stats = Path(f"/proc/{pid}/task")
    until(lambda: {stat.read_text().rpartition(")")[2].split()[0] for stat in stats.glob("*/stat")} == {"T"})


def seconds_of_a_failure(request: Callable[[], Any], message: str | None = None) -> float:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        request()
    return time.monotonic() - began


def test_a_newcomer_that_finds_no_store_says_so_within_the_limit() -> None:
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store  # the job has ended
    settings = InPlace("127.0.0.1", port, "job", 0, 1, 2, **{**QUICK, "store_timeout": 2.0})
    began = time.monotonic()
    with pytest.raises(
        MembershipError, match=f"at 127.0.0.1:{port} within 2 s .*If the job has ended, there is nothing"
    ):
        Membership(settings)
    assert time.monotonic() - began < 8.0


@pytest.mark.extended
def test_a_newcomer_whose_store_ends_while_it_waits_says_so_within_the_limit() -> None:
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    member = Membership(InPlace("127.0.0.1", store.port, "job", 0, 2, 2, **{**QUICK, "store_timeout": 2.0}))
    waits = call(member.first)
    time.sleep(0.5)
    del store
    with pytest.raises(MembershipError, match="If the job has ended, there is nothing to join"):
        waits.result(12.0)
    member.leave()


def test_the_store_does_not_grow_with_the_number_of_worlds(job: Job) -> None:
    members, world = job.first(2)
    keys = []
    store = members[0]._roster._store
    for number in range(1, 8):
        together([lambda m=m, w=world: m.meet(w) for m in members])
        for member in members:
            for name in range(30):
                member.store_of(world).set(f"{member.number}/{name}", "an address")
        members[0].has_failed(world)
        world = World(number, world.members, world.members)
        members[0].decide(world)
        if number > 3:
            until(lambda n=number: not [key for key in store.list_keys() if key.startswith(f"groups/{n - 3}/")])
            keys.append(len(store.list_keys()))
    assert max(keys) <= keys[0]
    assert {key.split("/")[1] for key in store.list_keys() if key.startswith("groups/")} == {"5", "6"}
    assert together([lambda m=m: m.meet(world) for m in members]) == [True, True]


def test_process_groups_of_worlds_do_not_see_each_other(job: Job) -> None:
    members, world = job.first(2)
    one, two = (member.store_of(world) for member in members)
    one.set("key", "of world 0")
    assert two.get("key") == b"of world 0"
    assert not members[0].store_of(World(1, world.members)).check(["key"])


@pytest.mark.extended
@pytest.mark.parametrize("victim", [0, 1])
def test_a_first_world_is_formed_whenever_one_dies(new_job: Callable[..., Job], victim: int) -> None:
    """Member 0 leads. Whichever request is its last, or that of another, the others are soon in one world."""

    def play(request: int) -> None:
        job = new_job((2, 3), last_call_timeout=1.0)
        members = [job.start(node) for node in range(3)]
        kill_at(members[victim], request)
        others = [member for member in members if member is not members[victim]]
        futures = {member: call(member.first) for member in members}
        worlds = {futures[member].result(LIMIT_S) for member in others}
        agree(others, worlds, dead=victim)

    each(play, range(0, 14) if victim == 0 else range(0, 6))


def agree(members: list[Membership], worlds: set[World], dead: int) -> None:
    """The members come to the world that they know of, which has a dead member or not, and then to the next."""
    (world,) = worlds
    assert {member.number for member in members} <= set(world.members)
    came = set(together([lambda m=m: m.meet(world) for m in members]))
    assert came == {dead not in world.members}
    if came == {False}:
        (after,) = set(together([lambda m=m: m.after_failure(world) for m in members]))
        assert set(after.members) == {member.number for member in members} and after.number == world.number + 1
        assert set(together([lambda m=m: m.meet(after) for m in members])) == {True}


@pytest.mark.extended
@pytest.mark.parametrize("victim", [0, 1])
def test_survivors_agree_whenever_another_one_dies_meanwhile(new_job: Callable[..., Job], victim: int) -> None:
    """One of four has died, and a second one does at each of its requests; member 0 leads."""

    def play(request: int) -> None:
        job = new_job()
        members, world = job.first(4)
        kill(members[3])
        kill_at(members[victim], request)
        others = [member for rank, member in enumerate(members[:3]) if rank != victim]
        futures = {member: call(member.after_failure, world) for member in members[:3]}
        worlds = {futures[member].result(LIMIT_S) for member in others}
        agree(others, worlds, dead=members[victim].number)

    each(play, range(1, 21, 2) if victim == 0 else range(0, 5))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_every_member_sees_the_same_worlds_in_a_random_history(new_job: Callable[..., Job], seed: int) -> None:
    chosen = random.Random(seed)
    job = new_job((1, 4))
    members, world = job.first(2)
    seen = {world.number: world}

    def note(found: list[World]) -> World:
        (one,) = set(found)
        assert seen.setdefault(one.number, one) == one and len(set(one.members)) == len(one.members)
        return one

    node = count(2)
    for _ in range(6):
        action = chosen.choice(["join", "join", "leave", "kill"]) if len(members) > 1 else "join"
        new: list[Membership] = []
        if action == "join" and len(members) < 4:
            new = [job.start(next(node))]
            future = call(new[0].first)
            newcomers = until(members[0].waiting)
            decided = World(world.number + 1, (*world.members, *newcomers), world.members)
            members[0].decide(decided)
            note([decided, future.result(LIMIT_S)])
        elif action == "kill":
            kill(members.pop(chosen.randrange(len(members))))
            decided = note(together([lambda m=m, w=world: m.after_failure(w) for m in members]))
        else:
            gone = members.pop(chosen.randrange(1, len(members))) if len(members) > 1 else None
            stay = tuple(member.number for member in members)
            decided = note([World(world.number + 1, stay, world.members)])
            members[0].decide(decided)
            if gone is not None:
                gone.leave()
        world, members = decided, by_rank([*members, *new], decided)
        assert together([lambda m=m, w=world: m.meet(w) for m in members]) == [True] * len(members)
    assert sorted(seen) == list(range(7))


@given(st.lists(st.integers(0, 40), unique=True))
def test_a_world_is_the_same_after_the_store(members: list[int]) -> None:
    assert numbers(runs(members)) == tuple(members)
    world = World(3, tuple(members), tuple(members[:2]))
    assert World.from_text(world.to_text()) == world
    assert runs(range(16384)) == "0:16384" and failures_in("3;4u;3;") == {3: False, 4: True}


def test_silence_is_what_was_seen_not_what_a_pause_of_the_watcher_hides() -> None:
    now = [0.0]
    watch = Watch(silence_s=3.0, max_gap_s=1.0, clock=lambda: now[0])
    watch.note({1: "5"})
    assert not watch.lives(1)  # not seen to move yet
    now[0] = 100.0  # the store was away
    watch.note({1: "5"})
    assert not watch.silent(1)
    for _ in range(2):
        now[0] += 1.0
        watch.note({1: "5"})
    assert watch.silent(1)
    watch.note({1: "6"})
    assert watch.lives(1) and not watch.silent(1)


def test_a_process_is_one_member(port: int) -> None:
    settings = InPlace("127.0.0.1", port, f"job{next(_jobs)}", 0, 1, 1, **QUICK)
    environment = {VARIABLE: settings.to_environment(), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert Membership.of_this_process({}) is None
    member = Membership.of_this_process(environment)
    assert member is not None and member is Membership.of_this_process(environment)
    assert member.first() == World(0, (0,)) and (member.node, member.min_nodes, member.max_nodes) == (0, 1, 1)
    member.leave()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "is not what torchrun --rdzv-backend=zeroelastic-in-place sets"),
        (json.dumps({"host": "h"}), "KeyError: 'port'"),
        (json.dumps({**asdict(InPlace("h", 1, "j", 0, 1, 2)), "notice": -1}), "notice is -1"),
        (json.dumps({**asdict(InPlace("h", 1, "j", 0, 1, 2)), "heartbeat_timeout": 1}), "3 times heartbeat_interval"),
        (json.dumps({**asdict(InPlace("h", 1, "j", 0, 1, 2)), "min_nodes": 3}), "3:2; it is MIN:MAX"),
        (InPlace("h", 1, "j", 0, 1, 2).to_environment(), "start the script by torchrun"),
    ],
)
def test_a_variable_that_no_agent_has_set_is_refused(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Membership.of_this_process({VARIABLE: value})
