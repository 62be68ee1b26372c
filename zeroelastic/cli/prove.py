"""``zeroelastic prove``: a training script resumed at two world sizes, compared bit for bit and step by step."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroelastic.cli.outcome import FAILED
from zeroelastic.cli.show import harmless, print_document

if TYPE_CHECKING:
    from zeroelastic.proving.records import Run

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


def prove(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint that the script resumes from.")],
    script: Annotated[
        list[str], typer.Argument(metavar="-- SCRIPT [ARGS]...", help="The training script, or -m MODULE; unchanged.")
    ],
    world_size: Annotated[int, typer.Option("--world-size", "-n", metavar="M", help="The size to resume at.")],
    from_world_size: Annotated[
        int | None, typer.Option(metavar="N", help="The size to compare with; default: the one that saved SRC.")
    ] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="Which tag, where SRC is the directory above.")] = None,
    steps: Annotated[int, typer.Option(metavar="K", min=1, help="Optimizer steps to compare.")] = 5,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The report's directory; must not exist.")] = Path("proof"),
    tolerance: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="Of losses, relative; default: by precision.")
    ] = None,
    repeat: Annotated[
        bool, typer.Option("--repeat/--no-repeat", help="Run the size to compare with twice, to see its noise.")
    ] = True,
    time_limit: Annotated[str, typer.Option(metavar="TIME", help="For each run: 90s, 15m, 2h.")] = "1h",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the checkpoint saved at the other size.")] = False,
    signed_off_by: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who answers for the report; stands in it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Prove on a training script of one's own that a checkpoint resumes at another world size.

    Runs the script under torchrun on this machine, at the size that saved SRC, once more, and at M: compares the state
    after the load bit for bit and the losses of K steps, saves at M and takes that back. Writes DIR/report.json and
    report.md. SRC is not changed, and saves of the script are skipped.
    Exit code 0: proved; 1: not proved, or the script fails; 2: wrong usage; 3: SRC is damaged.

    \b
    Examples:
        zeroelastic prove run --world-size 1 --steps 2 --no-repeat -- train.py
    """
    from zeroelastic.one_save import one_save
    from zeroelastic.proving.driver import Request, prepare, prove, sizes, verify_source
    from zeroelastic.proving.launcher import environment, failure_of, launch
    from zeroelastic.proving.report import document, write_report
    from zeroelastic.source import find_source

    limit = _seconds(time_limit)
    _check_script(script)
    found = find_source(src, tag=tag)
    with one_save(found.tag_dir):
        verified = verify_source(found)
    request = Request(found, world_size, from_world_size, steps, out, repeat, tolerance, keep)
    first, second = sizes(request, verified)
    env, device = environment(max(first, second), verified.num_bytes)
    request = Request(found, world_size, from_world_size, steps, prepare(out), repeat, tolerance, keep)

    def run(told: Run) -> str | None:
        status = launch(told, script, time_limit_s=limit, env=env)
        if status is None:
            return f"it took longer than {time_limit}; its output is in {told.log_path}"
        return failure_of(told) if status else None

    outcome = prove(request, verified, run, say=_log)
    command = ["zeroelastic", *sys.argv[1:]]
    report = document(outcome, script=script, command=command, device=device, signed_off_by=signed_off_by)
    write_report(request.out, report)
    if as_json:
        print_document(report)
    else:
        _show(report, request.out)
    if not outcome.judgement.proved:
        raise typer.Exit(FAILED)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise typer.BadParameter(f"{text!r} is not a time such as 90s, 15m or 2h.", param_hint="'--time-limit'")
    return float(match[1]) * _SECONDS[match[2]]


def _check_script(script: list[str]) -> None:
    from zeroelastic.errors import UsageError

    if script[0] == "-m":
        if len(script) < 2:
            raise UsageError("-m needs the name of a module.")
    elif not os.path.isfile(script[0]):
        raise UsageError(f"{script[0]}: no such script. It stands after --, with its arguments.")


def _show(report: dict[str, Any], out: Path) -> None:
    from rich.console import Console

    from zeroelastic.cli.show import say

    console = Console()
    say(console, (report["source"]["path"], "bold"))
    for check in report["checks"]:
        mark, style = {True: ("ok  ", "green"), False: ("FAIL", "bold red"), None: ("note", "yellow")}[check["ok"]]
        say(console, "  ", (mark, style), "  ", check["sentence"])
    style = "green" if not report["reasons"] else "bold red"
    say(console, (report["verdict"], style), f"; {out / 'report.md'}, sha256 {report['digest'][:12]}")


def _log(text: str) -> None:
    typer.echo(harmless(text), err=True)
