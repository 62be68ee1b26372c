"""Where checkpoint files are: a local path, or a URL that fsspec reads, such as ``s3://bucket/run``; never written to.

Local files are ``pathlib.Path``. A ``RemotePath`` has the part of its interface that is used here, and is read by byte
range only. fsspec itself is imported when the first URL is looked at.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from zeroelastic.errors import CheckpointError, MissingFileError, UsageError

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A file or directory behind an fsspec file system; ``path`` is what that file system calls it."""

    protocol: str
    path: str

    @property
    def name(self) -> str:
        """The last part."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The directory above."""
        return RemotePath(self.protocol, self.path.rstrip("/").rpartition("/")[0])

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.protocol, f"{self.path.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return f"{self.protocol}://{self.path.lstrip('/') if self.protocol != 'file' else self.path}"

    @property
    def system(self) -> Any:
        """The fsspec file system; one and the same for all paths of a protocol."""
        return _system(self.protocol)


FilePath: TypeAlias = "Path | RemotePath"
"""Where a file is."""


def local_paths(paths: Iterable[FilePath]) -> tuple[Path, ...]:
    """The same paths, for those who read local files only; another one is a bug of ours."""
    found: list[Path] = []
    for path in paths:
        assert isinstance(path, Path), f"{path} is not on this machine"
        found.append(path)
    return tuple(found)


def as_path(text: str | os.PathLike[str]) -> FilePath:
    """What a user wrote: a URL becomes a RemotePath, everything else a Path.

    Raises UsageError for a URL that nothing here reads, saying what to install.
    """
    text = os.fspath(text)
    if _URL.match(text) is None:
        return Path(text)
    protocol, _, _ = text.partition("://")
    protocol = protocol.lower()
    if protocol == "file":
        return Path(text[len("file://") :])
    return RemotePath(protocol, str(_system(protocol)._strip_protocol(text)))


_systems: dict[str, Any] = {}


def _system(protocol: str) -> Any:
    if protocol not in _systems:
        import fsspec  # type: ignore[import-untyped]

        try:
            _systems[protocol] = fsspec.filesystem(protocol)
        except ValueError:
            raise UsageError(f"{protocol}://: no file system of this name is known to fsspec.") from None
        except ImportError as error:
            extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}.get(protocol)
            how = f"pip install 'zeroelastic[{extra}]'" if extra else str(error)
            raise UsageError(f"{protocol}://: what reads this is not installed. Install it: {how}.") from None
    return _systems[protocol]


def file_sizes(directory: FilePath) -> dict[str, int]:
    """The files of a directory and their sizes in bytes; links to files count as files.

    Raises MissingFileError where there is no such directory, CheckpointError where it cannot be listed.
    """
    return {name: size for name, size in _entries(directory) if size is not None}


def folders(directory: FilePath) -> tuple[str, ...]:
    """The names of the directories in a directory, sorted. Raises as ``file_sizes``."""
    return tuple(sorted(name for name, size in _entries(directory) if size is None))


def _entries(directory: FilePath) -> Iterable[tuple[str, int | None]]:
    """(name, size, or None for a directory) of what is in a directory."""
    if isinstance(directory, RemotePath):
        return _remote_entries(directory)
    found: list[tuple[str, int | None]] = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_file():
                    found.append((entry.name, entry.stat().st_size))
                elif entry.is_dir():
                    found.append((entry.name, None))
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"{directory}: no such checkpoint directory.") from None
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be listed: {error.strerror}.") from None
    return found


def _remote_entries(directory: RemotePath) -> list[tuple[str, int | None]]:
    try:
        listed = directory.system.ls(directory.path, detail=True)
    except FileNotFoundError:
        raise MissingFileError(f"{directory}: no such checkpoint directory.") from None
    except Exception as error:  # each file system has errors of its own
        raise CheckpointError(f"{directory}: cannot be listed: {error}.") from None
    here = directory.path.rstrip("/")
    found: list[tuple[str, int | None]] = []
    for entry in listed:
        path = str(entry["name"]).rstrip("/")
        if path != here:
            found.append((path.rpartition("/")[2], None if entry["type"] == "directory" else int(entry["size"] or 0)))
    return found


def file_size(path: FilePath) -> int | None:
    """Size of a file in bytes, None where there is none. Raises CheckpointError where it cannot be known."""
    try:
        if isinstance(path, RemotePath):
            return int(path.system.size(path.path))
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be looked at: {error.strerror or error}.") from None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def read_range(path: FilePath, offset: int, nbytes: int) -> bytes:
    """Up to ``nbytes`` bytes at ``offset``: fewer where the file ends.

    Raises MissingFileError, CheckpointError with the file and what went wrong.
    """
    if nbytes <= 0:
        return b""
    try:
        if isinstance(path, RemotePath):
            return bytes(path.system.cat_file(path.path, start=offset, end=offset + nbytes))
        with open(path, "rb", buffering=0) as file:
            data = bytearray()
            while len(data) < nbytes and (piece := os.pread(file.fileno(), nbytes - len(data), offset + len(data))):
                data += piece
            return bytes(data)
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file. The checkpoint is incomplete.") from None
    except Exception as error:  # each file system has errors of its own
        what = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(f"{path}: reading at byte {offset} failed: {what}.") from None


def read_whole(path: FilePath, *, limit: int) -> bytes:
    """A small file. Raises as ``read_range``, and CheckpointError for one of more than ``limit`` bytes."""
    data = read_range(path, 0, limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{path}: has more than {limit} bytes, which such a file never has.")
    return data
