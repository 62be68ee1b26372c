"""Jobs of real ranks, driven command by command: forked from one process that has imported everything.

    with Server() as server, server.start(2, cwd, below) as job:
        answers = job.call("train", steps=1, salt=0)

A process that dies says so by its exit code; one that gives no answer in time has hung, which is an answer too.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from zeroelastic.testing.pool import PRELOADED as POOL_PRELOADED
from zeroelastic.testing.rank import RankJob, become_rank, preload, prepare_deepspeed

LIMIT_S = 60.0
"""No action may take longer on a rank."""

GRACE_S = 20.0
"""So long may a rank that lives take to notice that another one is gone."""

STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Makes a rank write the stacks of its threads. User code and launchers use SIGUSR1, SIGUSR2 and SIGTERM."""

PRELOADED = (
    *POOL_PRELOADED,
    "training",
    "lifecycle.rank",
    "typer.testing",
    "zeroelastic.cli.app",
    "zeroelastic.elastic",
    "zeroelastic.elastic.memory.checkpoints",
    "zeroelastic.elastic.memory.resume",
    "zeroelastic.deepspeed.load.tag_choice",
    "zeroelastic.verbs.verify.verify",
    "zeroelastic.runs.verdicts",
)


@dataclass(frozen=True)
class Answer:
    """What became of a command on one rank: "ok", "error", "exit" or "hang"."""

    kind: str
    value: Any = None
    error: str = ""
    names: tuple[str, ...] = ()
    code: int | None = None

    def __str__(self) -> str:
        return {"ok": f"ok {self.value}", "exit": f"exit code {self.code}", "hang": f"HANG {self.error}"}.get(
            self.kind, f"{self.names[:1]} {self.error}"
        )


@dataclass
class _Process:
    pid: int
    connection: Connection
    spec: RankJob
    code: int | None = None


@dataclass
class Job:
    """N ranks, or one process without a group for tools (``world_size`` 0)."""

    server: Server
    world_size: int
    processes: list[_Process] = field(default_factory=list)
    net: str = "G"
    """Which of the engines of these processes the commands are for."""

    def send(self, name: str, **kwargs: Any) -> None:
        for process in self.processes:
            if process.code is None:
                with suppress(OSError):
                    process.connection.send((self.net, name, kwargs))

    def send_to(self, rank: int, name: str, **kwargs: Any) -> None:
        self.processes[rank].connection.send((self.net, name, kwargs))

    def collect(self, limit_s: float = LIMIT_S) -> list[Answer]:
        """One answer of each rank; when one is gone, the others have ``GRACE_S`` more."""
        found: dict[int, Answer] = {}
        deadline = time.monotonic() + limit_s
        while True:
            for rank, process in enumerate(self.processes):
                if rank not in found and (answer := self._answer(process)) is not None:
                    found[rank] = answer
                    if answer.kind == "exit":
                        deadline = min(deadline, time.monotonic() + GRACE_S)
            missing = [process for rank, process in enumerate(self.processes) if rank not in found]
            if not missing:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                for rank, process in enumerate(self.processes):
                    if rank not in found:
                        found[rank] = Answer("hang", error=_stacks(process))
                break
            wait([process.connection for process in missing if process.code is None], left)
        return [found[rank] for rank in range(len(self.processes))]

    def call(self, name: str, **kwargs: Any) -> list[Answer]:
        self.send(name, **kwargs)
        return self.collect()

    def signal(self, rank: int, number: int) -> None:
        if self.processes[rank].code is None:
            os.kill(self.processes[rank].pid, number)

    def end(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            if process.code is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.connection.close()
            if process.code is None:
                process.code = self.server.reap(process.pid)

    def _answer(self, process: _Process) -> Answer | None:
        if process.code is not None:
            return Answer("exit", code=process.code)
        try:
            if not process.connection.poll():
                return None
            message = process.connection.recv()
        except (EOFError, OSError):
            process.code = self.server.reap(process.pid)
            return Answer("exit", code=process.code)
        if message[0] == "ok":
            return Answer("ok", message[1])
        _, names, text, trace = message
        return Answer("error", trace, text, tuple(names))


class Server:
    """The process that ranks are forked from."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name="ranks")
        self._process.start()
        theirs.close()
        self._number = 0

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def start(self, world_size: int, cwd: Path, below: Path, variables: Mapping[str, str] | None = None) -> Job:
        """Fork the ranks; returns when they have a process group, or one process without, with more ``variables``."""
        self._number += 1
        directory = self.scratch / f"job{self._number}"
        directory.mkdir(parents=True)
        key = secrets.token_bytes(16)
        with Listener(str(directory / "socket"), "AF_UNIX", backlog=8, authkey=key) as listener:
            specs = [
                RankJob(
                    rank=rank,
                    world_size=world_size,
                    directory=str(directory),
                    backend="gloo",
                    timeout=LIMIT_S,
                    environment={
                        **os.environ,
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(world_size),
                        "LOCAL_WORLD_SIZE": str(world_size),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": "0",
                    }
                    if world_size
                    else {**os.environ, **(variables or {})},
                    sys_path=tuple(sys.path),
                    working_directory=str(cwd),
                )
                for rank in range(max(world_size, 1))
            ]
            pids = self._ask(("start", specs, key, str(below)))
            job = Job(self, world_size)
            by_rank: dict[int, Connection] = {}
            for _ in specs:
                connection = listener.accept()
                by_rank[connection.recv()] = connection
        job.processes = [_Process(pid, by_rank[spec.rank], spec) for pid, spec in zip(pids, specs, strict=True)]
        return job

    @contextmanager
    def tool(self, cwd: Path, below: Path) -> Iterator[Job]:
        job = self.start(0, cwd, below)
        try:
            yield job
        finally:
            job.end()

    def reap(self, pid: int) -> int:
        code: int = self._ask(("reap", pid))
        return code

    def _ask(self, request: tuple[Any, ...]) -> Any:
        self._connection.send(request)
        if not self._connection.poll(300):
            raise RuntimeError("the process that ranks are forked from gives no answer")
        return self._connection.recv()


def _stacks(process: _Process) -> str:
    """The Python stacks of a process that has hung."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, STACKS_SIGNAL)
    time.sleep(0.5)
    path = process.spec.output
    return path.read_text(errors="backslashreplace")[-4000:] if path.exists() else ""


def _serve(requests: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preload(PRELOADED)
    prepare_deepspeed()
    while True:
        try:
            request = requests.recv()
        except EOFError:
            return
        if request[0] == "reap":
            _, status = os.waitpid(request[1], 0)
            requests.send(os.waitstatus_to_exitcode(status))
            continue
        _, specs, key, below = request
        parent, pids = os.getpid(), []
        for spec in specs:
            pid = os.fork()
            if pid == 0:
                requests.close()
                _rank_main(spec, parent, key, below)
            pids.append(pid)
        requests.send(pids)


def _rank_main(spec: RankJob, parent: int, key: bytes, below: str) -> None:
    """A forked process, from its first instruction to its last; never returns."""
    code = 1
    try:
        become_rank(spec, parent)
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
        from lifecycle import rank

        connection = Client(f"{spec.directory}/socket", "AF_UNIX", authkey=key)
        connection.send(spec.rank)
        rank.serve(connection, below)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
