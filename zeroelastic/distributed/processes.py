"""The processes that share the work of a command by rank: this one alone, or on request all of one torchrun or srun.

One process needs no torch. Several talk through torch.distributed with gloo, on the addresses that the launcher gave.
A launcher's variables alone are no sign of it: a command that a training script starts inherits them from its rank.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

from zeroelastic.errors import UsageError
from zeroelastic.extras import require_torch

T = TypeVar("T")

_WAIT = timedelta(hours=6)
"""How long a process waits for one that is still moving bytes."""

FIND_SECONDS = "ZEROELASTIC_FIND_SECONDS"
"""The environment variable that says for how long processes look for each other; 60 s without it."""

_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among ``size``; all of them call the collective methods in the same order."""

    rank: int = 0
    size: int = 1

    def mine(self, count: int) -> range:
        """The numbers below ``count`` that are this process's share."""
        return range(self.rank, count, self.size)

    def all_gather(self, value: T) -> list[T]:
        """The value of every process, by rank. Collective; values are pickled, so keep them small."""
        return [value] if self.size == 1 else _collective().all_gather(value)

    def all_or_raise(self, action: Callable[[], T]) -> T:
        """Run an action on every process; if it fails on any, every process raises. Collective."""
        return action() if self.size == 1 else _collective().all_or_raise(action)

    def run_on_rank0(self, action: Callable[[], T]) -> T:
        """Run an action on rank 0; every process gets its result, which is pickled, or its error. Collective."""
        result = self.all_or_raise(lambda: action() if self.rank == 0 else None)
        return result if self.size == 1 else _collective().broadcast(result)  # type: ignore[return-value]


def _collective() -> Any:
    """The module, which imports torch: one process alone does without."""
    from zeroelastic.distributed import collective

    return collective


def num_launched() -> int:
    """The number of processes that the launcher of this process, or of its parent job, started; 1 without one."""
    sizes = [os.environ.get(name, "") for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")]
    return next((int(size) for size in sizes if size.isdecimal()), 1)


@contextmanager
def launched_processes(*, distributed: bool) -> Iterator[Processes]:
    """This process alone, or with ``distributed`` all that the launcher started, connected while it lasts.

    Raises UsageError without a launcher, or where the processes do not find each other in a minute (FIND_SECONDS).
    A process that gets a signal ends at once, also while it waits for the others.
    """
    if not distributed:
        yield Processes()
        return
    found = _find(os.environ)
    if found.size == 1:
        yield found
        return
    require_torch("--distributed")
    import torch.distributed as dist

    with _signals_obeyed():
        store = _meet(found)
        dist.init_process_group("gloo", store=store, rank=found.rank, world_size=found.size, timeout=_WAIT)
        try:
            yield found
            dist.barrier()
        finally:
            dist.destroy_process_group()


def _meet(found: Processes) -> Any:
    """The store of these processes, for this command, when all of them are there. Raises UsageError."""
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import DistError
    from torch.distributed.rendezvous import rendezvous

    limit_s = _find_seconds()
    end = time.monotonic() + limit_s
    there: list[int] = []
    try:
        limit = timedelta(seconds=limit_s)
        store, _, _ = next(rendezvous("env://", found.rank, found.size, timeout=limit))
        number = store.add(f"zeroelastic/commands/{found.rank}", 1)  # one job may start several, one after the other
        store = PrefixStore(f"zeroelastic/{number}", store)
        store.set(f"here/{found.rank}", "")
        for rank in range(found.size):
            store.wait([f"here/{rank}"], timedelta(seconds=max(0.1, end - time.monotonic())))
            there.append(rank)
    except DistError as error:
        first_line = str(error).partition("\n")[0].rstrip(".")
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        what = f"rank {len(there)} is not here" if there else f"they cannot meet at {where} ({first_line})"
        raise UsageError(
            f"--distributed: {found.size} processes did not find each other in {limit_s:g} s: {what}. Start all of "
            f"them by one torchrun or srun, or leave --distributed out; {FIND_SECONDS} sets the time."
        ) from None
    return store


def _find_seconds() -> float:
    text = os.environ.get(FIND_SECONDS, "60")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{FIND_SECONDS} is {text!r}, not a positive number of seconds. Set it to one, such as 300.")
    return seconds


@contextmanager
def _signals_obeyed() -> Iterator[None]:
    """While it lasts, a signal that has a handler ends this process also where C++ code keeps the handler from running.

    Waiting for another process is such code: Python runs handlers between its own instructions only.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    obeyed_at = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal obeyed_at
        obeyed_at = time.monotonic()
        handler = before[signal.Signals(number)]
        assert callable(handler)
        handler(number, frame)

    def watch() -> None:
        while number := os.read(came, 1):
            since = time.monotonic() - 1.0
            time.sleep(_GRACE_S)
            if number[0] in numbers and obeyed_at < since:
                os._exit(128 + number[0])
        os.close(came)

    came, comes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(came, True)
    previous = signal.set_wakeup_fd(comes, warn_on_full_buffer=False)
    for number in numbers:
        if callable(before[number]):
            signal.signal(number, handle)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        for number in numbers:
            if callable(before[number]):
                signal.signal(number, before[number])
        signal.set_wakeup_fd(previous)
        os.close(comes)


def _find(env: os._Environ[str]) -> Processes:
    if "WORLD_SIZE" not in env and "SLURM_STEP_NUM_TASKS" not in env:
        raise UsageError(
            "--distributed: neither torchrun nor srun has started this process. Start the command with one of them, "
            "or leave the option out."
        )
    if int(env.get("WORLD_SIZE", "1")) > 1:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise UsageError(f"WORLD_SIZE is set and {', '.join(missing)} is not. Start several processes by torchrun.")
        return Processes(int(env["RANK"]), int(env["WORLD_SIZE"]))
    size = int(env.get("SLURM_STEP_NUM_TASKS", "1"))  # set by srun alone, not inside a batch script
    if size == 1 or "WORLD_SIZE" in env:
        return Processes()
    if "SLURM_PROCID" not in env:
        raise UsageError("SLURM_STEP_NUM_TASKS is set and SLURM_PROCID is not. Start several processes by srun.")
    env.setdefault("MASTER_ADDR", first_host(env.get("SLURM_STEP_NODELIST", "localhost")))
    job = int(env.get("SLURM_JOB_ID", "0")) * 31 + int(env.get("SLURM_STEP_ID", "0"))
    env.setdefault("MASTER_PORT", str(20000 + job % 20000))
    return Processes(int(env["SLURM_PROCID"]), size)


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: ``gpu[003-007,9]`` begins with ``gpu003``."""
    match = re.match(r"([^,\[]+)(?:\[([^\]-]+?)(?:[-,][^\]]*)?\]([^,\[]*))?", nodes)
    if match is None:
        raise UsageError(f"{nodes!r} is not a list of hosts. Set MASTER_ADDR.")
    return match[1] + (match[2] or "") + (match[3] or "")
