"""The order in which the checkpoints of a run were committed: the newest, a ``latest`` that was set back, branches.

A commit record has the time of its commit and the save that the run continued from. Other tags (older records, and
those of DeepSpeed) have only the modification times of their files, which a copy of the directory changes, so these are
used only where the steps, or ``latest``, confirm them. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from zeroelastic.errors import printable, some
from zeroelastic.io.paths import FilePath
from zeroelastic.tags.names import HERE

StepFrom = Literal["record", "header", "name"]

_MAX_LISTED = 3


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
        f"Newer, and not taken: {some(map(printable, newer), _MAX_LISTED)}"
    )


def about_left(left: Sequence[Tag]) -> str | None:
    """A sentence about branches that were left, None where there are none."""
    if not left:
        return None
    verb = "is" if len(left) == 1 else "are"
    return f"LEFT: {some((printable(tag.name) for tag in left), _MAX_LISTED)} {verb} of a branch that was rolled back"
