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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    UnreadableError,
    ZeroElasticError,
    missing_directory,
    missing_file,
)
from zeroelastic.io.paths import (
    FilePath,
    WatchedPath,
    watched_path,
)
from zeroelastic.io.remote import RemotePath, read_ranges
from zeroelastic.io.retries import reason

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


class Blocks(ABC):
    """A file of which headers, many small ranges, are read; ``bytes_read`` counts what was read so far.

    ``has_cache``: what was read is kept, and costs nothing when it is read again. ``capacity`` is how many small ranges
    are certainly kept after a prefetch. In a ``with`` block a file on a disk stays open.
    """

    size: int
    bytes_read: int
    has_cache, capacity = True, 1 << 20

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to ``nbytes`` bytes at ``offset``: fewer where the file ends. Raises MissingFileError, UnreadableError."""

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:  # noqa: B027  most need none
        """Read (offset, nbytes) at once, so that ``read`` finds them; nothing where that would gain nothing."""

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class LocalFile(Blocks):
    """A local file; ``bytes_read`` counts a byte as often as it was read.

    In a ``with`` block it is open from the first read on; outside of one each read opens it.
    """

    has_cache = False

    def __init__(self, path: Path) -> None:
        """Raises MissingFileError, UnreadableError, CheckpointError as ``open_regular``."""
        self.path, self.bytes_read, self._is_kept = path, 0, False
        self._file: io.FileIO | None = None
        self.size = os.fstat(self._open().fileno()).st_size

    def _open(self) -> io.FileIO:
        if self._file is None:
            try:
                self._file = open_regular(self.path)
            except FileNotFoundError:
                raise missing_file(self.path) from None
            except OSError as error:
                raise UnreadableError(f"{self.path}: cannot be read: {error.strerror}.") from None
        return self._file

    def read(self, offset: int, nbytes: int) -> bytes:
        try:
            data = _read_fully(self._open().fileno(), max(0, min(nbytes, self.size - offset)), offset)
        except OSError as error:
            raise UnreadableError(f"{self.path}: reading at byte {offset} failed: {error.strerror}.") from None
        if not self._is_kept:
            self._close()
        self.bytes_read += len(data)
        return data

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def __enter__(self) -> LocalFile:
        self._is_kept = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_kept = False
        self._close()


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
        entries = directory.entries()
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


def directory_exists(directory: FilePath) -> bool:
    """Whether there is such a directory; a local one that is watched was there when it was first looked at.

    Raises UnreadableError where that cannot be known.
    """
    if isinstance(directory, WatchedPath) and directory.first_seen is not None:
        return True
    try:
        list_directory(directory)
    except MissingFileError:
        return False
    return True


def watched(directory: FilePath, telling: str) -> FilePath:
    """A path of this directory that remembers the states of its files; a missing directory's path is unchanged.

    Where there is a file ``telling``, which every save writes anew, its state stands for all of them. What is behind a
    URL is remembered when it is first listed.
    """
    if isinstance(directory, RemotePath):
        return directory if directory.first_seen is not None else replace(directory, first_seen={})
    if isinstance(directory, WatchedPath) and directory.first_seen is not None:
        return directory
    seen = _states(directory, telling)
    return directory if seen is None else watched_path(directory, seen)


def has_changed(directory: FilePath, telling: str) -> bool:
    """Whether a directory that is ``watched`` is gone, or a file of it is gone or another one. Raises UnreadableError.

    One request behind a URL, if the directory was listed.
    """
    if not isinstance(directory, (RemotePath, WatchedPath)) or directory.first_seen is None:
        return False
    if isinstance(directory, RemotePath):
        now = directory.states() if directory.first_seen else {}
    else:
        now = _states(directory, telling)
    return now is None or any(now.get(name) != state for name, state in directory.first_seen.items())


def _states(directory: Path, telling: str) -> dict[str, object] | None:
    """The states of a local directory's files, or of one that tells; None where there is no directory.

    That file is opened: a network file system may answer ``stat`` with what it was told earlier.
    """
    with suppress(OSError):
        fd = os.open(directory / telling, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return {telling: _state(os.fstat(fd))}
        finally:
            os.close(fd)
    found: dict[str, object] = {}
    try:
        for entry in os.scandir(directory):
            with suppress(OSError):
                if not entry.is_dir():
                    found[entry.name] = _state(entry.stat(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:  # it cannot be listed, which is the error of whoever reads it
        pass
    return found


def _state(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def file_version(path: FilePath) -> str:
    """A text that is another one where a file was replaced: its size, and the time of its change or the store's tag."""
    if isinstance(path, RemotePath):
        info = path.system.info(path.path)
        return f"{info.get('size')} {info.get('ETag') or info.get('mtime')}"
    found = os.stat(path)
    return f"{found.st_size} {found.st_mtime_ns}"


def is_link(path: FilePath) -> bool:
    """Whether a path is a symbolic link, of which there are none behind URLs."""
    return not isinstance(path, RemotePath) and os.path.islink(path)


def modified_at(path: FilePath) -> float:
    """When a file or directory changed, in seconds since 1970; 0 where that is not known, as behind a URL."""
    try:
        return 0.0 if isinstance(path, RemotePath) else os.stat(path).st_mtime
    except OSError:
        return 0.0


def file_size(path: FilePath) -> int | None:
    """Size of a file in bytes, None where there is none. Raises UnreadableError where it cannot be known."""
    if isinstance(path, RemotePath):
        return path.size()
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
            return path.read(offset, nbytes)
        return local_range(path, offset, nbytes)
    except ZeroElasticError:
        raise
    except FileNotFoundError:
        raise missing_file(path) from None
    except Exception as error:  # file systems raise errors of many kinds
        raise UnreadableError(f"{path}: {failure}: {reason(error)}.") from None


def open_blocks(path: FilePath, size: int | None = None, *, ahead: bool = True) -> Blocks:
    """A file of which headers are read; ``size``, if it is known, saves a question about one behind a URL.

    Of such a file, ``ahead`` reads the first and the last blocks at once, up to 64 KiB each. Raises as ``Blocks.read``.
    """
    return BlockFile(path, size, ahead=ahead) if isinstance(path, RemotePath) else LocalFile(path)


_MAX_REQUEST_BYTES = 8 << 20


class BlockFile(Blocks):
    """A remote file: whole blocks are read, neighbours in one request; the last blocks are kept.

    Memory: 4 MiB of blocks, and what one ``read`` returns. ``bytes_read`` counts what was requested.
    """

    BLOCK = 2 << 10
    _MAX_BLOCKS = 2048
    _ENDS = 64 << 10
    _ENDS_SHARE = 1024  # of a file, so that what is read ahead in vain stays far below a hundredth of it
    capacity = _MAX_BLOCKS // 2

    def __init__(self, path: RemotePath, size: int | None = None, *, ahead: bool = True) -> None:
        """Without a ``size`` look it up. Raises MissingFileError, CheckpointError."""
        size = path.size() if size is None else size
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
        numbers = self._numbers(offset, nbytes)
        blocks = self._get(numbers)
        data = b"".join(blocks[number] for number in numbers)
        begin = offset - numbers.start * self.BLOCK
        return data[begin : begin + nbytes]

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._get(sorted({number for offset, nbytes in ranges for number in self._numbers(offset, nbytes)}))

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
