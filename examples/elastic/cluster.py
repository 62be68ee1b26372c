"""Plays a cluster on one machine: several torchrun agents, each a "node", of which any may be killed and started again.

    python examples/elastic/cluster.py --out demo-elastic

runs train.py once without a break, and once through 4 -> 3 -> 2 -> 4 -> 1 -> 3 nodes, losing them by SIGKILL; then it
compares the two: the samples of every step, the weights at the end, the steps that were lost at each kill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
STORE = (
    "import sys, time, datetime; from torch.distributed import TCPStore; "
    "store = TCPStore('127.0.0.1', int(sys.argv[1]), is_master=True, wait_for_workers=False); "
    "print('ready', flush=True); time.sleep(1e6)"
)
SCENARIO = ((6, -1), (16, -1), (26, +2), (38, -3), (48, +2))
"""(once this step is trained, nodes that go or come)"""
WEIGHT_TOLERANCE = 1e-4
"""Of final weights: at another world size gradients are summed in another order, and Adam divides small ones."""
RENDEZVOUS = (
    "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120,close_timeout=10"
)


class Cluster:
    """Agents of one job, their rendezvous store in a process of its own, so that any node may die."""

    def __init__(self, out: Path, arguments: list[str], *, nodes: str) -> None:
        self.out, self.arguments, self.nodes = out, arguments, nodes
        self.agents: list[subprocess.Popen[bytes]] = []
        self.port = free_port()
        self.store = subprocess.Popen([sys.executable, "-c", STORE, str(self.port)], stdout=subprocess.PIPE)
        assert self.store.stdout is not None
        if self.store.stdout.readline().strip() != b"ready":
            raise RuntimeError("the rendezvous store did not start")

    def add(self) -> None:
        """Start a node."""
        number = len(list(self.out.glob("node*.log")))
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.nodes}", "--nproc-per-node=1"),
            *("--max-restarts=100", "--monitor-interval=0.2", "--rdzv-backend=c10d", "--rdzv-id=job"),
            *(f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-conf={RENDEZVOUS}", "--local-addr=127.0.0.1"),
            *(str(HERE / "train.py"), *self.arguments),
        ]
        with open(self.out / f"node{number}.log", "wb") as output:
            agent = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment()
            )
        self.agents.append(agent)

    def kill(self) -> None:
        """SIGKILL a node: the oldest agent and all its workers, at once."""
        agent = self.agents.pop(0)
        family = [psutil.Process(agent.pid)]
        family += family[0].children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        agent.wait()

    def wait(self, until: float) -> list[int]:
        """The exit codes of the nodes, when all have ended."""
        return [agent.wait(max(until - time.monotonic(), 0.1)) for agent in self.agents]

    def close(self) -> None:
        """End what is left."""
        while self.agents:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.kill()
        self.store.kill()
        self.store.communicate()  # closes its pipe too


def environment() -> dict[str, str]:
    """What agents need besides their arguments.

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
def cluster(out: Path, arguments: list[str], *, nodes: str) -> Iterator[Cluster]:
    made = Cluster(out, arguments, nodes=nodes)
    try:
        yield made
    finally:
        made.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def last_step(path: Path) -> int:
    return max((entry["step"] for entry in read_log(path) if entry["event"] == "step"), default=0)


def play(
    out: Path, scenario: tuple[tuple[int, int], ...], *, steps: int, save_steps: int, limit: float, first: int = 4
) -> None:
    """Run the job through kills and joins, on ``first`` nodes to begin with. TimeoutError when it takes too long."""
    out.mkdir(parents=True)
    log = out / "log.jsonl"
    arguments = ["--ckpt", str(out / "ckpt"), "--events", str(log), "--steps", str(steps)]
    arguments += ["--save-steps", str(save_steps), "--step-seconds", "0.2"]
    until = time.monotonic() + limit
    with cluster(out, arguments, nodes="1:4") as nodes:
        for _ in range(first):
            nodes.add()
        for step, change in scenario:
            while last_step(log) < step:
                if time.monotonic() > until or any(agent.poll() is not None for agent in nodes.agents):
                    raise TimeoutError(f"step {step} was not reached; see {out}/node*.log")
                time.sleep(0.1)
            note(log, event="nodes", change=change, step=last_step(log))
            for _ in range(abs(change)):
                nodes.kill() if change < 0 else nodes.add()
        codes = nodes.wait(until)
        if any(codes):
            raise RuntimeError(f"nodes ended with {codes}; see {out}/node*.log")


