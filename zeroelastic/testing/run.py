"""Functions run on ranks: new processes, a rendezvous by file, a time limit, the first traceback.

Invariant: when ``supervise`` returns or raises, no process of a rank is left.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from zeroelastic.errors import signal_name
from zeroelastic.testing.rank import RankFailure, RankJob, rank_main

logger = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_VARIABLE = "ZEROELASTIC_TEST_GRACE_S"
"""An environment variable: for so many seconds after the first failure, failures of other ranks are reported too."""

_GRACE_S = 0.5
_TICK_S = 0.5
_STACKS_S = 2.0
_LEAVE_S = 60.0
# When set by a launcher, these contradict the file rendezvous or the rank numbers.
_LAUNCHER_VARIABLES = {"MASTER_ADDR", "MASTER_PORT", "LOCAL_SIZE", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RUN_ID"}


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
    backend: str | None = None,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[T]:
    """Results, by rank, of ``fn(*args, **kwargs)`` run in ``world_size`` new processes, one process group.

    torch.distributed is initialised before fn runs, through a file in a private directory: no port is opened, and
    ``deepspeed.initialize`` and ``deepspeed.init_distributed`` adopt the process group. RANK, LOCAL_RANK, WORLD_SIZE,
    LOCAL_WORLD_SIZE, DS_ACCELERATOR and OMP_NUM_THREADS=1 are set; ``env`` adds to them or overrides them. ``backend``
    None or "gloo" runs on the CPU, on every machine; "nccl" gives each rank its own GPU. fn, its arguments and its
    result are pickled, so fn must be defined at the top level of a module; tensors may be among them. The output of the
    ranks is shown when one fails; with ZEROELASTIC_TEST_VERBOSE=1 it is shown at once. ``timeout`` is in seconds and
    includes the start of the processes.

        def total(x: int) -> int:
            t = torch.tensor(x + dist.get_rank())
            dist.all_reduce(t)
            return int(t)

        assert run_ranks(total, 3, 10) == [33, 33, 33]

    Raises RankError with the first rank's traceback when one fails, RankTimeoutError with the stacks of the
    ranks that hang, TypeError when something cannot be pickled, ValueError when the machine lacks the GPUs.
    """
    with rank_jobs(fn, args, kwargs, world_size, timeout=timeout, backend=backend, env=env) as jobs:
        return results_of(jobs, supervise(multiprocessing.get_context("spawn"), jobs))


def results_of(jobs: list[RankJob], error: RankError | None) -> list[Any]:
    """The ranks' results, by rank, unless ``supervise`` returned an error, which is raised."""
    if error is not None:
        raise error
    return [pickle.loads(job.file("result").read_bytes()) for job in jobs]


def gpus_available() -> int:
    """The number of GPUs that ranks of a NCCL run can use: 0 without CUDA, NCCL or a device::

    pytest.mark.skipif(gpus_available() < 2, reason="needs 2 GPUs")
    """
    import torch

    usable = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    return torch.cuda.device_count() if usable else 0


@contextmanager
def rank_jobs(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    world_size: int,
    *,
    timeout: float,
    backend: str | None,
    env: Mapping[str, str] | None,
) -> Iterator[list[RankJob]]:
    """The jobs of one run, by rank, and for so long its private directory with the pickled call.

    Raises ValueError when world size, backend or GPUs do not fit, TypeError when the call cannot be pickled.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; a run needs at least one rank.")
    backend = backend or "gloo"
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend is {backend!r}; known are 'gloo' (CPU) and 'nccl' (one GPU a rank).")
    if backend == "nccl" and gpus_available() < world_size:
        raise ValueError(f"backend 'nccl' needs a GPU per rank: {world_size} ranks, {gpus_available()} GPUs available.")
    try:
        call = pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"{fn!r} and its arguments cannot be sent to another process: {error}. Ranks are processes of their own: "
            "define functions and classes at the top level of a module (no lambda, no nested function) and pass values "
            "that pickle."
        ) from error
    shared = rank_environment(backend) | {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    with tempfile.TemporaryDirectory(prefix="zeroelastic-ranks-") as directory:
        (Path(directory) / "call").write_bytes(call)
        yield [
            RankJob(
                rank=rank,
                world_size=world_size,
                directory=directory,
                backend=backend,
                timeout=timeout,
                environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})},
                sys_path=tuple(sys.path),
                working_directory=os.getcwd(),
            )
            for rank in range(world_size)
        ]


def rank_environment(backend: str) -> dict[str, str]:
    """The environment that all ranks have: the caller's, without what a launcher of the caller set."""
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    accelerator = "cuda" if backend == "nccl" else "cpu"
    return environment | {
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "DS_ACCELERATOR": accelerator,
        "OMP_NUM_THREADS": "1",
    }


class Cancelled(Exception):
    """The process that requested the run has cancelled it, or ended."""


@dataclass(slots=True)
class _Rank:
    """A rank process. Its function ``ended`` well if it has no ``failure``."""

    job: RankJob
    process: BaseProcess
    connection: Connection
    ended: bool = False
    failure: RankFailure | None = None

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


def supervise(context: BaseContext, jobs: list[RankJob], owner: Connection | None = None) -> RankError | None:
    """Start one process for each job and wait for all of them; none is left afterwards.

    Returns the error that says which ranks failed, or hung. Raises Cancelled when ``owner``, the connection to the
    process that requested the run, sends anything or is closed meanwhile.
    """
    deadline = time.monotonic() + jobs[0].timeout
    ranks: list[_Rank] = []
    try:
        for job in jobs:
            ranks.append(_start(context, job, deadline))
        _watch(ranks, deadline, owner)
        error = _judge(ranks)
        if error is None:
            _let_leave(ranks)
        return error
    finally:
        for rank in ranks:
            _kill(rank)


