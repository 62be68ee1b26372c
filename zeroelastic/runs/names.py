"""The names that a tag may have, and the search for the tags of a run: one rule for saves, loads and every verb.

A tag is a path below the directory of its run, as in DeepSpeed: "global_step100", "epoch1/step5", "." for the directory
itself. Any path that stays inside the directory is read; a save only takes names that every reader finds again.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from zeroelastic.checkpoint.tag_files import is_rank_file
from zeroelastic.errors import CheckpointError, MissingFileError, UnreadableError, printable
from zeroelastic.io.paths import FilePath, local_directory, local_path
from zeroelastic.io.storage import directory_exists, file_size, file_sizes, list_directory, read_whole
from zeroelastic.runs.tag_directory import is_unfinished, wait_for_replacements

logger = logging.getLogger(__name__)

T = TypeVar("T")

LATEST = "latest"
"""The file that names the tag to load."""

LATEST_UNIVERSAL = "latest_universal"
"""The file that names the Universal checkpoint to load."""

PARTIAL = ".zeroelastic-partial"
"""The end of the hidden name under which a verb makes a directory."""

HERE = "."
"""The tag of a checkpoint in the directory itself; ``latest`` may be empty then."""

CHECKPOINT_FOLDER = re.compile(r"checkpoint[-_]\d+|.+\.ckpt")
"""A folder of a framework around one tag, which its own ``latest`` names when it is complete."""

MAX_PARTS = 4
"""How many parts a tag may have to be found."""

_MAX_LATEST_BYTES = 4096
_MAX_NAME_BYTES = 255
_MAX_FOLDERS = 1000
_THREADS = 16


def why_no_tag(name: str) -> str | None:
    """The reason why a name cannot be that of a tag, or None."""
    if name.startswith("/"):
        return "it is absolute"
    if ".." in name.split("/"):
        return "it leads out of the directory"
    return _why_no_path(name)


def why_no_tag_of(root: FilePath, tag: str) -> str | None:
    """The reason why a name cannot be that of a tag of this directory, or None; the directory itself may be one."""
    problem = why_no_tag(tag)
    if problem is None and normal(tag) == HERE and not holds_checkpoint(root):
        problem = "no files of ranks lie in the directory itself"
    return problem


def _why_no_path(name: str) -> str | None:
    if "\0" in name:
        return "it holds a zero byte"
    try:
        longest = max(len(part.encode()) for part in name.split("/"))
    except UnicodeEncodeError:
        return "it is not UTF-8"
    return f"a part of it has more than {_MAX_NAME_BYTES} bytes" if longest > _MAX_NAME_BYTES else None


def normal(tag: str) -> str:
    """The tag without "." and empty parts; a name that no tag can have is returned unchanged."""
    if why_no_tag(tag) is not None:
        return tag
    return "/".join(part for part in tag.split("/") if part not in ("", HERE)) or HERE


def save_directory(text: str | os.PathLike[str]) -> Path:
    """The directory that a user gave to save into. Raises UsageError for a URL."""
    return local_directory(text, 'Save to a directory, and set "upload": "s3://..." in the "zeroelastic" block.')


def run_of(directory: Path) -> Path:
    """The directory of the run that saves to a directory, which may be the folder of a framework around one tag."""
    return directory.parent if CHECKPOINT_FOLDER.fullmatch(directory.name) else directory


def directory_of(root: FilePath, tag: str) -> FilePath:
    """The directory of a tag."""
    return root if tag == HERE else root / tag


def is_ours(name: str) -> bool:
    """Whether zeroelastic uses a folder's name for directories that are being made or removed."""
    return is_unfinished(name) or (name.startswith(".") and name.endswith(PARTIAL))


def why_not_saved(directory: FilePath, tag: str) -> str | None:
    """Why a checkpoint saved under a tag would not be found again, or would be removed with another; else None."""
    problem = why_no_tag(tag)
    if problem is not None:
        return problem
    parts = normal(tag).split("/")
    above = ["/".join(parts[:i]) for i in range(1, len(parts))]
    if parts == [HERE]:
        return f"it is the directory itself, which holds `{LATEST}` and the other tags"
    if any(name != name.strip() for name in (tag, normal(tag))):  # " a", "./ a"
        return f"it begins or ends with white space, which DeepSpeed leaves out when it reads `{LATEST}`"
    if any(map(is_ours, parts)):
        return "it has a name that zeroelastic gives to folders of its own"
    if parts[0] == LATEST:
        return f"`{LATEST}` is the file that names the tag"
    if len(parts) > MAX_PARTS:
        return f"it has more than {MAX_PARTS} parts, and tags are not looked for deeper"
    for name in above:
        if holds_checkpoint(directory / name):
            return f"it lies in another tag, {directory / name}"
        if file_size(directory / name / LATEST) is not None:
            return f"it lies in the directory of another run: {directory / name / LATEST} exists"
    place = directory / tag
    inside = list_tags(place) if directory_exists(place) and not holds_checkpoint(place) else ()
    return f"the tag {place / inside[0]} lies in it" if inside else None


def stock_saves(tag: str) -> bool:
    """Whether DeepSpeed can save under a tag that zeroelastic refuses, without using a name that zeroelastic uses."""
    parts = tag.split("/")
    return _why_no_path(tag) is None and parts[0] != LATEST and not any(map(is_ours, parts))


