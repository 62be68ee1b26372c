"""The tag that a run continues from, and the file ``latest``: found, repaired, and set to another tag."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from zeroelastic.errors import CheckpointError, UnreadableError, UsageError
from zeroelastic.io.paths import FilePath
from zeroelastic.runs.candidates import Check, PassedOver, Run, check_quickly, check_tag, find_newest, list_run
from zeroelastic.runs.names import LATEST, named_latest
from zeroelastic.runs.order import Tag, committed_after, tags_to_try
from zeroelastic.runs.run_store import RunStore


@dataclass(frozen=True, slots=True)
class Latest:
    """``tag`` is the newest that verifies among ``run.tags``: what ``latest`` names, or the newest committed one.

    ``passed`` are those before it. ``named`` is the tag that the file names, ``problem`` the problem with the file;
    ``written``: it was, or would be, changed to name ``tag``.
    """

    run: Run
    tag: Tag | None
    passed: tuple[PassedOver, ...]
    named: str | None
    problem: str | None
    written: bool = False

    @property
    def newer(self) -> tuple[Tag, ...]:
        """Tags with the same parameters that were committed after ``tag`` and are not damaged, as far as is known."""
        passed = {verdict.tag for verdict in self.passed}
        later = () if self.tag is None else committed_after(self.run.tags, self.tag)
        return tuple(tag for tag in later if tag not in passed)


def find_latest(root: FilePath, check: Check) -> Latest:
    """The checkpoint that ``resume`` would load. Raises UsageError where there are none.

    Where ``latest`` names a tag that is damaged, those with the same parameters count. Example::

        find_latest(Path("ckpt"), check_quickly).tag
    """
    run = list_run(root)
    named, problem = (None, None) if run.in_folders else named_latest(root)
    params = next((tag.trained_params for tag in run.tags if tag.name == named), None)
    return Latest(run, *find_newest(tags_to_try(run.tags, named, params), check), named, problem)


def fix_latest(root: Path, check: Check, *, dry_run: bool = False) -> Latest:
    """Make ``latest`` name the checkpoint that ``find_latest`` finds. Raises UsageError, OSError.

    Raises UnreadableError where a newer tag may be whole and cannot be read now. A ``latest`` that a save has written
    meanwhile is kept.
    """
    found = find_latest(root, check)
    _refuse_folders(found.run, "--fix")
    if found.tag is None or found.tag.name == found.named:
        return found
    _refuse_unreadable(found.passed)
    if not dry_run:
        if named_latest(root) != (found.named, found.problem):
            return fix_latest(root, check)
        RunStore(root).point(found.tag.name)
        later = [tag for tag in list_run(root).tags if tag not in found.run.tags]
        if later:  # a save was committed in between, and may have written latest just before
            RunStore(root).point(later[0].name)
    return replace(found, written=True)


def set_latest(root: Path, name: str, check: Check = check_quickly, *, dry_run: bool = False) -> Latest:
    """Roll back: make ``latest`` name this tag, so that the next start of the job continues from it.

    Raises UsageError where there is no such tag, CheckpointError where it is damaged, UnreadableError, OSError::

        set_latest(Path("ckpt"), "global_step100")
    """
    run = list_run(root)
    _refuse_folders(run, "--set")
    tag = next((tag for tag in run.tags if tag.name == name), None)
    if tag is None:
        there = ", ".join(tag.name for tag in run.tags[:8])
        raise UsageError(f"{root}: has no tag {name}. There are, newest first: {there}.")
    verdict = check_tag(tag, check)
    if verdict is not None:
        kind = UnreadableError if verdict.undecided else CheckpointError
        raise kind(f"{tag.tag_dir}: {verdict.problems[0]} {LATEST} was not changed.")
    named, problem = named_latest(root)
    if not dry_run:
        RunStore(root).point(name)
    return Latest(run, tag, (), named, problem, True)


def _refuse_unreadable(passed: Iterable[PassedOver]) -> None:
    for verdict in passed:
        if verdict.may_be_newest:
            raise UnreadableError(
                f"{verdict.tag.tag_dir}: {verdict.problems[0].rstrip('.')}. It may be whole, and is newer than every "
                f"tag that verifies: {LATEST} was not changed. Run it again where this tag can be read, or name a "
                "tag with --set.",
                remedy="",
            )


def _refuse_folders(run: Run, option: str) -> None:
    if run.in_folders:
        raise UsageError(
            f"{run.root}: its checkpoints are in folders, which have a latest each; {option} is for tags. Give one "
            "of the folders."
        )
