"""The command line: ``zeroelastic`` and ``python -m zeroelastic``, and what its verbs have in common.

Each verb is a function of the same name. The file with the verbs of a group imports what ``--help`` needs and nothing
large: the functions that do the work import numpy, torch and the rest. Common to all are options, exit codes, signals,
how a report is shown, and processes that share the work. An exception becomes a sentence on stderr and an exit code; a
signal unwinds the stack.
"""

from __future__ import annotations

import functools
import gc
import io
import os
import signal
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from typer.core import TyperGroup
from typer.main import get_command

from zeroelastic._version import __version__
from zeroelastic.cli.terminal import print_report, print_written, printable, progress_of
from zeroelastic.cli.view import View, print_view
from zeroelastic.errors import CheckpointError, UsageError, ZeroElasticError, advice, without_pydantic

FAILED = 1
"""The verb failed, or cannot read its input now. ``diff``: the checkpoints differ."""

MISUSE = 2
"""The command line asks for something that is not possible."""

INVALID = 3
"""The checkpoint is damaged, incomplete, or contradicts itself."""

_NO_THREAD = "can't start new thread"  # what Python raises as a plain RuntimeError

P = ParamSpec("P")
R = TypeVar("R")


def verb(function: Callable[P, R]) -> Callable[P, R]:
    """The function as a command: its ZeroElasticErrors and OSErrors become a sentence and an exit code.

    Under ``--json`` the sentence is also in a document on stdout.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with outcome(as_json=bool(kwargs.get("as_json"))):
            return function(*args, **kwargs)

    return run


def reports(
    module: str,
    show: Callable[..., View | None],
    *,
    code: Callable[[Any], int] = lambda report: 0 if report.ok else INVALID,
    show_all: Callable[..., View | None] | None = None,
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """The body of a command: call the function of that name in ``module``, show its report, exit with its ``code``.

    ``show`` prints the report for people, or returns its view, which is printed, and is the page of --html. The
    function and ``show`` get those arguments of the command that they have, too. With --all, the function NAME_all is
    called, ``show_all`` shows its report, and options that it does not have are refused.
    """

    def decorate(command: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(command)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            from zeroelastic.cli.view import check_page, write_page

            bound = signature(command).bind(*args, **kwargs)
            bound.apply_defaults()
            given, name, present = bound.arguments, command.__name__, show
            if given.pop("all_tags", False) and show_all is not None:
                name, present = f"{name}_all", show_all
            html, force = given.get("html"), bool(given.get("force"))
            function = getattr(import_module(module), name)
            wanted, shown = (signature(each).parameters for each in (function, present))
            without = given.keys() - {*wanted, *shown, "quiet", "as_json"}
            assert without <= {"html", "force"} or name != command.__name__
            for option in sorted(without) if name != command.__name__ else ():
                if given[option] != signature(command).parameters[option].default:
                    flag = f"--{option.replace('_', '-')}"
                    raise UsageError(f"{flag}: cannot be given with --all. Leave one of them out.")
            options = {option: value for option, value in given.items() if option in wanted}
            check_page(html, force=force)
            if "progress" in wanted:
                options["progress"] = progress_of(quiet=given["quiet"])
            report = function(**options)
            view = None
            if html is not None or not given["as_json"]:
                view = present(report, **{option: value for option, value in given.items() if option in shown})
            if html is not None and view is not None:
                write_page(html, name, view, force=force)
            if given["as_json"]:
                print_report(report)
            elif view is not None:
                print_view(view)
                print_written(html)
            if found := code(report):
                raise typer.Exit(found)

        return run

    return decorate


@contextmanager
def outcome(*, as_json: bool = False) -> Iterator[None]:
    """Turn errors that are no bugs of ours into exit codes; unwind on SIGTERM and SIGHUP as on Ctrl-C.

    These are ZeroElasticError, OSError, MemoryError, and a thread that the system does not start. Other exceptions are
    bugs and keep their traceback.
    """

    def end(error: object, code: int) -> None:
        show_error(error, as_json=as_json)
        drop_unwritable_output()
        raise typer.Exit(code)

    with unwinding_signals():
        try:
            yield
        except UsageError as error:
            end(error, MISUSE)
        except CheckpointError as error:
            end(error, INVALID)
        except BrokenPipeError:  # the reader of our output has closed the pipe
            drop_unwritable_output()
            raise typer.Exit(FAILED) from None
        except ZeroElasticError as error:
            end(error, FAILED)
        except MemoryError:
            end("out of memory", FAILED)
        except RuntimeError as error:
            if str(error) != _NO_THREAD:
                raise
            end(
                "the system starts no more threads. Raise the limit of processes (ulimit -u, or the container's) or of "
                "memory (ulimit -v).",
                FAILED,
            )
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            end(f"{where}{error.strerror or error}", FAILED)


def drop_unwritable_output() -> None:
    """Write the rest of the output, or drop it: Python would fail again at exit, in other words."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    from zeroelastic.verbs.interface import Failure

    message = advice(error) if isinstance(error, ZeroElasticError) else str(error)
    if as_json:
        with suppress(OSError):  # of a disk that is full, which may be the error itself
            print_report(Failure(ok=False, error=message))
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


_GROUPS = {
    "Look at a checkpoint": {
        "inspect": "inspect",
        "verify": "verify",
        "diff": "verify",
        "plan": "inspect",
    },
    "Make another of it": {"reshard": "copies", "export": "copies", "convert": "copies"},
    "The directory of a run": {"ls": "runs", "latest": "runs", "prune": "runs"},
    "A training job": {"doctor": "doctor"},
}
"""The verbs as ``--help`` shows them, each with the module that has its function."""