def _start(context: BaseContext, job: RankJob, deadline: float) -> _Rank:
    ours, theirs = context.Pipe()
    # Every concrete context has this attribute; the type BaseContext does not.
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=rank_main, args=(job, deadline, os.getpid(), theirs), name=f"rank{job.rank}"
    )
    with child_environment(job.environment):
        process.start()
    theirs.close()
    return _Rank(job, process, ours)


@contextmanager
def child_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Replace os.environ, so that a child process has its variables before it imports modules that read them."""
    saved = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environment)
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _watch(ranks: list[_Rank], deadline: float, owner: Connection | None) -> None:
    """Wait until all ranks have ended, time is up, or the grace after a failure is over."""
    grace_s = float(ranks[0].job.environment.get(GRACE_VARIABLE, _GRACE_S))
    while pending := [rank for rank in ranks if not rank.ended]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return
        # A process that a rank forked can keep the rank's connection open, so the ranks are also polled.
        handles = [rank.connection for rank in pending] + ([owner] if owner is not None else [])
        if owner in wait(handles, min(remaining, _TICK_S)):
            raise Cancelled
        for rank in pending:
            _update(rank)
        if any(rank.failure for rank in ranks):
            deadline = min(deadline, time.monotonic() + grace_s)


def _update(rank: _Rank) -> None:
    """Note how a rank ended, if it has. A report that it sent before it died counts."""
    code = _exit_code(rank)
    try:
        if rank.connection.poll():
            rank.failure = rank.connection.recv()
            rank.ended = True
            return
    except (EOFError, OSError):
        time.sleep(0.01)  # it is about to end
    if code is not None:
        headline = f"exited with status {code} before its function returned"
        if code < 0:
            headline = f"was killed by {signal_name(-code)}"
        rank.failure = RankFailure(
            rank.job.rank, headline, rank.job.with_output(_stacks(rank.job)), time.monotonic_ns(), died=True
        )
        rank.ended = True


def _exit_code(rank: _Rank) -> int | None:
    """The exit code of a rank that has ended, negative for a signal.

    The process is not waited for, so its id is not used again while it is that of its session.
    """
    try:
        ended = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # multiprocessing waits for children that have ended whenever it starts one
        return rank.process.exitcode
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _judge(ranks: list[_Rank]) -> RankError | None:
    """Order the failures. Deaths come before exceptions: a rank that raised keeps its sockets, so its peers do not
    notice, while a death breaks the collectives of its peers, and their errors may be reported first.
    """
    failures = sorted(
        (rank.failure for rank in ranks if rank.failure is not None),
        key=lambda failure: (not failure.died, failure.moment_ns),
    )
    if failures:
        first, *others = failures
        lines = [f"rank {first.rank} of {len(ranks)} failed first: {first.headline}"]
        lines += ["", first.details] if first.details else []
        if others:
            lines += ["", "the others:", *(f"rank {failure.rank}: {failure.headline}" for failure in others)]
        return RankError("\n".join(lines), tuple(failures))
    hung = [rank.job for rank in ranks if not rank.ended]
    if not hung:
        return None
    lines = [f"of {len(ranks)} ranks these did not finish: {', '.join(str(job.rank) for job in hung)}"]
    for job in hung:
        headline = f"no result after {job.timeout:g} s"
        failures.append(RankFailure(job.rank, headline, job.with_output(_await_stacks(job)), time.monotonic_ns()))
        lines += ["", f"rank {job.rank}: {headline}", failures[-1].details]
    return RankTimeoutError("\n".join(lines), tuple(failures))


def _await_stacks(job: RankJob) -> str:
    """The stacks that a rank writes at the deadline, once they stop growing."""
    deadline = time.monotonic() + _STACKS_S
    before, text = "", _stacks(job)
    while (not text or text != before) and time.monotonic() < deadline:
        time.sleep(0.05)
        before, text = text, _stacks(job)
    return text or "(no stack: the process is stopped, or has not begun)"


def _stacks(job: RankJob) -> str:
    """The stacks that faulthandler wrote for a rank, from the innermost frame to the rank's function."""
    entry = f'\n  File "{rank_main.__code__.co_filename}", line '
    threads = job.read("stacks").strip().split("\n\n")
    return "\n\n".join(thread.split(entry)[0] for thread in threads if not thread.startswith("Extension modules"))


def _let_leave(ranks: list[_Rank]) -> None:
    """Let all ranks exit together, because leaving the process group is collective."""
    deadline = time.monotonic() + _LEAVE_S
    for rank in ranks:
        with suppress(OSError):
            rank.connection.send(None)
    for rank in ranks:
        while (code := _exit_code(rank)) is None and (remaining := deadline - time.monotonic()) > 0:
            wait([rank.process.sentinel], min(remaining, _TICK_S))
        if code != 0:
            logger.warning("rank %d returned, then did not exit cleanly: %s", rank.job.rank, code)


def _kill(rank: _Rank) -> None:
    """Kill a rank and every process in its session, also those in other process groups, and wait for the rank."""
    pid = rank.pid
    rank.process.kill()
    while members := [int(name) for name in os.listdir("/proc") if name.isdigit() and _runs_in(int(name), pid)]:
        for member in members:
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        time.sleep(0.01)
    rank.process.join()
    rank.process.close()
    rank.connection.close()


def _runs_in(pid: int, session: int) -> bool:
    """Whether a process is in a session, and no zombie."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        # The files of all processes take 20 times as long.
        if os.getsid(pid) == session:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
