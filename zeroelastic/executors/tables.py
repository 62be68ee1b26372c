"""The tables that executors run: byte ranges, their destinations, conversions, and the digests they add to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from zeroelastic.core.digest import UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.io.paths import FilePath, local_paths

UInt32Array = npt.NDArray[np.uint32]

ByteBuffer = npt.NDArray[np.uint8]
"""A writable, contiguous view of a destination's bytes, shape ``(nbytes,)``."""

MAX_DIGESTED_BYTES = 8
"""The largest element that a digest takes as one."""

Cast = Literal["none", "float32->bfloat16", "float32->float16", "bfloat16->float32", "float16->float32"]
"""A conversion on the way, as ``Tensor.copy_`` rounds; row lengths and digests are those of the source."""

CASTS: tuple[Cast, ...] = ("none", "float32->bfloat16", "float32->float16", "bfloat16->float32", "float16->float32")
"""Every conversion; the position is its number in the C interface."""

_MOST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """A contiguous range of a GPU's memory: its address, its size in bytes, and the number of the device."""

    address: int
    nbytes: int
    device: int = 0


def cast_between(src: str, dst: str) -> Cast | None:
    """The conversion of one dtype to another, "none" for the same one; None where executors have none."""
    return "none" if src == dst else next((cast for cast in CASTS if cast == f"{src}->{dst}"), None)


def cast_itemsizes(cast: Cast) -> tuple[int, int]:
    """Bytes of one element before and after a conversion; (1, 1) without one."""
    if cast == "none":
        return 1, 1
    return (4, 2) if cast.startswith("float32") else (2, 4)


@dataclass(frozen=True, slots=True)
class CopyTable:
    """Row i moves ``nbytes[i]`` bytes at ``src_offset[i]`` of source ``src[i]`` to ``dst_offset[i]`` of ``dst[i]``.

    A side is a file or a buffer, as the function says. Rows must not overlap in their destinations. Each array has
    shape ``(num_rows,)``; all quantities are in bytes. With a conversion, ``nbytes`` is of the source.
    """

    src: Int64Array
    src_offset: Int64Array
    dst: Int64Array
    dst_offset: Int64Array
    nbytes: Int64Array

    def check(
        self,
        num_src: int,
        src_nbytes: Sequence[int] | None,
        num_dst: int,
        dst_nbytes: Sequence[int] | None,
        *,
        digest: DigestRows | None = None,
        cast: Cast = "none",
    ) -> None:
        """Assert once that every row is inside its sides, whose sizes are None where they are files.

        A failure is a bug of ours: it names the first bad row. The native engine makes the same checks itself.
        """
        sides = ((self.src, self.src_offset, num_src, src_nbytes), (self.dst, self.dst_offset, num_dst, dst_nbytes))
        _check_rows(self.nbytes, sides, digest, cast)

    @property
    def columns(self) -> tuple[Int64Array, ...]:
        """The arrays, in their order."""
        return self.src, self.src_offset, self.dst, self.dst_offset, self.nbytes

    def rows(self, index: Int64Array) -> CopyTable:
        """The table of some of the rows, in the order given."""
        return CopyTable(*(column[index] for column in self.columns))


