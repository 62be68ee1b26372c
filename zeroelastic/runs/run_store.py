"""The directory of a run on a disk: its tags, ``latest``, and what saves have left.

Kept is everything that a running save may still need.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.tag_files import is_temporary
from zeroelastic.errors import UsageError
from zeroelastic.io.atomic import sync_directory, write_atomically
from zeroelastic.io.paths import relative_name
from zeroelastic.runs.names import LATEST, PARTIAL, TRASH
from zeroelastic.runs.order import Tag
from zeroelastic.runs.tag_directory import is_unfinished, life_of_owner, replaces_nothing

MIN_AGE_S = 3600.0
"""A save whose process cannot be seen counts as dead when nothing has changed for this long."""

CHANGED = "it changed while this ran"
"""The reason to keep a tag, or the files of a dead save, that a save or another removal is changing."""

_TEMPORARY = re.compile(r"\.latest\.\d+(\.[0-9a-f]+)?\.tmp")
_MIN_AGE_UNASKED_S = 24 * 3600.0

Links = dict[str, str]
"""Symbolic links, by their own names or by their targets, relative to a directory."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The contents of a directory: bytes that its removal frees, time of the last change, and a mark of its state.

    ``is_committed``: of a tag, whether it has a commit record, which is written last and removed first.
    """

    nbytes: int
    changed_at: float
    temporaries: tuple[str, ...]
    one_device: bool
    mark: tuple[tuple[str, int, int, int], ...]
    is_committed: bool = False


@dataclass(frozen=True, slots=True)
class Leftover:
    """What there is of a save that did not finish, or may still be running; ``remove``: it is dead."""

    name: str
    tree: Tree
    remove: bool
    reason: str


logger = logging.getLogger(__name__)


class RunStore:
    """The directory of a run. Each object sees the run as it is when it is asked first: open one for each operation."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def point(self, name: str) -> None:
        """Let ``latest`` name a tag. Raises OSError."""
        write_atomically(self.root / LATEST, name.encode())

    def links(self, tags: Sequence[Tag]) -> tuple[Links, Links]:
        """The symbolic links in the folders of the tags, and for the paths that they lead to or into, the link."""
        links: Links = {}
        linked: Links = {}
        for folder in self._folders(tags):
            for entry in os.scandir(folder):
                if entry.is_symlink():
                    name = str(Path(entry.path).relative_to(self.root))
                    links[name] = name
                    target = Path(os.path.realpath(entry.path))
                    for path in (target, *target.parents):
                        if path.is_relative_to(self.root) and path != self.root:
                            linked[str(path.relative_to(self.root))] = name
        return links, linked

    def tree(self, tag: Tag) -> Tree:
        """What there is of a tag. Raises FileNotFoundError."""
        found = survey(Path(str(tag.path)))
        return replace(found, is_committed=(Path(str(tag.tag_dir)) / RECORD_NAME).exists())

    def leftovers(self, tags: Sequence[Tag], min_age_s: float) -> tuple[Leftover, ...]:
        """What saves have left, or are using now, in the folders that hold tags."""
        found: list[Leftover] = []
        folders = self._folders(tags)
        of_commands = [path for folder in folders for path in folder.glob(f".?*{PARTIAL}")]
        for path in [*self._left(folders), *of_commands]:
            what = "command" if path in of_commands else "save"
            try:
                tree = survey(path)
            except FileNotFoundError:  # a save has just put it in place, or removed it
                continue
            kept = why_kept(path, min_age_s, what)
            if kept is None and not tree.one_device:
                kept = "another file system is mounted in it"
            name = relative_name(path, self.root)
            found.append(Leftover(name, tree, kept is None, kept or f"of a {what} that did not finish"))
        return tuple(found)

    def _folders(self, tags: Sequence[Tag]) -> list[Path]:
        """The directory itself, and the folders between it and its tags; none without tags."""
        above = {parent for tag in tags for parent in Path(str(tag.path)).parents if parent.is_relative_to(self.root)}
        return sorted({self.root, *above}) if tags else []

    def remove(self, tag: Tag, tree: Tree) -> str | None:
        """Remove a tag; the reason why it is kept, where it is not as ``tree`` says any more. Raises OSError."""
        path = Path(str(tag.path))
        assert path.is_relative_to(self.root) and path != self.root
        try:
            if survey(path).mark != tree.mark:
                return CHANGED
            return self._move_and_delete(path, tree)
        except FileNotFoundError:
            return CHANGED

    def remove_leftover(self, found: Leftover) -> str | None:
        """Remove what a dead save has left; returns as ``remove``. Raises OSError."""
        path = self.root / found.name
        try:
            if replaces_nothing(path) or survey(path).mark != found.tree.mark:
                return CHANGED
            return self._move_and_delete(path, found.tree)
        except FileNotFoundError:
            return None  # a save has removed it

    def _move_and_delete(self, path: Path, tree: Tree) -> str | None:
        """Move a directory to the hidden folder and delete it; put it back if a save changed it just before."""
        moved = self._trash(make=True) / secrets.token_hex(8)
        try:
            os.rename(path, moved)
        except FileNotFoundError:
            if moved.parent.exists():
                raise
            return self._move_and_delete(path, tree)  # another removal has just removed the empty folder
        try:
            if _files(survey(moved)) != _files(tree) and not os.path.lexists(path):
                os.rename(moved, path)
                return CHANGED
        except FileNotFoundError:  # another removal has emptied the folder
            return None
        with suppress(FileNotFoundError):  # another removal empties the same folder
            sync_directory(moved.parent)
        sync_directory(path.parent)
        self.finish_removals()
        return None

    def _left(self, folders: Iterable[Path]) -> Iterator[Path]:
        """What saves have left, or are using now, in some folders."""
        return (folder / name for folder in folders for name in leftover_names(folder))

    def remove_dead_saves(self) -> None:
        """Remove what dead saves have left, as far as one look at the run's directory shows it. Never raises."""
        for left in self._left([self.root]):
            try:
                if why_kept(left) is not None:
                    continue
                _delete(left)
            except OSError as error:
                logger.warning("%s: left by a save that did not finish, cannot be removed: %s", left, error.strerror)
            else:
                logger.info("%s: removed, left by a save that did not finish", left)

    @property
    def interrupted(self) -> tuple[str, ...]:
        """What a removal that was killed has left to be deleted."""
        try:
            return tuple(sorted(os.listdir(self._trash(make=False))))
        except (FileNotFoundError, NotADirectoryError):
            return ()

    def interrupted_bytes(self) -> int:
        """Bytes that ``finish_removals`` frees."""
        nbytes = 0
        for name in self.interrupted:
            with suppress(FileNotFoundError):
                nbytes += survey(self.root / TRASH / name).nbytes
        return nbytes

    def finish_removals(self) -> None:
        """Delete what is ``interrupted``. Raises OSError."""
        trash = self._trash(make=False)
        for name in self.interrupted:
            _delete(trash / name)
        with suppress(OSError):  # gone, or another removal has just moved something there
            trash.rmdir()

    def _trash(self, *, make: bool) -> Path:
        """The hidden folder. Raises UsageError where its name is taken by something that is not a folder."""
        trash = self.root / TRASH
        if make:
            trash.mkdir(mode=0o700, exist_ok=True)
        if os.path.lexists(trash) and not stat.S_ISDIR(os.lstat(trash).st_mode):
            raise UsageError(f"{trash}: is not a folder; remove it.")
        return trash


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
    nbytes, changed_at = 0, 0.0
    temporaries: list[str] = []
    mark: list[tuple[str, int, int, int]] = []
    device = os.lstat(directory).st_dev
    one_device = True
    for path, found in _walk(directory):
        if stat.S_ISREG(found.st_mode):
            nbytes += found.st_size if found.st_nlink == 1 else 0
            if is_temporary(path.name):
                temporaries.append(str(path.relative_to(directory)))
        one_device = one_device and found.st_dev == device
        changed_at = max(changed_at, found.st_mtime)
        mark.append((str(path.relative_to(directory)), found.st_ino, found.st_size, found.st_mtime_ns))
    return Tree(nbytes, changed_at, tuple(sorted(temporaries)), one_device, tuple(sorted(mark)))


def _files(tree: Tree) -> set[tuple[str, int, int, int]]:
    """The entries of a tree without the directory's own, which a rename may change."""
    return {entry for entry in tree.mark if entry[0] != "."}


def _delete(path: Path) -> None:
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:  # another removal deletes it, too
        if path.exists():
            shutil.rmtree(path, ignore_errors=True)
