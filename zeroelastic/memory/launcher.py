"""The process that launched this worker, on this node: torchrun's agent, DeepSpeed's launcher, slurmstepd, ...

Workers of one launcher share a node's memory, and what they leave there is removed when the launcher ends.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zeroelastic.distributed.process_identity import start_of

_OF_A_WORKER = ("RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
"""Variables that a launcher sets for a worker, and a wrapper around the worker has too."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """A process by its id and its start (``start_of``), as ids are used again."""

    pid: int
    started: str

    @staticmethod
    def of(pid: int) -> Launcher:
        """The process that has this id now."""
        return Launcher(pid, start_of(pid))

    @property
    def lives(self) -> bool:
        """Whether it still runs."""
        return self.started != "" and start_of(self.pid) == self.started


def launcher() -> Launcher:
    """The launcher of this process: the nearest ancestor that is no wrapper (a shell, numactl) of this worker alone.

    A process that nobody launched is its own launcher.
    """
    if multiprocessing.parent_process() is None and "LOCAL_RANK" not in os.environ:
        return Launcher.of(os.getpid())
    return Launcher.of(_unlike(os.getppid(), os.environ))


def _unlike(pid: int, own: Mapping[str, str]) -> int:
    """The nearest of a process and its ancestors that was not started with this worker's variables."""
    wanted = {name: own.get(name) for name in _OF_A_WORKER}
    while wanted["LOCAL_RANK"] is not None and pid > 1:
        found = _environment(pid)
        if any(found.get(name) != value for name, value in wanted.items()):
            break
        pid = _parent(pid)
    return pid


def _environment(pid: int) -> dict[str, str]:
    """The variables a process was started with; none where they cannot be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 1
