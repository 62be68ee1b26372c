"""The nodes of a job that changes size in its processes: they come, are asked to leave, and die."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lifecycle.jobs import LIMIT_S, Answer, Job, Server

LIMITS = {
    "heartbeat_interval": 0.1,
    "heartbeat_timeout": 1.5,
    "last_call_timeout": 0.3,
    "failure_timeout": 20.0,
    "join_timeout": 60.0,
}


class Late(Exception):
    """A job did not do in time what it has to."""


class Nodes:
    """The store of one job, the processes of its nodes by number, and the journal that its ranks 0 write."""

    def __init__(self, server: Server, root: Path, cwd: Path, below: Path, **settings: Any) -> None:
        import torch.distributed as dist

        from zeroelastic.elastic.resize.roster import Roster

        self.root, self.journal, self.settings = root, root / "journal", settings
        self._server, self._cwd, self._below = server, cwd, below
        root.mkdir(mode=0o700, parents=True)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._roster = Roster(lambda: dist.PrefixStore("zeroelastic/job/job", self._store))
        self._roster.open()
        self.processes: dict[int, Job] = {}
        self.trains: list[int] = []
        """The nodes that take part."""

    def add(self, **differs: Any) -> int:
        """Start a node."""
        from zeroelastic.in_place import VARIABLE, InPlace

        node = self._roster.new_node()
        place = InPlace("127.0.0.1", self._store.port, "job", node, 1, 8, **LIMITS)
        variables = {VARIABLE: place.to_environment(), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        process = self._server.start(0, self._cwd, self._below, {**variables, "GLOO_SOCKET_IFNAME": "lo"})
        own = {"journal": str(self.journal), "node": str(self.root / f"node{node}")}
        process.send("worlds", **{**self.settings, **own, **differs})
        self.processes[node] = process
        return node

    def signal(self, nodes: list[int], number: int) -> None:
        """A signal to some nodes at once, which take part no more."""
        for node in nodes:
            self.processes[node].signal(0, number)
            self.trains.remove(node)

    def answer(self, node: int) -> Answer:
        """What became of a node."""
        (answer,) = self.processes[node].collect()
        return answer

    def events(self, did: str = "") -> list[dict[str, Any]]:
        """What the ranks 0 have seen, in order."""
        lines = self.journal.read_text().split("\n")[:-1] if self.journal.exists() else []
        return [event for event in map(json.loads, lines) if did in ("", event["did"])]

    def train(self, steps: int = 2) -> None:
        """Wait until the nodes that take part have trained some steps from now on. Raises Late."""
        before, size = len(self.events("step")), len(self.trains)
        self._wait(
            lambda: [event["size"] for event in self.events("step")[before:]][-steps:] == [size] * steps,
            f"{steps} steps on {size} ranks",
        )

    def end(self) -> list[Answer]:
        """Ask all nodes to leave at once, and see what becomes of them."""
        nodes = list(self.trains)
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):  # all have the signal at the same step
            for node in nodes:
                self.processes[node].signal(0, number)
        return [self.answer(node) for node in nodes]

    def close(self) -> None:
        for process in self.processes.values():
            process.end()

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not done():
            ended = {node: self.answer(node) for node in self.trains if self.processes[node].has_answered}
            if ended or time.monotonic() > deadline:
                seen = self.events()[-3:]
                raise Late(f"{what}: not within {LIMIT_S:.0f} s; {seen}; ended: {ended}")
            time.sleep(0.01)
