"""The supervisor of a run: starts the rank processes, watches them, reports how each ended, and ends them.

Invariant: when ``supervise`` returns or raises, no rank process is left.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from zeroelastic.errors import signal_name
from zeroelastic.testing.rank import STACKS_SIGNAL, Raised, RankJob, rank_main

logger = logging.getLogger(__name__)

# For this many seconds after the first failure, failures of other ranks are reported too.
_GRACE = 0.5
# An environment variable with another number of seconds, for tests of how the other ranks react.
GRACE_VARIABLE = "ZEROELASTIC_TEST_GRACE_S"
_TICK = 0.5
_OUTPUT_LINES = 20
_ENTRY = rank_main.__code__


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The failure of one rank: one line, the details (a traceback or stacks), and the last lines that it printed."""

    rank: int
    headline: str
    details: str
    output: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run: its failures in order of time, empty when every rank returned.

    ``timed_out``: the failures are ranks that hung.
    """

    failures: tuple[RankFailure, ...]
    timed_out: bool
    world_size: int


@dataclass(slots=True)
class _Rank:
    """A rank process. Its ``state`` is first starting, then running, then done, failed (``raised``) or died."""

    job: RankJob
    process: BaseProcess
    connection: Connection
    state: str = "starting"
    raised: Raised | None = None
    moment_ns: int = 0
    reaped: bool = False

    @property
    def pending(self) -> bool:
        return self.state in ("starting", "running")


class Cancelled(Exception):
    """The process that requested the run has closed its connection."""


def supervise(context: BaseContext, jobs: list[RankJob], owner: Connection | None = None) -> Outcome:
    """Start one process for each job and wait for all of them; none is left afterwards.

    Raises Cancelled when ``owner``, the connection to the process that requested the run, is closed meanwhile.
    """
    ranks: list[_Rank] = []
    try:
        deadline = time.monotonic() + jobs[0].timeout
        for job in jobs:
            ranks.append(_start(context, job))
        _watch(ranks, deadline, owner)
        outcome = _judge(ranks, jobs[0].timeout)
        if not outcome.failures:
            _release(ranks)
        return outcome
    finally:
        _end(ranks)


def _start(context: BaseContext, job: RankJob) -> _Rank:
    ours, theirs = context.Pipe()
    # Every concrete context has this attribute; the type BaseContext does not.
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=rank_main, args=(job, os.getpid(), theirs), name=f"rank{job.rank}"
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
    """Wait until all ranks have reported, time is up, or the grace after a failure is over."""
    while pending := [rank for rank in ranks if rank.pending]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return
        handles: list[Any] = [rank.connection for rank in pending] + [rank.process.sentinel for rank in pending]
        # A process that a rank forked can keep the rank's sentinel open, so the ranks are also polled.
        ready = wait(handles + ([owner] if owner is not None else []), min(remaining, _TICK))
        if owner is not None and owner in ready:
            raise Cancelled
        for rank in pending:
            _update(rank)
        if any(rank.state in ("failed", "died") for rank in ranks):
            grace = float(ranks[0].job.environment.get(GRACE_VARIABLE, _GRACE))
            deadline = min(deadline, time.monotonic() + grace)


def _update(rank: _Rank) -> None:
    """Update a rank's state. A report that it sent before it died counts."""
    dead = _is_dead(rank)
    while rank.pending and rank.connection.poll():
        try:
            message = rank.connection.recv()
        except (EOFError, OSError):
            break
        if isinstance(message, Raised):
            rank.state, rank.raised, rank.moment_ns = "failed", message, message.moment_ns
        else:
            rank.state = "running" if message == "started" else message
    if dead and rank.pending:
        rank.state = "died"
        rank.moment_ns = time.monotonic_ns()


def _judge(ranks: list[_Rank], timeout: float) -> Outcome:
    """Order the failures. Deaths come before exceptions: a rank that raised keeps its sockets, so its peers do not
    notice, while a death breaks the collectives of its peers, and their errors may be reported first.
    """
    ranks_by_time = sorted(ranks, key=lambda rank: rank.moment_ns)
    failures = [_death(rank) for rank in ranks_by_time if rank.state == "died"]
    for rank in ranks_by_time:
        if (raised := rank.raised) is not None:
            failures.append(RankFailure(rank.job.rank, raised.headline, raised.traceback, _last_output(rank.job)))
    timed_out = not failures and any(rank.pending for rank in ranks)
    if timed_out:
        failures = _hung([rank for rank in ranks if rank.pending], timeout)
    return Outcome(tuple(failures), timed_out, len(ranks))


