"""A cluster on one machine: several torchrun agents, each a "node"; any of them can be killed and started again.

    python examples/elastic/cluster.py --out demo-elastic
    python examples/elastic/cluster.py --out demo-elastic --scenario fixed-size
    sudo python examples/elastic/cluster.py --out demo-elastic --scenario network

Each runs train.py once without a break and once through its scenario, and compares the two: the samples of every step,
the weights at the end, the steps that were lost and what each restart cost. "elastic" goes through 4 -> 3 -> 2 -> 4 ->
1 -> 3 nodes, several ways. Nodes are lost by SIGKILL, with saves on the disk, then with checkpoints in memory; what a
node kept in memory goes with it.
"fixed-size" needs 3 nodes, so it waits for the one that was killed; "network" gives each node a host of its own and
pulls the cable of one, until its agent gives up; in "network-return" it is put back before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from judge import compare, compare_memory, last_step, read_trace, write_result
from network import Loopback, Namespaces

HERE = Path(__file__).resolve().parent
SCENARIO = ((6, -1), (16, -1), (26, +2), (38, -3), (48, +2))
"""(once this step is trained, nodes that go or come)"""
RENDEZVOUS = (
    "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120,close_timeout=10"
)
READ_TIMEOUT = 8
"""Seconds after which an agent that does not reach the rendezvous store gives up, and ends its workers."""
SILENCE = 8
"""Seconds after which ranks give up waiting for a rank that does not answer."""
RETRIES = 5
"""Of net.ipv4.tcp_retries2: a host that reaches nobody knows it after about 15 seconds, instead of 15 minutes."""

STEPS_BETWEEN = 3
"""Nodes that have come are there for so many steps before others go, and have got their copies by then."""
COPIES = 3
"""In the memory of other nodes: the scenario loses three of four nodes at once."""

Back = Literal["new agent", "same agent"]
BACK: dict[str, Back] = {"network": "new agent", "network-return": "same agent"}


@dataclass(frozen=True)
class Way:
    """How a job is started and where it keeps its state: the words between torchrun's and those of the script."""

    name: str
    launch: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    script: Path = HERE / "train.py"


DISK = Way("disk")
MEMORY = Way("memory", options=("--memory", str(COPIES)))


@dataclass(frozen=True)
class Node:
    """An agent, and the host that it is on."""

    agent: subprocess.Popen[bytes]
    host: int

    def family(self) -> list[psutil.Process]:
        """The processes of the agent and its workers that are alive."""
        try:
            agent = psutil.Process(self.agent.pid)
            return list(filter(alive, [agent, *agent.children(recursive=True)]))
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """SIGKILL the agent and its workers, at once: a worker that outlives its agent gets SIGTERM, and would save."""
        family = self.family()
        for action in (psutil.Process.suspend, psutil.Process.kill):
            for process in reversed(family):
                with contextlib.suppress(psutil.NoSuchProcess):
                    action(process)
        self.agent.wait()


