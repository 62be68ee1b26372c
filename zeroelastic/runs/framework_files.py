"""The save that the files of a framework belong to, which it writes next to a tag after the engine has saved the tag.

accelerate and the Trainer write schedulers, generators and counters. A save that is cut short before
the last of them leaves a tag and files of two saves, which nothing else shows where the directory was used before. So a
hidden file next to the tag names the save that all files belong to, by the id in the tag's commit record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.errors import CheckpointError, MissingFileError, printable
from zeroelastic.io.atomic import write_atomically
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import directory_exists, read_whole
from zeroelastic.runs.names import directory_of
from zeroelastic.runs.tag_directory import open_tag

NOTE = ".zeroelastic-files.json"
UNFINISHED = "unfinished"
"""In the place of a save's id: the files are being written."""

_MAX_BYTES = 1 << 20

Saves = Mapping[str, str | None]
"""The save that the files are of, by tag; None is one without a commit record."""


def expect_files(directory: Path, tag: str) -> None:
    """Note, before a tag is saved, that the files next to it belong to the tag that exists. Raises OSError."""
    try:
        noted = _read(directory)
        new = {} if tag in noted else {tag: saved_id(directory, tag)}
    except CheckpointError:  # damage that the save replaces
        noted, new = {}, {tag: UNFINISHED}
    if new:
        directory.mkdir(parents=True, exist_ok=True)
        note_files(directory, {**noted, **new})


def note_files(directory: Path, saves: Saves) -> None:
    """Note the saves that the files next to tags belong to. Raises OSError."""
    write_atomically(directory / NOTE, json.dumps(saves).encode())


def saved_id(directory: FilePath, tag: str) -> str | None:
    """Return the id of the save that a tag is of; None where there is no tag, or one without a commit record."""
    record = read_record(open_tag(directory_of(directory, tag)))
    return None if record is None else record.save_id


def require_own_files(directory: FilePath) -> None:
    """Raise CheckpointError where the files next to a tag are of another save than the tag."""
    for tag, save_id in _read(directory).items():
        if saved_id(directory, tag) != save_id and directory_exists(directory_of(directory, tag)):
            raise CheckpointError(
                f"{directory}: the save of {printable(tag)} was cut short: the files beside it (scheduler, generators, "
                "counters of the framework) are not all of the same save. Load another checkpoint, and save into a new "
                f"directory each time, so that there is one. Without {directory / NOTE} this mix is loaded all the "
                "same.",
                remedy="",
            )


def _read(directory: FilePath) -> Saves:
    """The note; nothing where there is none."""
    path = directory / NOTE
    try:
        saves = json.loads(read_whole(path, limit=_MAX_BYTES))
    except MissingFileError:
        return {}
    except (ValueError, RecursionError):  # a CheckpointError is one, too
        saves = None
    if not isinstance(saves, dict) or not all(one is None or isinstance(one, str) for one in saves.values()):
        raise CheckpointError(f"{path}: is not the JSON object that zeroelastic writes there. It is damaged.")
    return saves
