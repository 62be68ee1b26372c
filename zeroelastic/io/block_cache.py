"""A remote file that is read in blocks, some of which are kept: for headers, which are many small reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zeroelastic.io.failures import missing_file
from zeroelastic.io.paths import RemotePath
from zeroelastic.io.remote import read_ranges, remote_size

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
