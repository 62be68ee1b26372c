"""``zeroelastic verify``: every byte of a checkpoint read once, and what is wrong with it, if anything, named."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.cli.distributed import DistributedOption, processes_of
from zeroelastic.cli.outcome import INVALID

if TYPE_CHECKING:
    from zeroelastic.inventory import Inventory, Problem
    from zeroelastic.processes import Processes
    from zeroelastic.storage import FilePath
    from zeroelastic.verification import VerifyReport

_MOST_SHOWN = 20


def verify(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint: its tag directory, or the one above.")],
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="Which tag, where SRC is the directory above.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Look at names, sizes and the commit record only; open no payload.")
    ] = False,
    lift: Annotated[
        bool, typer.Option("--lift-quarantine", help="Take the mark of damage away, if the checkpoint is valid.")
    ] = False,
    distributed: DistributedOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Check that a checkpoint is what its save left: complete, undamaged, of one save.

    Reads every byte of every rank's files once: headers, checksums of all records, digests of all tensors against the
    commit record. What is damaged is named by file, parameter, state key and byte. With --distributed, the
    processes of one torchrun or srun share the reading.
    A checkpoint that was found damaged on a load may have a mark, by which it is passed over; --lift-quarantine removes
    it from one that turns out valid.
    Exit code 0: valid; 1: it could not be checked; 2: wrong usage; 3: invalid.

    \b
    Examples:
        zeroelastic verify ckpt
        zeroelastic verify ckpt --tag global_step2 --json
        zeroelastic verify ckpt/global_step4 --quick
        zeroelastic verify ckpt --tag global_step4 --lift-quarantine
    """
    from zeroelastic.errors import UsageError

    if lift and quick:
        raise UsageError(
            "--lift-quarantine: only a whole verification tells that a checkpoint is undamaged; no --quick."
        )
    with processes_of(distributed=distributed) as processes:
        began = time.monotonic()
        report, tag_dir, read_seconds = _verify(src, tag, quick, processes)
        seconds = time.monotonic() - began
    lifted = lift and report.valid and processes.rank == 0 and tag_dir is not None and _lift(tag_dir)
    if processes.rank != 0:
        pass  # rank 0 speaks for all
    elif as_json:
        typer.echo(json.dumps(_document(report, seconds, read_seconds, lifted), indent=2))
    else:
        _show(report, read_seconds, lifted)
    if not report.valid:
        raise typer.Exit(INVALID)


def _verify(
    src: str, tag: str | None, quick: bool, processes: Processes
) -> tuple[VerifyReport, FilePath | None, float]:
    """The report, the directory, pinned, and how long reading took when all headers were open."""
    from zeroelastic.cli.progress import progress_bar
    from zeroelastic.errors import CheckpointError
    from zeroelastic.inventory import take_inventory
    from zeroelastic.one_save import one_save
    from zeroelastic.source import find_source
    from zeroelastic.verification import damaged, verify_inventory

    def look() -> Inventory:
        tag_dir = find_source(src, tag=tag).tag_dir
        with one_save(tag_dir):
            return take_inventory(tag_dir, quick=quick)

    try:
        inventory = processes.settle(look)
    except CheckpointError as error:  # what cannot even be looked at is a finding, too
        return damaged(src, str(error), quick=quick), None, 0.0
    if quick:
        return verify_inventory(inventory, quick=True, processes=processes), inventory.tag_dir, 0.0
    began = time.monotonic()
    with progress_bar("verify", inventory.nbytes // processes.size) as advance:
        report = verify_inventory(inventory, progress=advance, processes=processes)
    return report, inventory.tag_dir, time.monotonic() - began


def _lift(tag_dir: FilePath) -> bool:
    from zeroelastic.errors import UsageError
    from zeroelastic.quarantine import lift_mark
    from zeroelastic.storage import RemotePath

    if isinstance(tag_dir, RemotePath):
        raise UsageError(f"{tag_dir}: --lift-quarantine writes on this machine only.")
    return lift_mark(tag_dir)


def _document(report: VerifyReport, seconds: float, read_seconds: float, lifted: bool) -> dict[str, object]:
    """What --json prints; the keys are documented in docs/cli.md."""
    return {
        "valid": report.valid,
        "checkpoint": report.tag_dir,
        "mode": report.mode,
        "format": report.format,
        "world_size": report.world_size,
        "content_root": report.content_root,
        "recorded_root": report.recorded_root,
        "problems": [problem._asdict() for problem in report.problems],
        "quarantine": None if report.quarantine is None else asdict(report.quarantine),
        "lifted": lifted,
        "checked": list(report.checked),
        "unchecked": list(report.unchecked),
        "num_files": report.num_files,
        "num_params": report.num_params,
        "num_tensors": report.num_tensors,
        "num_records": report.num_records,
        "num_bytes": report.num_bytes,
        "seconds": round(seconds, 3),
        "read_seconds": round(read_seconds, 3),
    }


def _show(report: VerifyReport, seconds: float, lifted: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from zeroelastic.cli.sizes import format_size

    out = Console()

    def say(*parts: str | tuple[str, str]) -> None:
        out.print(Text.assemble(*parts), soft_wrap=True)

    facts = [report.format, f"{report.world_size} ranks"] if report.world_size else []
    say((report.tag_dir, "bold"), "  ", ", ".join(fact for fact in facts if fact))
    for clause in report.checked:
        say("  ", ("ok  " if report.valid else "    ", "green"), "  ", clause)
    for clause in report.unchecked:
        say("  ", ("note", "yellow"), "  ", clause)
    if report.content_root is not None:
        compared = report.recorded_root is not None
        matches = "the saved one" if report.content_root == report.recorded_root else "not the saved one"
        say("        content root ", report.content_root[:12], f", {matches}" if compared else "")
    if report.mode == "full" and report.num_bytes:
        rate = format_size(report.num_bytes / max(seconds, 1e-9))
        say(f"        {format_size(report.num_bytes)} read in {seconds:.2f} s, {rate}/s")
    if report.quarantine is not None:
        done = "; the mark is gone now" if lifted else " (--lift-quarantine removes the mark)" if report.valid else ""
        say("  ", ("note", "yellow"), "  ", report.quarantine.sentence, done)
    if report.valid:
        say(("Valid" if report.mode == "full" else "Nothing is wrong with names and sizes", "green"), ".")
        return
    for problem in report.problems[:_MOST_SHOWN]:
        say("  ", ("FAIL", "bold red"), "  ", problem.sentence)
    more = len(report.problems) - _MOST_SHOWN
    if more > 0:
        say(f"        and {more} more; --json lists them all")
    say(("Invalid: ", "bold red"), _blame(report.problems))


def _blame(problems: tuple[Problem, ...]) -> str:
    """How many problems, and in which files."""
    files = sorted({problem.file for problem in problems if problem.file})
    count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
    if not files:
        return f"{count}."
    return f"{count} in {', '.join(files[:3])}" + (f" and {len(files) - 3} more files." if len(files) > 3 else ".")
