"""Names of processes that hold over all machines and all time, and whether the one that bears a name still runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

Life = Literal["lives", "ended", "unknown"]
"""``unknown``: it runs, or ran, on another machine or in another numbering of processes, which cannot be seen here."""


def identity(process: int) -> str:
    """The name of a process of this machine: where it is, its number and its time of start, "-" if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return f"{_place()} {process} -"
    return f"{_place()} {process} {'-' if fields[0] in 'ZX' else fields[19]}"


def life_of(name: str) -> Life:
    """Whether the process that ``identity`` gave this name still runs; a text that is no such name is unknown."""
    place, _, process = name.partition(" ")
    number = process.partition(" ")[0]
    if place != _place() or not number.isdecimal():
        return "unknown"
    now = identity(int(number))
    if now.endswith(" -") and not name.endswith(" -") and _is_hidden(int(number)):
        return "unknown"
    return "lives" if not name.endswith(" -") and now == name else "ended"


def _is_hidden(process: int) -> bool:
    """Whether a process of another user runs, of which /proc says nothing (mount option hidepid)."""
    try:
        os.kill(process, 0)
    except PermissionError:
        return not os.path.exists(f"/proc/{process}/stat")
    except (ProcessLookupError, OverflowError):
        pass
    return False


def _place() -> str:
    """A machine that runs, and a numbering of processes on it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
