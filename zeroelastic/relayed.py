"""The header of a file that another process reads: the ranges that parsing it took there, and a file of these here.

Parsing is the same on both sides, so the ranges suffice, whatever they are; and nothing that a file holds is trusted
more for having come from another process.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

from zeroelastic.errors import CheckpointError, MissingFileError, UnreadableError
from zeroelastic.pinned import PinnedPath

Ranges = Sequence[tuple[int, bytes]]
"""(offset, bytes) of a file, ascending; they neither overlap nor touch."""

_KEPT = 1 << 20


class RecordedFile:
    """A local file that remembers what was read of it. ``bytes_read`` counts as often as it was read."""

    def __init__(self, path: Path) -> None:
        """Raises MissingFileError, UnreadableError."""
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise MissingFileError(f"{path}: no such file. The checkpoint is incomplete.") from None
        except OSError as error:
            raise UnreadableError(f"{path}: cannot be read: {error.strerror}.") from None
        found = os.fstat(self._fd)
        if isinstance(path, PinnedPath):
            path.note_open(found)
        self.path, self.size, self.bytes_read = path, found.st_size, 0
        self.capacity = _KEPT
        self._read: list[tuple[int, bytes]] = []

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to ``nbytes`` bytes at ``offset``: fewer where the file ends. Raises UnreadableError."""
        try:
            data = os.pread(self._fd, max(0, min(nbytes, self.size - offset)), offset)
        except OSError as error:
            raise UnreadableError(f"{self.path}: reading at byte {offset} failed: {error.strerror}.") from None
        self.bytes_read += len(data)
        if data:
            self._read.append((offset, data))
        return data

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Nothing: a local file is read where it is needed."""

    def close(self) -> None:
        """No more reading; ``ranges`` stay."""
        os.close(self._fd)

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

    def __init__(self, path: Path, size: int, ranges: Ranges) -> None:
        self.path, self.size, self.bytes_read = path, size, 0
        self.capacity = _KEPT
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
                "it. The ranks run different versions of zeroelastic or Python."
            )
        return bytes(data[offset - start : offset - start + nbytes])

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Nothing: all there is came at once."""
