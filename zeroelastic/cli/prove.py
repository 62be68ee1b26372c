"""``zeroelastic prove``: resume a training script at two world sizes; compare state bit for bit, losses by step."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.output.options import ForceOption, HtmlOption, JsonOption, QuietOption, TagOption
from zeroelastic.cli.output.outcome import FAILED
from zeroelastic.cli.output.progress import progress_of
from zeroelastic.cli.output.show import log_line, print_document, print_styled, print_written
from zeroelastic.errors import UsageError

if TYPE_CHECKING:
    from zeroelastic.proving.records import RunSpec


def prove(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint that the script resumes from.")],
    script: Annotated[
        list[str], typer.Argument(metavar="-- SCRIPT [ARGS]...", help="The training script, or -m MODULE; unchanged.")
    ],
    world_size: Annotated[int, typer.Option("--world-size", "-n", metavar="M", help="The size to resume at.")],
    from_world_size: Annotated[
        int | None, typer.Option(metavar="N", help="The size to compare with; default: the one that saved SRC.")
    ] = None,
    tag: TagOption = None,
    steps: Annotated[int, typer.Option(metavar="K", min=1, help="Optimizer steps to compare.")] = 5,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The report's directory; must not exist.")] = Path("proof"),
    tolerance: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="Relative tolerance of losses; default: by precision.")
    ] = None,
    repeat: Annotated[
        bool, typer.Option("--repeat/--no-repeat", help="Run the size to compare with twice, to see its noise.")
    ] = True,
    time_limit: Annotated[str, typer.Option(metavar="TIME", help="For each run: 90s, 15m, 2h.")] = "1h",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the checkpoint saved at the other size.")] = False,
    signed_off_by: Annotated[
        str | None, typer.Option(metavar="NAME", help="Your name, written into the report.")
    ] = None,
    html: HtmlOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Prove with your own training script that a checkpoint resumes at another world size.

    Runs the script under torchrun on this machine, twice at the size that saved SRC and once at M: compares the state
    after the load bit for bit and the losses of K steps, saves at M and loads that save at the first size. Writes
    DIR/report.json and report.md. SRC is not changed, and saves of the script are skipped.
    Exit code 0: proved; 1: not proved, or the script fails; 2: wrong usage; 3: SRC is damaged.

    \b
    Examples:
        zeroelastic prove run --world-size 1 --steps 2 --no-repeat -- train.py
    """
    from zeroelastic.checkpoint.one_save import one_save
    from zeroelastic.cli.pages.render import check_report
    from zeroelastic.cli.pages.render import write_report as write_html
    from zeroelastic.extras import require_torch
    from zeroelastic.io.storage import file_sizes
    from zeroelastic.proving.driver import ProofRequest, prepare, prove, sizes, verify_source
    from zeroelastic.proving.launcher import environment, failure_of, launch
    from zeroelastic.proving.report import document, write_report
    from zeroelastic.runs.locate import find_source
    from zeroelastic.verbs.options import seconds_option

    require_torch("prove")
    check_report(html, force=force)
    limit = seconds_option(time_limit, "--time-limit")
    if not limit:
        raise UsageError("--time-limit: must be more than 0. Give a time such as 15m.")
    _check_script(script)
    found = find_source(src, tag=tag)
    say = _Steps(6 if repeat else 5, quiet=quiet)
    nbytes = sum(file_sizes(found.tag_dir).values())
    say.begin(f"verifying every byte of {found.tag_dir} ({format_size(nbytes)})")
    with one_save(found.tag_dir), progress_of(quiet=quiet)("verifying", nbytes) as advance:
        verified = verify_source(found, progress=advance)
    request = ProofRequest(found, world_size, from_world_size, steps, out, repeat, tolerance, keep)
    first, second = sizes(request, verified)
    env, device = environment(max(first, second), verified.bytes_read)
    request = ProofRequest(found, world_size, from_world_size, steps, prepare(out), repeat, tolerance, keep)

    def run(spec: RunSpec) -> str | None:
        status = launch(spec, script, time_limit_s=limit, env=env, waiting=say.still)
        if status is None:
            return f"it took longer than {time_limit}; its output is in {spec.log_path}"
        return failure_of(spec) if status else None

    outcome = prove(request, verified, run, log=say.begin)
    command = ["zeroelastic", *sys.argv[1:]]
    report = document(outcome, script=script, command=command, device=device, signed_off_by=signed_off_by)
    write_report(request.out, report)
    write_html(html, "prove", lambda: report, force=force)
    if as_json:
        print_document(report)
    else:
        _show(report, request.out)
        print_written(html)
    if not outcome.verdict.proved:
        raise typer.Exit(FAILED)


class _Steps:
    """A line on stderr for each step as it begins, and one every 10 s while it lasts; none if ``quiet``."""

    def __init__(self, count: int, *, quiet: bool) -> None:
        self._count, self._quiet, self._done = count, quiet, 0

    def begin(self, what: str) -> None:
        self._done += 1
        if not self._quiet:
            log_line(f"step {self._done} of {self._count}: {what}")

    def still(self, seconds: float) -> None:
        if not self._quiet:
            log_line(f"  {seconds:.0f} s")


def _check_script(script: list[str]) -> None:
    if script[0] == "-m":
        if len(script) < 2:
            raise UsageError("-m needs the name of a module. Give it after -m.")
    elif not os.path.isfile(script[0]):
        raise UsageError(f"{script[0]}: no such script. Give the script and its arguments after --.")


def _show(report: dict[str, Any], out: Path) -> None:
    print_styled((report["source"]["path"], "bold"))
    for check in report["checks"]:
        mark, style = {True: ("ok  ", "green"), False: ("FAIL", "bold red"), None: ("note", "yellow")}[check["ok"]]
        print_styled("  ", (mark, style), "  ", check["sentence"])
    style = "green" if not report["reasons"] else "bold red"
    print_styled((report["verdict"], style), f"; {out / 'report.md'}, sha256 {report['digest'][:12]}")
