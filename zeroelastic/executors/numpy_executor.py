"""The reference executor: plain slices, preadv and pwrite, one row after the other; what others are held to."""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from zeroelastic.digest import ByteArray, UInt64Array, combine, digest_range
from zeroelastic.errors import CheckpointError, MissingFileError, UnreadableError
from zeroelastic.executors.cast import cast_bytes
from zeroelastic.executors.progress import Progress, ProgressFunction
from zeroelastic.executors.table import (
    ByteBuffer,
    Cast,
    DigestRows,
    FileRows,
    MemoryRows,
    ReadResult,
    ReadTable,
    SegmentTable,
    UInt32Array,
    cast_itemsizes,
    check_crc32,
)
from zeroelastic.plan import coalesce
from zeroelastic.storage import FilePath, local_paths

_MAX_VECTORS = 1024  # IOV_MAX on Linux
_MAX_CALL_BYTES = 256 << 20
_STAGING_BYTES = 1 << 20


def read_segments(
    table: ReadTable,
    buffers: Sequence[ByteBuffer],
    digest: DigestRows | None = None,
    *,
    cast: Cast = "none",
    threads: int | None = None,
    progress: ProgressFunction | None = None,
) -> ReadResult:
    """Fill the buffers with as few calls as the file's runs allow; no staging but for a conversion, no byte read twice.

    Raises MissingFileError or CheckpointError with the file and the offset at which it failed.
    """
    table.check([len(buffer) for buffer in buffers], digest=digest, cast=cast)
    if cast != "none":
        return _read_converted(table, buffers, digest, cast, Progress(progress))
    file, file_offset, buffer, buffer_offset, nbytes = coalesce(
        table.file, table.file_offset, table.buffer, table.buffer_offset, table.nbytes
    )
    total = 0
    told = Progress(progress)
    paths = table.local_paths
    for number in np.unique(file):
        path = paths[int(number)]
        rows = np.flatnonzero(file == number)
        views = [
            memoryview(buffers[b])[o : o + n]
            for b, o, n in zip(buffer[rows].tolist(), buffer_offset[rows].tolist(), nbytes[rows].tolist(), strict=True)
        ]
        with _source(path) as fd:
            total += _read_rows(fd, path, file_offset[rows].tolist(), views, told)
    totals = _Totals(digest)
    for i, row in enumerate(_rows(table.segments)):
        totals.add(i, buffers[row.dst][row.dst_offset : row.dst_offset + row.nbytes], 0)
    told.finish()
    return ReadResult(total, table.files, totals.array())


def copy_segments(
    table: SegmentTable,
    src: Sequence[ByteArray],
    dst: Sequence[ByteBuffer],
    *,
    digest: DigestRows | None = None,
    cast: Cast = "none",
    threads: int | None = None,
) -> UInt64Array | None:
    """Copy between memory buffers, row by row. Returns the digests, when asked."""
    table.check(len(src), [len(b) for b in src], len(dst), [len(b) for b in dst], digest=digest, cast=cast)
    src_itemsize, dst_itemsize = cast_itemsizes(cast)
    totals = _Totals(digest)
    for i, row in enumerate(_rows(table)):
        data = src[row.src][row.src_offset : row.src_offset + row.nbytes]
        totals.add(i, data, 0)
        written = row.nbytes // src_itemsize * dst_itemsize
        cast_bytes(cast, data, dst[row.dst][row.dst_offset : row.dst_offset + written])
    return totals.array()


def write_segments(
    table: SegmentTable,
    src: Sequence[ByteArray],
    paths: Sequence[Path],
    *,
    digest: DigestRows | None = None,
    crc32: UInt32Array | None = None,
    cast: Cast = "none",
    sync: bool = False,
    threads: int | None = None,
    progress: ProgressFunction | None = None,
) -> UInt64Array | None:
    """Write buffers into files that exist already, neither created nor truncated. Returns the digests, when asked.

    ``crc32``, shape ``(num_rows,)``, is filled with the checksum of what was written of each row, as ``zlib.crc32``.
    ``sync`` flushes each file to its device before it returns. Raises OSError naming the file, and the offset where
    writing fails. Memory: a conversion goes through 1 MiB.
    """
    table.check(len(src), [len(buffer) for buffer in src], len(paths), None, digest=digest, cast=cast)
    check_crc32(crc32, len(table.nbytes))
    totals = _Totals(digest)
    told = Progress(progress)
    rows = _rows(table)
    with _Destinations(paths, sync) as files:
        for i in np.lexsort((table.dst_offset, table.dst)).tolist():
            row = rows[i]
            fd = files.open(row.dst)
            data = src[row.src][row.src_offset : row.src_offset + row.nbytes]
            totals.add(i, data, 0)
            offset, checksum = row.dst_offset, 0
            for piece in _chunks(len(data)) if cast != "none" or told.wanted else (slice(0, len(data)),):
                made = _converted(data[piece], cast)
                _write(fd, paths[row.dst], made, offset)
                offset += len(made)
                checksum = zlib.crc32(made.data, checksum) if crc32 is not None else 0
                told.add(piece.stop - piece.start)
            if crc32 is not None:
                crc32[i] = checksum
    told.finish()
    return totals.array()


