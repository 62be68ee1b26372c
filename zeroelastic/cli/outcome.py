"""How a verb ends: exceptions become a sentence on stderr and an exit code, signals unwind what is half-made."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ParamSpec, TypeVar

import typer

from zeroelastic.cli.show import harmless
from zeroelastic.errors import CheckpointError, UsageError, ZeroElasticError

FAILED = 1
"""It went wrong, or cannot be read here and now; for ``diff``: the checkpoints differ; for ``prove``: not proved."""

MISUSE = 2
"""It cannot be done as it was asked for."""

INVALID = 3
"""The checkpoint is damaged, incomplete, or contradicts itself."""

P = ParamSpec("P")
R = TypeVar("R")


def verb(function: Callable[P, R]) -> Callable[P, R]:
    """The function as a command: what it raises on purpose ends the process with a sentence and the right exit code."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with outcome():
            return function(*args, **kwargs)

    return run


@contextmanager
def outcome() -> Iterator[None]:
    """While it lasts, errors of ours and of the system become exit codes, and SIGTERM and SIGHUP unwind as Ctrl-C does.

    Other exceptions are bugs and keep their traceback.
    """
    with unwinding_signals():
        try:
            yield
        except UsageError as error:
            _end(error, MISUSE)
        except CheckpointError as error:
            _end(error, INVALID)
        except BrokenPipeError:  # whoever read our output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None
        except ZeroElasticError as error:
            _end(error, FAILED)
        except MemoryError:
            _end("out of memory", FAILED)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            _end(f"{where}{error.strerror or error}", FAILED)


def _end(error: object, code: int) -> None:
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    typer.echo(harmless(str(error)), err=True)  # it may quote names from a file
    raise typer.Exit(code)


@contextmanager
def unwinding_signals() -> Iterator[None]:
    """While it lasts, SIGTERM and SIGHUP unwind the stack as Ctrl-C does, instead of ending the process on the spot."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, unwind) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
