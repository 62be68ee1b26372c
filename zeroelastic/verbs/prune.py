"""``zeroelastic.prune``: remove old checkpoints of a run and keep the newest that verify."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from pydantic import PrivateAttr

from zeroelastic.errors import UnreadableError, with_remedy
from zeroelastic.io.paths import absolute, local_directory
from zeroelastic.runs.prune import Decision, PrunePlan, plan_prune, remove_tag
from zeroelastic.runs.run_store import Leftover, RunStore, removable
from zeroelastic.verbs.options import IN_A_STORE, Progress, no_progress, seconds_option, whole_option
from zeroelastic.verbs.report import Part, Report


class Outcome(NamedTuple):
    """What became of something that was to be removed: ``why`` it is still there, empty where it is gone."""

    why: str = ""
    failed: bool = False


class PrunedTag(Part):
    """A tag, what became of it ("kept", "removed", "would be removed" or "failed") and why; ``bytes`` if it goes."""

    tag: str
    path: str
    folder: str
    step: int | None
    saved_at: float
    valid: bool
    action: str
    reason: str
    bytes: int | None


class UnfinishedSave(Part):
    """A save that did not finish, by its name from the directory; what became of it, as of a tag, and why."""

    name: str
    action: str
    reason: str
    bytes: int


class PruneReport(Report):
    """What was removed, or would be. ``removed`` names the tags and unfinished saves that are gone."""

    directory: str
    keep: int
    dry_run: bool
    tags: tuple[PrunedTag, ...]
    unfinished: tuple[UnfinishedSave, ...]
    removed: tuple[str, ...]
    freed_bytes: int
    _plan: PrunePlan = PrivateAttr()

    @property
    def plan(self) -> PrunePlan:
        """The plan: each tag and the reason for its fate; not in the document."""
        return self._plan

    @property
    def has_work(self) -> bool:
        """Whether the plan removes anything."""
        return bool(self.plan.removals or self.dead)

    @property
    def dead(self) -> tuple[Leftover, ...]:
        """The saves that did not finish and that the plan removes."""
        return tuple(found for found in self.plan.unfinished if found.remove)

    @property
    def failed(self) -> bool:
        """Whether something could not be removed."""
        actions = [*(tag.action for tag in self.tags), *(save.action for save in self.unfinished)]
        return "failed" in actions

    @property
    def removable_bytes(self) -> int:
        """Bytes that all removals of the plan free."""
        return removable([*(tag.tree for tag in self.plan.removals), *(found.tree for found in self.dead)])


@with_remedy()
def prune(
    directory: str | os.PathLike[str],
    *,
    keep: int,
    invalid: bool = False,
    min_age: float | str = "1h",
    dry_run: bool = True,
    progress: Progress = no_progress,
) -> PruneReport:
    """Remove old checkpoints of a run; keep the ``keep`` newest that verify, and what may be being written.

    The command asks before it removes anything. This function cannot ask, so **it removes nothing unless it is called
    with** ``dry_run=False``. ``invalid`` also removes checkpoints that do not verify and are older than one that does.
    What has no commit record and changed within ``min_age`` (seconds, or a text such as "15m") stays. Where no
    checkpoint verifies, none is removed (``plan.has_valid``).

    Raises UsageError where there are no checkpoints.

    Example::

        import zeroelastic
        report = zeroelastic.prune("ckpt", keep=1)
        print([decision.tag.name for decision in report.plan.removals])
        zeroelastic.prune("ckpt", keep=1, dry_run=False)
    """
    keep = whole_option(keep, "--keep")
    root, min_age_s = local_directory(directory, IN_A_STORE), seconds_option(min_age, "--min-age")
    plan = plan_prune(root, keep=keep, invalid=invalid, min_age_s=min_age_s)
    report = _report(plan, keep, dry_run=dry_run)
    return report if dry_run else carry_out(report, progress=progress)


def carry_out(report: PruneReport, *, progress: Progress = no_progress) -> PruneReport:
    """Remove what the plan of a report says; something that a save works on by now is kept, which is no failure."""
    plan = report.plan
    outcomes: dict[str, Outcome] = {}
    store = RunStore(plan.root)
    with progress("removing", report.removable_bytes) as advance:
        for decision in plan.removals:
            outcomes[decision.tag.name] = _outcome(partial(remove_tag, plan, decision))
            advance(removable([decision.tree]))
        for found in report.dead:
            outcomes[found.name] = _outcome(partial(store.remove, plan.root / found.name, found.tree))
            advance(found.tree.nbytes)
    return _report(plan, report.keep, dry_run=False, outcomes=outcomes)


def _report(
    plan: PrunePlan, keep: int, *, dry_run: bool, outcomes: Mapping[str, Outcome] = MappingProxyType({})
) -> PruneReport:
    def fate(item: Decision | Leftover, name: str) -> dict[str, str]:
        outcome = outcomes.get(name, Outcome())
        action = "failed" if outcome.failed else "kept" if outcome.why or not item.remove else "removed"
        if item.remove and dry_run:
            action = "would be removed"
        return {"action": action, "reason": outcome.why or item.reason}

    removed = tuple(name for name, outcome in outcomes.items() if not outcome.why)
    freed = removable(decision.tree for decision in plan.removals if decision.tag.name in removed)
    freed += removable(found.tree for found in plan.unfinished if found.name in removed)
    failed = any(outcome.failed for outcome in outcomes.values())
    report = PruneReport(
        ok=not failed and (plan.has_valid or not plan.decisions),
        directory=absolute(str(plan.root)),
        keep=keep,
        dry_run=dry_run,
        tags=tuple(
            PrunedTag(
                tag=decision.tag.name,
                path=absolute(str(decision.tag.tag_dir)),
                folder=absolute(str(decision.tag.path)),
                step=decision.tag.step,
                saved_at=decision.tag.saved_at,
                valid=decision.valid,
                bytes=None if decision.tree is None else decision.tree.nbytes,
                **fate(decision, decision.tag.name),
            )
            for decision in plan.decisions
        ),
        unfinished=tuple(
            UnfinishedSave(name=found.name, bytes=found.tree.nbytes, **fate(found, found.name))
            for found in plan.unfinished
        ),
        removed=removed,
        freed_bytes=freed,
    )
    report._plan = plan
    return report


def _outcome(remove: Callable[[], str | None]) -> Outcome:
    try:
        return Outcome(remove() or "")
    except UnreadableError as error:
        return Outcome(str(error), failed=True)
    except OSError as error:
        return Outcome(f"{error.filename}: {error.strerror}", failed=True)