def note(log: Path, **fields: object) -> None:
    with open(log, "a") as file:
        file.write(json.dumps({"time": time.time(), **fields}) + "\n")


def committed_samples(log: Path) -> dict[int, tuple[int, list[int]]]:
    """What each step was trained on in the end: world size, and the samples of all ranks, sorted.

    A step that was trained again after a kill counts as it was the last time.
    """
    last: dict[int, dict[int, dict[str, Any]]] = {}
    for entry in read_log(log):
        if entry["event"] == "resume":
            for step in [step for step in last if step > entry["step"]]:
                if entry["rank"] == 0:
                    del last[step]
        if entry["event"] == "step":
            last.setdefault(entry["step"], {})[entry["rank"]] = entry
    return {
        step: (len(ranks), sorted(index for entry in ranks.values() for index in entry["samples"]))
        for step, ranks in sorted(last.items())
    }


def lost_steps(log: Path) -> list[int]:
    """Steps that had to be trained again, at each start after the first."""
    lost: list[int] = []
    reached = 0
    for entry in read_log(log):
        if entry["event"] == "step":
            reached = max(reached, entry["step"])
        elif entry["event"] == "resume" and entry["rank"] == 0:
            if reached:
                lost.append(reached - entry["step"])
            reached = entry["step"]
    return lost


def world_sizes(log: Path) -> list[int]:
    """The world size of each start that trained at least one step."""
    sizes: list[int] = []
    for entry in read_log(log):
        if entry["event"] == "step" and (not sizes or sizes[-1] != entry["world_size"]):
            sizes.append(entry["world_size"])
    return sizes


def furthest_weight(first: Path, second: Path) -> float:
    """The largest difference between two runs' final weights, relative to the largest weight of its tensor."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as read  # DeepSpeed's own reader

    one, other = read(str(first)), read(str(second))
    if one.keys() != other.keys():
        raise ValueError(f"the two runs hold different parameters: {sorted(one.keys() ^ other.keys())}")
    pairs = [(one[name].detach(), other[name].detach()) for name in one]
    return max(float((ours - theirs).abs().max() / ours.abs().max()) for ours, theirs in pairs)


def compare(whole: Path, elastic: Path, *, save_steps: int) -> dict[str, Any]:
    """What the demonstration shows, and ``problems`` for what it was to show and did not."""
    log = elastic / "log.jsonl"
    resumes = [entry for entry in read_log(log) if entry["event"] == "resume"]
    samples = {step: seen for step, (_, seen) in committed_samples(log).items()}
    expected = {step: seen for step, (_, seen) in committed_samples(whole / "log.jsonl").items()}
    found = {
        "world_sizes": world_sizes(log),
        "steps": len(samples),
        "samples_as_uninterrupted": samples == expected and bool(samples),
        "resumes": len({(entry["tag"], entry["pid"]) for entry in resumes if entry["rank"] == 0}),
        "bit_exact_resumes": all(entry["exact"] for entry in resumes if entry["tag"] is not None),
        "lost_steps": lost_steps(log),
        "furthest_weight": furthest_weight(whole / "ckpt", elastic / "ckpt"),
    }
    problems = [what for what in ("samples_as_uninterrupted", "bit_exact_resumes") if not found[what]]
    problems += ["lost_steps"] if max(found["lost_steps"], default=0) > save_steps else []
    problems += ["furthest_weight"] if not found["furthest_weight"] <= WEIGHT_TOLERANCE else []
    return {**found, "problems": problems}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-elastic"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-steps", type=int, default=5)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for each of the two runs")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name, scenario in (("whole", ()), ("elastic", SCENARIO)):
        play(args.out / name, scenario, steps=args.steps, save_steps=args.save_steps, limit=args.limit)
    found = compare(args.out / "whole", args.out / "elastic", save_steps=args.save_steps)
    (args.out / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