class Cluster:
    """The agents of one job. The rendezvous store is a separate process, so that any node may die."""

    def __init__(
        self,
        out: Path,
        arguments: list[str],
        *,
        nodes: str,
        network: Loopback,
        way: Way,
    ) -> None:
        self.out, self.arguments, self.size, self.network, self.way = out, arguments, nodes, network, way
        self.trace, self.hold = out / "trace.jsonl", out / "hold"
        self.nodes: list[Node] = []
        self.started: list[Node] = []
        self.port = free_port()
        self.store = subprocess.Popen(
            [*network.command(None), sys.executable, str(HERE / "store.py"), str(self.port)],
            stdout=subprocess.PIPE,
        )
        assert self.store.stdout is not None
        if not self.store.stdout.readline().startswith(b"ready"):
            raise RuntimeError("the rendezvous store did not start")

    def add(self, host: int | None = None) -> Node:
        """Start a node on a host; by default on the host with the node's number."""
        number = len(list(self.out.glob("node*.log")))
        host = number if host is None else host
        command = [
            *self.network.command(host),
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.size}", "--nproc-per-node=1"),
            *("--max-restarts=100", "--monitor-interval=0.2", "--rdzv-backend=c10d", "--rdzv-id=job"),
            f"--rdzv-endpoint={self.network.store_address}:{self.port}",
            *(
                f"--rdzv-conf={RENDEZVOUS},read_timeout={READ_TIMEOUT}",
                f"--local-addr={self.network.address(host)}",
            ),
            *(
                *self.way.launch,
                str(self.way.script),
                *self.arguments,
                *self.way.options,
                "--trace",
                str(self.trace),
            ),
            *("--hold", str(self.hold)),
        ]
        with open(self.out / f"node{number}.log", "wb") as output:
            agent = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**environment(), **self.network.environment()},
            )
        self.started.append(Node(agent, host))
        self.nodes.append(self.started[-1])
        return self.nodes[-1]

    def kill(self) -> None:
        """SIGKILL a node: the oldest agent and all its workers, at once."""
        self.nodes.pop(0).kill()

    def change(self, number: int) -> None:
        """Start this number of nodes; where it is negative, kill them: the oldest agents."""
        for _ in range(abs(number)):
            if number > 0:
                self.add()
            else:
                self.kill()

    def reach(self, what: str, until: float, done: Callable[[], bool]) -> None:
        """Wait until it is done. Raises TimeoutError when time is up, or when a node has ended."""
        while not done():
            if time.monotonic() > until or any(node.agent.poll() is not None for node in self.nodes):
                raise TimeoutError(f"{what} was not reached; see {self.out}/node*.log")
            time.sleep(0.1)

    def wait_before(self, step: int) -> None:
        """Hold the job before this step while the file ``hold`` exists."""
        written = self.hold.with_suffix(".new")
        written.write_text(str(step - 1))
        written.replace(self.hold)

    def arrive(self, size: int, until: float) -> None:
        """Wait until the job has begun again at a size, from now on."""
        since = time.time()
        self.reach(
            f"a start on {size} nodes",
            until,
            lambda: any(
                entry["event"] == "resume" and entry["world_size"] == size and entry["time"] > since
                for entry in read_trace(self.trace)
            ),
        )

    def finish(self, until: float) -> None:
        """Wait until all nodes have ended. RuntimeError when one did by an error."""
        codes = [node.agent.wait(max(until - time.monotonic(), 0.1)) for node in self.nodes]
        if any(codes):
            raise RuntimeError(f"nodes ended with {codes}; see {self.out}/node*.log")

    def close(self) -> None:
        """End what is left."""
        for node in self.started:
            node.kill()
        self.store.kill()
        self.store.communicate()  # closes its pipe too


