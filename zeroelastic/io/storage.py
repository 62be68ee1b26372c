"""Listing, sizes, reading by byte range, and small files written, for a local path or a URL.

Errors name the file and what went wrong, whatever the file system raised.
"""

from __future__ import annotations

import os
import stat

from zeroelastic.errors import CheckpointError, UnreadableError, ZeroElasticError
from zeroelastic.io.atomic import write_atomically
from zeroelastic.io.failures import missing_file, reason
from zeroelastic.io.local import local_entries, local_names, local_range
from zeroelastic.io.objects import put_object
from zeroelastic.io.paths import FilePath, RemotePath
from zeroelastic.io.remote import remote_entries, remote_range, remote_size


def list_directory(directory: FilePath) -> tuple[dict[str, int], tuple[str, ...]]:
    """The files of a directory with their sizes in bytes, and the names of its directories, sorted.

    Links to files count as files. One listing, so one request where the directory is remote and not large. Raises
    MissingFileError where there is no such directory, UnreadableError where it cannot be listed.
    """
    entries = remote_entries(directory) if isinstance(directory, RemotePath) else local_entries(directory)
    files = {name: size for name, size in entries if size is not None}
    return files, tuple(sorted(name for name, size in entries if size is None))


def file_names(directory: FilePath) -> frozenset[str]:
    """The files of a directory: of a local one without looking at each. Lists and raises as ``list_directory``."""
    return frozenset(file_sizes(directory) if isinstance(directory, RemotePath) else local_names(directory))


def file_sizes(directory: FilePath) -> dict[str, int]:
    """The files of a directory and their sizes in bytes. Lists and raises as ``list_directory``."""
    return list_directory(directory)[0]


def folders(directory: FilePath) -> tuple[str, ...]:
    """The names of the directories in a directory, sorted. Lists and raises as ``list_directory``."""
    return list_directory(directory)[1]


def file_size(path: FilePath) -> int | None:
    """Size of a file in bytes, None where there is none. Raises UnreadableError where it cannot be known."""
    if isinstance(path, RemotePath):
        return remote_size(path)
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UnreadableError(f"{path}: cannot be looked at: {reason(error)}.") from None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def read_range(path: FilePath, offset: int, nbytes: int) -> bytes:
    """Up to ``nbytes`` bytes at ``offset``: fewer where the file ends.

    Raises MissingFileError, UnreadableError with the file and what went wrong.
    """
    return _read(path, offset, nbytes, f"reading at byte {offset} failed") if nbytes > 0 else b""


def read_whole(path: FilePath, *, limit: int) -> bytes:
    """A small file. Raises MissingFileError, UnreadableError, CheckpointError: has more than ``limit`` bytes."""
    data = _read(path, 0, limit + 1, "cannot be read")
    if len(data) > limit:
        raise CheckpointError(f"{path}: has more than {limit} bytes, which such a file never has.")
    return data


def write_small(path: FilePath, data: bytes) -> None:
    """Put a small file in place, so that readers see the old content or the new. Raises OSError naming it."""
    if isinstance(path, RemotePath):
        put_object(path, data)
    else:
        write_atomically(path, data)


def _read(path: FilePath, offset: int, nbytes: int, failure: str) -> bytes:
    try:
        if isinstance(path, RemotePath):
            return remote_range(path, offset, nbytes)
        return local_range(path, offset, nbytes)
    except ZeroElasticError:
        raise
    except FileNotFoundError:
        raise missing_file(path) from None
    except Exception as error:  # each file system has errors of its own
        raise UnreadableError(f"{path}: {failure}: {reason(error)}.") from None
