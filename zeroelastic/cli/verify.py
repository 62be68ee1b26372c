"""``zeroelastic verify``: every byte of a checkpoint read once, and what is wrong with it, if anything, named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.cli.output.distributed import DistributedOption, processes_of
from zeroelastic.cli.output.options import ForceOption, HtmlOption, JsonOption, QuietOption, TagOption
from zeroelastic.cli.output.outcome import INVALID
from zeroelastic.cli.output.progress import progress_of
from zeroelastic.cli.output.show import print_report, print_styled, print_wrapped, print_written
from zeroelastic.errors import counted

if TYPE_CHECKING:
    from zeroelastic.verbs.verify.report import Problem, VerifyReport

_MOST_SHOWN = 20


def verify(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint: its tag directory, or the one above.")],
    tag: TagOption = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Look at names, sizes and the commit record only; open no payload.")
    ] = False,
    lift: Annotated[
        bool, typer.Option("--lift-quarantine", help="Take the mark of damage away, if the checkpoint is valid.")
    ] = False,
    distributed: DistributedOption = False,
    html: HtmlOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check that a checkpoint is what its save left: complete, undamaged, of one save.

    Reads every byte of every rank's files once: headers, checksums of all records, digests of all tensors against the
    commit record. What is damaged is named by file, parameter, state key and byte. With --distributed, the
    processes of one torchrun or srun share the reading.
    A checkpoint that was found damaged on a load may have a mark, by which it is passed over; --lift-quarantine removes
    it from one that turns out valid.
    Exit code 0: valid, or sound and not supported; 1: it could not be checked; 2: wrong usage; 3: invalid.

    \b
    Examples:
        zeroelastic verify ckpt
        zeroelastic verify ckpt --tag global_step2 --json
        zeroelastic verify ckpt/global_step4 --quick
        zeroelastic verify ckpt --tag global_step4 --lift-quarantine
    """
    from zeroelastic.cli.pages.render import check_report, write_report
    from zeroelastic.verbs.verify.verify import verify as run

    with processes_of(distributed=distributed) as processes:
        processes.all_or_raise(lambda: check_report(html if processes.rank == 0 else None, force=force))
        report = run(
            src,
            tag=tag,
            quick=quick,
            lift_quarantine=lift,
            processes=processes,
            progress=progress_of(quiet=quiet, rank=processes.rank),
        )
    if processes.rank == 0:  # it reports for all
        write_report(html, "verify", report.to_json, force=force)
        if as_json:
            print_report(report)
        else:
            _show(report)
            print_written(html)
    if not report.valid:
        raise typer.Exit(INVALID)


def _show(report: VerifyReport) -> None:
    from zeroelastic.byte_sizes import format_size

    facts = [report.format, counted(report.world_size, "rank")] if report.world_size else []
    print_styled((report.path, "bold"), "  ", ", ".join(fact for fact in facts if fact))
    for clause in report.checked:
        print_styled("  ", ("ok  " if report.valid else "    ", "green"), "  ", clause)
    for clause in report.unchecked:
        print_styled("  ", ("note", "yellow"), "  ", clause)
    for clause in report.unsupported:
        print_styled("  ", ("not supported", "yellow"), "  ", clause)
    if report.content_root is not None:
        compared = report.recorded_root is not None
        matches = "the saved one" if report.content_root == report.recorded_root else "not the saved one"
        print_styled("        content root ", report.content_root[:12], f", {matches}" if compared else "")
    if report.mode == "full" and report.bytes_read:
        rate = format_size(report.bytes_read / max(report.read_seconds, 1e-9))
        print_styled(f"        {format_size(report.bytes_read)} read in {report.read_seconds:.2f} s, {rate}/s")
    if report.quarantine is not None:
        done = (
            "; the mark is gone now"
            if report.lifted
            else " (--lift-quarantine removes the mark)"
            if report.valid
            else ""
        )
        print_styled("  ", ("note", "yellow"), "  ", report.quarantine.sentence, done)
    if report.valid and report.unsupported:
        sound = "Sound by its checksums" if report.mode == "full" else "Nothing is wrong with names and sizes"
        print_styled((sound, "green"), "; not supported: only a training job resumes it, as said above.")
        return
    if report.valid:
        print_styled(("Valid" if report.mode == "full" else "Nothing is wrong with names and sizes", "green"), ".")
        return
    for problem in report.problems[:_MOST_SHOWN]:
        print_styled("  ", ("FAIL", "bold red"), "  ", problem.sentence)
    more = len(report.problems) - _MOST_SHOWN
    if more > 0:
        print_styled(f"        and {more} more; --json lists them all")
    print_styled(("Invalid: ", "bold red"), _blame(report.problems))
    if report.remedy is not None:
        print_wrapped(report.remedy, first="", rest="")


def _blame(problems: tuple[Problem, ...]) -> str:
    """How many problems, and in which files."""
    files = sorted({problem.file for problem in problems if problem.file})
    count = counted(len(problems), "problem")
    if not files:
        return f"{count}."
    return f"{count} in {', '.join(files[:3])}" + (
        f" and {counted(len(files) - 3, 'more file')}." if len(files) > 3 else "."
    )
