"""``zeroelastic.prune``: remove old checkpoints of a run and keep the newest that verify."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from zeroelastic.errors import UnreadableError, with_remedy
from zeroelastic.io.paths import absolute, as_path
from zeroelastic.json_document import document
from zeroelastic.runs.prune import Decision, PrunePlan, plan_prune, removable, remove_tag
from zeroelastic.runs.run_store import Leftover, open_run
from zeroelastic.verbs.options import Progress, no_progress, seconds_option


class Outcome(NamedTuple):
    """What became of something that was to be removed: ``why`` it is still there, empty where it is gone."""

    why: str = ""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What was removed, or would be: the ``plan`` has each tag and the reason for its fate.

    ``outcomes`` is by name, and empty where nothing was tried.
    """

    plan: PrunePlan
    keep: int
    dry_run: bool
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)

    @property
    def has_work(self) -> bool:
        """Whether the plan removes anything."""
        return bool(self.plan.removals or self.plan.leftovers or self.dead)

    @property
    def dead(self) -> tuple[Leftover, ...]:
        """The saves that did not finish and that the plan removes."""
        return tuple(found for found in self.plan.unfinished if found.remove)

    @property
    def failed(self) -> bool:
        """Whether something could not be removed."""
        return any(outcome.failed for outcome in self.outcomes.values())

    @property
    def removed(self) -> tuple[str, ...]:
        """The names of the tags and unfinished saves that are gone."""
        return tuple(name for name, outcome in self.outcomes.items() if not outcome.why)

    @property
    def freed_nbytes(self) -> int:
        """Bytes that the removal freed."""
        gone = set(self.removed)
        tags = sum(d.tree.nbytes for d in self.plan.removals if d.tree is not None and d.tag.name in gone)
        return tags + sum(found.tree.nbytes for found in self.plan.unfinished if found.name in gone)

    def action(self, item: Decision | Leftover) -> str:
        """What became of a tag or an unfinished save: "kept", "removed", "would be removed" or "failed"."""
        if not item.remove:
            return "kept"
        if self.dry_run:
            return "would be removed"
        outcome = self.outcomes.get(_name(item), Outcome())
        return "failed" if outcome.failed else "kept" if outcome.why else "removed"

    def reason(self, item: Decision | Leftover) -> str:
        """Why that became of it."""
        return self.outcomes.get(_name(item), Outcome()).why or item.reason

    def to_json(self) -> dict[str, object]:
        """The document of ``zeroelastic prune --json``; docs/reference/cli/prune.md has its keys."""
        plan = self.plan
        body = {
            "directory": absolute(str(plan.root)),
            "keep": self.keep,
            "dry_run": self.dry_run,
            "tags": [
                {
                    "tag": decision.tag.name,
                    "path": absolute(str(decision.tag.tag_dir)),
                    "folder": absolute(str(decision.tag.path)),
                    "step": decision.tag.step,
                    "saved_at": decision.tag.saved_at,
                    "valid": decision.valid,
                    "action": self.action(decision),
                    "reason": self.reason(decision),
                    "bytes": None if decision.tree is None else decision.tree.nbytes,
                }
                for decision in plan.decisions
            ],
            "unfinished": [
                {
                    "name": found.name,
                    "action": self.action(found),
                    "reason": self.reason(found),
                    "bytes": found.tree.nbytes,
                }
                for found in plan.unfinished
            ],
            "removed": list(self.removed),
            "freed_bytes": self.freed_nbytes,
            "leftovers": len(plan.leftovers),
        }
        return document(body, ok=not self.failed and (plan.has_valid or not plan.decisions))


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

    ``directory`` may be a URL; of dead saves there, open uploads are aborted.

    Raises UsageError where there are no checkpoints.

    Example::

        import zeroelastic
        report = zeroelastic.prune("ckpt", keep=1)
        print([decision.tag.name for decision in report.plan.removals])
        zeroelastic.prune("ckpt", keep=1, dry_run=False)
    """
    root, min_age_s = as_path(directory), seconds_option(min_age, "--min-age")
    plan = plan_prune(root, keep=keep, invalid=invalid, min_age_s=min_age_s)
    report = PruneReport(plan, keep, dry_run)
    return report if dry_run else carry_out(report, progress=progress)


def carry_out(report: PruneReport, *, progress: Progress = no_progress) -> PruneReport:
    """Remove what the plan of a report says; something that a save works on by now is kept, which is no failure."""
    plan = report.plan
    outcomes: dict[str, Outcome] = {}
    store = open_run(plan.root)
    if plan.leftovers:
        store.finish_removals()
    nbytes = removable(plan.removals) + sum(found.tree.nbytes for found in report.dead)
    with progress("removing", nbytes) as advance:
        for decision in plan.removals:
            outcomes[decision.tag.name] = _outcome(partial(remove_tag, plan, decision))
            advance(removable([decision]))
        for found in report.dead:
            outcomes[found.name] = _outcome(partial(store.remove_leftover, found))
            advance(found.tree.nbytes)
    return PruneReport(plan, report.keep, False, outcomes)


def _outcome(remove: Callable[[], str | None]) -> Outcome:
    try:
        return Outcome(remove() or "")
    except UnreadableError as error:
        return Outcome(str(error), failed=True)
    except OSError as error:
        return Outcome(f"{error.filename}: {error.strerror}", failed=True)


def _name(item: Decision | Leftover) -> str:
    return item.tag.name if isinstance(item, Decision) else item.name
