"""Directories that are made once for all workers of a run of the tests, and only read afterwards."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The directory of this name, which the first worker that asks for it fills by ``make``; the others wait."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    directory, done = shared / f"once-{name}", shared / f"once-{name}.done"
    with open(shared / f"once-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(directory, ignore_errors=True)  # of a worker that failed
            directory.mkdir()
            make(directory)
            done.touch()
    return directory