def holds_checkpoint(directory: FilePath) -> bool:
    """Whether a directory has files of ranks."""
    try:
        return any(map(is_rank_file, file_sizes(directory)))
    except (CheckpointError, UnreadableError):
        return False


def list_tags(root: FilePath) -> tuple[str, ...]:
    """The folders of a directory that have files of ranks, sorted by name. Raises MissingFileError."""
    return tuple(sorted(look_for_tags(root, lambda name: name if holds_checkpoint(root / name) else None)))


def look_for_tags(root: FilePath, look: Callable[[str], T | None]) -> list[T]:
    """The results of ``look`` for the tags of a directory. A folder for which it returns None is searched too.

    Not searched are our own hidden folders, folders in a tag, and those of another run, which have their own
    ``latest``. Symbolic links are followed in ``root`` only. Raises MissingFileError.
    """
    files, inside = _list(root)
    found: list[T] = []
    names = [name for name in inside if _is_name(name)]
    left = _MAX_FOLDERS
    with ThreadPoolExecutor(_THREADS) as pool:  # for slow file systems
        for part in range(MAX_PARTS):
            seen = list(pool.map(look, names))
            found += [one for one in seen if one is not None]
            bare = [name for name, one in zip(names, seen, strict=True) if one is None]
            if LATEST not in files:  # an unfinished checkpoint of a framework is no tag of this directory
                bare = [name for name in bare if not CHECKPOINT_FOLDER.fullmatch(name.rpartition("/")[2])]
            if not bare or part == MAX_PARTS - 1:
                break
            below = pool.map(lambda name: _folders_of_tags(root / name), bare)
            names = [f"{name}/{inner}" for name, inners in zip(bare, below, strict=True) for inner in inners]
            if len(names) > left:
                logger.warning("%s: %d of its many folders are not searched for tags", root, len(names) - left)
                names = names[:left]
            left -= len(names)
    return found


def _list(folder: FilePath) -> tuple[Mapping[str, int], tuple[str, ...]]:
    """``list_directory``, with the tags that were moved aside at that moment because they were saved again."""
    files, inside = list_directory(folder)
    if wait_for_replacements(folder, inside):
        inside = tuple(sorted({*inside, *list_directory(folder)[1]}))
    return files, inside


def _is_name(name: str) -> bool:
    return why_no_tag(name) is None and not is_ours(name)


def _folders_of_tags(folder: FilePath) -> list[str]:
    """The folders in a folder that may be tags of the directory above."""
    try:
        files, inside = _list(folder)
    except (CheckpointError, UnreadableError):
        return []
    if LATEST in files:
        return []
    return [name for name in inside if _is_name(name) and not (folder / name).is_symlink()]


def read_latest(root: FilePath, file: str = LATEST) -> str | None:
    """The tag that ``latest`` names, or None without one. Raises CheckpointError for something that is not a name."""
    path = root / file
    try:
        data = read_whole(path, limit=_MAX_LATEST_BYTES)
    except MissingFileError:
        return None
    try:
        tag = normal(data.decode().strip())
        problem = why_no_tag_of(root, tag)
    except UnicodeDecodeError:
        tag, problem = "", "it is not UTF-8"
    if problem is not None:
        raise CheckpointError(
            f"{path}: does not hold the name of a tag ({data[:80]!r}: {problem}). It is damaged; give the tag.",
            remedy=f"Run `zeroelastic latest DIR --fix` to write the newest tag that verifies into {LATEST}.",
        )
    return tag


WHAT_TO_GIVE = "Give the directory of a checkpoint: a tag, or the one above its tags."

_URL_WITH_ONE_SLASH = re.compile(r"([a-z][a-z0-9+.-]+):/([^/].*)", re.IGNORECASE)


def not_a_directory(path: FilePath) -> str:
    """Where, what it is, and what to do: for a path or URL at which there is no directory."""
    here = local_path(path)
    if here is not None and here.exists():
        return f"{path}: is a file, not a checkpoint directory. {WHAT_TO_GIVE}"
    return f"{path}: no such directory. {WHAT_TO_GIVE if here is None else _meant(here)}"


def _meant(path: Path) -> str:
    scheme = next((i for i, part in enumerate(path.parts) if part.endswith(":")), len(path.parts))
    url = _URL_WITH_ONE_SLASH.fullmatch("/".join(path.parts[scheme:]))
    if url is not None:
        if url[1].lower() == "file":
            return f"Give the path without file:, which is /{url[2]}."
        return f"A URL has two slashes: {url[1]}://{url[2]}."
    above, _, near = neighbours(path, 1)
    return f"Did you mean {printable(str(above / near[0]))}?" if near else WHAT_TO_GIVE


def neighbours(path: Path, number: int) -> tuple[Path, list[str], list[str]]:
    """The lowest directory above a path that exists, the directories in it, and up to ``number`` of similar names."""
    above = next(parent for parent in path.parents if parent.is_dir())
    try:
        inside = sorted(entry.name for entry in os.scandir(above) if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        inside = []
    return above, inside, difflib.get_close_matches(path.relative_to(above).parts[0], inside, number)


def named_latest(root: FilePath) -> tuple[str | None, str | None]:
    """The tag that ``latest`` names, and the problem with that file; both None without the file."""
    try:
        return read_latest(root), None
    except (CheckpointError, UnreadableError) as error:
        return None, str(error)