def environment() -> dict[str, str]:
    """The environment of the agents.

    Without the variable, workers meet in a store that the first agent hosts, and every agent keeps its address for as
    long as it lives (torch 2.13, DynamicRendezvousHandler.next_rendezvous): when that node is lost, the others wait for
    it forever. With it, each start has a store of its own, on whichever node is the first then.
    """
    return {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def cluster(
    out: Path,
    *,
    nodes: str,
    steps: int,
    save_steps: int,
    first: int,
    network: Loopback | None = None,
    way: Way = DISK,
) -> Iterator[Cluster]:
    """A job on its ``first`` nodes; it is gone at the end, whatever happens."""
    out.mkdir(parents=True)
    arguments = ["--ckpt", str(out / "ckpt"), "--steps", str(steps), "--save-steps", str(save_steps)]
    arguments += ["--step-seconds", "0.2"] + ([] if network is None else ["--timeout", str(SILENCE)])
    hosts = Loopback() if network is None else network
    with contextlib.closing(hosts):
        made = Cluster(out, arguments, nodes=nodes, network=hosts, way=way)
        try:
            for _ in range(first):
                made.add()
            yield made
        finally:
            made.close()


def play(
    out: Path,
    scenario: tuple[tuple[int, int], ...],
    *,
    steps: int,
    save_steps: int,
    limit: float,
    first: int = 4,
    way: Way = DISK,
) -> None:
    """Run the job through kills and joins, on ``first`` nodes to begin with. TimeoutError when it takes too long."""
    until = time.monotonic() + limit
    with cluster(out, nodes="1:4", steps=steps, save_steps=save_steps, first=first, way=way) as job:
        earliest = 0
        for number, (step, change) in enumerate(scenario, 1):
            at = max(step, earliest)
            job.reach(f"step {at}", until, lambda at=at: last_step(job.trace) >= at)
            job.change(change)
            if change > 0:
                job.wait_before(scenario[number][0] if number < len(scenario) else steps)
                job.arrive(len(job.nodes), until)
                job.hold.unlink()
            earliest = last_step(job.trace) + STEPS_BETWEEN if change > 0 else 0
        job.finish(until)


def play_fixed_size(
    out: Path, *, size: int, kill_at: int, away: float, steps: int, save_steps: int, limit: float
) -> dict[str, Any]:
    """Run a job of a fixed size, kill a node, start it again after ``away`` seconds. Returns what was seen."""
    until = time.monotonic() + limit
    with cluster(out, nodes=str(size), steps=steps, save_steps=save_steps, first=size) as job:
        job.reach(f"step {kill_at}", until, lambda: last_step(job.trace) >= kill_at)
        job.change(-1)
        time.sleep(1.0)  # what was under way
        at_kill = len(read_trace(job.trace))
        time.sleep(away)
        found = {
            "steps_while_waiting": len(read_trace(job.trace)) - at_kill,
            "agents_waiting": sum(node.agent.poll() is None for node in job.nodes),
        }
        job.change(+1)
        job.finish(until)
    return found


def play_cut(
    out: Path, *, size: int, cut_at: int, steps: int, save_steps: int, limit: float, back: Back | None
) -> dict[str, Any]:
    """Run a job on hosts of their own, and pull one's cable. Returns what happened.

    ``back``: with "new agent" the cable stays away for longer than the agent behind it waits: it ends, a new one is
    started in its place and finds nobody until the cable is back. With "same agent" the cable is back earlier, and the
    agent goes on by itself. Otherwise the job ends without it.
    """
    until = time.monotonic() + limit
    network = Namespaces(size, retries=RETRIES if back == "new agent" else None)
    with cluster(out, nodes=f"1:{size}", steps=steps, save_steps=save_steps, first=size, network=network) as job:
        job.reach(f"step {cut_at}", until, lambda: last_step(job.trace) >= cut_at)
        lost = job.nodes.pop(0)
        workers = lost.family()[1:]
        job.wait_before(steps)
        cut_time, began = time.time(), time.monotonic()
        network.cut(lost.host)
        job.reach("a step without it", until, lambda: last_step(job.trace, world_size=size - 1) > 0)
        found: dict[str, Any] = {"seconds_to_a_step_without_it": time.monotonic() - began}
        found["workers_left"] = sum(map(alive, {*workers, *lost.family()[1:]}))
        if back == "new agent":
            with contextlib.suppress(subprocess.TimeoutExpired):
                lost.agent.wait(max(until - time.monotonic(), 0.1))
            found["its_end_seen_after_seconds"], found["its_exit_code"] = time.monotonic() - began, lost.agent.poll()
            # Where it was cut off it cannot begin a job of its own, though one node would be enough for one.
            again = job.add(lost.host)
            time.sleep(4.0)
            found["workers_of_new_agent"] = len(again.family()[1:])
        elif back == "same agent":
            job.nodes.append(lost)
        if back is not None:
            network.mend(lost.host)
            job.arrive(size, until)
        job.hold.unlink()
        job.finish(until)
        pids = {worker.pid for worker in workers}
        found["steps_by_lost_workers"] = sum(
            entry["event"] == "step" and entry["pid"] in pids and entry["time"] > cut_time + 1
            for entry in read_trace(job.trace)
        )
    return found


def alive(process: psutil.Process) -> bool:
    """Whether it runs; one that has ended and was not yet waited for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-elastic"))
    parser.add_argument("--scenario", choices=("elastic", "fixed-size", *BACK), default="elastic")
    parser.add_argument("--steps", type=int, help="60, or 30 where one node goes and comes back")
    parser.add_argument("--save-steps", type=int, default=5)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for each of the two runs")
    parser.add_argument("--results", type=Path, help="keep the result in this directory too, as JSON and Markdown")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    steps = args.steps or (60 if args.scenario == "elastic" else 30)
    common = {"steps": steps, "save_steps": args.save_steps, "limit": args.limit}
    whole, broken = args.out / "whole", args.out / "elastic"
    play(whole, (), first=4 if args.scenario == "elastic" else 3, **common)
    happened: dict[str, Any] = {}
    if args.scenario == "elastic":
        play(broken, SCENARIO, **common)
    elif args.scenario == "fixed-size":
        happened = play_fixed_size(broken, size=3, kill_at=8, away=15.0, **common)
    else:
        happened = play_cut(broken, size=3, cut_at=8, back=BACK[args.scenario], **common)
    found = {"scenario": args.scenario, **compare(whole, broken, happened, save_steps=args.save_steps)}
    places = [directory for directory in (args.out, args.results) if directory is not None]
    names = [write_result(directory, found) for directory in places]
    print(names[0].read_text())
    problems = list(found["problems"])
    if args.scenario == "elastic":
        kept = args.out / "memory"
        play(kept, SCENARIO, way=MEMORY, **common)
        in_memory = {"scenario": "memory", **compare_memory(whole, kept)}
        names = [write_result(directory, in_memory) for directory in places]
        print(names[0].read_text())
        problems += in_memory["problems"]
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
