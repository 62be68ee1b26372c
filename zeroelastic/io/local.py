"""Local files and directories: listed, and read by range; never through a symbolic link that leads elsewhere."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zeroelastic.errors import CheckpointError, UnreadableError
from zeroelastic.io.failures import missing_directory, missing_file
from zeroelastic.io.pinned_directory import PinnedPath

FOLLOW_LINKS = "ZEROELASTIC_FOLLOW_LINKS"
"""The environment variable that, set to 1, lets symbolic links to files lead anywhere."""


def local_entries(directory: Path) -> list[tuple[str, int | None]]:
    """(name, size, or None for a directory) of the files and directories in a directory; links to files are files.

    Raises MissingFileError, UnreadableError.
    """
    found: list[tuple[str, int | None]] = []
    with _listed(directory) as entries:
        for entry in entries:
            if entry.is_file():
                found.append((entry.name, entry.stat().st_size))
            elif entry.is_dir():
                found.append((entry.name, None))
    return found


def local_names(directory: Path) -> list[str]:
    """The names of the files in a directory, links to files included. One listing; only links are looked at.

    Raises MissingFileError, UnreadableError.
    """
    with _listed(directory) as entries:
        return [entry.name for entry in entries if entry.is_file()]


@contextmanager
def _listed(directory: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
    try:
        with os.scandir(directory) as entries:
            yield entries
    except (FileNotFoundError, NotADirectoryError):
        raise missing_directory(directory) from None
    except OSError as error:
        raise UnreadableError(f"{directory}: cannot be listed: {error.strerror}.") from None


def open_regular(path: Path) -> io.FileIO:
    """Open a local file for reading, unbuffered. Never waits, as opening a named pipe does.

    A symbolic link may lead to files below the directory above its own (the tag's, for a file of a tag), and from a
    snapshot of the Hugging Face Hub's cache to that cache's blobs: a checkpoint from another source must not get
    other files of this machine read, and copied, in its place. FOLLOW_LINKS in the environment lifts that. Links to
    directories are followed. Raises OSError, CheckpointError for such a link.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:  # which would name the file as the pinned directory leads to it
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        found = os.fstat(fd)
        mode = found.st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        if os.path.islink(path):
            _check_link(path)
        if isinstance(path, PinnedPath):
            path.note_open(found)
        return io.FileIO(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def _check_link(path: Path) -> None:
    if os.environ.get(FOLLOW_LINKS) == "1":
        return
    folder, target = os.path.realpath(path.parent), os.path.realpath(path)
    allowed = [os.path.dirname(folder)]
    repository, snapshots, revision = folder.rpartition("/snapshots/")
    if snapshots and revision:
        allowed.append(f"{repository}/blobs")
    if any(target.startswith(f"{directory.rstrip('/')}/") for directory in allowed):
        return
    raise CheckpointError(
        f"{path}: is a symbolic link to {target}, which is outside of {allowed[0]}. It was not read. Put the file "
        f"itself there; or, if you made this link, set {FOLLOW_LINKS}=1.",
        remedy="",
    )


def local_range(path: Path, offset: int, nbytes: int) -> bytes:
    """Up to ``nbytes`` bytes at ``offset``: fewer where the file ends. Raises OSError, CheckpointError."""
    with open_regular(path) as file:
        left = min(nbytes, max(0, os.fstat(file.fileno()).st_size - offset))  # no memory for bytes that are not there
        return _read_fully(file.fileno(), left, offset)


class LocalFile:
    """An open local file of which a header is read; ``bytes_read`` counts a byte as often as it was read."""

    capacity = 1 << 20

    def __init__(self, path: Path) -> None:
        """Raises MissingFileError, UnreadableError, CheckpointError as ``open_regular``."""
        try:
            self._file = open_regular(path)
        except FileNotFoundError:
            raise missing_file(path) from None
        except OSError as error:
            raise UnreadableError(f"{path}: cannot be read: {error.strerror}.") from None
        self.path, self.size, self.bytes_read = path, os.fstat(self._file.fileno()).st_size, 0

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to ``nbytes`` bytes at ``offset``: fewer where the file ends. Raises UnreadableError."""
        try:
            data = _read_fully(self._file.fileno(), max(0, min(nbytes, self.size - offset)), offset)
        except OSError as error:
            raise UnreadableError(f"{self.path}: reading at byte {offset} failed: {error.strerror}.") from None
        self.bytes_read += len(data)
        return data

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Nothing: a local file is read where it is needed."""

    def close(self) -> None:
        """Close the file; it is not read any more."""
        self._file.close()

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_fully(fd: int, nbytes: int, offset: int) -> bytes:
    pieces: list[bytes] = []
    while nbytes and (piece := os.pread(fd, nbytes, offset)):
        pieces.append(piece)
        offset += len(piece)
        nbytes -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
