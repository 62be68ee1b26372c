"""``zeroelastic.latest``: the newest checkpoint of a run that verifies, and the file ``latest``, repaired or set."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, PrivateAttr

from zeroelastic.errors import CheckpointError, UnreadableError, UnsupportedError, UsageError, printable, with_remedy
from zeroelastic.io.paths import FilePath, absolute, as_path, local_directory
from zeroelastic.io.storage import file_sizes
from zeroelastic.runs.names import LATEST, named_latest
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.tags import Tag, committed_after, in_folders, tags_to_try
from zeroelastic.runs.verdicts import Check, Verdict, check_quickly, check_tag, find_newest
from zeroelastic.verbs.interface import IN_A_STORE, Part, Progress, Report, no_progress
from zeroelastic.verbs.verify.findings import VerifyReport
from zeroelastic.verbs.verify.verify import verify_checkpoint


class PassedOver(Part):
    """A newer checkpoint that does not verify."""

    tag: str
    step: int | None
    problems: tuple[str, ...]
    undecided: bool = Field(default=False, exclude=True)
    may_be_newest: bool = Field(default=False, exclude=True)


class LatestFile(Part):
    """What the file ``latest`` names, whether that is the newest, and whether it was written."""

    names: str | None
    is_newest: bool
    fixed: bool
    problem: str | None = Field(default=None, exclude=True)  # with the file
    changes: bool = Field(default=False, exclude=True)  # it was, or would be, written


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
    _tag: Tag | None = PrivateAttr()

    @property
    def tag(self) -> Tag | None:
        """The newest checkpoint that verifies, or None."""
        return self._tag


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
    check: Check = _check_quickly if quick or set_to is not None else lambda tag_dir: _check_fully(tag_dir, progress)
    store, tags = _tags_of(directory, "--fix" if fix else None if set_to is None else "--set")
    named, problem = (None, None) if in_folders(tags) else named_latest(store.root)
    passed: tuple[Verdict, ...] = ()
    if set_to is not None:
        found: Tag | None = _require(store, tags, set_to, check)
    else:
        params = next((tag.trained_params for tag in tags if tag.name == named), None)
        found, passed = find_newest(tags_to_try(tags, named, params), check)
    changes = found is not None and (set_to is not None or (fix and found.name != named))
    if found is not None and changes:
        _refuse_unreadable(passed)
        if not dry_run:
            if fix and named_latest(store.root) != (named, problem):  # a save has written it meanwhile
                return latest(directory, quick=quick, fix=True, progress=progress)
            _point(store, tags, found, fix=fix)
    newer = () if found is None else committed_after(tags, found)
    report = LatestReport(
        ok=found is not None,
        directory=absolute(str(store.root)),
        tag=None if found is None else found.name,
        path=None if found is None else absolute(str(found.tag_dir)),
        folder=None if found is None else absolute(str(found.path)),
        step=None if found is None else found.step,
        saved_at=None if found is None else found.saved_at,
        verified="quick" if quick or set_to is not None else "full",
        num_tags=len(tags),
        passed_over=tuple(map(_passed_over, passed)),
        newer=tuple(tag.name for tag in newer if all(tag is not verdict.tag for verdict in passed)),
        latest=LatestFile(
            names=named,
            is_newest=found is not None and named == found.name,
            fixed=changes and not dry_run,
            problem=problem,
            changes=changes,
        ),
    )
    report._tag = found
    return report


def _tags_of(directory: str | os.PathLike[str], changing: str | None) -> tuple[RunStore, Sequence[Tag]]:
    """The tags of a run; ``changing`` is the option that writes its ``latest``, if any. Raises UsageError."""
    store = RunStore(as_path(directory) if changing is None else local_directory(directory, IN_A_STORE))
    tags = store.require_tags()
    if changing is not None and in_folders(tags):
        raise UsageError(
            f"{store.root}: its checkpoints are in folders, which have a latest each; {changing} is for tags. Give one "
            "of the folders."
        )
    return store, tags


def _passed_over(verdict: Verdict) -> PassedOver:
    return PassedOver(
        tag=verdict.tag.name,
        step=verdict.tag.step,
        problems=verdict.problems,
        undecided=verdict.undecided,
        may_be_newest=verdict.may_be_newest,
    )


def _require(store: RunStore, tags: Sequence[Tag], name: str, check: Check) -> Tag:
    """The tag of this name, which ``latest`` is to name. Raises an error unless it is there and whole."""
    tag = next((tag for tag in tags if tag.name == name), None)
    if tag is None:
        there = ", ".join(tag.name for tag in tags[:8])
        raise UsageError(f"{store.root}: has no tag {name}. There are, newest first: {there}.")
    verdict = check_tag(tag, check)
    if verdict is not None:
        kind = UnreadableError if verdict.undecided else CheckpointError
        raise kind(f"{tag.tag_dir}: {verdict.problems[0]} {LATEST} was not changed.")
    return tag


def _point(store: RunStore, tags: Sequence[Tag], found: Tag, *, fix: bool) -> None:
    """Let ``latest`` name a tag; with ``fix`` one that a save has committed meanwhile, which may have written it."""
    store.point(found.name)
    later = [tag for tag in store.tags() if tag not in tags] if fix else []
    if later:
        store.point(later[0].name)


def _refuse_unreadable(passed: Sequence[Verdict]) -> None:
    for verdict in passed:
        if verdict.may_be_newest:
            raise UnreadableError(
                f"{verdict.tag.tag_dir}: {verdict.problems[0].rstrip('.')}. It may be whole, and is newer than every "
                f"tag that verifies: {LATEST} was not changed. Run it again where this tag can be read, or name a "
                "tag with --set.",
                remedy="",
            )


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
