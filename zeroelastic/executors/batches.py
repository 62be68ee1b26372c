"""Rows cut into batches that fit a buffer; digests and checksums of pieces are joined (as by zlib's crc32_combine)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from zeroelastic.core.digest import UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.core.slices import numbered
from zeroelastic.executors import native_executor
from zeroelastic.executors.build_info import is_usable
from zeroelastic.executors.tables import DigestRows, Moved, MoveOptions, UInt32Array, cast_itemsizes

_ALIGNMENT = 8
"""Pieces begin at multiples of it, in their rows and in the buffer: no element is cut, and each is aligned."""

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # polynomials over GF(2) are reflected: bit 31 is the coefficient of x^0


@dataclass(frozen=True, slots=True)
class PieceBatch:
    """Pieces of rows that fit a buffer together: piece i is ``nbytes[i]`` bytes from byte ``start[i]`` of a row.

    ``offset`` is where the piece is in the buffer. All arrays have shape ``(num_pieces,)``, in bytes.
    """

    row: Int64Array
    start: Int64Array
    nbytes: Int64Array
    offset: Int64Array


def batches(nbytes: Int64Array, capacity: int) -> Iterator[PieceBatch]:
    """Pieces that cover rows of ``nbytes[i]`` bytes, in their order, by batches of at most ``capacity`` bytes.

    A row is cut only where a batch ends. An empty row is one empty piece.
    """
    capacity = capacity // _ALIGNMENT * _ALIGNMENT
    assert capacity > 0, "a buffer has room for 8 bytes"
    if len(nbytes) == 0:
        return
    padded = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    begin = np.cumsum(padded) - padded  # if all rows were in one buffer, which the batches cut
    first = begin // capacity
    count = (begin + np.maximum(nbytes, 1) - 1) // capacity - first + 1
    row, batch = numbered(first, count)
    low = np.maximum(begin[row], batch * capacity)
    high = np.minimum((begin + nbytes)[row], (batch + 1) * capacity)
    bounds = np.flatnonzero(np.diff(batch, prepend=-1, append=-1))
    for at, end in pairwise(bounds.tolist()):
        some = slice(at, end)
        yield PieceBatch(
            row=row[some],
            start=low[some] - begin[row[some]],
            nbytes=high[some] - low[some],
            offset=low[some] - batch[some] * capacity,
        )


class DigestTotals:
    """The digests of an operation, added up over pieces of rows; nothing where none are asked for."""

    def __init__(self, digest: DigestRows | None) -> None:
        self._digest = digest
        self.totals: UInt64Array | None = None if digest is None else np.zeros(len(digest.seeds), dtype=np.uint64)

    def rows(self, row: Int64Array, start: Int64Array | None = None) -> DigestRows | None:
        """The digest rows of some rows, or of pieces of rows that begin ``start`` bytes into each."""
        if self._digest is None:
            return None
        streams, stream = np.unique(self._digest.stream[row], return_inverse=True)
        first, itemsize = self._digest.start[row], self._digest.itemsize[row]
        if start is not None:
            first = first + start // itemsize
        return DigestRows(self._digest.seeds[streams], stream.reshape(-1), first, itemsize)

    def add(self, row: Int64Array, found: UInt64Array | None) -> None:
        """Add the digests that were computed with what ``rows`` gave for the same rows."""
        if self._digest is not None and self.totals is not None and found is not None:
            self.totals[np.unique(self._digest.stream[row])] += found  # modulo 2**64


class PieceTotals:
    """Digests and checksums of an operation that an engine does piece by piece, put together."""

    def __init__(self, options: MoveOptions) -> None:
        self._options = options
        self._digests = DigestTotals(options.digest)
        self._checksums: list[tuple[Int64Array, Int64Array, UInt32Array]] = []

    def run(
        self, engine: Callable[[MoveOptions], Moved], row: Int64Array, start: Int64Array | None, nbytes: Int64Array
    ) -> int:
        """Call an engine, with options for it, for pieces of rows, in the order of each row.

        Piece i is ``nbytes[i]`` bytes of row ``row[i]``, from byte ``start[i]`` on. Returns the bytes that were read.
        """
        options = self._options
        crc32 = None if options.crc32 is None else np.zeros(len(row), dtype=np.uint32)
        digests, num_read = engine(replace(options, digest=self._digests.rows(row, start), crc32=crc32))
        self._digests.add(row, digests)
        if crc32 is not None:
            src_itemsize, dst_itemsize = cast_itemsizes(options.cast)
            self._checksums.append((row, nbytes // src_itemsize * dst_itemsize, crc32))
        return num_read

    def finish(self) -> UInt64Array | None:
        """The digests of all; the checksum of each row is filled in, 0 for one without pieces."""
        crc32 = self._options.crc32
        if crc32 is not None:
            crc32[:] = 0
            if self._checksums:
                row, nbytes, found = (np.concatenate(column) for column in zip(*self._checksums, strict=True))
                crc32[:] = join_crc32_groups(row, found, nbytes, len(crc32))
        return self._digests.totals


def join_crc32(crc32: UInt32Array, nbytes: Int64Array) -> int:
    """The checksum of all runs in their order; both arrays have shape ``(num_runs,)``. 0 where there are none."""
    assert crc32.dtype == np.uint32 and nbytes.dtype == np.int64 and len(crc32) == len(nbytes)
    if is_usable("native"):
        return native_executor.join_crc32(np.ascontiguousarray(crc32), np.ascontiguousarray(nbytes))
    return join_crc32_reference(crc32, nbytes)


def join_crc32_groups(group: Int64Array, crc32: UInt32Array, nbytes: Int64Array, num_groups: int) -> UInt32Array:
    """The checksum of each group's runs, joined in the order of the rows; 0 for a group without runs.

    Row i is a run of ``nbytes[i]`` bytes of group ``group[i]``; a negative group is left out. Returns an array of shape
    ``(num_groups,)``.
    """
    order = np.argsort(group, kind="stable")
    bounds = np.searchsorted(group[order], np.arange(num_groups + 1, dtype=np.int64)).tolist()
    joined = np.zeros(num_groups, dtype=np.uint32)
    for number, (begin, end) in enumerate(pairwise(bounds)):
        some = order[begin:end]
        joined[number] = crc32[some[0]] if end - begin == 1 else join_crc32(crc32[some], nbytes[some])
    return joined


def join_crc32_reference(crc32: UInt32Array, nbytes: Int64Array) -> int:
    """``join_crc32`` in Python: what the native engine matches."""
    joined = 0
    for second, length in zip(crc32.tolist(), nbytes.tolist(), strict=True):
        joined = _multiply(_power_of_x(8 * length), joined) ^ second
    return joined


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@functools.lru_cache(maxsize=4096)
def _power_of_x(exponent: int) -> int:
    result, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        exponent >>= 1
    return result