VERBS = tuple(name for verbs in _GROUPS.values() for name in verbs)

_MisusedError: Any = typer.BadParameter.__base__  # of all errors about a command line, typer exports only this one


def verb_function(name: str) -> Any:
    """The function of a verb, whose module is imported now."""
    module = next(verbs[name] for verbs in _GROUPS.values() if name in verbs)
    return getattr(import_module(f"zeroelastic.cli.{module}"), name)


class _Verbs(UserDict[str, Any]):
    """The commands by name, each imported and built when it is used: a verb does not wait for the others."""

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is None:
            single = typer.Typer(add_completion=False, rich_markup_mode=None)
            single.command()(verb(verb_function(name)))
            self.data[name] = get_command(single)
        return self.data[name]


class _Group(TyperGroup):
    """The verbs in their groups; a wrong command line ends as a verb does, with one line of the error and its code."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Verbs(dict.fromkeys(VERBS))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, names in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, (self.commands[name].help or "").partition("\n\n")[0]) for name in names])

    def main(self, *args: Any, **options: Any) -> Any:
        alone = options.get("standalone_mode", True)
        options["standalone_mode"] = False
        try:
            code = super().main(*args, **options)
            if not alone:
                return code
        except _MisusedError as error:
            if not alone:
                raise
            if "NoArgs" in type(error).__name__:  # the command alone: the message is the help
                error.show()
            else:
                words = options.get("args") or (args[0] if args else None) or sys.argv[1:]
                show_error(_about_misuse(error), as_json="--json" in words)
                of_verb = f"zeroelastic {words[0]}" if words and words[0] in VERBS else "zeroelastic"
                typer.echo(f"Try '{error.ctx.command_path if error.ctx else of_verb} --help'.", err=True)
            code = MISUSE
        except typer.Abort:  # the end of input, where something was asked
            if not alone:
                raise
            show_error("nothing was answered")
            code = FAILED
        sys.exit(code or 0)


_FOR_RANKS = ("--to", "--ranks", "--num-ranks", "--nproc-per-node", "--nproc_per_node")
"""Options of other verbs and programs by which a number of ranks may be meant."""


def _about_misuse(error: Any) -> str:
    """The sentence of an error about the command line, which for a value of a wrong type is pydantic's."""
    values: Any = getattr(error.__cause__, "errors", list)()
    if values:
        error.message = f"{values[0]['input']!r}: {without_pydantic(values[0]['msg'])}"
    name = getattr(error, "option_name", None)
    if name == "--allow-global":
        error.message += " after the verb; give it before: zeroelastic --allow-global NAME VERB ..."
    elif name in _FOR_RANKS and any("--world-size" in param.opts for param in error.ctx.command.params):
        error.possibilities = ["--world-size"]
    return str(error.format_message())


app = typer.Typer(
    name="zeroelastic",
    cls=_Group,
    help="DeepSpeed ZeRO checkpoints that resume at any world size.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: tables with borders leave a help text of 80 columns half of them
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zeroelastic {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    context: typer.Context,
    allow_global: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-global",
            metavar="NAME",
            help="Let headers name this class, such as package.module.Class: it is neither imported nor called, an "
            "inert stand-in takes its place. May be given several times.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """DeepSpeed ZeRO checkpoints that resume at any world size."""
    if allow_global:
        from zeroelastic.torch_file.safe_unpickler import allow_globals

        try:
            context.with_resource(allow_globals(allow_global))
        except UsageError as error:
            raise typer.BadParameter(str(error), param_hint="--allow-global") from None


def main() -> None:
    """Run the command line; never returns."""
    gc.set_threshold(
        100_000
    )  # headers are many small objects without cycles, looking for which takes a fifth of the time
    prepare_streams()
    try:
        with outcome():  # of what is no verb, such as --help
            try:
                app(prog_name="zeroelastic")
            finally:
                sys.stdout.flush()  # what cannot be written is an error here, and not behind the end
    except typer.Exit as end:
        sys.exit(end.exit_code)


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
    """Return whether ranks have files in a folder, or a Universal checkpoint its parameters. Opens no file."""
    from zeroelastic.checkpoint.tag_files import is_rank_file

    try:
        return any(name == "zero" or is_rank_file(name) for name in os.listdir(folder))
    except OSError:
        return False


RunArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="The directory that holds the tags, or the checkpoint-N folders.")
]

DstArgument = Annotated[Path, typer.Argument(metavar="DST", help="The directory to make; it must not exist.")]

TagOption = Annotated[
    str | None,
    typer.Option(
        "--tag",
        metavar="TAG",
        autocompletion=complete_tag,
        help="The tag, if SRC is the directory above; default: the one that latest names, or the only one.",
    ),
]

HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Also write a self-contained .html report."),
]

ForceOption = Annotated[bool, typer.Option("--force", help="Replace the file of --html.")]

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress on stderr.")]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


TpOption = Annotated[
    int | None,
    typer.Option("--tp", metavar="T", min=1, help="Tensor parallel size (AutoTP); default: the source's."),
]

EpOption = Annotated[
    int | None, typer.Option("--ep", metavar="E", min=1, help="Expert parallel size; default: the source's.")
]

LikeOption = Annotated[
    str | None,
    typer.Option(
        metavar="TAG", help="With --tp: a checkpoint of a run of that size, which says how it cuts the weights."
    ),
]
