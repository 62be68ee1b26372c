"""The command line: ``zeroelastic`` and ``python -m zeroelastic``.

Each verb is a function of the same name in a file of the same name. The file imports what ``--help`` needs and nothing
large: the functions that do the work import numpy, torch and the rest.
"""

from __future__ import annotations

import gc
from collections import UserDict
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from zeroelastic._version import __version__
from zeroelastic.cli.output.outcome import verb

VERBS = (
    *("inspect", "verify", "plan", "reshard", "diff", "export"),
    *("convert", "latest", "prune", "prove", "timeline", "doctor"),
)


class _Verbs(UserDict[str, Any]):
    """The commands by name, each imported and built when it is used: a verb does not wait for eleven others."""

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is None:
            single = typer.Typer(add_completion=False)
            single.command()(verb(getattr(import_module(f"zeroelastic.cli.{name}"), name)))
            self.data[name] = get_command(single)
        return self.data[name]


class _Group(TyperGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Verbs(dict.fromkeys(VERBS))


app = typer.Typer(
    name="zeroelastic",
    cls=_Group,
    help="DeepSpeed ZeRO checkpoints that resume at any world size.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
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
    app(prog_name="zeroelastic")
