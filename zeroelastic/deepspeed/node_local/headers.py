"""The header of a file that only another rank sees: that rank records the ranges that parsing took; here they are read.

Parsing is the same on both sides, so the recorded ranges suffice. Content that came from another rank is checked like
the content of a local file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from zeroelastic.errors import CheckpointError
from zeroelastic.io.paths import FilePath, RemotePath
from zeroelastic.io.storage import BlockFile, LocalFile

Ranges = Sequence[tuple[int, bytes]]
"""(offset, bytes) of a file, ascending; they neither overlap nor touch."""


class RecordedFile:
    """A file, on a disk or behind a URL, that remembers what was read of it; ``ranges`` stay when it is closed."""

    def __init__(self, path: FilePath, size: int | None = None) -> None:
        """Open it; ``size``, if it is known, saves a question about a file behind a URL. Raises as the readers do."""
        self._file = BlockFile(path, size) if isinstance(path, RemotePath) else LocalFile(path)
        self._read: list[tuple[int, bytes]] = []

    @property
    def path(self) -> FilePath:
        """Where it is."""
        return self._file.path

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self._file.size

    @property
    def bytes_read(self) -> int:
        """What was read of it so far, or requested."""
        return self._file.bytes_read

    @property
    def capacity(self) -> int:
        """As of the file."""
        return self._file.capacity

    def read(self, offset: int, nbytes: int) -> bytes:
        """As of the file."""
        data = self._file.read(offset, nbytes)
        if data:
            self._read.append((offset, data))
        return data

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As of the file."""
        self._file.prefetch(ranges)

    def close(self) -> None:
        """Close it, if it is on a disk."""
        if isinstance(self._file, LocalFile):
            self._file.close()

    @property
    def ranges(self) -> Ranges:
        """All that was read, each byte once."""
        merged: list[tuple[int, bytearray]] = []
        for offset, data in sorted(self._read, key=lambda one: one[0]):
            end = merged[-1][0] + len(merged[-1][1]) if merged else -1
            if offset > end:
                merged.append((offset, bytearray(data)))
            elif offset + len(data) > end:
                merged[-1][1].extend(data[end - offset :])
        return [(offset, bytes(data)) for offset, data in merged]


class ReceivedFile:
    """A file of ``size`` bytes of which only some ranges are here; reading it costs no bytes of a disk."""

    def __init__(self, path: FilePath, size: int, ranges: Ranges) -> None:
        self.path, self.size, self.bytes_read, self.capacity = path, size, 0, LocalFile.capacity
        self._starts = [offset for offset, _ in ranges]
        self._ranges = ranges

    def read(self, offset: int, nbytes: int) -> bytes:
        """As of the file itself. Raises CheckpointError for a range that was not read where the file is."""
        nbytes = max(0, min(nbytes, self.size - offset))
        if nbytes == 0:
            return b""
        at = bisect_right(self._starts, offset) - 1
        start, data = self._ranges[at] if at >= 0 else (0, b"")
        if offset + nbytes > start + len(data):
            raise CheckpointError(
                f"{self.path}: bytes {offset} to {offset + nbytes} of its header did not come from the rank that sees "
                "it. The ranks run different versions of zeroelastic or Python.",
                remedy="Install the same versions on every node.",
            )
        return bytes(data[offset - start : offset - start + nbytes])

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Nothing: all there is came at once."""
