"""torchrun's own agents, each of which starts its node by itself: running workers stay when others come or go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import warm_python
from torch.distributed.elastic.rendezvous import RendezvousParameters

from zeroelastic.elastic.resize.rendezvous import create_handler
from zeroelastic.errors import ConfigError, MembershipError
from zeroelastic.in_place import BACKEND, VARIABLE, InPlace, note_joined, refuse_outside_of_worlds

HERE = Path(__file__).parent
LIMIT_S = 120.0
SETTINGS = "last_call_timeout=1,heartbeat_interval=0.2,heartbeat_timeout=3,close_timeout=60"

pytestmark = pytest.mark.starts_processes


class Agents:
    """torchrun's agents of one job, of two workers each, and what their workers said."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self.stack = directory, stack
        self.port = free_port()
        self.python = warm_python.executable()

    def start(
        self,
        name: str,
        *,
        nodes: str = "1:3",
        workers: int = 2,
        restarts: int = 2,
        script: Path = HERE / "in_place_worker.py",
        python: str | None = None,
    ) -> subprocess.Popen[bytes]:
        """``python`` is that of the workers: by default a warm one, where ZEROELASTIC=1 has no effect."""
        command = [
            *(self.python, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={workers}"),
            *("--rdzv-id=job", f"--max-restarts={restarts}", "--monitor-interval=0.2"),
            *(f"--rdzv-backend={BACKEND}", f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-conf={SETTINGS}"),
            *(str(script), str(self.directory)),
        ]
        # RES_OPTIONS: torch asks for the name of each host that it connects to, and waits for an answer
        environment = {**os.environ, "PYTHON_EXEC": python or self.python, "RES_OPTIONS": "timeout:1 attempts:1"}
        environment.pop("ZEROELASTIC", None)
        with open(self.directory / f"{name}.out", "wb") as output:
            agent = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        self.stack.callback(end, agent)
        return agent

    def said(self, event: str) -> list[dict[str, Any]]:
        path = self.directory / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if line["event"] == event]

    def until(self, what: Callable[[], Any], *agents: subprocess.Popen[bytes]) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while not (found := what()):
            assert time.monotonic() < deadline, self.output()
            assert all(agent.poll() is None for agent in agents), self.output()
            time.sleep(0.05)
        return found

    def world(self, num_members: int, after: int, *agents: subprocess.Popen[bytes]) -> tuple[int, dict[int, int]]:
        """The number of a world of so many members that all of them have come to, and their processes by member."""

        def complete() -> tuple[int, dict[int, int]] | None:
            entries = [entry for entry in self.said("world") if len(entry["members"]) == num_members]
            latest = max((entry["world"] for entry in entries), default=-1)
            came = {entry["number"]: entry["pid"] for entry in entries if entry["world"] == latest}
            return (latest, came) if latest > after and len(came) == num_members else None

        return self.until(complete, *agents)

    def output(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.directory.glob("*.out")))


def free_port() -> int:
    return int(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port)


def end(agent: subprocess.Popen[bytes]) -> None:
    if agent.poll() is None:
        agent.send_signal(signal.SIGINT)
        try:
            agent.wait(10)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait(10)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with ExitStack() as stack:
        stack.callback((tmp_path / "stop").touch)
        yield Agents(tmp_path, stack)


@pytest.mark.extended
def test_running_workers_stay_when_nodes_come_fail_and_leave(agents: Agents) -> None:
    first = agents.start("first")
    agents.until(lambda: agents.said("start"), first)
    second = agents.start("second")
    number, four = agents.world(4, -1, first, second)

    third = agents.start("third")
    number, six = agents.world(6, number, first, second, third)
    assert four.items() <= six.items()  # the same processes

    node = {entry["number"]: entry["node"] for entry in agents.said("start")}
    failed = [member for member in four if node[member] == 1]
    os.kill(six[failed[0]], signal.SIGKILL)
    number, again = agents.world(6, number, first, second, third)
    stayed = {member: pid for member, pid in six.items() if member not in failed}
    assert stayed.items() <= again.items() and not set(failed) & again.keys()
    restarts = {entry["number"]: entry["restarts"] for entry in agents.said("start")}
    assert [restarts[member] for member in sorted(again)] == [0, 0, 0, 0, 1, 1]

    third.send_signal(signal.SIGTERM)
    number, left = agents.world(4, number, first, second)
    assert left.items() <= again.items()
    signalled = {entry["number"] for entry in agents.said("SIGTERM")} - set(failed)
    assert signalled == again.keys() - left.keys() == {member for member in again if node.get(member) == 2}
    assert third.wait(LIMIT_S) == 1  # torchrun's own, where a signal ends it

    (agents.directory / "stop-0").touch()
    agents.until(lambda: "hosts the store" in (agents.directory / "first.out").read_text(), first)
    agents.world(2, number, first, second)
    (agents.directory / "stop").touch()
    assert second.wait(LIMIT_S) == 0 and first.wait(LIMIT_S) == 0
    assert {entry["on"] for entry in agents.said("start")} == {"1"}


