"""The arguments of executors: tables of byte ranges, options, and a progress function; and the type of an engine.

An engine is one function: it takes a table, the files or the memory that its rows are in, the files or the memory that
they go to, if they go anywhere, and options. ``dispatch`` has a function for each of the six operations.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from zeroelastic.core.digest import ByteArray, UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import ConfigError
from zeroelastic.io.paths import FilePath

B = TypeVar("B")
C = TypeVar("C")
S = TypeVar("S", bound=Sized)

UInt32Array = npt.NDArray[np.uint32]

ByteBuffer = npt.NDArray[np.uint8]
"""A writable, contiguous view of a destination's bytes, shape ``(nbytes,)``."""

MAX_DIGESTED_BYTES = 8
"""The largest element that a digest takes as one."""

Cast = Literal["none", "float32->bfloat16", "float32->float16", "bfloat16->float32", "float16->float32"]
"""A conversion on the way, as ``Tensor.copy_`` rounds; row lengths and digests are those of the source."""

CASTS: tuple[Cast, ...] = ("none", "float32->bfloat16", "float32->float16", "bfloat16->float32", "float16->float32")
"""Every conversion; the position is its number in the C interface."""

ProgressFunction: TypeAlias = Callable[[int], None]
"""Called with the bytes of the sources that are done since the last call; an exception in it ends the operation."""

PROGRESS_INTERVAL_S = 0.05
"""The least time between two calls of a progress function."""

_MOST = 2**63 - 1
_MAX_DEFAULT_THREADS = 16


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

    @property
    def columns(self) -> tuple[Int64Array, ...]:
        """The arrays, in their order."""
        return self.src, self.src_offset, self.dst, self.dst_offset, self.nbytes

    def rows(self, index: Int64Array) -> CopyTable:
        """The table of some of the rows, in the order given."""
        return CopyTable(*(column[index] for column in self.columns))


@dataclass(frozen=True, slots=True)
class Ranges:
    """Row i is ``nbytes[i]`` bytes at ``src_offset[i]`` of file or buffer ``src[i]``.

    Rows may be in any order and overlap. Each array has shape ``(num_rows,)``; all quantities are in bytes.
    """

    src: Int64Array
    src_offset: Int64Array
    nbytes: Int64Array

    def rows(self, index: Int64Array) -> Ranges:
        """The table of some of the rows, in the order given."""
        return Ranges(self.src[index], self.src_offset[index], self.nbytes[index])


Table: TypeAlias = "CopyTable | Ranges"


