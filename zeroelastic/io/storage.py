"""Listing, sizes and reading by byte range, for a local path or a URL.

Errors name the file and what went wrong, whatever the file system raised. Headers, which are many small reads, are read
through ``open_blocks``.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from zeroelastic.errors import CheckpointError, UnreadableError, ZeroElasticError, missing_file
from zeroelastic.io.paths import DiskPath, FilePath, open_regular, read_fully
from zeroelastic.io.remote import RemotePath, RemoteRange, read_ranges
from zeroelastic.io.retries import reason


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
        self._file: io.FileIO | None = self._open()
        self.size = os.fstat(self._file.fileno()).st_size

    def _open(self) -> io.FileIO:
        try:
            return open_regular(self.path)
        except FileNotFoundError:
            raise missing_file(self.path) from None
        except OSError as error:
            raise UnreadableError(f"{self.path}: cannot be read: {error.strerror}.") from None

    def read(self, offset: int, nbytes: int) -> bytes:
        file = (self._file if self._is_kept else None) or self._open()
        try:
            data = read_fully(file.fileno(), max(0, min(nbytes, self.size - offset)), offset)
        except OSError as error:
            raise UnreadableError(f"{self.path}: reading at byte {offset} failed: {error.strerror}.") from None
        if self._is_kept:
            self._file = file
        else:
            file.close()  # not one that another thread reads
        self.bytes_read += len(data)
        return data

    def __enter__(self) -> LocalFile:
        self._is_kept = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_kept = False
        if self._file is not None:
            self._file.close()
        self._file = None


def place(path: FilePath) -> DiskPath | RemotePath:
    """Return an object with the methods of both kinds of paths."""
    return path if isinstance(path, RemotePath) else DiskPath(path)


def list_directory(directory: FilePath) -> tuple[dict[str, int], tuple[str, ...]]:
    """The files of a directory with their sizes in bytes, and the directories' names, sorted.

    Links to files count as files. One listing, so one request where the directory is remote and not large. Raises
    MissingFileError where there is no such directory, UnreadableError where it cannot be listed.
    """
    entries = place(directory).entries()
    files = {name: size for name, size in entries if size is not None}
    return files, tuple(sorted(name for name, size in entries if size is None))


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
    return place(directory).exists()


def file_size(path: FilePath) -> int | None:
    """Size of a file in bytes, None where there is none. Raises UnreadableError where it cannot be known."""
    return place(path).size()


def read_range(path: FilePath, offset: int, nbytes: int) -> bytes:
    """Up to ``nbytes`` bytes at ``offset``: fewer where the file ends.

    Raises MissingFileError, UnreadableError with the file and what went wrong.
    """
    with _named_errors(path, f"reading at byte {offset} failed"):
        return place(path).read(offset, nbytes) if nbytes > 0 else b""


def read_exactly(path: FilePath, offset: int, nbytes: int) -> bytes:
    """The ``nbytes`` bytes at ``offset``; of a store a short answer is asked for again, and one too long is refused.

    Raises MissingFileError, UnreadableError, CheckpointError for a file that ends before.
    """
    with _named_errors(path, f"reading at byte {offset} failed"):
        return place(path).read_exactly(offset, nbytes) if nbytes > 0 else b""


def read_whole(path: FilePath, *, limit: int) -> bytes:
    """A small file. Raises MissingFileError, UnreadableError, CheckpointError: has more than ``limit`` bytes."""
    with _named_errors(path, "cannot be read"):
        data = place(path).read(0, limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{path}: has more than {limit} bytes, which such a file never has.")
    return data


@contextmanager
def _named_errors(path: FilePath, failure: str) -> Iterator[None]:
    """Errors inside the block name the file and what failed."""
    try:
        yield
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
        wanted: list[RemoteRange] = []
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
