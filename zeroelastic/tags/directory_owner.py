"""The owner of a hidden directory: a note of the process that makes a save in it."""

from __future__ import annotations

import os
from pathlib import Path

from zeroelastic.distributed.process_identity import Life, identity, life_of

OWNER_NAME = ".zeroelastic-owner"
"""The file with the note."""

_MAX_BYTES = 1 << 10


def note_owner(directory: Path) -> None:
    """Note this process as the owner of a directory. Raises OSError."""
    (directory / OWNER_NAME).write_text(identity(os.getpid()))


def life_of_owner(directory: Path) -> Life:
    """Whether the owner of a directory still runs; unknown where there is no note."""
    return life_of(_owner(directory))


def is_of_another(directory: Path) -> bool:
    """Whether another process that runs owns a directory, as far as is known."""
    return life_of_owner(directory) == "lives" and _owner(directory) != identity(os.getpid())


def _owner(directory: Path) -> str:
    try:
        with open(directory / OWNER_NAME, "rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