def _check_rows(
    nbytes: Int64Array,
    sides: Sequence[tuple[Int64Array, Int64Array, int, Sequence[int] | None]],
    digest: DigestRows | None,
    cast: Cast = "none",
) -> None:
    """``sides`` are the source and, if there is one, the destination: number, offset, count and sizes."""
    for column in (column for side, offset, _, _ in sides for column in (side, offset)):
        assert column.shape == nbytes.shape, f"a column has shape {column.shape}, not {nbytes.shape}"
    src_itemsize, dst_itemsize = cast_itemsizes(cast)
    good = (nbytes >= 0) & (nbytes <= _MOST // 2) & (nbytes % src_itemsize == 0)
    nbytes = np.where(good, nbytes, 0)
    for side, length in zip(sides, (nbytes, nbytes // src_itemsize * dst_itemsize), strict=False):
        good &= _inside(*side[:2], length, *side[2:])
    if digest is not None:
        good &= _digestible(digest, nbytes)
    bad = np.flatnonzero(~good)
    assert len(bad) == 0, f"row {bad[0]} of a segment table leaves its file or buffer"


def _digestible(digest: DigestRows, nbytes: Int64Array) -> npt.NDArray[np.bool_]:
    for column in (digest.stream, digest.start, digest.itemsize):
        assert column.shape == nbytes.shape, f"a column has shape {column.shape}, not {nbytes.shape}"
    good = (digest.stream >= 0) & (digest.stream < len(digest.seeds)) & (digest.start >= 0)
    good &= np.isin(digest.itemsize, (1, 2, 4, 8)) & (digest.start <= _MOST - nbytes)
    good &= nbytes % np.where(good, digest.itemsize, 1) == 0
    return good


def _inside(
    side: Int64Array, offset: Int64Array, nbytes: Int64Array, count: int, sizes: Sequence[int] | None
) -> npt.NDArray[np.bool_]:
    good = (side >= 0) & (side < count) & (offset >= 0) & (offset <= _MOST - nbytes)
    if sizes is not None and count:
        size = np.array(sizes, dtype=np.int64)[np.where(good, side, 0)]
        good &= np.where(good, offset, 0) <= size - nbytes
    return good


@dataclass(frozen=True, slots=True)
class ReadTable:
    """Row i reads ``nbytes[i]`` bytes at ``file_offset[i]`` of ``paths[file[i]]`` to ``buffer_offset[i]`` of buffer i.

    Invariants: rows are sorted by (file, file_offset), do not overlap in the buffers, and lie inside them
    (``check``). Each array has shape ``(num_rows,)``; all quantities are in bytes. With a conversion, ``nbytes`` is
    of the file.
    """

    paths: tuple[FilePath, ...]
    file: Int64Array
    file_offset: Int64Array
    buffer: Int64Array
    buffer_offset: Int64Array
    nbytes: Int64Array

    @property
    def local_paths(self) -> tuple[Path, ...]:
        """The files, for an engine that reads only what is on a disk."""
        return local_paths(self.paths)

    @property
    def segments(self) -> CopyTable:
        """The same rows, with the files as sources and the buffers as destinations."""
        return CopyTable(self.file, self.file_offset, self.buffer, self.buffer_offset, self.nbytes)

    @property
    def files(self) -> tuple[FilePath, ...]:
        """The files that rows name, in order: the ones that are opened."""
        return tuple(self.paths[int(number)] for number in np.flatnonzero(np.bincount(self.file)))

    def check(self, buffer_nbytes: Sequence[int], *, digest: DigestRows | None = None, cast: Cast = "none") -> None:
        """Assert once that every row stays inside its buffer and file table; a failure is a bug of ours."""
        self.segments.check(len(self.paths), None, len(buffer_nbytes), buffer_nbytes, digest=digest, cast=cast)

    def rows(self, index: Int64Array) -> ReadTable:
        """The table of some of the rows, in the order given."""
        return ReadTable(self.paths, *(column[index] for column in self.segments.columns))


@dataclass(frozen=True, slots=True)
class FileRanges:
    """Row i is ``nbytes[i]`` bytes at ``file_offset[i]`` of ``paths[file[i]]``.

    Rows may be in any order, lie anywhere and overlap. Each array has shape ``(num_rows,)``; all quantities are in
    bytes.
    """

    paths: tuple[FilePath, ...]
    file: Int64Array
    file_offset: Int64Array
    nbytes: Int64Array

    @property
    def local_paths(self) -> tuple[Path, ...]:
        """The files, for an engine that reads only what is on a disk."""
        return local_paths(self.paths)

    def check(self, *, digest: DigestRows | None = None) -> None:
        """Assert once that every row is a range of one of the files; a failure is a bug of ours."""
        _check_rows(self.nbytes, ((self.file, self.file_offset, len(self.paths), None),), digest)


@dataclass(frozen=True, slots=True)
class MemoryRanges:
    """Row i is ``nbytes[i]`` bytes at ``offset[i]`` of buffer ``buffer[i]``.

    Rows may be in any order and overlap. Each array has shape ``(num_rows,)``; all quantities are in bytes.
    """

    buffer: Int64Array
    offset: Int64Array
    nbytes: Int64Array

    def check(self, buffer_nbytes: Sequence[int], *, digest: DigestRows | None = None) -> None:
        """Assert once that every row is inside its buffer; a failure is a bug of ours."""
        _check_rows(self.nbytes, ((self.buffer, self.offset, len(buffer_nbytes), buffer_nbytes),), digest)


@dataclass(frozen=True, slots=True)
class DigestRows:
    """What each row of a table adds to a digest: arrays parallel to the rows.

    ``stream`` indexes ``seeds``; ``start`` is the global position of the row's first element; ``itemsize`` in bytes.
    An element of 16 bytes (complex128) counts as two of 8, here and in ``dispatch.digest_range``.
    """

    seeds: UInt64Array
    stream: Int64Array
    start: Int64Array
    itemsize: Int64Array

    def __post_init__(self) -> None:
        if (self.itemsize == 2 * MAX_DIGESTED_BYTES).any():
            is_pair = self.itemsize == 2 * MAX_DIGESTED_BYTES
            object.__setattr__(self, "start", np.where(is_pair, 2 * self.start, self.start))
            object.__setattr__(self, "itemsize", np.where(is_pair, MAX_DIGESTED_BYTES, self.itemsize))


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of a read: payload bytes read, files opened, and the partial digest of each stream if requested."""

    bytes_read: int
    files: tuple[FilePath, ...]
    digests: UInt64Array | None


def check_crc32(crc32: UInt32Array | None, num_rows: int) -> None:
    """Assert that the array of checksums, if there is one, has a place for each row."""
    if crc32 is not None:
        assert crc32.shape == (num_rows,) and crc32.dtype == np.uint32 and crc32.flags.c_contiguous
        assert crc32.flags.writeable
