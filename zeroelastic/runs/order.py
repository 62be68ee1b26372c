"""The order in which the checkpoints of a run were committed: the newest, a ``latest`` that was set back, branches.

A commit record has the time of its commit and the save that the run continued from. Tags that DeepSpeed saved have
only the modification times of their files, which a copy of the directory changes, so these are used only where the
steps, or ``latest``, confirm them.

Several runs may save to one directory, such as a GAN's two engines. Two tags are of one run where one descends from the
other by their commit records, or where their records name the same run and the same trained parameters. Parameters that
change on purpose (unfrozen ones, an adapter, a longer vocabulary) leave the chain of parents as it is, so that the run
stays one. Tags without a record are of one run where they have the same trained parameters, names that differ in
numbers alone, and different steps; they join the only run with a record that is like them in this; where steps are
equal, they may be of several engines (``model0_5`` and ``model1_5``). Of tags of which nothing is known, all are of the
run where there is only one. Pure.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from zeroelastic.errors import printable, some
from zeroelastic.io.paths import FilePath
from zeroelastic.runs.names import HERE

StepFrom = Literal["record", "header", "name"]


@dataclass(frozen=True, slots=True)
class Tag:
    """A checkpoint of a run.

    ``path`` is the tag directory ``tag_dir``, or the ``checkpoint-N`` folder around it. ``step`` is None where it is
    unknown; then, and where only the name has it, the tag cannot be whole. ``saved_at`` is the time of the commit in
    seconds since 1970: that in its record (``dated``), or the modification time of its record or first header, limited
    by ``newest_first``. ``modified_at`` is this modification time; 0 behind a URL. ``save_id``, ``parent`` and ``run``
    are those of its record; ``trained_params`` is the digest of its trained parameters' names and shapes, by its record
    or its header. ``unfinished`` is the problem with the folder around it.
    """

    name: str
    path: FilePath
    tag_dir: FilePath
    step: int | None
    step_from: StepFrom | None
    saved_at: float
    modified_at: float
    dated: bool = False
    save_id: str | None = None
    parent: str | None = None
    run: str | None = None
    trained_params: str | None = None
    unfinished: str | None = None

    @property
    def asked_for(self) -> tuple[FilePath, str]:
        """The directory and the tag to give to ``load_checkpoint``."""
        if self.path != self.tag_dir:
            return self.path, str(self.tag_dir)[len(str(self.path)) :].strip("/")
        directory = self.path
        for _ in self.name.split("/") if self.name != HERE else ():
            directory = directory.parent
        return directory, self.name

    @property
    def age_key(self) -> tuple[bool, float, int, list[tuple[int, str]]]:
        """Greater is newer; tags of unknown step are greatest."""
        parts = [(int(digits or 0), text) for text, digits in re.findall(r"(\D*)(\d{0,18})", self.name)]
        return self.step is None, self.saved_at, self.step or 0, parts


def newest_first(tags: Iterable[Tag], latest: str | None) -> tuple[Tag, ...]:
    """The tags, last committed first; where the times are equal or unknown, the greater step first.

    A tag without a recorded time does not count as later than one of a greater step, except if ``latest`` names it and
    its files are the last modified: then the run was rolled back.
    """
    tags = [tag if tag.dated else replace(tag, saved_at=tag.modified_at) for tag in tags]
    if not _files_tell(tags, latest):
        tags = list(_no_later_than_greater_steps(tags))
    return tuple(sorted(tags, key=lambda tag: tag.age_key, reverse=True))


def _files_tell(tags: Sequence[Tag], latest: str | None) -> bool:
    """Whether ``latest`` contradicts the order of steps, and the modification times confirm ``latest``."""
    named = next((tag for tag in tags if tag.name == latest and not tag.dated), None)
    if named is None or named.step is None:
        return False
    others = [tag for tag in tags if tag is not named and tag.step is not None]
    greater = any(tag.step is not None and tag.step > named.step for tag in others)
    return greater and all(tag.saved_at < named.saved_at for tag in others)


def _no_later_than_greater_steps(tags: Sequence[Tag]) -> Iterable[Tag]:
    yield from (tag for tag in tags if tag.step is None)
    bound = float("inf")
    known = sorted((tag for tag in tags if tag.step is not None), key=lambda tag: -(tag.step or 0))
    for _, group in groupby(known, key=lambda tag: tag.step):
        placed = [tag if tag.dated else replace(tag, saved_at=min(tag.saved_at, bound)) for tag in group]
        yield from placed
        bound = min(bound, *(tag.saved_at for tag in placed))


def pointed_at(tags: Sequence[Tag], latest: str | None, written_at: float) -> int:
    """The index among ``tags``, newest first, at which a run continues: 0, or of the tag ``latest`` was set back to.

    It was set back if the file was ``written_at`` a time after the last commit. An older ``latest`` is left by a crash
    between a commit and the update of ``latest``. Both times are of files in one directory.
    """
    at = next((i for i, tag in enumerate(tags) if tag.name == latest), 0)
    return at if all(tag.modified_at < written_at for tag in tags[:at]) else 0


def left_behind(tags: Sequence[Tag], chosen: Tag) -> tuple[Tag, ...]:
    """The tags, newest first, of branches that the run left before it saved ``chosen``.

    They were committed before ``chosen`` and are not among its ancestors: they are of a later step, or descend from one
    of these ancestors on another branch.
    """
    parents = {tag.save_id: tag.parent for tag in tags if tag.save_id is not None}
    line = set(_line(chosen.save_id, parents))
    older = tags[tags.index(chosen) + 1 :]
    return tuple(
        tag
        for tag in older
        if tag.step is not None
        and chosen.step is not None
        and tag.save_id not in line
        and (tag.step > chosen.step or not line.isdisjoint(_line(tag.parent, parents)))
    )


def _line(save_id: str | None, parents: dict[str, str | None]) -> Iterable[str]:
    """A save and its known ancestors."""
    seen: set[str] = set()
    while save_id is not None and save_id not in seen:
        seen.add(save_id)
        yield save_id
        save_id = parents.get(save_id)


def about_pointed(chosen: str, newer: Sequence[str]) -> str:
    """A sentence about a ``latest`` that was set back to an older tag."""
    return (
        f"NOT THE NEWEST: latest was pointed at {printable(chosen)} after the last commit. "
        f"Newer, and not taken: {some(map(printable, newer))}"
    )


def about_unpointed(chosen: str, named: str) -> str:
    """A sentence about a ``latest`` that names an older tag, and was not set back to it as far as its time tells."""
    return (
        f"NOT WHAT LATEST NAMES: {printable(chosen)} was committed after {printable(named)}, and latest was not "
        "written since, as after a crash. Where the directory was copied without its times, latest may have been set "
        f"back: `zeroelastic latest DIR --set {printable(named)}` says so again"
    )


def about_left(left: Sequence[Tag]) -> str | None:
    """A sentence about branches that were left, None where there are none."""
    if not left:
        return None
    verb = "is" if len(left) == 1 else "are"
    return f"LEFT: {some(printable(tag.name) for tag in left)} {verb} of a branch that was rolled back"


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


def left_out_of_run(own: Sequence[Tag], tags: Sequence[Tag], latest: str | None) -> Tag | None:
    """The tag that ``latest`` names, or the newest of a later step, if it may be of the same run as its ``own`` tags.

    Both are newest first, and it is not among ``own``: its trained parameters are others, and no chain of parents leads
    from it to them, because tags were removed or saved over, or the run saved to another directory in between.
    """
    if not own or own[0].step is None or own[0].run is None:
        return None
    step = own[0].step
    wanted = [tag for tag in tags if tag.name == latest]
    wanted += [tag for tag in tags[:1] if tag.step is not None and tag.step > step]
    return next((tag for tag in wanted if tag not in own and tag.run == own[0].run), None)


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
