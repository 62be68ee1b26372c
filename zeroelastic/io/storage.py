"""Listing, sizes, reading by byte range, and small files written, for a local path or a URL.

Errors name the file and what went wrong, whatever the file system raised. A local file is never opened through a
symbolic link that leads elsewhere. Headers, which are many small reads, are read through ``LocalFile`` or, of a remote
file, in blocks through ``BlockFile``.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from zeroelastic.errors import CheckpointError, UnreadableError, ZeroElasticError
from zeroelastic.io.paths import FilePath, RemotePath, missing_directory, missing_file, reason
from zeroelastic.io.remote import read_ranges, remote_entries, remote_range, remote_size

FOLLOW_LINKS = "ZEROELASTIC_FOLLOW_LINKS"
"""The environment variable that, set to 1, lets symbolic links to files lead anywhere."""


@contextmanager
def _listed(directory: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
    try:
        with os.scandir(directory) as entries:
            yield entries
    except (FileNotFoundError, NotADirectoryError):
        raise missing_directory(directory) from None
    except UnreadableError:
        raise
    except OSError as error:
        raise UnreadableError(f"{directory}: cannot be listed: {error.strerror}.") from None


def _is(look: Callable[[], bool], directory: Path, name: str) -> bool:
    """What an entry of a directory says of itself. A link that leads to itself leads nowhere: it is nothing."""
    try:
        return look()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise UnreadableError(f"{directory / name}: cannot be looked at: {error.strerror}.") from None


def open_regular(path: Path) -> io.FileIO:
    """Open a local file for reading, unbuffered. Never waits, as opening a named pipe does.

    A symbolic link may lead to files below the directory above its own (the tag's, for a file of a tag), and from a
    snapshot of the Hugging Face Hub's cache to that cache's blobs: a checkpoint from another source must not get
    other files of this machine read, and copied, in its place. FOLLOW_LINKS in the environment lifts that. Links to
    directories are followed. Raises OSError, CheckpointError for such a link.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        mode = found.st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        if os.path.islink(path):
            _check_link(path)
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


def list_directory(directory: FilePath) -> tuple[dict[str, int], tuple[str, ...]]:
    """The files of a directory with their sizes in bytes, and the names of its directories, sorted.

    Links to files count as files. One listing, so one request where the directory is remote and not large. Raises
    MissingFileError where there is no such directory, UnreadableError where it cannot be listed.
    """
    files: dict[str, int] = {}
    inside: list[str] = []
    if isinstance(directory, RemotePath):
        entries = remote_entries(directory)
        files |= {name: size for name, size in entries if size is not None}
        inside += (name for name, size in entries if size is None)
    else:
        with _listed(directory) as found:
            for entry in found:
                if _is(entry.is_file, directory, entry.name):
                    files[entry.name] = entry.stat().st_size
                elif _is(entry.is_dir, directory, entry.name):
                    inside.append(entry.name)
    return files, tuple(sorted(inside))


def file_names(directory: FilePath) -> frozenset[str]:
    """The files of a directory: of a local one without looking at each. Lists and raises as ``list_directory``."""
    if isinstance(directory, RemotePath):
        return frozenset(file_sizes(directory))
    with _listed(directory) as entries:
        return frozenset(entry.name for entry in entries if _is(entry.is_file, directory, entry.name))


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


def read_exactly(path: FilePath, offset: int, nbytes: int) -> bytes:
    """The ``nbytes`` bytes at ``offset``; of a store a short answer is asked for again, and one too long is refused.

    Raises MissingFileError, UnreadableError, CheckpointError for a file that ends before.
    """
    if isinstance(path, RemotePath) and nbytes > 0:
        return read_ranges([(path, offset, nbytes)])[0]
    data = read_range(path, offset, nbytes)
    if len(data) < nbytes:
        raise CheckpointError(f"{path}: ends at byte {offset + len(data)}. The file is truncated.")
    return data


def read_whole(path: FilePath, *, limit: int) -> bytes:
    """A small file. Raises MissingFileError, UnreadableError, CheckpointError: has more than ``limit`` bytes."""
    data = _read(path, 0, limit + 1, "cannot be read")
    if len(data) > limit:
        raise CheckpointError(f"{path}: has more than {limit} bytes, which such a file never has.")
    return data


def _read(path: FilePath, offset: int, nbytes: int, failure: str) -> bytes:
    try:
        if isinstance(path, RemotePath):
            return remote_range(path, offset, nbytes)
        return local_range(path, offset, nbytes)
    except ZeroElasticError:
        raise
    except FileNotFoundError:
        raise missing_file(path) from None
    except Exception as error:  # file systems raise errors of many kinds
        raise UnreadableError(f"{path}: {failure}: {reason(error)}.") from None


@contextmanager
def open_blocks(path: FilePath, size: int | None = None) -> Iterator[LocalFile | BlockFile]:
    """A file of which headers are read; ``size``, if it is known, saves a question about one behind a URL."""
    if isinstance(path, RemotePath):
        yield BlockFile(path, size)
        return
    with LocalFile(path) as file:
        yield file


_MAX_REQUEST_BYTES = 8 << 20


class BlockFile:
    """A remote file of which headers are read: whole blocks, neighbours in one request; the last blocks are kept.

    Memory: 4 MiB of blocks, and what one ``read`` returns. ``bytes_read`` counts what was requested.
    """

    BLOCK = 2 << 10
    _MAX_BLOCKS = 2048
    _ENDS = 64 << 10
    _ENDS_SHARE = 1024  # of a file, so that what is read ahead in vain stays far below a hundredth of it

    def __init__(self, path: RemotePath, size: int | None = None, *, ahead: bool = True) -> None:
        """With ``ahead`` read the first and the last blocks, up to 64 KiB each; without a ``size`` look it up.

        Raises MissingFileError, CheckpointError.
        """
        size = remote_size(path) if size is None else size
        if size is None:
            raise missing_file(path)
        self.path = path
        self.size = size
        self.bytes_read = 0
        self._blocks: dict[int, bytes] = {}
        if ahead:
            ends = max(self.BLOCK, min(self._ENDS, size // self._ENDS_SHARE))
            self.prefetch([(0, ends), (max(0, size - ends), ends)])

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to ``nbytes`` bytes at ``offset``: fewer where the file ends. Raises MissingFileError, CheckpointError."""
        numbers = self._numbers(offset, nbytes)
        blocks = self._get(numbers)
        data = b"".join(blocks[number] for number in numbers)
        begin = offset - numbers.start * self.BLOCK
        return data[begin : begin + nbytes]

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read (offset, nbytes) at once, so that ``read`` finds them; at most ``capacity`` of them are kept."""
        self._get(sorted({number for offset, nbytes in ranges for number in self._numbers(offset, nbytes)}))

    @property
    def capacity(self) -> int:
        """How many small ranges are certainly kept after a prefetch."""
        return self._MAX_BLOCKS // 2

    def _numbers(self, offset: int, nbytes: int) -> range:
        end = min(offset + nbytes, self.size)
        return range(offset // self.BLOCK, -(-end // self.BLOCK)) if 0 <= offset < end else range(0)

    def _get(self, numbers: Sequence[int]) -> Mapping[int, bytes]:
        found = {number: self._blocks[number] for number in numbers if number in self._blocks}
        runs: list[range] = []
        for number in numbers:
            if number in found:
                continue
            if runs and runs[-1].stop == number and len(runs[-1]) * self.BLOCK < _MAX_REQUEST_BYTES:
                runs[-1] = range(runs[-1].start, number + 1)
            else:
                runs.append(range(number, number + 1))
        wanted: list[tuple[RemotePath, int, int]] = []
        for run in runs:
            begin = run.start * self.BLOCK
            wanted.append((self.path, begin, min(run.stop * self.BLOCK, self.size) - begin))
        for run, data in zip(runs, read_ranges(wanted), strict=True):
            self.bytes_read += len(data)
            for i, number in enumerate(run):
                found[number] = data[i * self.BLOCK : (i + 1) * self.BLOCK]
        # Of a long read only the end is kept, where the next one may begin.
        for number in numbers if len(numbers) <= self._MAX_BLOCKS else numbers[-1:]:
            self._blocks.pop(number, None)
            self._blocks[number] = found[number]  # the newest are last
        for number in list(self._blocks)[: -self._MAX_BLOCKS]:
            del self._blocks[number]
        return found
