"""``zeroelastic latest``: the newest checkpoint of a run that verifies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.cli.outcome import FAILED, INVALID
from zeroelastic.cli.show import harmless, print_document

if TYPE_CHECKING:
    from zeroelastic.storage import FilePath
    from zeroelastic.tags import PassedOver, Run, Tag

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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --fix: say what would be written only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Print the newest checkpoint that verifies; newer ones are passed over, and stderr says why.

    Newest is what was saved at the greatest step, whatever its name. Verifying reads every byte, unless --quick.
    Exit code 0: there is one; 2: wrong usage; 3: none verifies.

    \b
    Examples:
        zeroelastic latest ckpt
        zeroelastic latest ckpt --quick --path
        zeroelastic latest ckpt --fix --dry-run
        zeroelastic latest ckpt --quick --json
    """
    from zeroelastic.errors import UsageError
    from zeroelastic.storage import RemotePath, as_path
    from zeroelastic.tags import check_quickly, find_newest, list_run, named_latest

    if dry_run and not fix:
        raise UsageError("--dry-run: goes with --fix; without it nothing is written.")
    run = list_run(as_path(directory))
    if fix and run.in_folders:
        raise UsageError(f"{run.root}: its checkpoints are in folders, which have a latest each; --fix is for tags.")
    if fix and isinstance(run.root, RemotePath):
        raise UsageError(f"{run.root}: --fix writes on this machine only.")
    newest, passed = find_newest(run.tags, check_quickly if quick else _check_fully)
    named, unreadable = (None, None) if run.in_folders else named_latest(run.root)
    fixed = fix and newest is not None and named != newest.name
    if fixed and newest is not None and not dry_run:
        _write_latest(run, newest)
    if as_json:
        print_document(_document(run, newest, passed, quick, named, fixed and not dry_run))
    else:
        _show(newest, passed, path)
        _show_latest(newest, named, unreadable, run.in_folders, fixed, dry_run)
    if newest is None:
        raise typer.Exit(FAILED if any(verdict.undecided for verdict in passed) else INVALID)


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


def _write_latest(run: Run, newest: Tag) -> None:
    from pathlib import Path

    from zeroelastic.record import write_atomically
    from zeroelastic.tag_names import LATEST

    assert isinstance(run.root, Path)
    write_atomically(run.root / LATEST, newest.name.encode())  # without a newline, as DeepSpeed writes it


def _document(
    run: Run, newest: Tag | None, passed: tuple[PassedOver, ...], quick: bool, named: str | None, fixed: bool
) -> dict[str, object]:
    return {
        "ok": newest is not None,
        "tag": None if newest is None else newest.name,
        "path": None if newest is None else str(newest.path),
        "tag_dir": None if newest is None else str(newest.tag_dir),
        "step": None if newest is None else newest.step,
        "saved_at": None if newest is None else newest.saved_at,
        "verified": "quick" if quick else "full",
        "num_tags": len(run.tags),
        "passed_over": [
            {"tag": verdict.tag.name, "step": verdict.tag.step, "problems": verdict.problems} for verdict in passed
        ],
        "latest": {"names": named, "is_newest": newest is not None and named == newest.name, "fixed": fixed},
    }


def _show(newest: Tag | None, passed: tuple[PassedOver, ...], path: bool) -> None:
    for verdict in passed:
        more = len(verdict.problems) - _SHOWN
        what = " ".join(verdict.problems[:_SHOWN]) + (f" And {more} more problems." if more > 0 else "")
        _log(f"passed over {verdict.tag.name}: {what}")
    if newest is None:
        _log("No checkpoint verifies.")
    else:
        typer.echo(str(newest.path) if path else newest.name)


def _show_latest(
    newest: Tag | None, named: str | None, unreadable: str | None, in_folders: bool, fixed: bool, dry_run: bool
) -> None:
    """What the file says, where it does not say the newest."""
    if newest is None or in_folders or named == newest.name:
        return
    said = unreadable or (f"latest names {named}." if named else "There is no file latest.")
    if fixed:
        _log(f"{said} It {'would now name' if dry_run else 'now names'} {newest.name}.")
    else:
        _log(f"{said} --fix lets it name {newest.name}.")


def _log(text: str) -> None:
    typer.echo(harmless(text), err=True)
