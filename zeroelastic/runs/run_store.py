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
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from zeroelastic.errors import CheckpointError, MissingFileError, UnreadableError, UsageError
from zeroelastic.io.atomic import sync_directory, write_atomically
from zeroelastic.io.paths import FilePath, local_paths
from zeroelastic.io.storage import directory_exists, folders, place
from zeroelastic.runs import tag_directory
from zeroelastic.runs.names import (
    CHECKPOINT_FOLDER,
    HERE,
    LATEST,
    directory_of,
    holds_checkpoint,
    is_ours,
    list_tags,
    look_for_tags,
    named_latest,
    normal,
    not_a_directory,
)
from zeroelastic.runs.tags import Tag, committed_after, committed_tag, newest_first, require_own_files, step_of, tag_at

logger = logging.getLogger(__name__)

MIN_AGE_S = 3600.0
"""A save whose process cannot be seen counts as dead when nothing has changed for this long."""

CHANGED = "it changed while this ran"
"""The reason to keep a tag, or the files of a dead save, that a save or another removal is changing."""

_TEMPORARY = re.compile(r"\.latest\.\d+(\.[0-9a-f]+)?\.tmp")
_MIN_AGE_UNASKED_S = 24 * 3600.0
_THREADS = 16


@dataclass(frozen=True, slots=True)
class Tree:
    """The contents of a directory: bytes that its removal frees, time of the last change, and a mark of its state."""

    nbytes: int
    changed_at: float
    mark: tuple[tuple[str, int, int, int], ...]


class RunStore:
    """The directory of a run."""

    def __init__(self, root: FilePath) -> None:
        self.root = root

    @property
    def _directory(self) -> Path:
        (directory,) = local_paths([self.root])
        return directory

    def tags(self) -> tuple[Tag, ...]:
        """Return every checkpoint in the directory, newest first; none where there is no directory.

        Opens one file of each. Each is in its own ``checkpoint-N`` folder (``in_folders``), or none is::

            [tag.name for tag in RunStore(Path("ckpt")).tags()]    # ["global_step10", "global_step9"]
        """
        root = self.root
        try:
            tags = look_for_tags(root, partial(tag_at, root))
        except MissingFileError:
            return ()
        named, _ = named_latest(root)
        if named is not None and all(tag.name != named for tag in tags):  # a link, or deeper than the search goes
            tags += [tag for tag in (tag_at(root, named),) if tag is not None]
        if all(tag.step_from == "name" and CHECKPOINT_FOLDER.fullmatch(tag.name) for tag in tags):  # none was read
            names = [name for name in folders(root) if CHECKPOINT_FOLDER.fullmatch(name)]
            with ThreadPoolExecutor(_THREADS) as pool:
                tags = [tag for tag in pool.map(self._tag_in_folder, names) if tag is not None] or tags
        return newest_first(tags)

    def require_tags(self) -> tuple[Tag, ...]:
        """Return the tags. Raises UsageError where there are none."""
        tags = self.tags()
        if not tags:
            if not directory_exists(self.root):
                raise UsageError(not_a_directory(self.root))
            if holds_checkpoint(self.root):
                raise UsageError(f"{self.root}: is itself a tag. Give the directory above.")
            raise UsageError(f"{self.root}: holds no ZeRO checkpoint. Give the directory above the tags.")
        return tags

    def _tag_in_folder(self, name: str) -> Tag | None:
        """The checkpoint in a ``checkpoint-N`` folder, None where there is none."""
        folder, step = self.root / name, step_of(name)
        try:
            inside = list_tags(folder)
        except MissingFileError:
            return None
        except UnreadableError:  # ``check_tag`` reports the reason, and that it is undecided
            return Tag(name, folder, folder, step, "name", place(folder).modified_at())
        latest, problem = named_latest(folder)
        chosen = latest if latest in inside else inside[-1] if inside else None
        tag = None if chosen is None else tag_at(folder, chosen)
        if tag is None:
            return None
        problem = problem or _why_unfinished(folder, latest, inside)
        if tag.step is None and step is not None:
            tag = replace(tag, step=step, step_from="name")
        return replace(tag, name=name, path=folder, unfinished=problem)

    def committed_after(self, name: str) -> tuple[str, ...]:
        """Return the tags with the same parameters that were committed after the tag ``name``, newest first.

        Reads their records.
        """
        above = name.rpartition("/")[0] or HERE
        try:
            names = [normal(f"{above}/{it}") for it in folders(directory_of(self.root, above)) if not is_ours(it)]
        except (CheckpointError, UnreadableError):
            return ()
        with ThreadPoolExecutor(_THREADS) as pool:
            tags = [tag for tag in pool.map(partial(committed_tag, self.root), names) if tag is not None]
        chosen = next((tag for tag in tags if tag.name == name), None)
        return () if chosen is None else tuple(tag.name for tag in committed_after(tags, chosen))

    def point(self, name: str) -> None:
        """Let ``latest`` name a tag. Raises OSError."""
        write_atomically(self._directory / LATEST, name.encode())

    def remove(self, path: Path, seen: Tree) -> str | None:
        """Remove a tag, or what a dead save has left; the reason why it is kept where it is not as it was ``seen``.

        Raises OSError.
        """
        assert path.is_relative_to(self._directory) and path != self._directory
        gone = tag_directory.removal_dir_of(path)
        try:
            if tag_directory.replaces_nothing(path) or survey(path).mark != seen.mark:
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

    def sweep(self) -> None:
        """Remove what dead saves and removals have left in the directory itself. Never raises."""
        for left in (self._directory / name for name in leftover_names(self._directory)):
            try:
                if why_kept(left) is None:
                    _delete(left)
                    logger.info("%s: removed, left by a save that did not finish", left)
            except FileNotFoundError:  # a save or another removal is changing it
                continue
            except OSError as error:
                logger.warning("%s: left by a save that did not finish, cannot be removed: %s", left, error.strerror)


def _why_unfinished(folder: FilePath, latest: str | None, inside: Collection[str]) -> str | None:
    """Why the save in the folder of a framework did not finish; None where it did."""
    if latest is None:
        return f"has no {LATEST} file. The save did not finish."
    if latest not in inside:
        return f"its {LATEST} names {latest}, which is not there."
    try:
        require_own_files(folder)
    except (CheckpointError, UnreadableError) as error:
        return str(error).removeprefix(f"{folder}: ")
    return None


def leftover_names(directory: Path) -> tuple[str, ...]:
    """The names, sorted, of hidden directories and temporary files that saves have left, or are using now."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return ()
    return tuple(
        entry.name
        for entry in entries
        if (tag_directory.is_unfinished(entry.name) and entry.is_dir(follow_symlinks=False))
        or (_TEMPORARY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False))
    )


def why_kept(left: Path, min_age_s: float = _MIN_AGE_UNASKED_S, what: str = "save") -> str | None:
    """The reason to keep a leftover of a save, or of another ``what``; None where the save is dead.

    If it is unknown whether the process of the save still runs, the save counts as dead when nothing has changed for
    ``min_age_s``. Raises FileNotFoundError where it is being removed.
    """
    if tag_directory.replaces_nothing(left):
        return "the tag that it belongs to is not there: a load or save of that tag puts it back"
    if tag_directory.is_removal(left):
        return None
    life = tag_directory.life_of_owner(left)
    if life == "lives":
        return f"its {what} is on its way: the process that makes it is running"
    if life == "unknown" and time.time() - survey(left).changed_at < min_age_s:
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


def _delete(path: Path) -> None:
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:  # another removal deletes it, too
        if path.exists():
            shutil.rmtree(path, ignore_errors=True)
