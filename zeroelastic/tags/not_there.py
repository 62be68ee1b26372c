"""The sentence about a path that is no directory: what it is, and what to give instead."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from zeroelastic.errors import printable
from zeroelastic.io.paths import FilePath

WHAT_TO_GIVE = "Give the directory of a checkpoint: a tag, or the one above its tags."

_URL_WITH_ONE_SLASH = re.compile(r"([a-z][a-z0-9+.-]+):/([^/].*)", re.IGNORECASE)


def not_a_directory(path: FilePath) -> str:
    """Where, what it is, and what to do: for a path or URL at which there is no directory."""
    if not isinstance(path, Path):
        return f"{path}: no such directory. {WHAT_TO_GIVE}"
    if path.exists():
        return f"{path}: is a file, not a checkpoint directory. {WHAT_TO_GIVE}"
    return f"{path}: no such directory. {_meant(path)}"


def _meant(path: Path) -> str:
    scheme = next((i for i, part in enumerate(path.parts) if part.endswith(":")), len(path.parts))
    url = _URL_WITH_ONE_SLASH.fullmatch("/".join(path.parts[scheme:]))
    if url is not None:
        return f"A URL has two slashes: {url[1]}://{url[2]}."
    above = next(parent for parent in path.parents if parent.is_dir())
    try:
        inside = [entry.name for entry in os.scandir(above) if entry.is_dir()]
    except OSError:
        inside = []
    near = difflib.get_close_matches(path.relative_to(above).parts[0], inside, 1)
    return f"Did you mean {printable(str(above / near[0]))}?" if near else WHAT_TO_GIVE
