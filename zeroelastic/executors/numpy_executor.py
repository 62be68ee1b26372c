"""The reference engine: plain slices, preadv and pwrite, one row after the other; the other engines must match it.

Its conversions agree with torch's ``Tensor.copy_`` bit for bit, except for the NaN of bfloat16.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from zeroelastic.core.digest import ByteArray, UInt64Array, combine, digest_range
from zeroelastic.core.plan import coalesce
from zeroelastic.errors import CheckpointError, UnreadableError, missing_file
from zeroelastic.executors.tables import (
    ByteBuffer,
    Cast,
    ConvertedCopies,
    CopyTable,
    DigestRows,
    Endpoints,
    Moved,
    MoveOptions,
    Progress,
    Table,
    cast_itemsizes,
    check_rows,
)
from zeroelastic.io.atomic import name_in_errors, write_fully
from zeroelastic.io.paths import local_paths

_MAX_VECTORS = 1024  # IOV_MAX on Linux
_MAX_CALL_BYTES = 256 << 20
_STAGING_BYTES = 1 << 20
_CHUNK_NUMEL = 1 << 18
_INFINITY = 0x7F800000

BFLOAT16_NAN = 0x7FC0
"""What every NaN becomes in bfloat16, on any machine: torch's rule for one element. Its vector units make others."""


def run(table: Table, options: MoveOptions, *, sides: Endpoints[ByteArray]) -> Moved:
    """Run a table as a ``tables.HostEngine``.

    No byte is read twice; between files, and for a conversion, rows go through 1 MiB.
    """
    check_rows(table, options, sides)
    src_paths, dst = sides.src_paths, sides.dst
    num_read = 0 if src_paths is None else int(table.nbytes.sum())
    if src_paths is not None and dst is not None and options.cast == "none":
        assert isinstance(table, CopyTable)
        return _read(table, local_paths(src_paths), dst, options), num_read
    rows = _rows(table)
    if src_paths is not None:
        pieces = _file_pieces(local_paths(src_paths), table)
    else:
        pieces = _memory_pieces(sides.src, rows, options)
    with _Destinations(sides.dst_paths or (), sync=options.sync) as files:
        write = files.write if sides.dst_paths is not None else None if dst is None else _into_memory(dst)
        return _run(pieces, options, rows, write), num_read


