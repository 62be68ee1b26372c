"""What should be on disk and in memory: plain values, no engine and no file.

A state is named by the fingerprint that was measured on the live engine just before it was saved; a load has to give
exactly that back. Nothing here knows how a checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Saved:
    """One save: ``save_id`` is what the disk calls it, once it was seen there."""

    tag: str
    state: str
    step: int
    world_size: int
    client_state: Mapping[str, Any]
    save_id: str = ""
    damage: str = ""

    @property
    def loaded_step(self) -> int:
        """DeepSpeed takes the step from the client state, where there is one."""
        return int(self.client_state.get("global_steps", self.step))


@dataclass
class Directory:
    """The committed tags of one directory, in the order of their commits, and what ``latest`` names."""

    tags: dict[str, Saved] = field(default_factory=dict)
    latest: str | None = None
    pointed: bool = False
    """Whether ``latest`` was pointed at an older tag since the last commit: that is where a job goes on."""
    deaths: dict[str, int] = field(default_factory=dict)
    """How many jobs were killed while they loaded a tag."""
    crashed: bool = False
    """Whether a save was killed here since the last one that was committed."""

    def commit(self, saved: Saved, *, latest: bool = True) -> None:
        """The newest save is the last of ``tags``, whatever its step; one of the same tag is gone."""
        self.tags.pop(saved.tag, None)
        self.tags[saved.tag] = saved
        self.deaths.pop(saved.tag, None)
        self.pointed = False
        if latest:
            self.latest = saved.tag

    def newest_first(self) -> list[Saved]:
        return list(reversed(self.tags.values()))

    def healthy(self) -> list[Saved]:
        """What a job may go on from, newest first."""
        line = self.newest_first()
        if self.pointed:
            line = line[next((i for i, saved in enumerate(line) if saved.tag == self.latest), 0) :]
        return [saved for saved in line if not saved.damage]

    def resumable(self) -> list[Saved]:
        """What ``resume`` may take: the newest healthy save; the one before it, too, once two loads died of it."""
        allowed: list[Saved] = []
        for saved in self.healthy():
            allowed.append(saved)
            if self.deaths.get(saved.tag, 0) < 2:
                break
        return allowed

    def kept(self, keep: int) -> set[str]:
        """What ``prune`` must leave: the newest whole ones, and what ``latest`` names."""
        whole = [saved.tag for saved in self.newest_first() if saved.damage in ("", "flip")]
        return {*whole[:keep], *({self.latest} & set(self.tags))}  # type: ignore[arg-type]

    def copy(self) -> Directory:
        return Directory(dict(self.tags), self.latest, self.pointed)


@dataclass(frozen=True)
class Pending:
    """A save in the background that was not committed when it was last looked at."""

    directory: str
    saved: Saved


@dataclass
class Live:
    """A job: what its engine holds (None after a load that failed), and where it is."""

    world_size: int
    state: str | None
    step: int
    cwd: str
    pending: Pending | None = None
    frozen: bool = False


def interrupted(before: Directory, saved: Saved, *, ids: Mapping[str, str], latest: str | None) -> Directory:
    """The directory after a save that was killed: the old one or the new one, as the disk says. Raises AssertionError.

    ``ids`` are the save ids on disk by tag. A tag that was there is still there, and ``latest`` names the new one
    only once that is committed.
    """
    after = before.copy()
    after.deaths, after.crashed = dict(before.deaths), True
    old = before.tags.get(saved.tag)
    found = ids.get(saved.tag)
    assert found is not None or old is None, f"the killed save took {saved.tag!r} away"
    if found is not None and (old is None or found != old.save_id):
        after.commit(saved, latest=latest == saved.tag)
    assert latest in (before.latest, after.latest), f"latest names {latest!r} after a killed save"
    return after


def differing(expected: Mapping[str, object], found: Mapping[str, object]) -> Iterable[str]:
    """What two tables of a directory do not have in common, a line each."""
    for key in sorted(set(expected) | set(found), key=str):
        if expected.get(key) != found.get(key):
            yield f"{key!r}: {found.get(key)!r}, expected {expected.get(key)!r}"
