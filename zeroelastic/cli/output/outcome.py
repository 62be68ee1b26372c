"""How a verb ends: an exception becomes a sentence on stderr and an exit code; a signal unwinds the stack."""

from __future__ import annotations

import functools
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import ParamSpec, TypeVar

import typer

from zeroelastic.cli.output.show import print_document, printable
from zeroelastic.errors import CheckpointError, UsageError, ZeroElasticError, advice
from zeroelastic.json_document import document

FAILED = 1
"""The verb failed, or cannot read its input now. ``diff``: the checkpoints differ; ``prove``: not proved."""

MISUSE = 2
"""The command line asks for something that is not possible."""

INVALID = 3
"""The checkpoint is damaged, incomplete, or contradicts itself."""

P = ParamSpec("P")
R = TypeVar("R")


def verb(function: Callable[P, R]) -> Callable[P, R]:
    """The function as a command: its ZeroElasticErrors and OSErrors become a sentence and an exit code.

    Under ``--json`` the sentence is also in a document on stdout; of several processes, in that of the first alone.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = not kwargs.get("distributed") or os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
        with outcome(as_json=first and bool(kwargs.get("as_json"))):
            return function(*args, **kwargs)

    return run


@contextmanager
def outcome(*, as_json: bool = False) -> Iterator[None]:
    """Turn ZeroElasticError, OSError and MemoryError into exit codes; unwind on SIGTERM and SIGHUP as on Ctrl-C.

    Other exceptions are bugs and keep their traceback.
    """

    def end(error: object, code: int) -> None:
        show_error(error, as_json=as_json)
        raise typer.Exit(code)

    with unwinding_signals():
        try:
            yield
        except UsageError as error:
            end(error, MISUSE)
        except CheckpointError as error:
            end(error, INVALID)
        except BrokenPipeError:  # the reader of our output has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None
        except ZeroElasticError as error:
            end(error, FAILED)
        except MemoryError:
            end("out of memory", FAILED)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            end(f"{where}{error.strerror or error}", FAILED)


def prepare_streams() -> None:
    """Let output never fail for a sign that the terminal's encoding lacks, nor where there is no stdout or stderr."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started this process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # of a stdout that was opened as a file and is a pipe by now
            sys.stdout.reconfigure(errors="backslashreplace")


def show_error(error: object, *, as_json: bool = False) -> None:
    """On stderr, in the style of all verbs: what went wrong, what to do. With ``as_json`` also a document on stdout."""
    message = advice(error) if isinstance(error, ZeroElasticError) else str(error)
    if as_json:
        with suppress(OSError):  # of a disk that is full, which may be the error itself
            print_document(document({"error": message}, ok=False))
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    typer.echo(printable(message), err=True)  # the message may quote names from a file


@contextmanager
def unwinding_signals() -> Iterator[None]:
    """Within this context, SIGTERM and SIGHUP unwind the stack as Ctrl-C does; they do not end the process at once."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, unwind) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