def _read(
    table: CopyTable, paths: Sequence[Path], buffers: Sequence[ByteBuffer], options: MoveOptions
) -> UInt64Array | None:
    """Fill the buffers with as few calls as the rows, which are in the order of the files, allow; no staging."""
    if options.copies is not None:
        _check_copies(table, options.copies)
    totals, progress = _DigestSums(options.digest), Progress(options.progress)
    file, file_offset, buffer, buffer_offset, nbytes = coalesce(*table.columns)
    for number in np.unique(file).tolist():
        own = np.flatnonzero(file == number)
        views = [
            memoryview(buffers[b])[o : o + n]
            for b, o, n in zip(buffer[own].tolist(), buffer_offset[own].tolist(), nbytes[own].tolist(), strict=True)
        ]
        with _source(paths[number]) as fd:
            _read_views(fd, paths[number], file_offset[own].tolist(), views, progress)
    for i, row in enumerate(_rows(table)):
        data = buffers[row.dst][row.dst_offset : row.dst_offset + row.nbytes]
        totals.add(i, data)
        if options.crc32 is not None:
            options.crc32[i] = zlib.crc32(data.data)
        if options.copies is not None and (copy := options.copies.buffers[row.dst]) is not None:
            itemsize, converted = cast_itemsizes(options.copies.cast)
            begin = row.dst_offset // itemsize * converted
            cast_bytes(options.copies.cast, data, copy[begin : begin + row.nbytes // itemsize * converted])
    progress.finish()
    return totals.array()


def _check_copies(table: CopyTable, copies: ConvertedCopies) -> None:
    """Assert that rows with a converted copy are of whole elements and have room there."""
    itemsize, converted = cast_itemsizes(copies.cast)
    room = np.array([-1 if copy is None else len(copy) for copy in copies.buffers], dtype=np.int64)[table.dst]
    whole = (table.dst_offset % itemsize == 0) & (table.nbytes % itemsize == 0)
    fits = (table.dst_offset + table.nbytes) // itemsize * converted <= room
    bad = np.flatnonzero((room >= 0) & ~(whole & fits))
    assert not len(bad), f"row {bad[0]} of a segment table leaves its file or buffer"


_Pieces: TypeAlias = "Generator[tuple[int, int, ByteArray], None, None]"
"""Every row in pieces, those of a row in their order: (row, bytes into it, the bytes there, valid until the next)."""


def _run(
    pieces: _Pieces,
    options: MoveOptions,
    rows: Sequence[_Segment],
    write: Callable[[int, int, ByteArray], None] | None = None,
) -> UInt64Array | None:
    """Digest, convert, write and sum every piece; ``write`` gets number and offset of the destination of ``rows``."""
    if options.crc32 is not None:
        options.crc32[:] = 0
    src_itemsize, dst_itemsize = cast_itemsizes(options.cast)
    totals, progress = _DigestSums(options.digest), Progress(options.progress)
    with contextlib.closing(pieces):
        for i, start, data in pieces:
            totals.add(i, data, start)
            made = data
            if options.cast != "none":
                made = np.empty(len(data) // src_itemsize * dst_itemsize, dtype=np.uint8)
                cast_bytes(options.cast, data, made)
            if write is not None:
                row = rows[i]
                write(row.dst, row.dst_offset + start // src_itemsize * dst_itemsize, made)
            if options.crc32 is not None:
                options.crc32[i] = zlib.crc32(made.data, int(options.crc32[i]))
            progress.add(len(data))
    progress.finish()
    return totals.array()


class _Segment(NamedTuple):
    src: int
    src_offset: int
    dst: int
    dst_offset: int
    nbytes: int


def _rows(table: Table) -> list[_Segment]:
    """Rows as Python numbers; those without a destination have zeros there."""
    none = np.zeros_like(table.nbytes)
    dst, dst_offset = (table.dst, table.dst_offset) if isinstance(table, CopyTable) else (none, none)
    columns = (table.src, table.src_offset, dst, dst_offset, table.nbytes)
    return [_Segment(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


class _DigestSums:
    """The digests of a call; nothing where none are asked for."""

    def __init__(self, digest: DigestRows | None) -> None:
        self._digest = digest
        self._totals = [] if digest is None else [0] * len(digest.seeds)

    def add(self, row: int, data: ByteArray, within: int = 0) -> None:
        """Add source bytes of a row that begin ``within`` bytes into it."""
        if self._digest is None:
            return
        stream, itemsize = int(self._digest.stream[row]), int(self._digest.itemsize[row])
        start = int(self._digest.start[row]) + within // itemsize
        found = digest_range(data, itemsize, seed=int(self._digest.seeds[stream]), start=start)
        self._totals[stream] = combine(self._totals[stream], found)

    def array(self) -> UInt64Array | None:
        return None if self._digest is None else np.array(self._totals, dtype=np.uint64)


class _Destinations:
    """Files being written, each opened when first needed; flushed, if asked, and closed in the end."""

    def __init__(self, paths: Sequence[Path], *, sync: bool) -> None:
        self._paths, self._sync = paths, sync
        self._fds: dict[int, int] = {}

    def write(self, number: int, offset: int, data: ByteArray) -> None:
        """Write bytes into a file."""
        with name_in_errors(self._paths[number]):
            if number not in self._fds:
                self._fds[number] = os.open(self._paths[number], os.O_WRONLY | os.O_CLOEXEC)
            write_fully(self._fds[number], data.data, offset)

    def __enter__(self) -> _Destinations:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        first: OSError | None = None
        for number, fd in self._fds.items():
            try:
                with name_in_errors(self._paths[number]):
                    try:
                        if self._sync and kind is None:
                            os.fsync(fd)
                    finally:
                        os.close(fd)  # network file systems may report a failed write no earlier than here
            except OSError as error:
                first = first or error
        if first is not None and kind is None:
            raise first


def _chunks(nbytes: int) -> Iterator[slice]:
    """Yield slices of 1 MiB that cover so many bytes; one empty slice for none."""
    for begin in range(0, max(nbytes, 1), _STAGING_BYTES):
        yield slice(begin, min(nbytes, begin + _STAGING_BYTES))


def _into_memory(buffers: Sequence[ByteBuffer]) -> Callable[[int, int, ByteArray], None]:
    def write(number: int, offset: int, data: ByteArray) -> None:
        buffers[number][offset : offset + len(data)] = data

    return write


def _memory_pieces(buffers: Sequence[ByteArray], rows: Sequence[_Segment], options: MoveOptions) -> _Pieces:
    """Rows of memory by destination: whole, or in pieces of 1 MiB for a conversion or a progress function."""
    in_pieces = options.cast != "none" or options.progress is not None
    for i in sorted(range(len(rows)), key=lambda i: (rows[i].dst, rows[i].dst_offset)):
        row = rows[i]
        data = buffers[row.src][row.src_offset : row.src_offset + row.nbytes]
        for piece in _chunks(row.nbytes) if in_pieces else (slice(0, row.nbytes),):
            yield i, piece.start, data[piece]


@contextlib.contextmanager
def _source(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise missing_file(path) from None
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be opened: {error.strerror}.") from None
    try:
        yield fd
    finally:
        os.close(fd)


def _file_pieces(paths: Sequence[Path], table: Table) -> _Pieces:
    """Rows of files in file order, through 1 MiB."""
    staging = np.empty(_STAGING_BYTES, dtype=np.uint8)
    order = np.lexsort((table.src_offset, table.src))
    for number in np.unique(table.src).tolist():
        path = paths[number]
        with _source(path) as fd:
            for i in order[table.src[order] == number].tolist():
                for piece in _chunks(int(table.nbytes[i])):
                    data = staging[: piece.stop - piece.start]
                    _read_fully(fd, path, int(table.src_offset[i]) + piece.start, [data.data])
                    yield i, piece.start, data


def _read_views(fd: int, path: Path, offsets: list[int], views: list[memoryview], progress: Progress) -> None:
    """Fill views from their offsets, neighbours in one call."""
    if progress.wanted:
        pieces = [(o + p.start, v[p]) for o, v in zip(offsets, views, strict=True) for p in _chunks(len(v))]
        offsets, views = [offset for offset, _ in pieces], [view for _, view in pieces]
    most = _STAGING_BYTES if progress.wanted else _MAX_CALL_BYTES
    first = 0
    while first < len(views):
        last = first
        nbytes = 0
        while (
            last < len(views)
            and last - first < _MAX_VECTORS
            and offsets[last] == offsets[first] + nbytes
            and (nbytes == 0 or nbytes + len(views[last]) <= most)
        ):
            nbytes += len(views[last])
            last += 1
        _read_fully(fd, path, offsets[first], views[first:last])
        progress.add(nbytes)
        first = last


def _read_fully(fd: int, path: Path, offset: int, views: list[memoryview]) -> None:
    views = [view for view in views if len(view)]
    while views:
        try:
            got = os.preadv(fd, views, offset)
        except OSError as error:
            raise UnreadableError(f"{path}: reading at byte {offset} failed: {error.strerror}.") from None
        if got == 0:
            raise CheckpointError(f"{path}: ends at byte {offset}. The file is truncated.")
        offset += got
        while got:
            if got >= len(views[0]):
                got -= len(views.pop(0))
            else:
                views[0] = views[0][got:]
                got = 0


def cast_bytes(cast: Cast, src: ByteArray, dst: ByteArray) -> None:
    """Convert the elements in ``src`` into ``dst``, both contiguous bytes, at any alignment; a few MiB besides."""
    if cast == "none":
        dst[:] = src
        return
    src_itemsize, dst_itemsize = cast_itemsizes(cast)
    convert = _CONVERSIONS[cast]
    numel = len(src) // src_itemsize
    for begin in range(0, numel, _CHUNK_NUMEL):
        end = min(numel, begin + _CHUNK_NUMEL)
        bits = src[begin * src_itemsize : end * src_itemsize].view(np.dtype(f"<u{src_itemsize}"))
        made = convert(bits).astype(np.dtype(f"<u{dst_itemsize}"), copy=False)
        dst[begin * dst_itemsize : end * dst_itemsize] = made.view(np.uint8)


def _to_bfloat16(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > _INFINITY
    return np.where(nan, np.uint64(BFLOAT16_NAN), rounded).astype(np.uint16)


def _to_float16(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    # numpy rounds like torch, but makes an infinity of a NaN whose upper bits of payload are zero.
    nan = (bits & 0x7FFFFFFF) > _INFINITY
    with np.errstate(over="ignore", under="ignore"):
        finite = np.where(nan, np.uint32(0), bits).view(np.float32).astype(np.float16).view(np.uint16)
    quiet = ((bits >> 16) & 0x8000) | 0x7E00 | ((bits >> 13) & 0x3FF)
    return np.where(nan, quiet, finite).astype(np.uint16)


def _from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    wide: npt.NDArray[np.uint32] = bits.astype(np.uint32) << np.uint32(16)
    return wide


def _from_float16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    nan = (bits & 0x7FFF) > 0x7C00
    finite = np.where(nan, np.uint16(0), bits).view(np.float16).astype(np.float32).view(np.uint32)
    wide = bits.astype(np.uint32)
    quiet = ((wide & 0x8000) << 16) | _INFINITY | 0x400000 | ((wide & 0x3FF) << 13)
    return np.where(nan, quiet, finite).astype(np.uint32)


_CONVERSIONS: dict[Cast, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {
    "float32->bfloat16": _to_bfloat16,
    "float32->float16": _to_float16,
    "bfloat16->float32": _from_bfloat16,
    "float16->float32": _from_float16,
}
