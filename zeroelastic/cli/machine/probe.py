"""A function called in a process of its own, so that its output, crash or hang does not reach the caller.

A truncated shared library kills the process that loads it (SIGBUS), importing DeepSpeed may print to stdout, and either
may hang. The answer comes back as JSON through an unnamed file; the output of the process goes to another one, of which
only the last line is ever shown.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from importlib import import_module
from types import TracebackType
from typing import TypeVar

Answer = TypeVar("Answer")

# The child gets the module path of its parent: "" or a script's folder in front could make it import other modules.
_CHILD = """\
import sys
sys.path[:] = sys.argv[1].split("\\n")
from zeroelastic.cli.machine.probe import _reply
_reply(*sys.argv[2:])
"""


class ProbeFailed(Exception):
    """The process gave no answer; the text is the reason."""


class Probe:
    """Starts ``"module:function"`` with string arguments in the background. Use it as a context manager.

    The function returns a string or a dataclass of plain values. ZEROELASTIC does not reach it: what the hook would do
    is asked for by name.
    """

    def __init__(self, question: str, *arguments: str) -> None:
        self._answer = os.memfd_create("answer")
        self._noise = os.memfd_create("noise")
        path = "\n".join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, path, str(self._answer), question, *arguments],
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name != "ZEROELASTIC"},
            stdout=self._noise,
            stderr=self._noise,
            pass_fds=[self._answer],
            start_new_session=True,
        )

    def answer(self, kind: type[Answer], *, limit_s: float) -> Answer:
        """Wait for the answer, an object of type ``kind``. Raises ProbeFailed when there is none."""
        from pydantic import TypeAdapter

        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ProbeFailed(f"it did not end within {limit_s:.0f} s") from None
        text = _contents(self._answer)
        if code < 0:
            raise ProbeFailed(f"the process was killed by {_signal_name(-code)}")
        if not text:
            printed = _contents(self._noise).decode(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(printed) if line.strip()), "nothing")
            raise ProbeFailed(f"the process ended with exit code {code}; its last line of output: {last}")
        if code:
            raise ProbeFailed(text.decode())
        return TypeAdapter(kind).validate_json(text)

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._answer)
        os.close(self._noise)


def describe_error(error: BaseException) -> str:
    """An exception in one line, like the last line of a traceback."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _reply(fd: str, question: str, *arguments: str) -> None:
    """The child's side: call the function and write its answer; exit without the imported modules' clean-up."""
    module, _, function = question.partition(":")
    try:
        value = getattr(import_module(module), function)(*arguments)
        text, code = json.dumps(asdict(value) if is_dataclass(value) else value), 0  # type: ignore[arg-type]
    except Exception as error:
        text, code = describe_error(error), 1
    with open(int(fd), "wb") as answer:
        answer.write(text.encode(errors="replace"))
    os._exit(code)


def _contents(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
