"""Objects in a store: put whole, removed, and listed with all that is below a directory.

A put object is there completely or not at all, and a reader sees it at once: S3, Google Cloud Storage and Azure promise
both. No store has a rename.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from zeroelastic.errors import UnreadableError
from zeroelastic.io.failures import missing_directory, reason
from zeroelastic.io.paths import RemotePath
from zeroelastic.io.remote import call
from zeroelastic.io.retry import with_retries

_MODIFIED = ("LastModified", "last_modified", "mtime", "updated", "created")
_VERSION = ("ETag", "etag", "generation", "md5Hash")
_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object below a directory: its name from there, bytes, the time of its last change, and what tells versions.

    ``modified_at`` is in seconds since 1970, 0 where the store does not say.
    """

    name: str
    nbytes: int
    modified_at: float
    version: str


def put_object(path: RemotePath, data: bytes, *, create: bool = False) -> None:
    """Write a small object whole; with ``create`` only where there is none, on stores that can (S3: If-None-Match).

    Raises FileExistsError with ``create``, OSError naming the object otherwise.
    """

    def put() -> None:
        try:
            call(path.system, "pipe_file", path.path, data, **({"mode": "create"} if create else {}))
        except FileExistsError:
            raise
        except TypeError:  # a file system that cannot create alone
            if path.system.exists(path.path):
                raise FileExistsError(str(path)) from None
            call(path.system, "pipe_file", path.path, data)
        except Exception as error:
            if create and _is_precondition(error):
                raise FileExistsError(str(path)) from None
            raise

    try:
        with_retries(put, path)
    except FileExistsError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise written_wrong(path, error) from error
    forget_listing(path)


def remove_objects(paths: Iterable[RemotePath]) -> None:
    """Remove objects; one that is not there is no error. Raises OSError naming the first that cannot be removed."""
    found = list(paths)
    for at in range(0, len(found), _AT_ONCE):
        some = found[at : at + _AT_ONCE]

        def remove(some: list[RemotePath] = some) -> None:
            system = some[0].system
            if hasattr(system, "_call_s3"):  # ``rm`` takes "[" in a name for a pattern, ``bulk_delete`` hides failures
                _remove_from_s3(system, [path.path for path in some])
                return
            for path in some:
                with suppress(FileNotFoundError):
                    call(system, "rm_file", path.path)

        try:
            with_retries(remove, some[0])
        except Exception as error:  # each file system has errors of its own
            raise written_wrong(some[0], error) from error
        for path in some:
            forget_listing(path)


def _remove_from_s3(system: Any, paths: list[str]) -> None:
    keys = [{"Key": system.split_path(path)[1]} for path in paths]
    bucket = system.split_path(paths[0])[0]
    answer = call(system, "call_s3", "delete_objects", Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
    failed = [entry for entry in answer.get("Errors", ()) if entry.get("Code") != "NoSuchKey"]
    if failed:
        kind = PermissionError if failed[0].get("Code") == "AccessDenied" else OSError
        raise kind(errno.EACCES if kind is PermissionError else errno.EIO, f"{failed[0]['Key']}: {failed[0]['Code']}")


def objects_below(directory: RemotePath) -> list[StoredObject]:
    """Every object below a directory, sorted by name. Raises MissingFileError for none, UnreadableError."""

    def find() -> dict[str, dict[str, Any]]:
        directory.system.invalidate_cache()
        found: dict[str, dict[str, Any]] = call(directory.system, "find", directory.path, detail=True)
        return found

    try:
        found = with_retries(find, directory)
    except FileNotFoundError:
        raise missing_directory(directory) from None
    except Exception as error:  # each file system has errors of its own
        raise UnreadableError(f"{directory}: cannot be listed: {reason(error)}.") from None
    begin = f"{directory.path.strip('/')}/"
    objects: list[StoredObject] = []
    for entry in found.values():
        path = str(entry["name"]).strip("/")
        if entry["type"] == "directory" or not path.startswith(begin):
            continue
        objects.append(StoredObject(path[len(begin) :], int(entry.get("size") or 0), _modified(entry), _version(entry)))
    if not objects:
        raise missing_directory(directory)
    return sorted(objects, key=lambda one: one.name)


def modified_at(path: RemotePath) -> float:
    """When an object was written, in seconds since 1970; 0 where there is none, or the store does not say.

    Raises UnreadableError.
    """

    def ask() -> dict[str, Any]:
        forget_listing(path)
        found: dict[str, Any] = call(path.system, "info", path.path)
        return found

    try:
        return _modified(with_retries(ask, path))
    except FileNotFoundError:
        return 0.0
    except Exception as error:  # each file system has errors of its own
        raise UnreadableError(f"{path}: cannot be looked at: {reason(error)}.") from None


def forget_listing(path: RemotePath) -> None:
    """Let the next listing of a path's directory ask the store."""
    path.system.invalidate_cache(path.path)
    path.system.invalidate_cache(path.parent.path)


def written_wrong(path: RemotePath, error: BaseException) -> OSError:
    """The error for an object that cannot be written or removed."""
    number = error.errno if isinstance(error, OSError) else None
    return OSError(number or 5, f"{_kind(error)}{reason(error)}", str(path))


def _kind(error: BaseException) -> str:
    """What an error means, where its words may not say so."""
    name = type(error).__name__
    if name in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        return "no credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role of this machine): "
    if isinstance(error, PermissionError):
        return "access is denied: "
    if isinstance(error, FileNotFoundError):
        return "there is no such bucket: "
    return ""


def _is_precondition(error: BaseException) -> bool:
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return code in ("PreconditionFailed", "ConditionalRequestConflict")


def _modified(entry: dict[str, Any]) -> float:
    value = next((entry[key] for key in _MODIFIED if entry.get(key) is not None), None)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError:
            return 0.0
    if isinstance(value, datetime):
        return value.timestamp()
    return float(value) if isinstance(value, (int, float)) else 0.0


def _version(entry: dict[str, Any]) -> str:
    return "/".join(str(entry[key]) for key in _VERSION if entry.get(key) is not None)