def _death(rank: _Rank) -> RankFailure:
    code = _reap(rank)
    if code is not None and code < 0:
        headline = f"was killed by {signal_name(-code)}"
    else:
        headline = f"exited with status {code} before its function returned"
    return RankFailure(rank.job.rank, headline, _read_stacks(rank.job), _last_output(rank.job))


def _hung(ranks: list[_Rank], timeout: float) -> list[RankFailure]:
    """The failures of ranks that did not finish, each with the Python stacks of all threads."""
    for rank in ranks:
        if rank.state == "running":
            os.kill(_pid(rank), STACKS_SIGNAL)
    failures = []
    for rank in ranks:
        if rank.state == "running":
            headline = f"no result after {timeout:g} s"
            stacks = _await_stacks(rank.job) or "(no stack: the process does not react to signals)"
        else:
            headline, stacks = f"still starting after {timeout:g} s", ""
        failures.append(RankFailure(rank.job.rank, headline, stacks, _last_output(rank.job)))
    return failures


def _await_stacks(job: RankJob, patience: float = 2.0) -> str:
    """The stacks that a rank writes after the signal, once they stop growing; empty when there are none."""
    deadline = time.monotonic() + patience
    text = ""
    while time.monotonic() < deadline:
        time.sleep(0.05)
        longer = _read_stacks(job)
        if longer and longer == text:
            break
        text = longer
    return text


def _read_stacks(job: RankJob) -> str:
    """The stacks that faulthandler wrote for a rank, from the innermost frame to the rank's function."""
    return "\n\n".join(
        thread.split(f'\n  File "{_ENTRY.co_filename}", line ')[0]
        for thread in _read_text(job.file("stacks")).strip().split("\n\n")
        if not thread.startswith("Extension modules")
    )


def _last_output(job: RankJob) -> str:
    return "\n".join(_read_text(job.file("output")).splitlines()[-_OUTPUT_LINES:])


def _read_text(path: Path) -> str:
    return path.read_text(errors="backslashreplace") if path.exists() else ""


def _release(ranks: list[_Rank], patience: float = 60.0) -> None:
    """Let all ranks that are done exit together, because leaving the process group is collective."""
    for rank in ranks:
        try:
            rank.connection.send("leave")
        except OSError:
            logger.warning("rank %d was gone before it was released", rank.job.rank)
    deadline = time.monotonic() + patience
    for rank in ranks:
        while not _is_dead(rank) and (remaining := deadline - time.monotonic()) > 0:
            wait([rank.process.sentinel], min(remaining, _TICK))
        if (code := _reap(rank)) != 0:
            logger.warning("rank %d returned, then did not exit cleanly: %s", rank.job.rank, code)


def _end(ranks: list[_Rank]) -> None:
    """End the remaining processes of each rank and close the connections."""
    for rank in ranks:
        if not rank.reaped:
            _reap(rank)
        rank.process.close()
        rank.connection.close()


def _is_dead(rank: _Rank) -> bool:
    """Whether a rank has ended. It is not waited for here, so its process id is not reused."""
    try:
        return os.waitid(os.P_PID, _pid(rank), os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _reap(rank: _Rank) -> int | None:
    """End a rank and all processes that it started, then wait for it. Returns its exit code."""
    # Whenever multiprocessing starts a process, it waits for children that have ended; then the id is free.
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, _pid(rank), os.WEXITED | os.WNOHANG | os.WNOWAIT)
        _kill_session(_pid(rank))
    rank.process.join()
    rank.reaped = True
    return rank.process.exitcode


def _kill_session(pid: int) -> None:
    """Kill a rank and every process in its session, also those in other process groups.

    The rank has not been waited for, so its process id is still the id of its session.
    """
    _kill(pid)
    while others := [member for member in _members(pid) if member != pid]:
        for member in others:
            _kill(member)
        time.sleep(0.01)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _members(session: int) -> list[int]:
    """The living processes of a session."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_member(pid, session)]


def _is_member(pid: int, session: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        # The files of all processes take 20 times as long.
        if os.getsid(pid) == session:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _pid(rank: _Rank) -> int:
    assert rank.process.pid is not None
    return rank.process.pid
