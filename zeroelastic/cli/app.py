"""The command line: ``zeroelastic`` and ``python -m zeroelastic``.

Each verb is a function of the same name. The file with the verbs of a group imports what ``--help`` needs and nothing
large: the functions that do the work import numpy, torch and the rest.
"""

from __future__ import annotations

import gc
import sys
from collections import UserDict
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from zeroelastic._version import __version__
from zeroelastic.cli.command import FAILED, MISUSE, outcome, prepare_streams, show_error, verb
from zeroelastic.errors import without_pydantic

_GROUPS = {
    "Look at a checkpoint": {
        "inspect": "inspect",
        "show": "inspect",
        "verify": "verify",
        "diff": "verify",
        "plan": "plan",
    },
    "Make another of it": {"reshard": "copies", "export": "copies", "convert": "copies"},
    "The directory of a run": {"ls": "runs", "latest": "runs", "prune": "runs"},
    "A training job": {"prove": "jobs", "timeline": "jobs", "doctor": "doctor"},
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
                typer.echo(f"Try '{error.ctx.command_path if error.ctx else 'zeroelastic'} --help'.", err=True)
            code = MISUSE
        except typer.Abort:  # the end of input, where something was asked
            if not alone:
                raise
            show_error("nothing was answered")
            code = FAILED
        sys.exit(code or 0)


def _about_misuse(error: Any) -> str:
    """The sentence of an error about the command line, which for a value of a wrong type is pydantic's."""
    values: Any = getattr(error.__cause__, "errors", list)()
    if values:
        error.message = f"{values[0]['input']!r}: {without_pydantic(values[0]['msg'])}"
    elif getattr(error, "option_name", None) == "--allow-global":
        error.message += " after the verb; give it before: zeroelastic --allow-global NAME VERB ..."
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
        from zeroelastic.errors import UsageError
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
            app(prog_name="zeroelastic")
    except typer.Exit as end:
        sys.exit(end.exit_code)
