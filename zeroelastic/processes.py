"""The processes that a command was started as: torchrun's, srun's, or this one alone; work is split over them by rank.

One process needs no torch. Several talk through torch.distributed with gloo, on the addresses that the launcher gave.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from zeroelastic.errors import UsageError

T = TypeVar("T")

_WAIT = timedelta(hours=6)
"""How long a process waits for one that is still moving bytes."""


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among ``size``; what is done together is done by all of them in the same order."""

    rank: int = 0
    size: int = 1

    def mine(self, count: int) -> range:
        """The numbers below ``count`` that are this process's share."""
        return range(self.rank, count, self.size)

    def gather(self, value: T) -> list[T]:
        """The value of every process, by rank. Collective; values are pickled, so keep them small."""
        if self.size == 1:
            return [value]
        from zeroelastic import agree

        return agree.gather(value)

    def settle(self, action: Callable[[], T]) -> T:
        """Run an action on every process; if it fails on any, every process raises. Collective."""
        if self.size == 1:
            return action()
        from zeroelastic import agree

        return agree.settle(action)

    def first(self, action: Callable[[], T]) -> T:
        """Run an action on rank 0; every process gets its result, which is pickled, or its error. Collective."""
        if self.size == 1:
            return action()
        from zeroelastic import agree

        result = agree.settle(lambda: action() if self.rank == 0 else None)
        return agree.broadcast(result)  # type: ignore[return-value]


@contextmanager
def launched_processes() -> Iterator[Processes]:
    """The processes of this command, connected while it lasts. Raises UsageError where a launcher left that unclear."""
    found = _find(os.environ)
    if found.size == 1:
        yield found
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=found.rank, world_size=found.size, timeout=_WAIT)
    try:
        yield found
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _find(env: os._Environ[str]) -> Processes:
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
