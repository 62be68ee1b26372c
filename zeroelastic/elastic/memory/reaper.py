"""A small process that removes a job's shared memory when its launcher has ended, in whatever way.

It is started by a worker, in its own session, and becomes a child of init: a kill of all processes that descend
from the launcher does not reach it. It imports nothing but the standard library: a few megabytes.

Run as a file: ``python -I -S reaper.py PID START DIRECTORY``.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from typing import Any

LOCK_NAME = "reaper.lock"
"""Locked while the process lives; it holds its machine's name (``process_identity.machine``)."""
_IDENTITY = os.path.join(os.path.dirname(__file__), "../../distributed/process_identity.py")
"""A module that imports the standard library alone; the package is not on the path of this process."""
_POLL_S = 0.5
_ONCE_MORE_S = 1.0


def start_reaper(pid: int, started: str, directory: str) -> None:
    """Start the process for a launcher and its directory, unless there is one; it waits when this returns.

    Raises OSError.
    """
    null = os.open(os.devnull, os.O_RDWR)
    try:
        starting = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", os.path.abspath(__file__), str(pid), started, directory],
            {"PATH": os.defpath},
            file_actions=[(os.POSIX_SPAWN_DUP2, null, number) for number in (0, 1, 2)],
            setsid=True,
        )
    finally:
        os.close(null)
    with suppress(ChildProcessError):  # a program that ignores SIGCHLD
        os.waitpid(starting, 0)


def main(pid: int, started: str, directory: str) -> None:
    """Wait for the end of a process, and remove a directory; ends at once where another process does so already."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _close_inherited()
    os.chdir("/")
    try:
        lock = os.open(os.path.join(directory, LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    identity = runpy.run_path(_IDENTITY)
    with suppress(OSError):
        os.pwrite(lock, identity["machine"]().encode(), 0)
    if os.fork() != 0:
        os._exit(0)  # the lock stays with the child
    _wait(pid, started, identity)
    shutil.rmtree(directory, ignore_errors=True)
    time.sleep(_ONCE_MORE_S)  # workers that outlived the launcher may have been writing
    shutil.rmtree(directory, ignore_errors=True)


def _close_inherited() -> None:
    """Close the worker's files. Those of gloo pass through exec: its peers would not notice the worker's death."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):
                os.close(int(name))


def _wait(pid: int, started: str, identity: dict[str, Any]) -> None:
    """Wait until there is no such process; one that waits for its parent to take notice has ended."""
    try:
        process = os.pidfd_open(pid)
    except (OSError, AttributeError):
        process = -1
    while identity["start_of"](pid) == started and (started or identity["is_hidden"](pid)):
        if process >= 0:
            select.select([process], [], [])
            return
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
