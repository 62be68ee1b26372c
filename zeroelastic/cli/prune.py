"""``zeroelastic prune``: remove old checkpoints of a run and keep the newest that verify."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from zeroelastic.cli.outcome import FAILED, INVALID
from zeroelastic.cli.show import harmless, print_document
from zeroelastic.cli.sizes import format_size

if TYPE_CHECKING:
    from zeroelastic.pruning import Decision, PrunePlan, Unfinished


class Outcome(NamedTuple):
    """What became of something that was to be removed: ``why`` it is still there, empty where it is gone."""

    why: str = ""
    failed: bool = False


_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
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
    from zeroelastic.pruning import plan_prune
    from zeroelastic.storage import as_path

    plan = plan_prune(as_path(directory), keep=keep, invalid=invalid, min_age_s=_seconds(min_age))
    dead = [found for found in plan.unfinished if found.remove]
    work = bool(plan.removals or plan.leftovers or dead) and not dry_run
    if work and not yes:
        if not sys.stdin.isatty() or as_json:
            raise UsageError("--yes is needed where nobody can be asked; --dry-run shows what would be removed.")
        _show(plan, {}, dry_run=True)
        if not typer.confirm(f"Remove {_what(plan)}?", err=True):
            _log("Nothing was removed.")
            raise typer.Exit(FAILED)
    outcomes = _carry_out(plan) if work else {}
    if as_json:
        print_document(_document(plan, outcomes, keep=keep, dry_run=dry_run))
    elif outcomes or yes or not work:
        _show(plan, outcomes, dry_run=dry_run)
    if any(outcome.failed for outcome in outcomes.values()):
        raise typer.Exit(FAILED)
    if plan.decisions and not plan.has_valid:
        undecided = any(decision.undecided for decision in plan.decisions)
        if as_json:
            raise typer.Exit(FAILED if undecided else INVALID)
        kind = UnreadableError if undecided else CheckpointError
        raise kind(f"{plan.root}: no checkpoint verifies, so that none is removed.")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a time such as 90s, 15m, 2h or 1d.", param_hint="'--min-age'")
    return float(match[1]) * _SECONDS[match[2]]


def _what(plan: PrunePlan) -> str:
    from zeroelastic.pruning import leftover_bytes, removable

    count = len(plan.removals)
    parts = [f"{count} {'checkpoint' if count == 1 else 'checkpoints'}"] if count else []
    parts += ["what an interrupted removal left"] if plan.leftovers else []
    dead = [found.tree.nbytes for found in plan.unfinished if found.remove]
    parts += [f"{len(dead)} {'save' if len(dead) == 1 else 'saves'} that did not finish"] if dead else []
    return f"{' and '.join(parts)} ({format_size(removable(plan.removals) + leftover_bytes(plan) + sum(dead))})"


def _carry_out(plan: PrunePlan) -> dict[str, Outcome]:
    """Remove what was decided; returns what became of each tag that was tried.

    What a save is at by now is left alone, which is no failure.
    """
    from zeroelastic.pruning import empty_trash, remove_tag, remove_unfinished

    outcomes: dict[str, Outcome] = {}
    if plan.leftovers:
        empty_trash(plan.root)
    for decision in plan.removals:
        try:
            outcomes[decision.tag.name] = Outcome(remove_tag(plan, decision) or "")
        except OSError as error:
            outcomes[decision.tag.name] = Outcome(f"{error.filename}: {error.strerror}", failed=True)
    for found in plan.unfinished:
        if found.remove:
            try:
                outcomes[found.name] = Outcome(remove_unfinished(plan, found) or "")
            except OSError as error:
                outcomes[found.name] = Outcome(f"{error.filename}: {error.strerror}", failed=True)
    return outcomes


def _freed(plan: PrunePlan, outcomes: dict[str, Outcome]) -> int:
    tags = sum(d.tree.nbytes for d in plan.removals if d.tree is not None and outcomes.get(d.tag.name) == Outcome())
    return tags + sum(found.tree.nbytes for found in plan.unfinished if outcomes.get(found.name) == Outcome())


def _action(decision: Decision | Unfinished, outcomes: dict[str, Outcome], dry_run: bool) -> str:
    if not decision.remove:
        return "kept"
    if dry_run:
        return "would be removed"
    outcome = outcomes.get(_name(decision), Outcome())
    return "failed" if outcome.failed else "kept" if outcome.why else "removed"


def _name(decision: Decision | Unfinished) -> str:
    from zeroelastic.pruning import Decision

    return decision.tag.name if isinstance(decision, Decision) else decision.name


def _document(plan: PrunePlan, outcomes: dict[str, Outcome], *, keep: int, dry_run: bool) -> dict[str, object]:
    return {
        "ok": not any(outcome.failed for outcome in outcomes.values()) and (plan.has_valid or not plan.decisions),
        "directory": str(plan.root),
        "keep": keep,
        "dry_run": dry_run,
        "tags": [
            {
                "tag": decision.tag.name,
                "path": str(decision.tag.path),
                "step": decision.tag.step,
                "saved_at": decision.tag.saved_at,
                "valid": decision.valid,
                "action": _action(decision, outcomes, dry_run),
                "reason": outcomes.get(decision.tag.name, Outcome()).why or decision.reason,
                "nbytes": None if decision.tree is None else decision.tree.nbytes,
            }
            for decision in plan.decisions
        ],
        "unfinished": [
            {
                "name": found.name,
                "action": _action(found, outcomes, dry_run),
                "reason": outcomes.get(found.name, Outcome()).why or found.reason,
                "nbytes": found.tree.nbytes,
            }
            for found in plan.unfinished
        ],
        "removed": [name for name, outcome in outcomes.items() if not outcome.why],
        "freed_nbytes": _freed(plan, outcomes),
        "leftovers": len(plan.leftovers),
    }


def _show(plan: PrunePlan, outcomes: dict[str, Outcome], *, dry_run: bool) -> None:
    from zeroelastic.cli.show import columns

    rows = [
        (
            _action(decision, outcomes, dry_run),
            decision.tag.name,
            "" if decision.tree is None else format_size(decision.tree.nbytes),
            outcomes.get(decision.tag.name, Outcome()).why or decision.reason,
        )
        for decision in plan.decisions
    ]
    rows += [
        (
            _action(found, outcomes, dry_run),
            found.name,
            format_size(found.tree.nbytes),
            outcomes.get(found.name, Outcome()).why or found.reason,
        )
        for found in plan.unfinished
    ]
    for line in columns(rows, right=frozenset({2})) if rows else ():
        typer.echo(line)
    if plan.leftovers:
        typer.echo(f"{'would finish' if dry_run else 'finished'} an interrupted removal")
    if not dry_run:
        gone = sum(not outcome.why for outcome in outcomes.values())
        typer.echo(f"{gone} removed, {format_size(_freed(plan, outcomes))} freed")


def _log(text: str) -> None:
    typer.echo(harmless(text), err=True)
