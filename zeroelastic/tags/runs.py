"""The runs that save to one directory, such as a GAN's two engines: which tag is of which run.

Two tags are of one run where one descends from the other by their commit records, or where their records name the same
run and the same trained parameters. Parameters that change on purpose (unfrozen ones, an adapter, a longer vocabulary)
leave the chain of parents as it is, so that the run stays one. Tags without a record (DeepSpeed's own) are of one run
where they have the same trained parameters, names that differ in numbers alone, and different steps; they join the only
run with a record that is like them in this; where steps are equal, they may be of several engines (``model0_5`` and
``model1_5``). Of tags of which nothing is known, all are of the run where there is only one. Pure.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from zeroelastic.errors import printable
from zeroelastic.tags.commit_order import Tag

Tags = tuple[Tag, ...]

_STARTED_DIGITS = 16


def runs_of(tags: Sequence[Tag]) -> tuple[Tags, ...]:
    """The tags by run, each in the order given; tags that cannot be assigned to a run are in none.

    Where there is only one run, all tags are of it but those that may be of several. Example::

        [[tag.name for tag in run] for run in runs_of(list_run(root).tags)]     # [["G_1", "G_0"], ["D_1", "D_0"]]
    """
    groups = _Groups(tags)
    by_id = {tag.save_id: i for i, tag in enumerate(tags) if tag.save_id is not None}
    for i, tag in enumerate(tags):
        if tag.parent in by_id:
            groups.join(i, by_id[tag.parent])
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)  # by run and parameters
    stock: dict[tuple[str, str], list[int]] = defaultdict(list)  # by parameters and name
    for i, tag in enumerate(tags):
        if tag.run is not None and tag.trained_params is not None:
            alike[tag.run, tag.trained_params].append(i)
        elif tag.step_from == "header" and tag.trained_params is not None:
            stock[tag.trained_params, _stem(tag.name)].append(i)
    for members in alike.values():
        groups.join(*members)
    ambiguous: set[int] = set()
    known = [i for members in alike.values() for i in members]
    for (params, stem), members in stock.items():
        if len({tags[i].step for i in members}) < len(members):
            ambiguous.update(members)
            continue
        known += members
        groups.join(*members)
        like = [i for (_, other), found in alike.items() if other == params for i in found]
        like = [i for i in like if _stem(tags[i].name) == stem]
        if like and len({groups.of(i) for i in like}) == 1:
            groups.join(members[0], like[0])
    certain = {groups.of(i) for i in known}
    if len(certain) <= 1:
        only = tuple(tag for i, tag in enumerate(tags) if i not in ambiguous)
        return (only,) if only else ()
    runs: dict[int, list[Tag]] = defaultdict(list)
    for i, tag in enumerate(tags):
        if groups.of(i) in certain:
            runs[groups.of(i)].append(tag)
    return tuple(map(tuple, runs.values()))


def run_of(tags: Sequence[Tag], name: str) -> Tags:
    """The tags of the run that a tag is of, in the order given; the tag alone where that is unknown."""
    own = next((run for run in runs_of(tags) if any(tag.name == name for tag in run)), None)
    return own if own is not None else tuple(tag for tag in tags if tag.name == name)


def without_other_runs(tags: Sequence[Tag], trained_params: str | None) -> Tags:
    """The tags without those of runs of other parameters, where a run of these parameters is among them.

    Tags that cannot be assigned stay. All tags stay where no run has these parameters: the run's own may have changed.
    """
    runs = runs_of(tags)
    own = [run for run in runs if trained_params is not None and _has(run, trained_params)]
    if not own:
        return tuple(tags)
    others = {tag.name for run in runs if run not in own and any(tag.trained_params for tag in run) for tag in run}
    return tuple(tag for tag in tags if tag.name not in others)


def runs_at_once(tags: Sequence[Tag]) -> tuple[str, str] | None:
    """A tag of each of two runs that existed at the same time, the newer one first; None where there are no two.

    They have the same parameters, or parameters that are none of the engine's: which one it continues is not known.
    """
    runs = [run for run in runs_of(tags) if all(tag.run is not None for tag in run)]
    for i, one in enumerate(runs):
        for other in runs[:i]:
            if _begun(one) < _ended(other) and _begun(other) < _ended(one) and one[0].run != other[0].run:
                return printable(other[0].name), printable(one[0].name)
    return None


def _has(run: Tags, trained_params: str) -> bool:
    return any(tag.trained_params == trained_params for tag in run)


def _begun(run: Tags) -> float:
    """When the engine that began a run was made, in seconds since 1970."""
    return min(int((tag.run or "")[:_STARTED_DIGITS], 16) / 1e6 for tag in run)


def _ended(run: Tags) -> float:
    return max(tag.saved_at for tag in run)


def _stem(name: str) -> str:
    """A tag's name without its numbers."""
    return re.sub(r"\d+", "#", name)


class _Groups:
    """Disjoint sets of numbers, each named by its least member."""

    def __init__(self, members: Sequence[object]) -> None:
        self._above = list(range(len(members)))

    def of(self, i: int) -> int:
        while self._above[i] != i:
            i = self._above[i]
        return i

    def join(self, *members: int) -> None:
        roots = {self.of(i) for i in members}
        least = min(roots)
        for root in roots:
            self._above[root] = least
