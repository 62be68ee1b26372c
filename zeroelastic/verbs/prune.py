"""``zeroelastic.prune``: remove old checkpoints of a run and keep the newest that verify."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from pydantic import PrivateAttr

from zeroelastic.errors import UnreadableError, with_remedy
from zeroelastic.io.paths import absolute, local_directory
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.verdicts import Decision, Leftover, PrunePlan, plan_prune, remove_tag
from zeroelastic.verbs.interface import IN_A_STORE, Part, Progress, Report, no_progress, seconds_option, whole_option


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
        """Return whether the plan removes anything."""
        return bool(self.plan.removals or self.dead)

    @property
    def dead(self) -> tuple[Leftover, ...]:
        """The saves that did not finish and that the plan removes."""
        return tuple(found for found in self.plan.unfinished if found.remove)

    @property
    def failed(self) -> bool:
        """Return whether something could not be removed."""
        actions = [*(tag.action for tag in self.tags), *(save.action for save in self.unfinished)]
        return "failed" in actions

    @property
    def removable_bytes(self) -> int:
        """Bytes that all removals of the plan free."""
        return sum(tag.bytes or 0 for tag in self.tags) + sum(found.tree.nbytes for found in self.dead)


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
    plan, store = report.plan, RunStore(report.plan.root)
    work: list[tuple[str, Decision | Leftover, Callable[[], str | None]]] = [
        (decision.tag.name, decision, partial(remove_tag, plan, decision)) for decision in plan.removals
    ]
    work += [(found.name, found, partial(store.remove, plan.root / found.name, found.tree)) for found in report.dead]
    outcomes: dict[str, tuple[str, str]] = {}
    with progress("removing", report.removable_bytes) as advance:
        for name, item, remove in work:
            try:
                kept = remove()
                outcomes[name] = ("removed", item.reason) if kept is None else ("kept", kept)
            except UnreadableError as error:
                outcomes[name] = "failed", str(error)
            except OSError as error:
                outcomes[name] = "failed", f"{error.filename}: {error.strerror}"
            advance(0 if item.tree is None else item.tree.nbytes)
    return _report(plan, report.keep, dry_run=False, outcomes=outcomes)


def _report(
    plan: PrunePlan, keep: int, *, dry_run: bool, outcomes: Mapping[str, tuple[str, str]] = MappingProxyType({})
) -> PruneReport:
    """``outcomes`` are what became of what was to be removed, and why, by name."""

    def fate(item: Decision | Leftover, name: str) -> dict[str, str]:
        planned = "would be removed" if item.remove else "kept", item.reason
        return dict(zip(("action", "reason"), outcomes.get(name, planned), strict=True))

    removed = tuple(name for name, (action, _) in outcomes.items() if action == "removed")
    trees = [decision.tree for decision in plan.removals if decision.tag.name in removed]
    trees += [found.tree for found in plan.unfinished if found.name in removed]
    failed = any(action == "failed" for action, _ in outcomes.values())
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
        freed_bytes=sum(tree.nbytes for tree in trees if tree is not None),
    )
    report._plan = plan
    return report
