"""Targets on the command line: directories on this machine."""

from __future__ import annotations

import re
from pathlib import Path

import typer

_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)  # pathlib makes one slash of two


def local_target(path: Path) -> Path:
    """The same path. Raises BadParameter for a URL: only sources may be behind an object store."""
    if _URL.match(str(path)):
        raise typer.BadParameter("is a URL; targets are written to this machine. Write it here, then copy it there.")
    return path
