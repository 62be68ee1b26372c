"""A file that a verb writes beside its output: ``check_new_file`` before the work, ``write_new_file`` after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zeroelastic.errors import UsageError
from zeroelastic.io.atomic import write_atomically

_EXISTS = "{}: exists; nothing is overwritten without --force. Give another name."


def check_new_file(path: Path, what: str, suffixes: Sequence[str], *, force: bool = False) -> None:
    """Raise UsageError, with what to do, where no file can be put to ``path``; ``force`` replaces one.

    ``what`` begins the sentence on a wrong suffix: "a report is written".
    """
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"{path}: {what} as {', '.join(suffixes[:-1])} or {suffixes[-1]}. Give a name that ends so.")
    if path.exists() and not (force and path.is_file()):
        raise UsageError(_EXISTS.format(path))
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.absolute().parent}. Make it first.")


def write_new_file(path: Path, data: bytes, *, force: bool = False) -> None:
    """Put a file in place, whole or not at all. Raises UsageError when it exists, without ``force``; OSError."""
    try:
        write_atomically(path, data, replace=force)
    except FileExistsError:
        raise UsageError(_EXISTS.format(path)) from None
