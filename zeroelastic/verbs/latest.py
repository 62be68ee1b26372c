"""``zeroelastic.latest``: the newest checkpoint of a run that verifies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from zeroelastic.errors import UnsupportedError, UsageError, printable, with_remedy
from zeroelastic.io.paths import FilePath, absolute, as_path
from zeroelastic.io.storage import file_sizes
from zeroelastic.json_document import document
from zeroelastic.runs.candidates import Check, check_quickly
from zeroelastic.runs.latest import Latest, find_latest, fix_latest, set_latest
from zeroelastic.runs.order import Tag
from zeroelastic.verbs.options import Progress, no_progress
from zeroelastic.verbs.verify.verify import VerifyReport, verify_checkpoint


@dataclass(frozen=True, slots=True)
class LatestReport:
    """What was found: ``found`` has the tags that were passed over, and why; ``verified`` is how tags were checked."""

    found: Latest
    verified: Literal["quick", "full"]
    dry_run: bool

    @property
    def tag(self) -> Tag | None:
        """The newest checkpoint that verifies (``name``, ``path``, ``tag_dir``, ``step``), or None."""
        return self.found.tag

    def to_json(self) -> dict[str, object]:
        """The document of ``zeroelastic latest --json``; docs/reference/cli/latest.md has its keys."""
        found, tag = self.found, self.found.tag
        body = {
            "directory": absolute(str(found.run.root)),
            "tag": None if tag is None else tag.name,
            "path": None if tag is None else absolute(str(tag.tag_dir)),
            "folder": None if tag is None else absolute(str(tag.path)),
            "step": None if tag is None else tag.step,
            "saved_at": None if tag is None else tag.saved_at,
            "verified": self.verified,
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
                "fixed": found.written and not self.dry_run,
            },
        }
        return document(body, ok=tag is not None)


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

    The newest is the one that was committed last; where the file ``latest`` was pointed at an older tag since, the run
    continues from there. Every byte is read, with ``quick`` only sizes and the commit record, or headers. ``fix`` lets
    ``latest`` name the tag that was found, ``set_to`` another tag; with ``dry_run`` nothing is written.

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
        found = set_latest(root, set_to, _check_quickly, dry_run=dry_run)
    else:
        found = fix_latest(root, check, dry_run=dry_run)
    return LatestReport(found, "quick" if quick or set_to is not None else "full", dry_run)


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
