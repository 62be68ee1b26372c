"""The tables that executors run: byte runs of files, where they go, and which digest each run adds to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zeroelastic.digest import UInt64Array
from zeroelastic.layout import Int64Array

ByteBuffer = npt.NDArray[np.uint8]
"""A writable, contiguous view of a destination's bytes, shape ``(nbytes,)``."""


@dataclass(frozen=True, slots=True)
class ReadTable:
    """Row i reads ``nbytes[i]`` bytes at ``file_offset[i]`` of ``paths[file[i]]`` to ``buffer_offset[i]`` of buffer i.

    Invariants: rows are sorted by (file, file_offset), do not overlap in the buffers, and lie inside them
    (``check``). Each array has shape ``(num_rows,)``; all quantities are in bytes.
    """

    paths: tuple[Path, ...]
    file: Int64Array
    file_offset: Int64Array
    buffer: Int64Array
    buffer_offset: Int64Array
    nbytes: Int64Array

    def check(self, buffers: Sequence[ByteBuffer]) -> None:
        """Assert once that every row stays inside its buffer and file table; a failure is a bug of ours."""
        sizes = np.array([len(buffer) for buffer in buffers], dtype=np.int64)
        assert (self.nbytes >= 0).all() and (self.file_offset >= 0).all() and (self.buffer_offset >= 0).all()
        if len(self.nbytes):
            assert self.buffer.min() >= 0 and self.buffer.max() < len(sizes), "no such buffer"
            assert self.file.min() >= 0 and self.file.max() < len(self.paths), "no such file"
            assert (self.buffer_offset + self.nbytes <= sizes[self.buffer]).all(), "a row leaves its buffer"

    def rows(self, index: Int64Array) -> ReadTable:
        """The table of some of the rows, in the order given."""
        return ReadTable(
            paths=self.paths,
            file=self.file[index],
            file_offset=self.file_offset[index],
            buffer=self.buffer[index],
            buffer_offset=self.buffer_offset[index],
            nbytes=self.nbytes[index],
        )


@dataclass(frozen=True, slots=True)
class DigestRows:
    """What each row of a ReadTable adds to a digest: arrays parallel to the rows.

    ``stream`` indexes ``seeds``; ``start`` is the global position of the row's first element; ``itemsize`` in bytes.
    """

    seeds: UInt64Array
    stream: Int64Array
    start: Int64Array
    itemsize: Int64Array


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What an executor did: payload bytes read, files opened, and the partial digest of each stream if asked."""

    bytes_read: int
    files: tuple[Path, ...]
    digests: UInt64Array | None
