"""``zeroelastic ls``, ``latest`` and ``prune``: the tags in the directory of a run."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.app import FAILED, INVALID, JsonOption, QuietOption, RunArgument, complete_tag, reports
from zeroelastic.cli.terminal import log_line, print_report, progress_of
from zeroelastic.cli.view import Table, print_table, row
from zeroelastic.errors import counted

if TYPE_CHECKING:
    from zeroelastic.verbs.prune import PruneReport
    from zeroelastic.verbs.tags import LatestFile, LatestReport, ListReport, TagInfo

_SHOWN = 3
_COPY_ONE = "Copy one again from where it is sound; `zeroelastic verify` lists what is wrong with each."


def _show_tags(report: ListReport) -> None:
    columns = ("tag", "step", "ranks", "stage", "size", "saved", "status")
    rows = tuple(row(*_cells(tag)) for tag in report.tags)
    print_table(Table("", rows, columns, frozenset({1, 2, 3, 4}), most=len(rows)), indent="")


def _cells(tag: TagInfo) -> tuple[str, ...]:
    numbers = ("" if value is None else str(value) for value in (tag.step, tag.world_size, tag.stage))
    saved = "" if tag.saved_at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(tag.saved_at))
    return (tag.tag, *numbers, format_size(tag.bytes), saved, tag.status + (", latest" if tag.latest else ""))


@reports("zeroelastic.verbs.tags", _show_tags)
def ls(
    directory: RunArgument,
    as_json: JsonOption = False,
) -> None:
    """List all checkpoints of a run, newest first: step, ranks, stage, size, time, and whether they are committed.

    Reads names, sizes and commit records; verify and latest check what is in the files.
    Exit code 0: listed; 2: wrong usage, or there is no checkpoint.

    \b
    Examples:
        zeroelastic ls ckpt
        zeroelastic ls ckpt --json
    """


def _show_found(report: LatestReport, path: bool, dry_run: bool) -> None:
    for verdict in report.passed_over:
        more = len(verdict.problems) - _SHOWN
        what = " ".join(verdict.problems[:_SHOWN]) + (f" And {more} more problems." if more > 0 else "")
        log_line(f"passed over {verdict.tag}: {what}")
    if report.newer:
        log_line(f"Committed after {report.tag_name}, and not taken: {', '.join(report.newer)}.")
    if report.tag_name is not None:
        typer.echo(report.tag.path if path and report.tag is not None else report.tag_name)
        _show_latest(report, report.latest, dry_run)
    elif report.passed_over:
        log_line("No checkpoint verifies.")
    else:
        log_line("latest names no checkpoint, and none has a commit record; --set names one.")


def _latest_code(report: LatestReport) -> int:
    if report.tag_name is not None:
        return 0
    return FAILED if any(verdict.undecided for verdict in report.passed_over) else INVALID


def _show_latest(report: LatestReport, file: LatestFile, dry_run: bool) -> None:
    """Print which tag the file names, where that is not the newest."""
    if report.folder != report.path or (file.is_newest and not file.changes):
        return
    said = file.problem or (f"latest names {file.names}." if file.names else "There is no file latest.")
    if file.changes:
        log_line(f"{said} It {'would now name' if dry_run else 'now names'} {report.tag_name}.")
    elif unread := [verdict.tag for verdict in report.passed_over if verdict.may_be_newest]:
        log_line(f"{said} --fix changes it when {unread[0]} can be read, which may be whole; --set names a tag now.")
    else:
        log_line(f"{said} --fix lets it name {report.tag_name}.")


@reports("zeroelastic.verbs.tags", _show_found, code=_latest_code)
def latest(
    directory: RunArgument,
    quick: Annotated[
        bool, typer.Option("--quick", help="Check sizes and the commit record, or else headers; read no weights.")
    ] = False,
    path: Annotated[bool, typer.Option("--path", help="Print the path, not the name.")] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Write this tag into the file latest, if it names another.")
    ] = False,
    set_to: Annotated[
        str | None,
        typer.Option(
            "--set", metavar="TAG", autocompletion=complete_tag, help="Roll back: write TAG into the file latest."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --fix or --set: say what would be written only.")
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print the newest checkpoint that verifies; newer ones are passed over, and stderr says why.

    The newest is the tag that the file latest names, or, if that does not verify, the one committed last.
    Verifying reads every byte, unless --quick; --set looks at sizes, records and headers. Exit code 0: there is one; 2:
    wrong usage; 3: none verifies.

    \b
    Examples:
        zeroelastic latest ckpt
        zeroelastic latest ckpt --quick --path
        zeroelastic latest ckpt --fix --dry-run
        zeroelastic latest ckpt --set global_step2
        zeroelastic latest ckpt --quick --json
    """


def prune(
    directory: RunArgument,
    keep: Annotated[int, typer.Option(metavar="K", help="Keep the newest K that verify.")],
    invalid: Annotated[
        bool,
        typer.Option("--invalid", help="Also remove tags that do not verify, if one that does is newer."),
    ] = False,
    min_age: Annotated[
        str,
        typer.Option(metavar="TIME", help="Keep what has no commit record if it changed within TIME (30s, 15m, 2h)."),
    ] = "1h",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove old checkpoints; keep the newest that verify, the tag that latest names, and unfinished saves.

    Checks sizes and commit records, or headers if there is no record. Asks before it removes anything.
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
        if as_json or sys.stdin is None or not sys.stdin.isatty():  # None: closed by who started this process
            raise UsageError("--yes is required if stdin is not a terminal; --dry-run shows what would be removed.")
        _show_pruned(report)
        if not typer.confirm(f"Remove {_what(report)}?", err=True):
            log_line("Nothing was removed.")
            raise typer.Exit(FAILED)
    if not dry_run:
        report = carry_out(report, progress=progress_of(quiet=quiet))
    if as_json:
        print_report(report)
    elif plan.removals or report.dead or yes or not work:
        _show_pruned(report)
    if report.failed:
        raise typer.Exit(FAILED)
    if plan.decisions and not plan.has_valid:
        undecided = any(decision.undecided for decision in plan.decisions)
        if as_json:
            raise typer.Exit(FAILED if undecided else INVALID)
        text = f"{plan.root}: no checkpoint verifies, so that none is removed."
        raise UnreadableError(text) if undecided else CheckpointError(text, remedy=_COPY_ONE)


def _what(report: PruneReport) -> str:
    """The number of tags and unfinished saves to remove, for the question."""
    count, dead = len(report.plan.removals), len(report.dead)
    parts = [counted(count, "checkpoint")] if count else []
    parts += [f"{counted(dead, 'save')} that did not finish"] if dead else []
    return f"{' and '.join(parts)} ({format_size(report.removable_bytes)})"


def _show_pruned(report: PruneReport) -> None:
    rows = [
        row(item.action, item.tag, None if item.bytes is None else format_size(item.bytes), item.reason)
        for item in report.tags
    ]
    rows += [row(item.action, item.name, format_size(item.bytes), item.reason) for item in report.unfinished]
    if rows:
        print_table(Table("", tuple(rows), right=frozenset({2}), most=len(rows)), indent="")
    if report.plan.removals and report.dry_run:
        log_line(
            "Sizes and records were checked, not contents; `zeroelastic latest DIR` reads every byte of the newest."
        )
    if not report.dry_run:
        typer.echo(f"{len(report.removed)} removed, {format_size(report.freed_bytes)} freed")
