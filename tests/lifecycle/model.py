"""What should be on disk and in memory: plain values, no engine and no file.

A state is named by the fingerprint that was measured on the live engine just before it was saved; a load has to give
exactly that back. Nothing here knows how a checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Origin:
    """Whose a state is: the run, by a number, and the network."""

    run: int = 0
    net: str = "G"


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
    position: int | None = None
    """How many samples were trained on; None where it was saved without a position."""
    origin: Origin = Origin()
    number: int = 0
    """Counts saves, on disk and in memory, in the order in which their state was copied."""
    committed: int = 0
    """The same count at the commit."""

    @property
    def loaded_step(self) -> int:
        """DeepSpeed takes the step from the client state, where there is one."""
        return int(self.client_state.get("global_steps", self.step))


@dataclass
class Directory:
    """The committed tags of one directory, in the order of their commits, and what ``latest`` names."""

    tags: dict[str, Saved] = field(default_factory=dict)
    latest: str | None = None

    def commit(self, saved: Saved, *, latest: bool = True) -> None:
        """The newest save is the last of ``tags``, whatever its step; one of the same tag is gone."""
        self.tags.pop(saved.tag, None)
        self.tags[saved.tag] = saved
        if latest:
            self.latest = saved.tag

    def newest_first(self, net: str = "") -> list[Saved]:
        """All saves, or those of one network."""
        return [saved for saved in reversed(self.tags.values()) if net in ("", saved.origin.net)]

    def tried(self, net: str) -> list[Saved]:
        """What an engine of a network tries: the tag that ``latest`` names, then older ones of the network."""
        order, named = self.newest_first(), self.tags.get(self.latest or "")
        if named is None:
            return self.newest_first(net)
        return [named, *(saved for saved in order[order.index(named) + 1 :] if net in ("", saved.origin.net))]

    def healthy(self, net: str) -> list[Saved]:
        """``tried`` without what is damaged."""
        return [saved for saved in self.tried(net) if not saved.damage]

    def continued(self) -> str:
        """The network of the tag that ``latest`` names; any, where it names none."""
        named = self.tags.get(self.latest or "")
        return "" if named is None else named.origin.net

    def resumable(self, net: str) -> list[Saved]:
        """What ``resume`` takes; nothing where the first that is whole, by its headers, is another network's."""
        for saved in self.tried(net):
            if saved.origin.net != net and saved.damage in ("", "flip"):
                return []
            if saved.origin.net == net and not saved.damage:
                return [saved]
        return []

    def kept(self, keep: int, only: str = "") -> set[str]:
        """What ``prune`` must leave: the newest whole ones of each network, and what ``latest`` names.

        With ``only``, it is the ``keep`` of that network's options, which leaves all that is of others.
        """
        kept = {self.latest} & set(self.tags)
        for net in {saved.origin.net for saved in self.tags.values()}:
            own = self.newest_first(net)
            whole = [saved for saved in own if saved.damage in ("", "flip")]
            kept |= {saved.tag for saved in (whole[:keep] if only in ("", net) else own)}
        return kept  # type: ignore[return-value]

    def copy(self) -> Directory:
        return Directory(dict(self.tags), self.latest)


@dataclass(frozen=True)
class Pending:
    """A save in the background that was not committed when it was last looked at."""

    directory: str
    saved: Saved


@dataclass
class Kept:
    """A checkpoint in the memory of nodes: the save on the disk that it continues, and whether it can be loaded.

    ``tolerance`` is how many of the nodes may be lost. ``begun`` is the save that was begun last, ``parent`` the one
    that was loaded or committed last, both by their numbers.
    """

    saved: Saved
    parent: int
    begun: int
    nodes: tuple[int, ...]
    tolerance: int
    damaged: bool = False

    def lost(self, nodes: Collection[int]) -> bool:
        """Whether too many of its nodes are not among these."""
        return len(set(self.nodes) - set(nodes)) > self.tolerance

    def newer(self, model: Directory) -> bool:
        """Whether a resume takes it rather than a save on the disk: it follows that one, or one that is passed over."""
        net = self.saved.origin.net
        for saved in model.tried(net):
            if saved.number in (self.parent, self.begun):
                return True
            if saved.damage in ("", "flip") and (saved.origin.net != net or not saved.damage):
                return False  # another network's is refused, a whole one is taken
        return True


@dataclass
class Memory:
    """What the nodes of a job have in memory of the run that saves to a directory, newest first.

    One of them is complete; it is not ``certain`` which one where a job was killed.
    """

    kept: list[Kept] = field(default_factory=list)
    certain: bool = True

    def resumable(self, model: Directory, net: str, nodes: Collection[int]) -> tuple[list[Saved], bool]:
        """What ``resume`` may take of memory and disk, and whether it fails for want of both."""
        disk = model.resumable(net)
        allowed: list[Saved] = []
        for kept in self.kept:
            if kept.lost(nodes):
                continue
            if not kept.newer(model):
                newest = [(saved.state, saved.position) for saved in disk[:1]]
                if not kept.damaged and (kept.saved.state, kept.saved.position) in newest:
                    allowed.append(kept.saved)  # the same state, whichever came later
                continue
            if not kept.damaged:
                allowed.append(kept.saved)
            if self.certain:
                same = [
                    saved for saved in disk if (saved.state, saved.position) == (kept.saved.state, kept.saved.position)
                ]
                return (disk, not disk) if kept.damaged else ([*allowed, *same], False)
        return [*allowed, *disk], False


@dataclass
class Live:
    """An engine: what it holds (None after a load that failed), and where it is.

    ``continues`` is the save that it loaded or committed last, ``begun`` the one that it has begun since, by numbers.
    ``unprotected``: it resumed from memory what no save on the disk has, and its next training loop, the first, begins
    with a checkpoint in memory. ``looped``: it had a training loop.
    """

    world_size: int
    state: str | None
    step: int
    cwd: str
    position: int = 0
    origin: Origin = Origin()
    options: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[int, ...] = ()
    elastic: bool = True
    continues: int = 0
    begun: int = 0
    pending: Pending | None = None
    frozen: bool = False
    unprotected: bool = False
    looped: bool = False

    @property
    def memory(self) -> Mapping[str, Any] | None:
        return self.options.get("memory")

    def kept(self, saved: Saved) -> Kept:
        """A checkpoint of now, in memory."""
        copies = int((self.memory or {}).get("copies", 1))
        return Kept(saved, self.continues, self.begun, self.nodes, min(copies, len(self.nodes) - 1))

    def loaded(self, saved: Saved, continues: int) -> None:
        """It goes on from a save."""
        self.origin, self.continues, self.begun, self.unprotected = saved.origin, continues, 0, False


def interrupted(before: Directory, saved: Saved, *, ids: Mapping[str, str], latest: str | None) -> Directory:
    """The directory after a save that was killed: the old one or the new one, as the disk says. Raises AssertionError.

    ``ids`` are the save ids on disk by tag. A tag that was there is still there, and ``latest`` names the new one
    only once that is committed.
    """
    after = before.copy()
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
