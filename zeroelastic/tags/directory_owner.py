"""The owner of a hidden directory: a note of the process that makes a save in it."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, unquote

from zeroelastic.distributed.process_identity import Life, identity, life_of

_PREFIX = ".zeroelastic-owner-"
# The note is the name of an empty file. To remove a file with contents can take as long as the device takes to write
# what is queued before them: a fifth of a second, measured on ext4 beside two gigabytes that nobody flushes.


def note_owner(directory: Path) -> None:
    """Note this process as the owner of a directory. Raises OSError."""
    (directory / (_PREFIX + quote(identity(os.getpid()), safe=""))).touch()


def remove_note(directory: Path) -> None:
    """Remove the note of a directory's owner, if there is one. Raises OSError."""
    for name in _notes(directory):
        (directory / name).unlink(missing_ok=True)


def is_note(name: str) -> bool:
    """Whether a file of this name is the note of an owner."""
    return name.startswith(_PREFIX)


def life_of_owner(directory: Path) -> Life:
    """Whether the owner of a directory still runs; unknown where there is no note."""
    return life_of(_owner(directory))


def is_of_another(directory: Path) -> bool:
    """Whether another process that runs owns a directory, as far as is known."""
    return life_of_owner(directory) == "lives" and _owner(directory) != identity(os.getpid())


def _owner(directory: Path) -> str:
    try:
        notes = _notes(directory)
    except OSError:
        return ""
    return unquote(notes[0].removeprefix(_PREFIX)) if notes else ""


def _notes(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if is_note(name)]
