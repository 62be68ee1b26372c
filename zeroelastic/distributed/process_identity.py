"""Names of processes, unique over all machines and boots, and whether the process of a name still runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

Life = Literal["lives", "ended", "unknown"]
"""``unknown``: the process is, or was, on another machine or in another PID namespace, which cannot be seen here."""


def identity(process: int) -> str:
    """The name of a process of this machine: machine, process id and start time, which is "-" if it has ended."""
    return f"{machine()} {process} {start_of(process) or '-'}"


def start_of(process: int) -> str:
    """When a process of this machine started, in the kernel's ticks (proc(5), stat, field 22); "" if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # a zombie has ended


def life_of(name: str) -> Life:
    """Whether the process that ``identity`` gave this name still runs; "unknown" for a text that is no such name."""
    where, _, process = name.partition(" ")
    number = process.partition(" ")[0]
    if where != machine() or not number.isdecimal():
        return "unknown"
    now = identity(int(number))
    if now.endswith(" -") and not name.endswith(" -") and is_hidden(int(number)):
        return "unknown"
    return "lives" if not name.endswith(" -") and now == name else "ended"


def is_hidden(process: int) -> bool:
    """Whether a process of another user runs that /proc does not show (mount option hidepid)."""
    try:
        os.kill(process, 0)
    except PermissionError:
        return not os.path.exists(f"/proc/{process}/stat")
    except (ProcessLookupError, OverflowError):
        pass
    return False


def machine() -> str:
    """The name of this machine's current boot and of this process's PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
