"""The application that the verbs hang on: ``zeroelastic`` and ``python -m zeroelastic``.

A verb is a function in a file of its own, registered here. Its file imports what ``--help`` needs and nothing heavy:
numpy, torch and whatever else the work takes are imported by the functions that do it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from zeroelastic._version import __version__
from zeroelastic.cli.convert import convert
from zeroelastic.cli.diff import diff
from zeroelastic.cli.doctor import doctor
from zeroelastic.cli.export import export
from zeroelastic.cli.inspect import inspect
from zeroelastic.cli.latest import latest
from zeroelastic.cli.outcome import verb
from zeroelastic.cli.plan import plan
from zeroelastic.cli.prove import prove
from zeroelastic.cli.prune import prune
from zeroelastic.cli.reshard import reshard
from zeroelastic.cli.timeline import timeline
from zeroelastic.cli.verify import verify

app = typer.Typer(
    name="zeroelastic",
    help="DeepSpeed ZeRO-3 checkpoints that resume at any world size.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (inspect, verify, plan, reshard, diff, export, convert, latest, prune, prove, timeline, doctor):
    app.command()(verb(command))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zeroelastic {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """DeepSpeed ZeRO-3 checkpoints that resume at any world size."""


def main() -> None:
    """Run the command line; never returns."""
    app(prog_name="zeroelastic")
