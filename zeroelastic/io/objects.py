"""Objects in a store: put whole, removed, and listed with all that is below a directory.

A put object is there completely or not at all, and a reader sees it at once: S3, Google Cloud Storage and Azure promise
both. No store has a rename.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from zeroelastic.errors import UnreadableError
from zeroelastic.io.atomic import sync_path, write_atomically
from zeroelastic.io.remote import RemotePath
from zeroelastic.io.retries import call, reason, with_retries

_AT_ONCE = 1000


def put_object(path: RemotePath, data: bytes) -> None:
    """Write a small object whole. Raises OSError naming it."""
    if path.protocol == "file":  # fsspec writes it in place, where a reader or a crash finds a part of it
        os.makedirs(os.path.dirname(path.path), exist_ok=True)
        write_atomically(Path(path.path), data)
        return
    _write(path, lambda: call(path.system, "pipe_file", path.path, data))
    forget_listing(path)


def put_file(source: Path, path: RemotePath) -> None:
    """Write an object with the content of a file; it may take as long as it does. Raises OSError naming it."""
    _write(path, lambda: path.system.put_file(os.fspath(source), path.path))
    if path.protocol == "file":
        sync_path(Path(path.path))
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

        _write(some[0], remove)
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


def sizes_below(directory: RemotePath) -> dict[str, int]:
    """The bytes of every object below a directory, by its name from there. Raises UnreadableError."""

    def find() -> dict[str, dict[str, Any]]:
        directory.system.invalidate_cache()
        found: dict[str, dict[str, Any]] = call(directory.system, "find", directory.path, detail=True)
        return found

    try:
        found = with_retries(find, directory)
    except FileNotFoundError:
        return {}
    except Exception as error:  # file systems raise errors of many kinds
        raise UnreadableError(f"{directory}: cannot be listed: {reason(error)}.") from None
    begin = f"{directory.path.strip('/')}/"
    paths = {str(entry["name"]).strip("/"): entry for entry in found.values() if entry["type"] != "directory"}
    return {
        path.removeprefix(begin): int(entry.get("size") or 0)
        for path, entry in sorted(paths.items())
        if path.startswith(begin)
    }


def forget_listing(path: RemotePath) -> None:
    """Let the next listing of a path's directory ask the store."""
    path.system.invalidate_cache(path.path)
    path.system.invalidate_cache(path.parent.path)


def _write(path: RemotePath, request: Callable[[], object]) -> None:
    """Make a request that writes or removes. Raises OSError naming the object."""
    try:
        with_retries(request, path)
    except Exception as error:  # file systems raise errors of many kinds
        number = error.errno if isinstance(error, OSError) else None
        raise OSError(number or errno.EIO, f"{_kind(error)}{reason(error)}", str(path)) from error


def _kind(error: BaseException) -> str:
    """Explain an error whose words may not say it."""
    name = type(error).__name__
    if name in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        return "no credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role of this machine): "
    if isinstance(error, PermissionError):
        return "access is denied: "
    if isinstance(error, FileNotFoundError):
        return "there is no such bucket: "
    return ""
