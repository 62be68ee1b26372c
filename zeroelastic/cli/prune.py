"""``zeroelastic prune``: remove old checkpoints of a run and keep the newest that verify."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.output.options import JsonOption, QuietOption
from zeroelastic.cli.output.outcome import FAILED, INVALID
from zeroelastic.cli.output.progress import progress_of
from zeroelastic.cli.output.show import log_line, print_columns, print_report

if TYPE_CHECKING:
    from zeroelastic.verbs.prune import PruneReport

_COPY_ONE = "Copy one again from where it is sound; `zeroelastic verify` lists what is wrong with each."


def prune(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="The directory that holds the tags, or the checkpoint-N folders.")
    ],
    keep: Annotated[int, typer.Option(metavar="K", help="How many of the newest that verify are kept.")],
    invalid: Annotated[
        bool, typer.Option("--invalid", help="Also remove what does not verify, where it is older than what does.")
    ] = False,
    min_age: Annotated[
        str,
        typer.Option(metavar="TIME", help="Leave what has no commit record and changed within TIME (30s, 15m, 2h)."),
    ] = "1h",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove old checkpoints; keep the newest that verify, what latest names, and what may be being written.

    Checks sizes and commit records, or headers where there is no record. Asks before it removes anything.
    Exit code 0: done; 1: something could not be removed, or judged; 2: wrong usage; 3: no checkpoint verifies, none is
    removed.

    \b
    Examples:
        zeroelastic prune ckpt --keep 1 --dry-run
        zeroelastic prune ckpt --keep 1 --dry-run --json
        zeroelastic prune old --keep 2 --yes
    """
    from zeroelastic.errors import CheckpointError, UnreadableError, UsageError
    from zeroelastic.verbs.prune import carry_out
    from zeroelastic.verbs.prune import prune as run

    report = run(directory, keep=keep, invalid=invalid, min_age=min_age, dry_run=True)
    plan, work = report.plan, report.has_work and not dry_run
    if work and not yes:
        if not sys.stdin.isatty() or as_json:
            raise UsageError("--yes is needed where nobody can be asked; --dry-run shows what would be removed.")
        _show(report)
        if not typer.confirm(f"Remove {_what(report)}?", err=True):
            log_line("Nothing was removed.")
            raise typer.Exit(FAILED)
    if not dry_run:
        report = carry_out(report, progress=progress_of(quiet=quiet))
    if as_json:
        print_report(report)
    elif plan.removals or report.dead or yes or not work:
        _show(report)
    if report.failed:
        raise typer.Exit(FAILED)
    if plan.decisions and not plan.has_valid:
        undecided = any(decision.undecided for decision in plan.decisions)
        if as_json:
            raise typer.Exit(FAILED if undecided else INVALID)
        text = f"{plan.root}: no checkpoint verifies, so that none is removed."
        raise UnreadableError(text) if undecided else CheckpointError(text, remedy=_COPY_ONE)


def _what(report: PruneReport) -> str:
    """What is about to be removed, as the question has it."""
    from zeroelastic.runs.prune import removable
    from zeroelastic.runs.run_store import open_run

    plan, count, dead = report.plan, len(report.plan.removals), report.dead
    parts = [f"{count} {'checkpoint' if count == 1 else 'checkpoints'}"] if count else []
    parts += ["what an interrupted removal left"] if plan.leftovers else []
    parts += [f"{len(dead)} {'save' if len(dead) == 1 else 'saves'} that did not finish"] if dead else []
    nbytes = (
        removable(plan.removals) + open_run(plan.root).interrupted_bytes() + sum(found.tree.nbytes for found in dead)
    )
    return f"{' and '.join(parts)} ({format_size(nbytes)})"


def _show(report: PruneReport) -> None:
    rows = [
        (item.action, item.tag, "" if item.bytes is None else format_size(item.bytes), item.reason)
        for item in report.tags
    ]
    rows += [(item.action, item.name, format_size(item.bytes), item.reason) for item in report.unfinished]
    if rows:
        print_columns(rows, right=frozenset({2}), indent="")
    if report.plan.removals and report.dry_run:
        log_line(
            "Sizes and records were checked, not contents; `zeroelastic latest DIR` reads every byte of the newest."
        )
    if report.leftovers:
        typer.echo(f"{'would finish' if report.dry_run else 'finished'} an interrupted removal")
    if not report.dry_run:
        typer.echo(f"{len(report.removed)} removed, {format_size(report.freed_bytes)} freed")