def check_rows(table: Table, options: MoveOptions, sides: Endpoints[S]) -> None:
    """Assert once that every row is inside its sides, that digests are of whole elements, and checksums have a place.

    A failure is a bug of ours: it names the first bad row. The native engine makes the same checks itself.
    """
    nbytes = table.nbytes
    check_crc32(options.crc32, len(nbytes))
    src_itemsize, dst_itemsize = cast_itemsizes(options.cast)
    good = (nbytes >= 0) & (nbytes <= _MOST // 2) & (nbytes % src_itemsize == 0)
    nbytes = np.where(good, nbytes, 0)
    checked = [(table.src, table.src_offset, nbytes, sides.src_paths, sides.src)]
    if isinstance(table, CopyTable):
        made = nbytes // src_itemsize * dst_itemsize
        checked.append((table.dst, table.dst_offset, made, sides.dst_paths, sides.dst or ()))
    for number, offset, length, paths, buffers in checked:
        sizes = None if paths is not None else np.array([len(buffer) for buffer in buffers], dtype=np.int64)
        good &= _inside(number, offset, length, len(buffers if paths is None else paths), sizes)
    if options.digest is not None:
        good &= _digestible(options.digest, nbytes)
    bad = np.flatnonzero(~good)
    assert len(bad) == 0, f"row {bad[0]} of a segment table leaves its file or buffer"


def check_crc32(crc32: UInt32Array | None, num_rows: int) -> None:
    """Assert that the array of checksums, if there is one, has a place for each row."""
    if crc32 is not None:
        assert crc32.shape == (num_rows,) and crc32.dtype == np.uint32 and crc32.flags.c_contiguous
        assert crc32.flags.writeable


def _digestible(digest: DigestRows, nbytes: Int64Array) -> npt.NDArray[np.bool_]:
    for column in (digest.stream, digest.start, digest.itemsize):
        assert column.shape == nbytes.shape, f"a column has shape {column.shape}, not {nbytes.shape}"
    good = (digest.stream >= 0) & (digest.stream < len(digest.seeds)) & (digest.start >= 0)
    good &= np.isin(digest.itemsize, (1, 2, 4, 8)) & (digest.start <= _MOST - nbytes)
    good &= nbytes % np.where(good, digest.itemsize, 1) == 0
    return good


def _inside(
    side: Int64Array, offset: Int64Array, nbytes: Int64Array, count: int, sizes: Int64Array | None
) -> npt.NDArray[np.bool_]:
    for column in (side, offset):
        assert column.shape == nbytes.shape, f"a column has shape {column.shape}, not {nbytes.shape}"
    good = (side >= 0) & (side < count) & (offset >= 0) & (offset <= _MOST - nbytes)
    if sizes is not None and count:
        good &= np.where(good, offset, 0) <= sizes[np.where(good, side, 0)] - nbytes
    return good


@dataclass(frozen=True, slots=True)
class DigestRows:
    """The digest to which each row of a table adds: arrays parallel to the rows.

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


@dataclass(frozen=True, slots=True)
class ConvertedCopies:
    """Memory that gets the bytes a second time, converted: for each buffer, one with as many elements, or None."""

    cast: Cast
    buffers: Sequence[ByteBuffer | None]


@dataclass(frozen=True, slots=True)
class MoveOptions:
    """Options of the pass that moves the bytes.

    ``digest``: what each row adds to which digest, which the operation returns. ``crc32``, shape ``(num_rows,)``: an
    array that is filled with the CRC-32 of the bytes written of each row (read, where nothing is written). ``cast``: a
    conversion of the elements. ``sync``: flush each file that was written to its device. ``threads``: None for
    ``default_threads``. ``progress``: called with the bytes of the sources that are done. ``copies``: converted copies
    of bytes that are read without a conversion. The functions of ``dispatch`` show which options an operation uses; it
    ignores the others.
    """

    digest: DigestRows | None = None
    crc32: UInt32Array | None = None
    cast: Cast = "none"
    sync: bool = False
    threads: int | None = None
    progress: ProgressFunction | None = None
    copies: ConvertedCopies | None = None


Moved: TypeAlias = "tuple[UInt64Array | None, int]"
"""The digests, where they were asked for, and of a read the bytes that were read."""


Operation = Literal["read", "copy", "write", "move", "scan", "sum"]


@dataclass(frozen=True, slots=True)
class Endpoints(Generic[B]):
    """The files or buffers that the rows of a table are in, and those that they go to.

    The sources are ``src_paths``, or ``src``; the destinations ``dst_paths``, or ``dst``, or there are none.
    """

    src_paths: Sequence[FilePath] | None = None
    src: Sequence[B] = ()
    dst_paths: Sequence[Path] | None = None
    dst: Sequence[B] | None = None

    @property
    def operation(self) -> Operation:
        """The name of what moves bytes between such sides."""
        if self.dst_paths is not None:
            return "write" if self.src_paths is None else "move"
        if self.dst is not None:
            return "copy" if self.src_paths is None else "read"
        return "sum" if self.src_paths is None else "scan"

    @property
    def buffers(self) -> list[B]:
        """All buffers of both sides."""
        return [*self.src, *(self.dst or ())]

    def having(self, form: Callable[[Sequence[B]], Sequence[C]]) -> Endpoints[C]:
        """Convert the buffers of both sides to another form."""
        return Endpoints(self.src_paths, form(self.src), self.dst_paths, None if self.dst is None else form(self.dst))


class HostEngine(Protocol):
    """An engine of files and host memory, of which destinations are writable."""

    def __call__(self, table: Table, options: MoveOptions, *, sides: Endpoints[ByteArray]) -> Moved: ...


class Progress:
    """Counts for the engines in Python; does nothing without a function."""

    def __init__(self, function: ProgressFunction | None) -> None:
        self._function = function
        self._done = 0
        self._last = time.monotonic()

    @property
    def wanted(self) -> bool:
        """Whether there is a progress function."""
        return self._function is not None

    def add(self, nbytes: int) -> None:
        """Count bytes that are done."""
        self._done += nbytes
        if self._function is not None and time.monotonic() - self._last >= PROGRESS_INTERVAL_S:
            self.finish()

    def finish(self) -> None:
        """Report the bytes since the last report; in the end, the rest."""
        if self._function is not None:
            done, self._done, self._last = self._done, 0, time.monotonic()
            self._function(done)


def default_threads() -> int:
    """Threads of one call: ``ZEROELASTIC_THREADS``, else this rank's share of the cores, at most 16.

    Raises ConfigError when the variable is not a positive number.
    """
    asked = os.environ.get("ZEROELASTIC_THREADS")
    if asked is not None:
        if not asked.isdecimal() or int(asked) < 1:
            raise ConfigError(
                f"ZEROELASTIC_THREADS is {asked!r}, not a positive number of threads. Set it to one, or leave it out."
            )
        return int(asked)
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    sharing = int(local_ranks) if local_ranks.isdecimal() else 1
    return max(1, min(_MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0)) // max(1, sharing)))
