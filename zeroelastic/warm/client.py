"""A worker as its launcher sees it: it waits for the process that was forked for it, and ends as that one ends."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from zeroelastic.distributed.process_identity import start_of
from zeroelastic.warm.messages import Request, receive, send, shared_environment

FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
    signal.SIGWINCH,
)  # fmt: skip
"""Signals that a launcher, a scheduler or a person may send to a worker."""

_TRIES = 3
_BACKLOG = 1024


def run_warm(request: Request, server_command: Sequence[str], launcher: int | None = None) -> str:
    """Let the warm process of a launcher run a worker; ends this process as the worker ends.

    The launcher is this process's parent unless it is given. Where it has no warm process, ``server_command``, followed
    by the number of a listening socket and the launcher's process id, starts one; it ends some time after the launcher.
    Returns only where nothing was run, with the reason.
    """
    launcher = os.getppid() if launcher is None else launcher
    why = "it ended before it could start a worker"
    for _ in range(_TRIES):
        try:
            connection = _connect(launcher, server_command, request)
        except OSError as error:
            return f"{error.strerror or error} ({error.filename or 'the socket of the warm process'})"
        with connection:
            answer = _ask(connection, request)
            if answer is None:
                continue
            if "pid" in answer:
                _wait(connection)
            why = str(answer["refused"])
            if not answer["again"]:
                break
    return why


def _ask(connection: socket.socket, request: Request) -> dict[str, Any] | None:
    """The answer to a request; None where the warm process ended meanwhile."""
    try:
        send(connection, request.to_message(), (0, 1, 2))
        answer = receive(connection)
    except OSError:
        return None
    return None if answer is None else answer[0]


def _wait(connection: socket.socket) -> NoReturn:
    """Pass signals on until the other process ends; then end in the same way."""

    def forward(number: int, _: object) -> None:
        with suppress(OSError):  # it has ended
            send(connection, {"signal": number})

    for forwarded in FORWARDED:
        signal.signal(forwarded, forward)
    try:
        answer = receive(connection)
    except OSError:
        answer = None
    if answer is None:
        sys.stderr.write("zeroelastic.run --warm: the warm process was killed, and this worker with it\n")
        sys.stderr.flush()
        os._exit(1)
    status = answer[0]["ended"]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core is that of the other process
        with suppress(OSError):  # SIGKILL
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def _connect(launcher: int, server_command: Sequence[str], request: Request) -> socket.socket:
    """A connection to the warm process of a launcher, started now where there is none. Raises OSError."""
    path = _directory() / f"{launcher}-{start_of(launcher)}"
    with _alone(path):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(os.fspath(path))
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
        _clean(path.parent)
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(os.fspath(path))
            listener.listen(_BACKLOG)
            with open(f"{path}.log", "w") as log:
                subprocess.Popen(
                    [*server_command, str(listener.fileno()), str(launcher)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                    env=shared_environment(request.environment),
                )
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(os.fspath(path))
        return connection


def _directory() -> Path:
    """Where this user's sockets are, which nobody else may enter. Raises OSError."""
    directory = Path(tempfile.gettempdir()) / f"zeroelastic-warm-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(1, "is not a directory that this user alone may enter", os.fspath(directory))
    return directory


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other worker of the launcher connects or starts a warm process meanwhile."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _clean(directory: Path) -> None:
    """Remove what launchers that have ended have left."""
    for entry in os.listdir(directory):
        process, _, start = entry.partition(".")[0].partition("-")
        if process.isdecimal() and start_of(int(process)) != start:
            (directory / entry).unlink(missing_ok=True)
