"""Functions run on ranks of one machine: new processes, a rendezvous by file, a time limit, the first traceback.

Ranks are forked from a process that has imported torch and deepspeed. Every run has new ranks, so no global state of
torch or deepspeed is passed from one run to the next. When a run ends, no process of a rank is left.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from zeroelastic.errors import signal_name
from zeroelastic.testing.rank import DEEPSPEED_MODULES, RankFailure, RankJob, preload, prepare_deepspeed, rank_main

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The seams of install() and the modules of a load take half of the rest.
PRELOADED = (
    *DEEPSPEED_MODULES,
    "zeroelastic.deepspeed.seams",
    "zeroelastic.deepspeed.wrappers",
    "zeroelastic.executors.staged",
    "zeroelastic.testing.state",
)
# When set by a launcher, these contradict the file rendezvous or the rank numbers.
_LAUNCHER_VARIABLES = {"MASTER_ADDR", "MASTER_PORT", "LOCAL_SIZE", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RUN_ID"}
# Times in seconds: to import modules; to look at ranks that say nothing; to print the stacks; to leave the process
# group; to end the pool.
_START_S = 300.0
_TICK_S = 0.5
_STACKS_S = 1.0
_LEAVE_S = 60.0
_END_S = 60.0


class RankError(RuntimeError):
    """A rank failed. ``failures`` are all failures, the cause first."""

    def __init__(self, message: str, failures: tuple[RankFailure, ...]) -> None:
        super().__init__(message, failures)
        self.failures = failures

    def __str__(self) -> str:
        return str(self.args[0])


class RankTimeoutError(RankError, TimeoutError):
    """Ranks did not finish in time; ``failures`` has the ranks that hung, with their Python stacks."""


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str = "gloo",
    **kwargs: Any,
) -> list[T]:
    """Results, by rank, of ``fn(*args, **kwargs)`` in ``world_size`` new processes: one run of a ``RankPool``.

    def total(x: int) -> int:
        t = torch.tensor(x + dist.get_rank())
        dist.all_reduce(t)
        return int(t)

    assert run_ranks(total, 3, 10) == [33, 33, 33]
    """
    with RankPool(backend=backend) as pool:
        return pool.run(fn, world_size, *args, timeout=timeout, **kwargs)


class RankPool:
    """Runs functions on ranks, without the start-up time from the second run on. One run at a time.

        with RankPool() as pool:
            for world_size in (1, 2, 3, 4):
                pool.run(train_step, world_size)

    The backend "gloo" runs on the CPU; "nccl" gives each rank its own GPU, and a new interpreter, because CUDA does not
    survive a fork. ``preload`` names modules that are imported once. Ranks have the caller's environment, working
    directory and sys.path; of a variable that is read on import, such as OMP_NUM_THREADS, the value at the first run
    counts.
    """

    def __init__(self, *, preload: Sequence[str] = (), backend: str = "gloo") -> None:
        self._preload = tuple(preload)
        self._backend = backend
        self._server: SpawnProcess | None = None

    def __enter__(self) -> RankPool:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(
        self,
        fn: Callable[..., T],
        world_size: int,
        *args: Any,
        timeout: float = 120.0,
        grace: float = 0.5,
        **kwargs: Any,
    ) -> list[T]:
        """Results, by rank, of ``fn(*args, **kwargs)`` on ``world_size`` ranks, one process group.

        torch.distributed is initialised before fn runs, through a file: no port is opened, and DeepSpeed adopts the
        process group. The variables of a launcher and DS_ACCELERATOR are set, and OMP_NUM_THREADS=1 unless the caller
        has set it. fn, its arguments and its result are pickled, so fn must be defined at the top level of a module.
        What ranks print is shown when one fails; with ZEROELASTIC_TEST_VERBOSE=1 at once. ``timeout`` is in seconds,
        without the first imports. For ``grace`` seconds after the first failure, failures of other ranks are reported
        too.

        Raises RankError with the first rank's traceback, RankTimeoutError with the stacks of the ranks that hang.
        """
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; a run needs at least one rank.")
        call = pickle.dumps((fn, args, kwargs))
        shared = self._environment() | {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        with tempfile.TemporaryDirectory(prefix="zeroelastic-ranks-") as directory:
            jobs = [
                RankJob(
                    rank=rank,
                    world_size=world_size,
                    directory=directory,
                    backend=self._backend,
                    timeout=timeout,
                    grace=grace,
                    environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    sys_path=tuple(sys.path),
                    working_directory=os.getcwd(),
                    call=call,
                )
                for rank in range(world_size)
            ]
            answer = self._request(jobs)
        if isinstance(answer, RankError):
            raise answer
        return [pickle.loads(result) for result in answer]

    def close(self) -> None:
        """End the pool's process, and the ranks of a run. A later run starts another one."""
        if self._server is not None:
            self._connection.close()
            self._server.join(_END_S)
            self._server.kill()
            self._server.join()
        self._server = None

    def _environment(self) -> dict[str, str]:
        """The environment that all ranks have: the caller's, without what a launcher of the caller set."""
        return {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            **{name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES},
            "CROSS_RANK": "0",
            "CROSS_SIZE": "1",
            "DS_ACCELERATOR": "cuda" if self._backend == "nccl" else "cpu",
        }

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        modules = () if self._backend == "nccl" else (*PRELOADED, *self._preload)
        self._server = context.Process(target=_serve, args=(theirs, modules), name="rank-pool")
        with patch.dict(os.environ, self._environment(), clear=True):
            self._server.start()
        theirs.close()

    def _request(self, jobs: list[RankJob]) -> list[bytes] | RankError:
        if self._server is None:
            self._start()
        try:
            self._connection.send(jobs)
            if not self._connection.poll(jobs[0].timeout + _START_S):
                raise TimeoutError("the pool's process, which imports modules first, gives no answer.")
            answer: list[bytes] | RankError = self._connection.recv()
            return answer
        except BaseException:
            self.close()  # the next run starts another process
            raise


