"""The order of a proof: the checkpoint is verified, run at its own size and at another, saved there and taken back."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from zeroelastic.errors import CheckpointError, RemoteRankError, UsageError
from zeroelastic.proving.judge import BACK, CONTROL, OTHER, REPEAT, Judgement, Source, judge
from zeroelastic.proving.records import Record, Role, Run, read_record
from zeroelastic.record import read_record as read_commit_record
from zeroelastic.source import Source as Found
from zeroelastic.tag_names import LATEST
from zeroelastic.verification import VerifyReport, verify_checkpoint

SAVED_TAG = "proof"

_OURS = ("runs", "checkpoint")

Launch = Callable[[Run], str | None]
"""Runs the script on the ranks of a run; returns why it failed, None when it did not."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be proved: ``steps`` optimizer steps at both sizes, ``repeat`` the first of them to see its noise.

    ``out`` is a directory of the proof's own. ``tolerance`` of losses is relative; None is that of the precision.
    """

    found: Found
    world_size: int
    from_world_size: int | None
    steps: int
    out: Path
    repeat: bool = True
    tolerance: float | None = None
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was run and found. ``seconds`` are by role; ``saved_root`` is of the save at the other size."""

    request: Request
    verified: VerifyReport
    global_steps: int | None
    records: Mapping[Role, Record]
    runs: tuple[Run, ...]
    seconds: Mapping[Role, float]
    saved_root: str | None
    judgement: Judgement


def sizes(request: Request, verified: VerifyReport) -> tuple[int, int]:
    """The two world sizes. Raises UsageError where they are the same or none."""
    first = verified.world_size if request.from_world_size is None else request.from_world_size
    if min(first, request.world_size) < 1:
        raise UsageError("a run needs at least one rank.")
    if first == request.world_size:
        raise UsageError(f"{request.world_size} is the size of both runs; a resume at another size is to be proved.")
    return first, request.world_size


def verify_source(found: Found) -> VerifyReport:
    """Every byte of the checkpoint read. Raises UsageError for one behind a URL, CheckpointError for a damaged one."""
    if not isinstance(found.tag_dir, Path):
        raise UsageError(f"{found.tag_dir}: is not on this machine, where the script would load it from.")
    verified = verify_checkpoint(found.tag_dir)
    if not verified.valid:
        more = len(verified.problems) - 1
        raise CheckpointError(
            f"{found.tag_dir}: is damaged: {verified.problems[0].sentence}"
            + (f" (and {more} more; zeroelastic verify lists them)" if more else "")
        )
    if verified.content_root is None:
        raise CheckpointError(f"{found.tag_dir}: its content root cannot be computed; zeroelastic verify says why.")
    return verified


def prove(
    request: Request, verified: VerifyReport, launch: Launch, *, say: Callable[[str], None] = lambda text: None
) -> Outcome:
    """Run what is to be run and judge it.

    A run that fails ends the proof, which then is none: its reason is a check that failed. Raises UsageError when the
    script never loads the checkpoint, or ends before the steps are done, and RemoteRankError when it fails at the size
    to compare with.
    """
    first, second = sizes(request, verified)
    tag_dir = Path(verified.tag_dir)
    protected = _protected(request.found)
    before = _listing(tag_dir)
    runs_folder, scratch = (request.out / name for name in _OURS)
    back = (str(scratch), SAVED_TAG)
    records: dict[Role, Record] = {}
    failures: dict[Role, str] = {}
    seconds: dict[Role, float] = {}
    runs: list[Run] = []

    def carry_out(role: Role, world_size: int, steps: int, **told: tuple[str, str]) -> bool:
        folder = runs_folder / role.replace(" ", "-")
        folder.mkdir(parents=True)
        run = Run(role, world_size, steps, str(tag_dir), str(folder), protected, **told)
        runs.append(run)
        say(f"{role}: {world_size} ranks ...")
        began = time.monotonic()
        failure = launch(run)
        seconds[role] = time.monotonic() - began
        record = read_record(run.record_path) if run.record_path.exists() else None
        if record is not None and record.finished:
            records[role] = record
            return True
        if failure is None:
            raise UsageError(_unfinished(record, run))
        if role == CONTROL:
            raise RemoteRankError(
                f"the script fails at the size to compare with, {world_size} ranks; {_log(run)}\n{failure}"
            )
        failures[role] = failure
        return False

    try:
        _ = (
            carry_out(CONTROL, first, request.steps)
            and (not request.repeat or carry_out(REPEAT, first, request.steps))
            and carry_out(OTHER, second, request.steps, save_to=back)
            and carry_out(BACK, first, 0, instead=back)
        )
        saved_root = verify_checkpoint(scratch / SAVED_TAG).content_root if OTHER in records else None
    finally:
        if not request.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    own = read_commit_record(tag_dir)
    steps = None if own is None else own.global_steps
    assert verified.content_root is not None
    judgement = judge(
        Source(verified.content_root, verified.recorded_root, steps),
        records,
        saved_root=saved_root,
        tolerance=request.tolerance,
        changed_files=_changes(before, _listing(tag_dir)),
        failures=failures,
    )
    return Outcome(request, verified, steps, records, tuple(runs), seconds, saved_root, judgement)


def _protected(found: Found) -> tuple[str, ...]:
    """The tag and ``latest``; where a framework has a folder for each checkpoint, that folder."""
    if found.framework == "deepspeed":
        return str(found.tag_dir), str(found.root / LATEST)
    return (str(found.root),)


def _unfinished(record: Record | None, run: Run) -> str:
    if record is None:
        return f"the script ended without having built a DeepSpeed engine's run to record; {_log(run)}"
    if record.loaded is None and not record.loads:
        return (
            "the script ended and never called engine.load_checkpoint. Give it the arguments that make it resume from "
            f"{run.source}; {_log(run)}"
        )
    if record.loaded is None:
        asked = ", ".join(dict.fromkeys(record.loads))
        return f"the script loaded {asked}, not {run.source}. Name what it loads, or let it load this; {_log(run)}"
    return (
        f"the script ended {len(record.losses)} optimizer steps after the load; {run.steps} are to be compared. Let it "
        f"train for longer, or give --steps; {_log(run)}"
    )


def _log(run: Run) -> str:
    return f"its output is in {run.log_path}"


def _listing(tag_dir: Path) -> dict[str, tuple[int, int, int]]:
    """Size, modification time and inode of every file below a tag, and of ``latest`` beside it."""
    paths = [Path(folder) / name for folder, _, names in os.walk(tag_dir) for name in names]
    paths += [path for path in (tag_dir.parent / LATEST,) if path.exists()]
    stats = {os.path.relpath(path, tag_dir): path.stat() for path in paths}
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}


def _changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    return (
        [f"{name}: is gone" for name in before if name not in after]
        + [f"{name}: is new" for name in after if name not in before]
        + [f"{name}: has changed" for name in before if name in after and before[name] != after[name]]
    )


def prepare(out: Path) -> Path:
    """Make the proof's directory. What an earlier proof left that came to no report goes.

    Raises UsageError where something else is there already.
    """
    if out.exists() and (not out.is_dir() or any(path.name not in _OURS for path in out.iterdir())):
        raise UsageError(f"{out}: exists. Give another --out, or remove it.")
    for name in _OURS:
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    return out.resolve()
