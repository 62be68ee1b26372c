"""The reference engine: plain slices, preadv and pwrite, one row after the other; the other engines must match it.

The operations are documented in ``dispatch``.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from zeroelastic.core.digest import ByteArray, UInt64Array, combine, digest_range
from zeroelastic.core.layout import Int64Array
from zeroelastic.core.plan import coalesce
from zeroelastic.errors import CheckpointError, UnreadableError
from zeroelastic.executors.cast import cast_bytes
from zeroelastic.executors.engine import PLAIN, ConvertedCopies, Options
from zeroelastic.executors.progress import Progress
from zeroelastic.executors.tables import (
    ByteBuffer,
    CopyTable,
    DigestRows,
    FileRanges,
    MemoryRanges,
    ReadResult,
    ReadTable,
    cast_itemsizes,
    check_crc32,
)
from zeroelastic.io.atomic import name_in_errors, write_fully
from zeroelastic.io.paths import FilePath, local_paths, missing_file

_MAX_VECTORS = 1024  # IOV_MAX on Linux
_MAX_CALL_BYTES = 256 << 20
_STAGING_BYTES = 1 << 20


def read_segments(table: ReadTable, buffers: Sequence[ByteBuffer], options: Options = PLAIN) -> ReadResult:
    """Fill the buffers with as few calls as the rows allow; no staging except for a conversion, no byte read twice."""
    table.check([len(buffer) for buffer in buffers], digest=options.digest, cast=options.cast)
    if options.cast != "none":
        pieces = _file_pieces(table.local_paths, table.file, table.file_offset, table.nbytes)
        digests = _run(pieces, options, _rows(table.segments), _into_memory(buffers))
        return ReadResult(int(table.nbytes.sum()), table.files, digests)
    if options.copies is not None:
        _check_copies(table, options.copies)
    totals, progress = _Totals(options.digest), Progress(options.progress)
    file, file_offset, buffer, buffer_offset, nbytes = coalesce(*table.segments.columns)
    total = 0
    paths = table.local_paths
    for number in np.unique(file).tolist():
        own = np.flatnonzero(file == number)
        views = [
            memoryview(buffers[b])[o : o + n]
            for b, o, n in zip(buffer[own].tolist(), buffer_offset[own].tolist(), nbytes[own].tolist(), strict=True)
        ]
        with _source(paths[number]) as fd:
            total += _read_views(fd, paths[number], file_offset[own].tolist(), views, progress)
    for i, row in enumerate(_rows(table.segments)):
        data = buffers[row.dst][row.dst_offset : row.dst_offset + row.nbytes]
        totals.add(i, data)
        if options.copies is not None and (copy := options.copies.buffers[row.dst]) is not None:
            itemsize, converted = cast_itemsizes(options.copies.cast)
            begin = row.dst_offset // itemsize * converted
            cast_bytes(options.copies.cast, data, copy[begin : begin + row.nbytes // itemsize * converted])
    progress.finish()
    return ReadResult(total, table.files, totals.array())


def _check_copies(table: ReadTable, copies: ConvertedCopies) -> None:
    """Assert that rows with a converted copy are of whole elements and have room there."""
    itemsize, converted = cast_itemsizes(copies.cast)
    room = np.array([-1 if copy is None else len(copy) for copy in copies.buffers], dtype=np.int64)[table.buffer]
    whole = (table.buffer_offset % itemsize == 0) & (table.nbytes % itemsize == 0)
    fits = (table.buffer_offset + table.nbytes) // itemsize * converted <= room
    bad = np.flatnonzero((room >= 0) & ~(whole & fits))
    assert not len(bad), f"row {bad[0]} of a segment table leaves its file or buffer"


def copy_segments(
    table: CopyTable, src: Sequence[ByteArray], dst: Sequence[ByteBuffer], options: Options = PLAIN
) -> UInt64Array | None:
    """Copy between memory buffers, row by row."""
    sizes = [len(buffer) for buffer in src], [len(buffer) for buffer in dst]
    table.check(len(src), sizes[0], len(dst), sizes[1], digest=options.digest, cast=options.cast)
    rows = _rows(table)
    return _run(_memory_pieces(src, rows, options), options, rows, _into_memory(dst))


def write_segments(
    table: CopyTable, src: Sequence[ByteArray], paths: Sequence[Path], options: Options = PLAIN
) -> UInt64Array | None:
    """Write buffers into existing files; a conversion goes through 1 MiB."""
    sizes = [len(buffer) for buffer in src]
    table.check(len(src), sizes, len(paths), None, digest=options.digest, cast=options.cast)
    rows, order = _rows(table), np.lexsort((table.dst_offset, table.dst)).tolist()
    with _Destinations(paths, sync=options.sync) as files:
        return _run(_memory_pieces(src, rows, options, order), options, rows, files.write)


def move_segments(
    table: CopyTable, src_paths: Sequence[FilePath], dst_paths: Sequence[Path], options: Options = PLAIN
) -> UInt64Array | None:
    """Move rows between existing files, through 1 MiB."""
    table.check(len(src_paths), None, len(dst_paths), None, digest=options.digest, cast=options.cast)
    pieces = _file_pieces(local_paths(src_paths), table.src, table.src_offset, table.nbytes)
    with _Destinations(dst_paths, sync=options.sync) as files:
        return _run(pieces, options, _rows(table), files.write)


def scan_segments(table: FileRanges, options: Options = PLAIN) -> UInt64Array | None:
    """Digests and checksums of ranges of files, through 1 MiB."""
    table.check(digest=options.digest)
    pieces = _file_pieces(table.local_paths, table.file, table.file_offset, table.nbytes)
    return _run(pieces, options, _src_rows(table.file, table.file_offset, table.nbytes))


def sum_segments(table: MemoryRanges, src: Sequence[ByteArray], options: Options = PLAIN) -> UInt64Array | None:
    """Digests and checksums of ranges of memory."""
    table.check([len(buffer) for buffer in src], digest=options.digest)
    rows = _src_rows(table.buffer, table.offset, table.nbytes)
    return _run(_memory_pieces(src, rows, options), options, rows)


_Pieces: TypeAlias = "Generator[tuple[int, int, ByteArray], None, None]"
"""Every row in pieces, those of a row in their order: (row, bytes into it, the bytes there, valid until the next)."""


def _run(
    pieces: _Pieces,
    options: Options,
    rows: Sequence[_Row],
    write: Callable[[int, int, ByteArray], None] | None = None,
) -> UInt64Array | None:
    """Digest, convert, write and sum every piece; ``write`` gets number and offset of the destination of ``rows``."""
    check_crc32(options.crc32, len(rows))
    if options.crc32 is not None:
        options.crc32[:] = 0
    src_itemsize, dst_itemsize = cast_itemsizes(options.cast)
    totals, progress = _Totals(options.digest), Progress(options.progress)
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


class _Row(NamedTuple):
    src: int
    src_offset: int
    dst: int
    dst_offset: int
    nbytes: int


def _rows(table: CopyTable) -> list[_Row]:
    return [_Row(*row) for row in zip(*(column.tolist() for column in table.columns), strict=True)]


def _src_rows(src: Int64Array, offset: Int64Array, nbytes: Int64Array) -> list[_Row]:
    """Rows without a destination."""
    none = np.zeros_like(nbytes)
    return _rows(CopyTable(src, offset, none, none, nbytes))


class _Totals:
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
    """What covers so many bytes by 1 MiB; one empty slice for none."""
    for begin in range(0, max(nbytes, 1), _STAGING_BYTES):
        yield slice(begin, min(nbytes, begin + _STAGING_BYTES))


def _into_memory(buffers: Sequence[ByteBuffer]) -> Callable[[int, int, ByteArray], None]:
    def write(number: int, offset: int, data: ByteArray) -> None:
        buffers[number][offset : offset + len(data)] = data

    return write


def _memory_pieces(
    buffers: Sequence[ByteArray], rows: Sequence[_Row], options: Options, order: Iterable[int] | None = None
) -> _Pieces:
    """Rows of memory: whole, or in pieces of 1 MiB for a conversion or a progress function."""
    in_pieces = options.cast != "none" or options.progress is not None
    for i in range(len(rows)) if order is None else order:
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


def _file_pieces(paths: Sequence[Path], file: Int64Array, offset: Int64Array, nbytes: Int64Array) -> _Pieces:
    """Rows of files in file order, through 1 MiB."""
    staging = np.empty(_STAGING_BYTES, dtype=np.uint8)
    order = np.lexsort((offset, file))
    for number in np.unique(file).tolist():
        path = paths[number]
        with _source(path) as fd:
            for i in order[file[order] == number].tolist():
                for piece in _chunks(int(nbytes[i])):
                    data = staging[: piece.stop - piece.start]
                    _read_fully(fd, path, int(offset[i]) + piece.start, [data.data])
                    yield i, piece.start, data


def _read_views(fd: int, path: Path, offsets: list[int], views: list[memoryview], progress: Progress) -> int:
    """Fill views from their offsets, neighbours in one call; returns the bytes that were read."""
    if progress.wanted:
        pieces = [(o + p.start, v[p]) for o, v in zip(offsets, views, strict=True) for p in _chunks(len(v))]
        offsets, views = [offset for offset, _ in pieces], [view for _, view in pieces]
    most = _STAGING_BYTES if progress.wanted else _MAX_CALL_BYTES
    first = 0
    total = 0
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
        total += nbytes
        first = last
    return total


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
