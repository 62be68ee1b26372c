"""The warm process of a node: it has imported what workers need, and forks one for each client that asks.

It serves the workers of one launcher, one start of the job after the other, and ends with the last of them after the
launcher has ended. A worker dies with its client, and with the warm process. Where what was imported is not what a
worker would import now, because a file or the environment has changed, the next client starts another warm process.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from zeroelastic.warm import LAUNCHER
from zeroelastic.warm.messages import Request, receive, send, shared_environment
from zeroelastic.warm.preload import ALWAYS, Sources, import_always, import_if_harmless, imports_of, source_of

logger = logging.getLogger(__name__)

_IDLE_S = 600.0
"""How long a warm process waits for the next start of a job whose launcher still runs."""
_LOOK_S = 1.0
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Server:
    """The state of a warm process: its ``workers`` are the connections to clients, by process id.

    ``refusal`` is why nothing can be forked. ``path`` is the search path without what belongs to a script, and
    ``source_directory`` where the scripts of this launcher lie, once one was started; ``to_import`` are modules.
    """

    listener: socket.socket | None
    launcher: int
    refusal: str | None = None
    process: int = field(default_factory=os.getpid)
    workers: dict[int, socket.socket] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=lambda: shared_environment(os.environ))
    sources: Sources = field(default_factory=Sources)
    path: list[str] = field(default_factory=lambda: sys.path[1:])
    source_directory: str | None = None
    looked_at: set[str] = field(default_factory=set)
    to_import: list[str] = field(default_factory=list)
    idle_s: float = 0.0

    def serve(self) -> Request | None:
        """Fork until there is nobody left to fork for: None then; in a forked worker, what it is to run."""
        with selectors.DefaultSelector() as selector:
            reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            signal.signal(signal.SIGCHLD, lambda *_: None)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)  # they are for workers: clients pass them on
            assert self.listener is not None
            selector.register(self.listener, selectors.EVENT_READ)
            selector.register(reading, selectors.EVENT_READ)
            while self.listener is not None or self.workers:
                events = selector.select(0 if self.to_import else _LOOK_S)
                for key, _ in events:
                    if key.fileobj is self.listener:
                        connection, _address = self.listener.accept()
                        request = self._answer(connection, selector)
                        if request is not None:
                            signal.set_wakeup_fd(-1)
                            os.close(reading)
                            os.close(writing)
                            return request
                    elif key.fileobj == reading:
                        with suppress(BlockingIOError):
                            os.read(reading, 1 << 16)
                    else:
                        self._forward_signal(key.data, selector)
                self._reap(selector)
                if not events:
                    self._when_idle(selector)
        return None

    def _answer(self, connection: socket.socket, selector: selectors.BaseSelector) -> Request | None:
        """Fork a worker for a client, or say why not; in the worker, its request."""
        try:
            message = receive(connection, 3)
        except OSError:
            message = None
        if message is None or len(message[1]) != 3:
            connection.close()
            return None
        request, files = Request(**message[0]), message[1]
        problem = self.refusal or self._outdated(request)
        with suppress(OSError):
            if problem is not None:
                send(connection, {"refused": problem, "again": self.refusal is None})
                if self.refusal is None:
                    self._close(selector)
        worker = -1
        if problem is None:
            gc.freeze()
            worker = os.fork()
            if worker == 0:
                self._become_worker(request, files, connection)
                return request
            self.workers[worker], self.idle_s = connection, 0.0
            selector.register(connection, selectors.EVENT_READ, worker)
            with suppress(OSError):
                send(connection, {"pid": worker})
            self._plan_imports(request)
        else:
            connection.close()
        for file in files:
            os.close(file)
        return None

    def _outdated(self, request: Request) -> str | None:
        """Why what was imported is not what this worker would import, or None."""
        wanted = shared_environment(request.environment)
        different = sorted(
            name for name in wanted.keys() | self.environment.keys() if wanted.get(name) != self.environment.get(name)
        )
        if different:
            return f"the environment is another one ({', '.join(different[:3])})"
        if self.source_directory not in (None, request.source_directory):
            return "it has served a script in another directory"
        changed = self.sources.changed()
        return f"{changed} has changed" if changed is not None else None

    def _become_worker(self, request: Request, files: list[int], connection: socket.socket) -> None:
        """Be the worker, with its files, directory, environment and processors, and nothing of the warm process."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self.process:  # the warm process has ended meanwhile
            os._exit(1)
        sys.path[:] = ["", *self.path]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for other in (connection, self.listener, *self.workers.values()):
            if other is not None:
                other.close()
        for standard, file in enumerate(files):
            os.dup2(file, standard)
        for file in files:
            if file > 2:
                os.close(file)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=stream is sys.stderr or os.isatty(1))  # type: ignore[union-attr]
        os.chdir(request.directory)
        os.umask(request.umask)
        os.sched_setaffinity(0, request.processors)
        os.environ.clear()
        os.environ.update(request.environment)
        os.environ[LAUNCHER] = f"{self.launcher}:{os.getpid()}"
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # the standard library's generator does that by itself

    def _plan_imports(self, request: Request) -> None:
        """Import what the script imports as soon as nobody waits, for the next start of the job."""
        if request.target in self.looked_at:
            return
        self.looked_at.add(request.target)
        self.source_directory = request.source_directory
        sys.path[:] = [request.source_directory, *self.path]
        target = request.target if request.is_module else os.path.join(request.directory, request.target)
        source = source_of(target, is_module=request.is_module)
        self.to_import += imports_of(source) if source is not None else []

    def _forward_signal(self, worker: int, selector: selectors.BaseSelector) -> None:
        """Pass on a signal of a client; a worker whose client is gone is killed."""
        connection = self.workers.get(worker)
        if connection is None:
            return
        try:
            message = receive(connection)
        except OSError:
            message = None
        number = signal.SIGKILL if message is None else message[0]["signal"]
        os.kill(worker, number)
        if message is None:
            selector.unregister(connection)

    def _reap(self, selector: selectors.BaseSelector) -> None:
        """Tell the clients of workers that have ended."""
        for worker in list(self.workers):
            ended, status = os.waitpid(worker, os.WNOHANG)
            if ended == 0:
                continue
            connection = self.workers.pop(worker)
            with suppress(KeyError, ValueError):
                selector.unregister(connection)
            with suppress(OSError):
                send(connection, {"ended": status})
            connection.close()

    def _when_idle(self, selector: selectors.BaseSelector) -> None:
        """Nothing happened: import one more module, or look whether this process is still of use."""
        if self.to_import:
            name = self.to_import.pop(0)
            problem = import_if_harmless(name)
            self.sources.note()
            if problem is not None:
                logger.info("not imported ahead: %s: %s", name, problem)
            return
        self.idle_s = 0.0 if self.workers else self.idle_s + _LOOK_S
        if not Path(f"/proc/{self.launcher}").exists() or self.idle_s > _IDLE_S:
            self._close(selector)

    def _close(self, selector: selectors.BaseSelector) -> None:
        """Take no more clients: the next one starts another warm process."""
        if self.listener is None:
            return
        with suppress(OSError):
            os.unlink(self.listener.getsockname())  # first: later the path may be that of the next warm process
        selector.unregister(self.listener)
        self.listener.close()
        self.listener = None


def serve_until_worker(listener: int, launcher: int, always: Sequence[str] = ALWAYS) -> Request | None:
    """Be the warm process of a launcher on a listening socket; returns in each worker, and None at the end."""
    server = Server(socket.socket(fileno=listener), launcher)
    server.refusal = import_always(always)
    server.sources.note()
    return server.serve()
