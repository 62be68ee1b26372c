"""The directory of a run on a disk: ``latest`` is written, tags are removed, and what killed saves have left is swept.

A tag that is removed first gets a hidden name (``tag_directory``), so that it is never seen in part: a removal that is
killed is finished by the next save or ``prune``. Kept is everything that a running save may still need.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zeroelastic.io.atomic import sync_directory, write_atomically
from zeroelastic.io.paths import relative_name
from zeroelastic.runs.names import LATEST, PARTIAL
from zeroelastic.runs.order import Tag
from zeroelastic.runs.tag_directory import (
    is_being_removed,
    is_unfinished,
    life_of_owner,
    removal_dir_of,
    replaces_nothing,
)

logger = logging.getLogger(__name__)

MIN_AGE_S = 3600.0
"""A save whose process cannot be seen counts as dead when nothing has changed for this long."""

CHANGED = "it changed while this ran"
"""The reason to keep a tag, or the files of a dead save, that a save or another removal is changing."""

_TEMPORARY = re.compile(r"\.latest\.\d+(\.[0-9a-f]+)?\.tmp")
_MIN_AGE_UNASKED_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Tree:
    """The contents of a directory: bytes that its removal frees, time of the last change, and a mark of its state."""

    nbytes: int
    changed_at: float
    mark: tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Leftover:
    """What there is of a save that did not finish, or may still be running; ``remove``: it is dead."""

    name: str
    tree: Tree
    remove: bool
    reason: str


class RunStore:
    """The directory of a run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def point(self, name: str) -> None:
        """Let ``latest`` name a tag. Raises OSError."""
        write_atomically(self.root / LATEST, name.encode())

    def links(self, tags: Sequence[Tag]) -> dict[str, str]:
        """Why symbolic links in the folders of the tags keep directories, by the directory's name."""
        kept: dict[str, str] = {}
        for folder in self._folders(tags):
            for entry in os.scandir(folder):
                if entry.is_symlink():
                    name = relative_name(Path(entry.path), self.root)
                    target = Path(os.path.realpath(entry.path))
                    inside = [path for path in (target, *target.parents) if path.is_relative_to(self.root)]
                    kept |= {relative_name(path, self.root): f"the symbolic link {name} leads to it" for path in inside}
                    kept[name] = "is a symbolic link"
        return kept

    def remove(self, path: Path, seen: Tree) -> str | None:
        """Remove a tag, or what a dead save has left; the reason why it is kept where it is not as it was ``seen``.

        Raises OSError.
        """
        assert path.is_relative_to(self.root) and path != self.root
        gone = removal_dir_of(path)
        try:
            if replaces_nothing(path) or survey(path).mark != seen.mark:
                return CHANGED
            if not path.is_dir():
                path.unlink()
                return None
            os.rename(path, gone)
            if _files(survey(gone)) != _files(seen) and not os.path.lexists(path):  # by a save, just before
                os.rename(gone, path)
                return CHANGED
        except FileNotFoundError:  # a save or another removal has just removed it
            return CHANGED
        sync_directory(path.parent)
        _delete(gone)
        return None

    def leftovers(self, tags: Sequence[Tag], min_age_s: float) -> tuple[Leftover, ...]:
        """What saves and verbs have left, or are using now, in the folders that hold tags."""
        found: list[Leftover] = []
        for folder in self._folders(tags):
            of_verbs = sorted(path.name for path in folder.glob(f".?*{PARTIAL}"))
            for name in (*leftover_names(folder), *of_verbs):
                path, what = folder / name, "command" if name in of_verbs else "save"
                with suppress(FileNotFoundError):  # a save has just put it in place, or removed it
                    tree, kept = survey(path), why_kept(path, min_age_s, what)
                    reason = kept or f"of a {what} that did not finish"
                    found.append(Leftover(relative_name(path, self.root), tree, kept is None, reason))
        return tuple(found)

    def sweep(self) -> None:
        """Remove what dead saves and removals have left in the directory itself. Never raises."""
        for left in (self.root / name for name in leftover_names(self.root)):
            try:
                if why_kept(left) is not None:
                    continue
                _delete(left)
            except OSError as error:
                logger.warning("%s: left by a save that did not finish, cannot be removed: %s", left, error.strerror)
            else:
                logger.info("%s: removed, left by a save that did not finish", left)

    def _folders(self, tags: Sequence[Tag]) -> list[Path]:
        """The directory itself, and the folders between it and its tags."""
        above = {parent for tag in tags for parent in Path(str(tag.path)).parents if parent.is_relative_to(self.root)}
        return sorted({self.root, *above})


def leftover_names(directory: Path) -> tuple[str, ...]:
    """The names, sorted, of hidden directories and temporary files that saves have left, or are using now."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return ()
    return tuple(
        entry.name
        for entry in entries
        if (is_unfinished(entry.name) and entry.is_dir(follow_symlinks=False))
        or (_TEMPORARY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False))
    )


def why_kept(left: Path, min_age_s: float = _MIN_AGE_UNASKED_S, what: str = "save") -> str | None:
    """The reason to keep a leftover of a save, or of another ``what``; None where the save is dead.

    If it is unknown whether the process of the save still runs, the save counts as dead when nothing has changed for
    ``min_age_s``.
    """
    if replaces_nothing(left):
        return "the tag that it belongs to is not there: a load or save of that tag puts it back"
    if is_being_removed(left):
        return None
    life = life_of_owner(left)
    if life == "lives":
        return f"its {what} is on its way: the process that makes it is running"
    if life == "unknown" and time.time() - _changed_at(left) < min_age_s:
        return f"a {what} may be on its way: it changed within the last {min_age_s / 60:.0f} minutes"
    return None


def _walk(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """A file or directory and everything below it; links are not followed. Raises FileNotFoundError."""
    found = os.lstat(path)
    yield path, found
    if stat.S_ISDIR(found.st_mode):
        with os.scandir(path) as entries:  # closed also where something is removed meanwhile
            for entry in entries:
                yield from _walk(Path(entry.path))


def _changed_at(path: Path) -> float:
    """When anything in a directory, or a file, changed last: now where something is being removed."""
    try:
        return max(found.st_mtime for _, found in _walk(path))
    except FileNotFoundError:
        return time.time()


def survey(directory: Path) -> Tree:
    """List everything below a directory; links are not followed. A file with other hard links frees nothing."""
    found = [(str(path.relative_to(directory)), about) for path, about in _walk(directory)]
    return Tree(
        nbytes=sum(about.st_size for _, about in found if stat.S_ISREG(about.st_mode) and about.st_nlink == 1),
        changed_at=max(about.st_mtime for _, about in found),
        mark=tuple(sorted((name, about.st_ino, about.st_size, about.st_mtime_ns) for name, about in found)),
    )


def _files(tree: Tree) -> set[tuple[str, int, int, int]]:
    """The entries of a tree without the directory's own, which a rename may change."""
    return {entry for entry in tree.mark if entry[0] != "."}


def removable(trees: Iterable[Tree | None]) -> int:
    """Bytes that the removal of some trees frees."""
    return sum(tree.nbytes for tree in trees if tree is not None)


def _delete(path: Path) -> None:
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:  # another removal deletes it, too
        if path.exists():
            shutil.rmtree(path, ignore_errors=True)
