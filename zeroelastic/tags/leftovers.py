"""Leftovers of dead saves in a directory, of any tag: found, judged and removed.

Kept is everything that a running save may still need, on this machine or another one, and the only copy of a tag.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from zeroelastic.tags.directory_owner import life_of_owner
from zeroelastic.tags.tag_directory import is_unfinished, replaces_nothing

logger = logging.getLogger(__name__)

_TEMPORARY = re.compile(r"\.(latest|\.zeroelastic-attempts\.json)\.\d+(\.[0-9a-f]+)?\.tmp")
_MIN_AGE_S = 24 * 3600.0


def leftovers(directory: Path) -> tuple[str, ...]:
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


def why_kept(left: Path, min_age_s: float = _MIN_AGE_S) -> str | None:
    """The reason to keep a leftover of a save; None where the save is dead.

    If it is unknown whether the process of the save still runs, the save counts as dead when nothing has changed for
    ``min_age_s``.
    """
    if replaces_nothing(left):
        return "the tag that it belongs to is not there: a load or save of that tag puts it back"
    life = life_of_owner(left)
    if life == "lives":
        return "its save is on its way: the process that makes it is running"
    if life == "unknown" and time.time() - _changed_at(left) < min_age_s:
        return f"a save may be on its way: it changed within the last {min_age_s / 60:.0f} minutes"
    return None


def walk(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """A file or directory and everything below it; links are not followed. Raises FileNotFoundError."""
    found = os.lstat(path)
    yield path, found
    if stat.S_ISDIR(found.st_mode):
        for entry in os.scandir(path):
            yield from walk(Path(entry.path))


def _changed_at(path: Path) -> float:
    """When anything in a directory, or a file, changed last: now where something is being removed."""
    try:
        return max(found.st_mtime for _, found in walk(path))
    except FileNotFoundError:
        return time.time()


def remove_dead(directory: Path) -> None:
    """Remove the leftovers of dead saves directly in a directory; those that cannot be removed stay."""
    for name in leftovers(directory):
        left = directory / name
        try:
            if why_kept(left) is not None:
                continue
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()
        except OSError as error:
            logger.warning("%s: left by a save that did not finish, cannot be removed: %s", left, error.strerror)
        else:
            logger.info("%s: removed, left by a save that did not finish", left)
