"""What verbs have in common: options, exit codes, signals, files beside their output, processes that share the work.

An exception becomes a sentence on stderr and an exit code; a signal unwinds the stack.
"""

from __future__ import annotations

import functools
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, ParamSpec, TypeVar

import typer

from zeroelastic.cli.terminal import print_document, printable
from zeroelastic.errors import CheckpointError, UsageError, ZeroElasticError, advice
from zeroelastic.json_document import document

if TYPE_CHECKING:
    from zeroelastic.distributed.processes import Processes

FAILED = 1
"""The verb failed, or cannot read its input now. ``diff``: the checkpoints differ; ``prove``: not proved."""

MISUSE = 2
"""The command line asks for something that is not possible."""

INVALID = 3
"""The checkpoint is damaged, incomplete, or contradicts itself."""

P = ParamSpec("P")
R = TypeVar("R")
_EXISTS = "{}: exists; nothing is overwritten without --force. Give another name."


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


def complete_tag(context: typer.Context, incomplete: str) -> list[str]:
    """The tags of the directory that the command line names; none for a URL, or where nothing can be listed."""
    given = context.params.get("src") or context.params.get("directory")
    left = (word for word in context.args if not word.startswith("-"))  # not assigned yet: the line ends in --tag
    root = Path(given or next(left, ".")).expanduser()
    try:
        return sorted(name for name in os.listdir(root) if name.startswith(incomplete) and _is_tag(root / name))
    except OSError:
        return []


def _is_tag(folder: Path) -> bool:
    """Whether ranks have files in a folder, or a Universal checkpoint its parameters. Opens no file."""
    from zeroelastic.checkpoint.tag_files import is_rank_file

    try:
        return any(name == "zero" or is_rank_file(name) for name in os.listdir(folder))
    except OSError:
        return False


TagOption = Annotated[
    str | None,
    typer.Option(
        "--tag",
        metavar="TAG",
        autocompletion=complete_tag,
        help="Which tag, where SRC is the directory above; default: what latest names.",
    ),
]

HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="FILE", help="Also write a report for a browser: one .html file, nothing beside it."
    ),
]

ForceOption = Annotated[bool, typer.Option("--force", help="Replace the file of --html, if there is one.")]

PlotForceOption = Annotated[bool, typer.Option("--force", help="Replace the files of --plot and --html.")]

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress on stderr.")]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


DistributedOption = Annotated[
    bool, typer.Option("--distributed", help="Share the work among all processes that torchrun or srun has started.")
]


@contextmanager
def processes_of(*, distributed: bool) -> Iterator[Processes]:
    """The processes of a verb. Without ``--distributed``, one that a launcher started works alone, with a note."""
    from zeroelastic.distributed.processes import launched_processes, num_launched

    count = num_launched()
    if count > 1 and not distributed:
        typer.echo(f"note: this process works alone; --distributed shares the work among {count} processes", err=True)
    with launched_processes(distributed=distributed) as processes:
        yield processes


def check_new_file(path: Path, what: str, suffixes: Sequence[str], *, force: bool = False) -> None:
    """Raise UsageError, with what to do, where no file can be put to ``path``; ``force`` replaces one.

    ``what`` begins the sentence on a wrong suffix: "a report is written".
    """
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"{path}: {what} as {', '.join(suffixes[:-1])} or {suffixes[-1]}. Give a name that ends so.")
    if path.exists() and not (force and path.is_file()):
        raise UsageError(_EXISTS.format(path))
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.absolute().parent}. Make it first.")


def write_new_file(path: Path, data: bytes, *, force: bool = False) -> None:
    """Put a file in place, whole or not at all. Raises UsageError when it exists, without ``force``; OSError."""
    from zeroelastic.io.atomic import write_atomically

    try:
        write_atomically(path, data, replace=force)
    except FileExistsError:
        raise UsageError(_EXISTS.format(path)) from None
