"""``zeroelastic latest``: the newest checkpoint of a run that verifies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.cli.output.options import JsonOption, QuietOption, complete_tag
from zeroelastic.cli.output.outcome import FAILED, INVALID
from zeroelastic.cli.output.progress import progress_of
from zeroelastic.cli.output.show import log_line, print_report

if TYPE_CHECKING:
    from zeroelastic.runs.latest import Latest

_SHOWN = 3


def latest(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="The directory that holds the tags, or the checkpoint-N folders.")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Check sizes and the commit record, or else headers; read no weights.")
    ] = False,
    path: Annotated[bool, typer.Option("--path", help="Print the path, not the name.")] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Let the file latest name this tag, where it does not yet.")
    ] = False,
    set_to: Annotated[
        str | None,
        typer.Option(
            "--set", metavar="TAG", autocompletion=complete_tag, help="Roll back: let the file latest name TAG."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --fix or --set: say what would be written only.")
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print the newest checkpoint that verifies; newer ones are passed over, and stderr says why.

    Newest is what was committed last; but where the file latest was pointed at an older tag since, as --set does, that
    is where the run goes on. Verifying reads every byte, unless --quick; --set looks at sizes, records and headers.
    Exit code 0: there is one; 2: wrong usage; 3: none verifies.

    \b
    Examples:
        zeroelastic latest ckpt
        zeroelastic latest ckpt --quick --path
        zeroelastic latest ckpt --fix --dry-run
        zeroelastic latest ckpt --set global_step2
        zeroelastic latest ckpt --quick --json
    """
    from zeroelastic.verbs.latest import latest as run

    report = run(directory, quick=quick, fix=fix, set_to=set_to, dry_run=dry_run, progress=progress_of(quiet=quiet))
    found = report.found
    if as_json:
        print_report(report)
    else:
        _show(found, path)
        _show_latest(found, dry_run)
    if found.tag is None:
        raise typer.Exit(FAILED if any(verdict.undecided for verdict in found.passed) else INVALID)


def _show(found: Latest, path: bool) -> None:
    from zeroelastic.runs.order import about_left, about_pointed

    for verdict in found.passed:
        more = len(verdict.problems) - _SHOWN
        what = " ".join(verdict.problems[:_SHOWN]) + (f" And {more} more problems." if more > 0 else "")
        log_line(f"passed over {verdict.tag.name}: {what}")
    if found.newer and not found.written:
        log_line(f"{about_pointed(found.run.tags[found.at].name, [tag.name for tag in found.newer])}.")
    left = about_left(found.left)
    if left is not None:
        log_line(f"{left}.")
    if found.tag is None:
        log_line("No checkpoint verifies.")
    else:
        typer.echo(str(found.tag.path) if path else found.tag.name)


def _show_latest(found: Latest, dry_run: bool) -> None:
    """What the file says, where it does not say the newest."""
    if found.tag is None or found.run.in_folders or (found.named == found.tag.name and not found.written):
        return
    said = found.problem or (f"latest names {found.named}." if found.named else "There is no file latest.")
    if found.written:
        newer = f" Newer, and not taken: {', '.join(tag.name for tag in found.newer)}." if found.newer else ""
        log_line(f"{said} It {'would now name' if dry_run else 'now names'} {found.tag.name}.{newer}")
    else:
        log_line(f"{said} --fix lets it name {found.tag.name}.")
