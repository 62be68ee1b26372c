"""A ``python`` that starts in milliseconds: it forks from a process that has imported torch and deepspeed.

Commands of the documentation and of the examples start launchers and ranks, of which each one imports for six seconds
what the last one imported. ``executable()`` is the path of a program that takes the arguments of ``python`` (a script,
``-m``, ``-c``) and behaves as that does: its files, environment, directory, signals and exit status are those of the
process that runs. ``torchrun`` starts its ranks by it where PYTHON_EXEC says so, and so do some benchmarks. zeroelastic
itself is not imported before the fork. tests/project/test_docs.py runs one page by the real one.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import types
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1

# The program itself: it sends what it was started with, passes signals on, and ends as the process did.
_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({socket!r})
    request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "little")], [0, 1, 2])
    server.sendall(request)
    pid = int.from_bytes(server.recv(8), "little")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    status = int.from_bytes(server.recv(8) or bytes([0, 1]), "little")
if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.waitstatus_to_exitcode(status))
"""

_programs: dict[tuple[str, ...], str] = {}


def executable(*preload: str) -> str:
    """The path of the program; its process is started when it is asked for first. ``preload`` are more modules."""
    if preload not in _programs:
        directory = tempfile.mkdtemp(prefix="warm-python-")
        program = Path(directory, "python")
        address = str(Path(directory, "socket"))
        program.write_text(_CLIENT.format(python=sys.executable, socket=address))
        program.chmod(0o755)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen(64)
        # Until the imports are done, a command waits in the listener's queue.
        command = [sys.executable, __file__, str(listener.fileno()), str(os.getpid()), *preload]
        server = subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL)
        listener.close()
        atexit.register(_end, server, directory, os.getpid())
        _programs[preload] = str(program)
    return _programs[preload]


def _end(server: subprocess.Popen[bytes], directory: str, owner: int) -> None:
    if os.getpid() != owner:
        return
    server.kill()
    server.wait()
    for name in ("python", "socket"):
        with suppress(FileNotFoundError):
            Path(directory, name).unlink()
    Path(directory).rmdir()


@dataclass(frozen=True)
class _Command:
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    files: list[int]


def _serve(listener: socket.socket) -> _Command:
    """Forks a process for each command. Returns in the forked ones, with the command."""
    loop = selectors.DefaultSelector()
    loop.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in loop.select():
            if key.fileobj is listener:
                client, _ = listener.accept()
                command = _receive(client)
                if command is None:
                    client.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    client.close()
                    listener.close()
                    loop.close()
                    return command
                for file in command.files:
                    os.close(file)
                with suppress(OSError):  # a program that was killed since: its file is ready below
                    client.sendall(pid.to_bytes(8, "little"))
                # The process has ended, or the program was killed and takes the process with it.
                ended = os.pidfd_open(pid)
                loop.register(ended, selectors.EVENT_READ, (pid, ended, client))
                loop.register(client, selectors.EVENT_READ, (pid, ended, client))
            # Both of a command may be ready at once, and the numbers of its files may be another command's by then.
            elif loop.get_map().get(key.fd) is key:
                pid, ended, client = key.data
                if key.fileobj is client:
                    os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                loop.unregister(ended)
                loop.unregister(client)
                with suppress(OSError):
                    client.sendall(status.to_bytes(8, "little"))
                os.close(ended)
                client.close()


def _receive(client: socket.socket) -> _Command | None:
    """The command that a program sends; None where the program was killed before it had sent all of it."""
    data, files = b"", []
    with suppress(ConnectionError):
        size, files, _, _ = socket.recv_fds(client, 8, 3)
        while more := client.recv(1 << 20):
            data += more
            if len(data) == int.from_bytes(size, "little"):
                return _Command(*json.loads(data), list(files))
    for file in files:
        os.close(file)
    return None


def _become(command: _Command, path: list[str]) -> None:
    """Take over what a process is started with; ``path`` is what sys.path has behind PYTHONPATH."""
    for number, file in enumerate(command.files):
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        assert stream is not None
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.chdir(command.directory)
    os.environ.clear()
    os.environ.update(command.environment)
    # What it starts by that starts as fast.
    sys.executable = command.environment.get("PYTHON_EXEC", sys.executable)
    sys.path[:] = [*filter(None, command.environment.get("PYTHONPATH", "").split(os.pathsep)), *path]
    random.seed()
    torch = sys.modules["torch"]
    torch.set_num_threads(int(command.environment.get("OMP_NUM_THREADS", "1")))


def _run(arguments: list[str]) -> None:
    """As ``python`` with these arguments."""
    while arguments[0] in ("-u", "-I", "-S"):  # the last two leave out what is imported already
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
        return
    script = arguments[0]
    assert not script.startswith("-"), f"the warm python has no option {script}"
    sys.argv = arguments
    sys.path.insert(0, str(Path(script).resolve().parent))
    main.__file__ = script
    exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    number, parent, *more = sys.argv[1:]
    if os.getppid() != int(parent):
        sys.exit(1)
    os.set_inheritable(int(number), False)
    given = {Path(__file__).parent, *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))}
    # Run as a file, so that zeroelastic itself stays to be imported by what is forked, or not.
    imports = runpy.run_path(str(Path(__file__).parent.parent / "zeroelastic/testing/rank.py"))
    imports["preload"]([*imports["DEEPSPEED_MODULES"], "torch.distributed.run", *more])
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started threads, which a fork does not copy"
    asked = _serve(socket.socket(fileno=int(number)))
    _become(asked, [entry for entry in sys.path if Path(entry) not in given])
    _run(asked.arguments)
