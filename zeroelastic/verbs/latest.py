"""``zeroelastic.latest``: the newest checkpoint of a run that verifies."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, PrivateAttr

from zeroelastic.errors import UnsupportedError, UsageError, printable, with_remedy
from zeroelastic.io.paths import FilePath, absolute, as_path, local_directory
from zeroelastic.io.storage import file_sizes
from zeroelastic.runs.candidates import Check, check_quickly
from zeroelastic.runs.latest import Latest, find_latest, fix_latest, set_latest
from zeroelastic.runs.order import Tag
from zeroelastic.verbs.options import IN_A_STORE, Progress, no_progress
from zeroelastic.verbs.report import Part, Report
from zeroelastic.verbs.verify.report import VerifyReport
from zeroelastic.verbs.verify.verify import verify_checkpoint


class PassedOver(Part):
    """A newer checkpoint that does not verify."""

    tag: str
    step: int | None
    problems: tuple[str, ...]


class LatestFile(Part):
    """What the file ``latest`` names, whether that is the newest, and whether it was written."""

    names: str | None
    is_newest: bool
    fixed: bool


class LatestReport(Report):
    """The newest checkpoint that verifies; ``verified`` is how tags were checked.

    ``newer`` are tags that were committed after the one that ``latest`` names. The attribute ``tag`` is the checkpoint
    (``name``, ``path``, ``tag_dir``, ``step``), or None; the document has its name.
    """

    directory: str
    tag_name: str | None = Field(alias="tag")
    path: str | None
    folder: str | None
    step: int | None
    saved_at: float | None
    verified: Literal["full", "quick"]
    num_tags: int
    passed_over: tuple[PassedOver, ...]
    newer: tuple[str, ...]
    latest: LatestFile
    dry_run: bool = Field(default=False, exclude=True)
    _found: Latest = PrivateAttr()

    @property
    def found(self) -> Latest:
        """The tags of the run, and what was found out about each; not in the document."""
        return self._found

    @property
    def tag(self) -> Tag | None:
        """The newest checkpoint that verifies, or None."""
        return self._found.tag


@with_remedy()
def latest(
    directory: str | os.PathLike[str],
    *,
    quick: bool = False,
    fix: bool = False,
    set_to: str | None = None,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> LatestReport:
    """Find the newest checkpoint of a run that verifies.

    That is the tag which the file ``latest`` names, or the newest committed one where that does not verify. Every byte
    is read, with ``quick`` only sizes and the commit record, or headers. ``fix`` lets ``latest`` name the tag that was
    found, ``set_to`` another tag; with ``dry_run`` nothing is written.

    Raises UsageError where there are no checkpoints, CheckpointError, UnreadableError.

    Example::

        import zeroelastic
        report = zeroelastic.latest("ckpt", quick=True)
        print(report.tag.name, report.tag.step)
    """
    if fix and set_to is not None:
        raise UsageError("--fix and --set: give only one of the two.")
    if dry_run and not fix and set_to is None:
        raise UsageError("--dry-run: goes with --fix or --set; without them nothing is written.")
    root = as_path(directory)
    check: Check = _check_quickly if quick else lambda tag_dir: _check_fully(tag_dir, progress)
    if not fix and set_to is None:
        found = find_latest(root, check)
    elif set_to is not None:
        found = set_latest(local_directory(directory, IN_A_STORE), set_to, _check_quickly, dry_run=dry_run)
    else:
        found = fix_latest(local_directory(directory, IN_A_STORE), check, dry_run=dry_run)
    return _report(found, "quick" if quick or set_to is not None else "full", dry_run)


def _report(found: Latest, verified: Literal["quick", "full"], dry_run: bool) -> LatestReport:
    tag = found.tag
    passed = found.passed
    report = LatestReport(
        ok=tag is not None,
        directory=absolute(str(found.run.root)),
        tag=None if tag is None else tag.name,
        path=None if tag is None else absolute(str(tag.tag_dir)),
        folder=None if tag is None else absolute(str(tag.path)),
        step=None if tag is None else tag.step,
        saved_at=None if tag is None else tag.saved_at,
        verified=verified,
        num_tags=len(found.run.tags),
        passed_over=tuple(PassedOver(tag=v.tag.name, step=v.tag.step, problems=tuple(v.problems)) for v in passed),
        newer=tuple(newer.name for newer in found.newer),
        latest=LatestFile(
            names=found.named,
            is_newest=tag is not None and found.named == tag.name,
            fixed=found.written and not dry_run,
        ),
        dry_run=dry_run,
    )
    report._found = found
    return report


def _check_quickly(tag_dir: FilePath) -> tuple[str, ...]:
    try:
        return check_quickly(tag_dir)
    except UnsupportedError:  # names and sizes can be checked all the same
        return _problems(verify_checkpoint(tag_dir, quick=True))


def _check_fully(tag_dir: FilePath, progress: Progress) -> tuple[str, ...]:
    with progress(f"verifying {printable(tag_dir.name)}", sum(file_sizes(tag_dir).values())) as advance:
        return _problems(verify_checkpoint(tag_dir, progress=advance))


def _problems(report: VerifyReport) -> tuple[str, ...]:
    return tuple(
        problem.sentence if problem.file in problem.sentence else f"{problem.file}: {problem.sentence}"
        for problem in report.problems
    )
