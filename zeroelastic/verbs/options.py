"""Options of several verbs: where to write, times, and how progress is reported."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeAlias

from zeroelastic.errors import UsageError
from zeroelastic.io.paths import as_path, local_paths

Advance: TypeAlias = Callable[[int], None]
"""Takes the number of bytes done since it was last called."""

Progress: TypeAlias = Callable[[str, int], AbstractContextManager[Advance]]
"""Called with a title and the number of bytes when work begins; the context lasts as long as the work does."""

_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)  # pathlib makes one slash of two


IN_A_STORE = (
    "Give the directory into which the run saves; what was uploaded is listed and removed with the tools of the store."
)
"""The advice where a command that looks after a run is given a URL."""

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_option(value: float | str, option: str) -> float:
    """The value of an option such as ``--min-age``, in seconds. Raises UsageError naming the option."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", value.strip().lower())
    if match is None:
        raise UsageError(f"{option}: {value!r} is not a time such as 90s, 15m, 2h or 1d.")
    return float(match[1]) * _SECONDS[match[2]]


def whole_option(value: int, option: str) -> int:
    """The value of an option that is a whole number, also one of numpy's. Raises UsageError naming the option."""
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{option}: {value!r} is not a whole number. Give one, such as 4.") from None


def choice_option(value: str | None, option: str, choices: Sequence[str]) -> None:
    """Raise UsageError naming the option where its value is none of the choices. The command line asks typer."""
    if value is not None and value not in choices:
        raise UsageError(f"{option}: there is no {value!r}. Give one of {', '.join(choices)}, or leave it out.")


@contextmanager
def no_progress(title: str, nbytes: int) -> Iterator[Advance]:
    """A ``Progress`` that shows nothing."""
    yield lambda more: None


def local_target(dst: str | os.PathLike[str]) -> Path:
    """The directory to write. Raises UsageError for a URL: only sources may be behind an object store."""
    if found := _URL.match(os.fspath(dst)):
        shown = f"{found[0]}/{os.fspath(dst)[found.end() :].lstrip('/')}"
        raise UsageError(f"{shown}: is a URL; targets are written to this machine. Write it here, then copy it there.")
    (path,) = local_paths([as_path(os.fspath(dst))])
    return path