def move_segments(
    table: SegmentTable,
    src_paths: Sequence[FilePath],
    dst_paths: Sequence[Path],
    *,
    digest: DigestRows | None = None,
    crc32: UInt32Array | None = None,
    cast: Cast = "none",
    sync: bool = False,
    threads: int | None = None,
    progress: ProgressFunction | None = None,
) -> UInt64Array | None:
    """Move runs between files that exist already, through 1 MiB. Returns the digests, when asked.

    ``crc32`` and ``sync`` as of ``write_segments``. Raises MissingFileError or CheckpointError for a source, OSError
    for a destination.
    """
    table.check(len(src_paths), None, len(dst_paths), None, digest=digest, cast=cast)
    check_crc32(crc32, len(table.nbytes))
    totals = _Totals(digest)
    told = Progress(progress)
    staging = np.empty(_STAGING_BYTES, dtype=np.uint8)
    rows = _rows(table)
    order = np.lexsort((table.src_offset, table.src))
    sources = local_paths(src_paths)
    with _Destinations(dst_paths, sync) as files:
        for number in np.unique(table.src).tolist():
            path = sources[number]
            with _source(path) as fd:
                for i in order[table.src[order] == number].tolist():
                    row = rows[i]
                    target = files.open(row.dst)
                    offset, checksum = row.dst_offset, 0
                    for piece in _chunks(row.nbytes):
                        data = staging[: piece.stop - piece.start]
                        _read_run(fd, path, row.src_offset + piece.start, [data.data])
                        totals.add(i, data, piece.start)
                        made = _converted(data, cast)
                        _write(target, dst_paths[row.dst], made, offset)
                        offset += len(made)
                        checksum = zlib.crc32(made.data, checksum) if crc32 is not None else 0
                        told.add(len(data))
                    if crc32 is not None:
                        crc32[i] = checksum
    told.finish()
    return totals.array()


def scan_segments(
    table: FileRows,
    *,
    digest: DigestRows | None = None,
    crc32: UInt32Array | None = None,
    threads: int | None = None,
    progress: ProgressFunction | None = None,
) -> UInt64Array | None:
    """Digests, when asked, and checksums of rows of files, through 1 MiB; nothing is kept.

    ``crc32``, shape ``(num_rows,)``, is filled with the checksum of each row, as ``zlib.crc32``. Raises what
    ``read_segments`` raises.
    """
    table.check(digest=digest)
    check_crc32(crc32, len(table.nbytes))
    totals = _Totals(digest)
    told = Progress(progress)
    staging = np.empty(_STAGING_BYTES, dtype=np.uint8)
    offsets, sizes = table.file_offset.tolist(), table.nbytes.tolist()
    order = np.lexsort((table.file_offset, table.file))
    paths = table.local_paths
    for number in np.unique(table.file).tolist():
        path = paths[number]
        with _source(path) as fd:
            for i in order[table.file[order] == number].tolist():
                checksum = 0
                for piece in _chunks(sizes[i]):
                    data = staging[: piece.stop - piece.start]
                    _read_run(fd, path, offsets[i] + piece.start, [data.data])
                    totals.add(i, data, piece.start)
                    checksum = zlib.crc32(data.data, checksum) if crc32 is not None else 0
                    told.add(len(data))
                if crc32 is not None:
                    crc32[i] = checksum
    told.finish()
    return totals.array()


def sum_segments(
    table: MemoryRows,
    src: Sequence[ByteArray],
    *,
    digest: DigestRows | None = None,
    crc32: UInt32Array | None = None,
    threads: int | None = None,
) -> UInt64Array | None:
    """Digests, when asked, and checksums of rows of memory. ``crc32`` as of ``scan_segments``."""
    table.check([len(buffer) for buffer in src], digest=digest)
    check_crc32(crc32, len(table.nbytes))
    totals = _Totals(digest)
    rows = zip(table.buffer.tolist(), table.offset.tolist(), table.nbytes.tolist(), strict=True)
    for i, (number, offset, nbytes) in enumerate(rows):
        data = src[number][offset : offset + nbytes]
        totals.add(i, data, 0)
        if crc32 is not None:
            crc32[i] = zlib.crc32(data.data)
    return totals.array()


class _Row:
    __slots__ = ("dst", "dst_offset", "nbytes", "src", "src_offset")

    def __init__(self, src: int, src_offset: int, dst: int, dst_offset: int, nbytes: int) -> None:
        self.src, self.src_offset, self.dst, self.dst_offset, self.nbytes = src, src_offset, dst, dst_offset, nbytes


