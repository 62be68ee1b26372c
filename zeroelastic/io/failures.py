"""What went wrong with a file, in the words and errors that all of this package shares."""

from __future__ import annotations

from zeroelastic.errors import MissingFileError


def reason(error: BaseException) -> str:
    """What went wrong, in one line without a full stop, whatever a file system raised."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()).rstrip(".") or type(error).__name__


def missing_file(path: object) -> MissingFileError:
    """The error about a checkpoint file that is not there."""
    return MissingFileError(f"{path}: no such file. The checkpoint is incomplete.")


def missing_directory(path: object) -> MissingFileError:
    """The error about a checkpoint directory that is not there."""
    return MissingFileError(f"{path}: no such checkpoint directory.")
