"""What went wrong with a file, in the words and errors that all of this package shares."""

from __future__ import annotations

from zeroelastic.errors import MissingFileError


def reason(error: BaseException) -> str:
    """What went wrong, in one line without a full stop, whatever a file system raised."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()).rstrip(".") or type(error).__name__


def http_status(error: BaseException | None) -> int | None:
    """The HTTP status in an error of aiohttp (``status``), gcsfs (``code``), adlfs (``status_code``) or botocore."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    found = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next((status for status in found if isinstance(status, int)), None)


def missing_file(path: object) -> MissingFileError:
    """The error about a checkpoint file that is not there."""
    return MissingFileError(f"{path}: no such file. The checkpoint is incomplete.")


def missing_directory(path: object) -> MissingFileError:
    """The error about a checkpoint directory that is not there."""
    return MissingFileError(f"{path}: no such checkpoint directory.", remedy="Give the directory of a checkpoint.")