def _serve(requests: Connection, modules: tuple[str, ...]) -> None:
    """The pool's process: imports modules, then serves one request at a time until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if modules:
        preload(modules)
        prepare_deepspeed()
    # A fork copies one thread only: if an import has started more, ranks are spawned.
    forks = modules and len(os.listdir("/proc/self/task")) == 1
    context = multiprocessing.get_context("fork") if forks else multiprocessing.get_context("spawn")
    with suppress(EOFError):
        while True:
            requests.send(_supervise(context, requests.recv(), requests))


@dataclass(slots=True)
class _Rank:
    """A rank process, and how its function ended: with a pickled result, or not."""

    job: RankJob
    process: BaseProcess
    connection: Connection
    end: bytes | RankFailure | None = None

    def update(self) -> None:
        """Note how the function ended, if it has. What the rank sent before it died counts."""
        code = self.process.exitcode
        try:
            if self.connection.poll():
                self.end = self.connection.recv()
                return
        except (EOFError, OSError):
            self.process.join(_TICK_S)  # it is about to end
        if code is not None:
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with status {code}"
            self.end = self.job.failure(f"{how} before its function returned", died=True)

    def kill(self) -> None:
        """Kill the rank and every process in its session, also those in other process groups."""
        pid = self.process.pid
        self.process.kill()
        self.process.join()
        while members := [int(name) for name in os.listdir("/proc") if name.isdigit() and _runs_in(int(name), pid)]:
            for member in members:
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            time.sleep(0.01)
        self.connection.close()


def _supervise(context: ForkContext | SpawnContext, jobs: list[RankJob], owner: Connection) -> list[bytes] | RankError:
    """Start one process for each job and wait for all of them; none is left afterwards.

    Returns the pickled results by rank, or the error. Raises EOFError when ``owner``, which requested the run, is gone.
    """
    deadline = time.monotonic() + jobs[0].timeout
    ranks: list[_Rank] = []
    try:
        for job in jobs:
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(job, deadline, os.getpid(), theirs))
            process.start()
            ranks.append(_Rank(job, process, ours))
            theirs.close()
        _watch(ranks, deadline + _STACKS_S, owner)
        if error := _judge(ranks):
            return error
        _let_leave(ranks)
        return [rank.end for rank in ranks if isinstance(rank.end, bytes)]
    finally:
        for rank in ranks:
            rank.kill()


def _watch(ranks: list[_Rank], deadline: float, owner: Connection) -> None:
    """Wait until all ranks have ended, time is up, or the grace after a failure is over."""
    while (pending := [rank for rank in ranks if rank.end is None]) and (remaining := deadline - time.monotonic()) > 0:
        # A process that a rank forked can keep the rank's connection open, so the ranks are also polled.
        if owner in wait([owner, *(rank.connection for rank in pending)], min(remaining, _TICK_S)):
            owner.recv()
        for rank in pending:
            rank.update()
        if any(isinstance(rank.end, RankFailure) for rank in pending):
            deadline = min(deadline, time.monotonic() + ranks[0].job.grace)


def _judge(ranks: list[_Rank]) -> RankError | None:
    """Order the failures, if there are any; without one, ranks that have not ended have hung.

    Deaths come first: they break the collectives of others, whose errors may be reported before.
    """
    kind = RankError
    if not any(isinstance(rank.end, RankFailure) for rank in ranks):
        kind = RankTimeoutError
        for rank in ranks:
            rank.end = rank.end or rank.job.failure(f"no result after {rank.job.timeout:g} s")
    failures = [rank.end for rank in ranks if isinstance(rank.end, RankFailure)]
    if not failures:
        return None
    first, *others = sorted(failures, key=lambda failure: (not failure.died, failure.moment_ns))
    lines = [f"rank {first.rank} of {len(ranks)} failed first: {first.headline}", "", first.details]
    if others:
        lines += ["", "the others:", *(f"rank {failure.rank}: {failure.headline}" for failure in others)]
    return kind("\n".join(lines), (first, *others))


def _let_leave(ranks: list[_Rank]) -> None:
    """Let all ranks exit together, because leaving the process group is collective."""
    deadline = time.monotonic() + _LEAVE_S
    for rank in ranks:
        with suppress(OSError):
            rank.connection.send(None)
    for rank in ranks:
        rank.process.join(max(deadline - time.monotonic(), 0))
        if (code := rank.process.exitcode) != 0:
            logger.warning("rank %d returned, then did not exit cleanly: %s", rank.job.rank, code)


def _runs_in(pid: int, session: int | None) -> bool:
    """Whether a process is in a session, and no zombie."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        # The files of all processes take 20 times as long.
        if os.getsid(pid) == session:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
