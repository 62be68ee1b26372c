"""``zeroelastic latest``: the newest checkpoint of a run that verifies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.cli.outcome import FAILED, INVALID
from zeroelastic.cli.show import harmless, print_document

if TYPE_CHECKING:
    from zeroelastic.latest import Latest
    from zeroelastic.storage import FilePath

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
        str | None, typer.Option("--set", metavar="TAG", help="Roll back: let the file latest name TAG.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --fix or --set: say what would be written only.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
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
    from pathlib import Path

    from zeroelastic.errors import UsageError
    from zeroelastic.latest import find_latest, fix_latest, set_latest
    from zeroelastic.storage import as_path
    from zeroelastic.tags import check_quickly

    if fix and set_to is not None:
        raise UsageError("--fix and --set: one of the two.")
    if dry_run and not fix and set_to is None:
        raise UsageError("--dry-run: goes with --fix or --set; without them nothing is written.")
    root = as_path(directory)
    check = check_quickly if quick else _check_fully
    if not fix and set_to is None:
        found = find_latest(root, check)
    elif not isinstance(root, Path):
        raise UsageError(f"{root}: {'--fix' if fix else '--set'} writes on this machine only.")
    elif set_to is not None:
        found = set_latest(root, set_to, dry_run=dry_run)
    else:
        found = fix_latest(root, check, dry_run=dry_run)
    if as_json:
        print_document(_document(found, quick or set_to is not None, dry_run))
    else:
        _show(found, path)
        _show_latest(found, dry_run)
    if found.tag is None:
        raise typer.Exit(FAILED if any(verdict.undecided for verdict in found.passed) else INVALID)


def _check_fully(tag_dir: FilePath) -> tuple[str, ...]:
    from zeroelastic.cli.progress import progress_bar
    from zeroelastic.storage import file_sizes
    from zeroelastic.verification import verify_checkpoint

    with progress_bar(f"verifying {harmless(tag_dir.name)}", sum(file_sizes(tag_dir).values())) as advance:
        report = verify_checkpoint(tag_dir, progress=advance)
    return tuple(
        problem.sentence if problem.file in problem.sentence else f"{problem.file}: {problem.sentence}"
        for problem in report.problems
    )


def _document(found: Latest, quick: bool, dry_run: bool) -> dict[str, object]:
    tag = found.tag
    return {
        "ok": tag is not None,
        "tag": None if tag is None else tag.name,
        "path": None if tag is None else str(tag.path),
        "tag_dir": None if tag is None else str(tag.tag_dir),
        "step": None if tag is None else tag.step,
        "saved_at": None if tag is None else tag.saved_at,
        "verified": "quick" if quick else "full",
        "num_tags": len(found.run.tags),
        "passed_over": [
            {"tag": verdict.tag.name, "step": verdict.tag.step, "problems": verdict.problems}
            for verdict in found.passed
        ],
        "newer": [newer.name for newer in found.newer],
        "left": [left.name for left in found.left],
        "latest": {
            "names": found.named,
            "is_newest": tag is not None and found.named == tag.name,
            "fixed": found.written and not dry_run,
        },
    }


def _show(found: Latest, path: bool) -> None:
    from zeroelastic.commit_order import about_left, about_pointed

    for verdict in found.passed:
        more = len(verdict.problems) - _SHOWN
        what = " ".join(verdict.problems[:_SHOWN]) + (f" And {more} more problems." if more > 0 else "")
        _log(f"passed over {verdict.tag.name}: {what}")
    if found.newer and not found.written:
        _log(f"{about_pointed(found.run.tags[found.at].name, [tag.name for tag in found.newer])}.")
    left = about_left(found.left)
    if left is not None:
        _log(f"{left}.")
    if found.tag is None:
        _log("No checkpoint verifies.")
    else:
        typer.echo(str(found.tag.path) if path else found.tag.name)


def _show_latest(found: Latest, dry_run: bool) -> None:
    """What the file says, where it does not say the newest."""
    if found.tag is None or found.run.in_folders or (found.named == found.tag.name and not found.written):
        return
    said = found.problem or (f"latest names {found.named}." if found.named else "There is no file latest.")
    if found.written:
        newer = f" Newer, and not taken: {', '.join(tag.name for tag in found.newer)}." if found.newer else ""
        _log(f"{said} It {'would now name' if dry_run else 'now names'} {found.tag.name}.{newer}")
    else:
        _log(f"{said} --fix lets it name {found.tag.name}.")


def _log(text: str) -> None:
    typer.echo(harmless(text), err=True)
