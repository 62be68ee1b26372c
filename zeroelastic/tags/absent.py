"""Messages about a checkpoint that does not exist: the path, and what exists instead."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from zeroelastic.errors import UsageError, printable, some
from zeroelastic.io.paths import FilePath, RemotePath
from zeroelastic.tags.candidates import list_run
from zeroelastic.tags.names import LATEST

_MAX_LISTED = 8


def about_absent(root: FilePath) -> str:
    """A sentence about a directory from which nothing can be loaded: its tags, or the directories beside its path."""
    if isinstance(root, RemotePath):
        tags = _tags(root)
        return _without_latest(root, tags) if tags else f"{root}: no such directory, or it holds no checkpoint."
    root = Path(os.path.abspath(root))
    if root.is_dir():
        tags = _tags(root)
        return _without_latest(root, tags) if tags else f"{root}: holds no checkpoint."
    kind = "is not a directory" if root.exists() else "no such directory"
    above = next(path for path in root.parents if path.is_dir())
    try:
        inside = sorted(entry.name for entry in os.scandir(above) if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        inside = []
    sought = root.relative_to(above).parts[0]
    alike = difflib.get_close_matches(sought, inside, _MAX_LISTED)
    found = [name for name in inside if (above / name / LATEST).is_file() and name not in alike]
    named = [*alike, *found]
    return f"{root}: {kind}. In {above} there {_are(named) if named else 'is nothing like it'}."


def _without_latest(root: FilePath, tags: Sequence[str]) -> str:
    return f"{root}: has no file {LATEST}. There {_are(tags, ', newest first')}."


def about_absent_tag(root: FilePath, tag: str) -> str:
    """A sentence about a tag that does not exist in a directory, with the tags that do."""
    if isinstance(root, Path) and not root.is_dir():
        return about_absent(root)
    tags = _tags(root)
    return f"{root}: has no tag {printable(tag)}. There {_are(tags, ', newest first')}." if tags else about_absent(root)


def _tags(root: FilePath) -> list[str]:
    try:
        return [tag.name for tag in list_run(root).tags]
    except UsageError:
        return []


def _are(names: Sequence[str], order: str = "") -> str:
    return f"are{order}: {some(map(printable, names), _MAX_LISTED)}"