def _rows(table: SegmentTable) -> list[_Row]:
    columns = (table.src, table.src_offset, table.dst, table.dst_offset, table.nbytes)
    return [_Row(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


class _Totals:
    """The digests of a call; nothing where none are asked for."""

    def __init__(self, digest: DigestRows | None) -> None:
        self._digest = digest
        self._totals = [] if digest is None else [0] * len(digest.seeds)

    def add(self, row: int, data: ByteArray, within: int) -> None:
        """Add source bytes of a row that begin ``within`` bytes into it."""
        if self._digest is None:
            return
        stream, itemsize = int(self._digest.stream[row]), int(self._digest.itemsize[row])
        start = int(self._digest.start[row]) + within // itemsize
        part = digest_range(data, itemsize, seed=int(self._digest.seeds[stream]), start=start)
        self._totals[stream] = combine(self._totals[stream], part)

    def array(self) -> UInt64Array | None:
        return None if self._digest is None else np.array(self._totals, dtype=np.uint64)


class _Destinations:
    """Files being written, each opened when first needed; flushed, if asked, and closed in the end."""

    def __init__(self, paths: Sequence[Path], sync: bool) -> None:
        self._paths = paths
        self._sync = sync
        self._fds: dict[int, int] = {}

    def open(self, number: int) -> int:
        if number not in self._fds:
            try:
                self._fds[number] = os.open(self._paths[number], os.O_WRONLY | os.O_CLOEXEC)
            except OSError as error:
                raise _named(error, self._paths[number]) from None
        return self._fds[number]

    def __enter__(self) -> _Destinations:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        first: OSError | None = None
        for number, fd in self._fds.items():
            try:
                try:
                    if self._sync and kind is None:
                        os.fsync(fd)
                finally:
                    os.close(fd)  # network file systems may report a failed write no earlier than here
            except OSError as error:
                first = first or _named(error, self._paths[number])
        if first is not None and kind is None:
            raise first


def _named(error: OSError, path: Path) -> OSError:
    return OSError(error.errno, error.strerror, str(path))


def _chunks(nbytes: int) -> Iterator[slice]:
    for begin in range(0, nbytes, _STAGING_BYTES):
        yield slice(begin, min(nbytes, begin + _STAGING_BYTES))


def _converted(data: ByteArray, cast: Cast) -> ByteArray:
    if cast == "none":
        return data
    src_itemsize, dst_itemsize = cast_itemsizes(cast)
    made = np.empty(len(data) // src_itemsize * dst_itemsize, dtype=np.uint8)
    cast_bytes(cast, data, made)
    return made


def _write(fd: int, path: Path, data: ByteArray, offset: int) -> None:
    view = data.data
    while len(view):
        try:
            put = os.pwrite(fd, view[:_MAX_CALL_BYTES], offset)
            if put == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}, writing at byte {offset}", str(path)) from None
        view = view[put:]
        offset += put


def _read_converted(
    table: ReadTable, buffers: Sequence[ByteBuffer], digest: DigestRows | None, cast: Cast, told: Progress
) -> ReadResult:
    src_itemsize, dst_itemsize = cast_itemsizes(cast)
    totals = _Totals(digest)
    staging = np.empty(_STAGING_BYTES, dtype=np.uint8)
    rows = _rows(table.segments)
    paths = table.local_paths
    for number in np.unique(table.file).tolist():
        path = paths[number]
        with _source(path) as fd:
            for i in np.flatnonzero(table.file == number).tolist():
                row = rows[i]
                for piece in _chunks(row.nbytes):
                    data = staging[: piece.stop - piece.start]
                    _read_run(fd, path, row.src_offset + piece.start, [data.data])
                    totals.add(i, data, piece.start)
                    begin = row.dst_offset + piece.start // src_itemsize * dst_itemsize
                    made = len(data) // src_itemsize * dst_itemsize
                    cast_bytes(cast, data, buffers[row.dst][begin : begin + made])
                    told.add(len(data))
    told.finish()
    return ReadResult(int(table.nbytes.sum()), table.files, totals.array())


@contextlib.contextmanager
def _source(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file. The checkpoint is incomplete.") from None
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be opened: {error.strerror}.") from None
    try:
        yield fd
    finally:
        os.close(fd)


def _read_rows(fd: int, path: Path, offsets: list[int], views: list[memoryview], told: Progress) -> int:
    if told.wanted:
        offsets, views = _cut(offsets, views)
    most = _STAGING_BYTES if told.wanted else _MAX_CALL_BYTES
    first = 0
    total = 0
    while first < len(views):
        last = first
        run = 0
        while (
            last < len(views)
            and last - first < _MAX_VECTORS
            and offsets[last] == offsets[first] + run
            and (run == 0 or run + len(views[last]) <= most)
        ):
            run += len(views[last])
            last += 1
        _read_run(fd, path, offsets[first], views[first:last])
        told.add(run)
        total += run
        first = last
    return total


def _cut(offsets: list[int], views: list[memoryview]) -> tuple[list[int], list[memoryview]]:
    pieces = [(o + p.start, v[p]) for o, v in zip(offsets, views, strict=True) for p in _chunks(len(v))]
    return [offset for offset, _ in pieces], [view for _, view in pieces]


def _read_run(fd: int, path: Path, offset: int, views: list[memoryview]) -> None:
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