ALONE = """
import deepspeed, torch.distributed
from torch.distributed.distributed_c10d import init_process_group

for begin in (deepspeed.init_distributed, init_process_group):
    try:
        begin("gloo")
    except ValueError as error:
        print(type(error).__name__, error, flush=True)
torch.distributed.init_process_group("gloo")
print("it trains")
"""


def test_a_script_that_does_not_join_the_others_is_refused_by_whatever_it_begins(agents: Agents) -> None:
    script = agents.directory / "plain.py"
    script.write_text(ALONE)
    agent = agents.start("plain", nodes="1:2", workers=1, restarts=0, script=script, python=sys.executable)
    assert agent.wait(LIMIT_S) == 1
    output = agents.output()
    assert output.count("ConfigError") >= 3 and output.count("Build the engine inside zeroelastic.elastic.worlds") == 3
    assert "it trains" not in output.replace(ALONE, "")


def test_only_a_process_that_has_joined_a_world_may_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroelastic.in_place._joined", False)
    refuse_outside_of_worlds({})
    with pytest.raises(ConfigError, match="another rendezvous backend"):
        refuse_outside_of_worlds({VARIABLE: "{}"})
    note_joined()
    refuse_outside_of_worlds({VARIABLE: "{}"})


def parameters(port: int, **settings: Any) -> RendezvousParameters:
    # as torchrun does, which always adds a timeout
    return RendezvousParameters(BACKEND, f"127.0.0.1:{port}", "job", 1, 2, "127.0.0.1", timeout=900, **settings)


def test_each_start_of_the_workers_is_a_node_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("ZEROELASTIC", "")
    host: Any = create_handler(parameters(0, is_host="1", notice="12", close_timeout="0.1"))
    guest: Any = create_handler(parameters(host._port, is_host="0"))
    assert host.get_backend() == BACKEND and host.get_run_id() == "job"
    for number, handler in enumerate((host, guest, host)):
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1) and handler.num_nodes_waiting() == 0
        found = InPlace.from_environment()
        assert found is not None and (found.node, found.port) == (number, host._port)
        assert found.notice == (12.0 if handler is host else 30.0)
        assert not info.store.check(["key"])
        info.store.set("key", "of this start")
    assert not host.is_closed()
    assert guest.shutdown() and host.shutdown()

    def ended() -> list[str]:
        return sorted(filter(None, host._roster._call("get", "ended").decode().split(";")))

    deadline = time.monotonic() + LIMIT_S
    while ended() != ["n0", "n1", "n2"]:  # a store answers no append, so another connection may see it later
        assert time.monotonic() < deadline, ended()


def test_torchrun_imports_zeroelastic_only_for_its_rendezvous() -> None:
    code = "import sys, torch.distributed.run; print([name for name in sys.modules if name.startswith('zeroelastic')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"


def test_the_package_offers_it_to_torchrun() -> None:
    (found,) = [entry for entry in entry_points(group="torchrun.handlers") if entry.name == BACKEND]
    with pytest.raises(ConfigError, match="notice is '-1'"):
        found.load()()(parameters(1, notice="-1"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"last_call": "1"}, "last_call is not known .* take one of join_timeout, last_call_timeout"),
        ({"join_timeout": "soon"}, "join_timeout is 'soon'; it has to be a number of seconds above 0"),
        ({"read_timeout": "0"}, "read_timeout is '0'"),
        ({"heartbeat_interval": "2"}, "heartbeat_timeout 3 times heartbeat_interval or more"),
    ],
)
def test_a_setting_that_cannot_be_is_named(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_handler(parameters(1, **settings))


def test_an_agent_that_finds_no_store_says_so_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROELASTIC", "")
    port, began = free_port(), time.monotonic()
    with pytest.raises(MembershipError, match=rf"answer at 127.0.0.1:{port} within 2 s \(read_timeout\): "):
        create_handler(parameters(port, is_host="0", read_timeout="2"))
    assert time.monotonic() - began < 8.0


def test_it_cannot_be_used_where_zeroelastic_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROELASTIC", "0")
    with pytest.raises(ConfigError, match="Leave the variable out"):
        create_handler(parameters(1))


def test_a_port_that_is_taken_is_named_where_the_store_has_to_be_here() -> None:
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{other.port}"):
        create_handler(parameters(other.port, is_host="1"))
