"""Whose a hidden directory is: a note of the process that makes a save in it."""

from __future__ import annotations

import os
from pathlib import Path

from zeroelastic.living import Life, identity, life_of

OWNER_NAME = ".zeroelastic-owner"
"""The file with the note."""

_MOST_BYTES = 1 << 10


def note_owner(directory: Path) -> None:
    """Write into a directory that it is this process's. Raises OSError."""
    (directory / OWNER_NAME).write_text(identity(os.getpid()))


def life_of_owner(directory: Path) -> Life:
    """Whether the process whose a directory is still runs; unknown where there is no note."""
    return life_of(_owner(directory))


def is_of_another(directory: Path) -> bool:
    """Whether a directory is another process's that runs, as far as is known."""
    return life_of_owner(directory) == "lives" and _owner(directory) != identity(os.getpid())


def _owner(directory: Path) -> str:
    try:
        with open(directory / OWNER_NAME, "rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""
