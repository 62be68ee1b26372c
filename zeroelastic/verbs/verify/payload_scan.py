"""Saved ranks' files read to the last byte: a digest per tensor, and the CRC-32 of every record.

Each byte is read once; while one file is read, a thread finds out what is in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from typing import NamedTuple

import numpy as np

from zeroelastic.checkpoint.optimizer_file import OptimizerHeader
from zeroelastic.checkpoint.tag_files import saved_as
from zeroelastic.checkpoint.tag_headers import TagHeaders
from zeroelastic.core.digest import UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import CheckpointError
from zeroelastic.executors.dispatch import DigestRows, Ranges, join_crc32_groups, scan_segments
from zeroelastic.executors.tables import ProgressFunction
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import read_range
from zeroelastic.torch_file.zip_check import ZipRecord, ZipRecords, read_zip_records


class BadRecord(NamedTuple):
    """A record whose payload has CRC-32 ``found`` instead of the recorded one, in a file of ``rank``."""

    rank: int
    file: str
    record: ZipRecord
    found: int


class BadPart(NamedTuple):
    """A rank's part of a trained parameter, by its number, whose digest is not the one in the same file."""

    rank: int
    file: str
    param: int


class Damage(NamedTuple):
    """Damage to the structure of a file, outside of its records: a sentence, and the byte range where known."""

    file: str
    sentence: str
    offset: int | None = None
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class RankScan:
    """The result of reading some ranks' files.

    ``digests`` and ``covered`` run parallel to ``TagHeaders.streams``: the sum of the partial digests of the elements
    that were read, and their number. ``unread`` are files that could not be read to their end. ``tables`` are the files
    whose own digests were compared with what they hold, ``unstated`` those that state no checksums.
    """

    digests: UInt64Array
    covered: Int64Array
    bad_records: tuple[BadRecord, ...] = ()
    bad_parts: tuple[BadPart, ...] = ()
    damage: tuple[Damage, ...] = ()
    unread: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    unstated: tuple[str, ...] = ()
    num_files: int = 0
    num_records: int = 0
    nbytes: int = 0


def scan_ranks(headers: TagHeaders, *, progress: ProgressFunction | None = None) -> RankScan:
    """Read every byte of the files of all saved ranks. Damage is returned, not raised."""
    progress = progress or (lambda nbytes: None)
    return reduce(
        lambda a, b: RankScan(*(getattr(a, field.name) + getattr(b, field.name) for field in fields(RankScan))),
        (scan(progress) for scan in _scans(headers)),
        _nothing(headers),
    )


class RankRows(NamedTuple):
    """The runs of one file that belong to tensors, in file order.

    ``tensor`` indexes ``TagHeaders.tensors``, or the tensors and copies of ``TagHeaders.streams``.
    """

    offset: Int64Array
    nbytes: Int64Array
    tensor: Int64Array
    start: Int64Array
    itemsize: Int64Array

    def take(self, index: Int64Array) -> RankRows:
        """Some of the rows."""
        return RankRows(*(column[index] for column in self))


def file_rows(headers: TagHeaders, rank: int, path: FilePath) -> RankRows:
    """Which bytes of a rank's file hold which elements of which stream; no rows where its header could not be read."""
    base = 0
    found = [RankRows(*np.empty((5, 0), dtype=np.int64))]
    for number, part in enumerate(headers.parts):
        if rank in part.extents:
            _, rows = part.rank_rows(rank)
            if path in rows.paths:
                rows = rows.take(np.flatnonzero((rows.file == rows.paths.index(path)) & (rows.numel > 0)))
                stream = headers.streams.of_rows(headers.parts, number, rows, rows.target + base)
                found.append(RankRows(rows.file_offset, rows.nbytes, stream, rows.start, rows.itemsize))
        base += sum(len(dtypes) for dtypes in part.dtypes)
    rows_of_file = RankRows(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
    return rows_of_file.take(np.argsort(rows_of_file.offset, kind="stable"))


_Scan = Callable[[ProgressFunction], RankScan]


def _scans(headers: TagHeaders) -> Iterator[_Scan]:
    """Yield a function that reads each file, prepared while the caller reads the file before."""
    prepared = [partial(_prepare, headers, rank, path) for rank in headers.ranks for path in headers.files(rank)]
    with ThreadPoolExecutor(1) as worker:
        found: Future[_Scan] | None = None
        for prepare in prepared:
            following = worker.submit(copy_context().run, prepare)
            if found is not None:
                yield found.result()
            found = following
        if found is not None:
            yield found.result()


def _prepare(headers: TagHeaders, rank: int, path: FilePath) -> _Scan:
    """Find out what a file holds; the function that is returned reads its payload."""
    name, size = path.name, headers.sizes[path.name]
    try:
        records = read_zip_records(path, size)
    except CheckpointError as error:
        return partial(_pass_over, headers, path, str(error), size)
    damage = [
        Damage(name, f"{name}: {fault.what}. The file is damaged.", fault.offset, fault.nbytes)
        for fault in records.faults
    ]
    if (folder := saved_as(records.directory.folder, name)) is not None:
        damage.append(Damage(name, f"{name}: was written as {folder}. The file is in the wrong place."))
    rows = file_rows(headers, rank, path)
    filled = np.flatnonzero(records.nbytes)
    begin = records.offset[filled]
    table = cover(begin, begin + records.nbytes[filled], rows)
    return partial(_scan_file, headers, rank, path, records, filled, damage, rows, table)


def _scan_file(
    headers: TagHeaders,
    rank: int,
    path: FilePath,
    records: ZipRecords,
    filled: Int64Array,
    damage: Sequence[Damage],
    rows: RankRows,
    table: Cover,
    progress: ProgressFunction,
) -> RankScan:
    """Read a file. ``filled`` are the numbers of the records that are not empty, which ``table`` counts."""
    name, size = path.name, headers.sizes[path.name]
    crc32 = np.zeros(len(table.nbytes), dtype=np.uint32)
    num_streams = len(headers.streams.tensor)
    seeds = np.append(headers.seeds[headers.streams.tensor], np.uint64(0))
    digest = DigestRows(seeds, np.where(table.tensor < 0, num_streams, table.tensor), table.start, table.itemsize)
    zeros = np.zeros(len(table.nbytes), dtype=np.int64)
    left = size

    def advance(nbytes: int) -> None:
        nonlocal left
        nbytes = min(nbytes, left)
        left -= nbytes
        progress(nbytes)

    try:
        sums = scan_segments(
            Ranges(zeros, table.offset, table.nbytes),
            [path],
            digest=digest,
            crc32=crc32,
            progress=advance,
        )
    except CheckpointError as error:
        return _pass_over(headers, path, str(error), left, progress)
    progress(left)
    assert sums is not None
    digests = sums[:num_streams]
    covered = np.zeros(num_streams, dtype=np.int64)
    np.add.at(covered, rows.tensor, rows.nbytes // rows.itemsize)
    found = join_crc32_groups(table.record, crc32, table.nbytes, len(filled))
    bad = [
        BadRecord(rank, name, records[int(filled[number])], int(found[number]))
        for number in np.flatnonzero(found != records.crc32[filled]).tolist()
        if records.directory.states_checksums
    ]
    shard = headers.shards.get(rank)
    parts: tuple[BadPart, ...] | None = None
    if shard is not None and shard.path == path and shard.digests is not None:
        parts = _bad_parts(headers, shard, digests, bad)
    return RankScan(
        digests=digests,
        covered=covered,
        bad_records=tuple(bad),
        bad_parts=parts or (),
        damage=tuple(damage),
        num_files=1,
        num_records=len(records) if records.directory.states_checksums else 0,
        unstated=() if records.directory.states_checksums else (name,),
        tables=() if parts is None else (name,),
        nbytes=size,
    )


class Cover(NamedTuple):
    """Rows that cover every record of a file: the runs of tensors, and the gaps between them, whose ``tensor`` is -1.

    ``record`` is -1 for a run whose bytes another row covers too: it is digested, and left out of checksums.
    """

    offset: Int64Array
    nbytes: Int64Array
    tensor: Int64Array
    start: Int64Array
    itemsize: Int64Array
    record: Int64Array


def cover(begin: Int64Array, end: Int64Array, rows: RankRows) -> Cover:
    """Cover the records from ``begin[i]`` to ``end[i]`` with the runs of tensors, in file order, and the gaps."""
    # A file that was made to deceive may give two tensors the same bytes, or bytes of no record: digests only.
    row_end = rows.offset + rows.nbytes
    reached = np.concatenate(([0], np.maximum.accumulate(row_end)))[:-1]
    within = np.searchsorted(begin, rows.offset, side="right") - 1
    alone = (rows.offset >= reached) & (within >= 0) & (row_end <= np.append(end, 0)[within])
    kept = rows.take(np.flatnonzero(alone))
    extra = rows.take(np.flatnonzero(~alone))
    # Gaps: what is left of each record before its rows, between them and behind them.
    edges_begin = np.concatenate([begin, kept.offset + kept.nbytes])
    edges_end = np.concatenate([kept.offset, end])
    gap_begin, gap_end = np.sort(edges_begin), np.sort(edges_end)
    wide = np.flatnonzero(gap_end > gap_begin)
    gap_begin, gap_end = gap_begin[wide], gap_end[wide]
    zero = np.zeros(len(wide), dtype=np.int64)
    columns = (
        (kept.offset, gap_begin, extra.offset),
        (kept.nbytes, gap_end - gap_begin, extra.nbytes),
        (kept.tensor, zero - 1, extra.tensor),
        (kept.start, zero, extra.start),
        (kept.itemsize, zero + 1, extra.itemsize),
    )
    offset, nbytes, tensor, start, itemsize = (np.concatenate(column) for column in columns)
    record = np.searchsorted(begin, offset, side="right") - 1
    record[len(kept.offset) + len(wide) :] = -1
    order = np.lexsort((offset, record))
    return Cover(*(column[order] for column in (offset, nbytes, tensor, start, itemsize, record)))


def _bad_parts(
    headers: TagHeaders, shard: OptimizerHeader, digests: UInt64Array, bad: list[BadRecord]
) -> tuple[BadPart, ...] | None:
    """The parameters whose part contradicts the file's own digests; None where these are damaged."""
    place = shard.digests
    assert place is not None
    if any(found.record.offset <= place.offset < found.record.offset + found.record.nbytes for found in bad):
        return None
    want = np.frombuffer(read_range(shard.path, place.offset, place.nbytes), dtype="<u8")
    part, tensor = headers.parts[0], headers.streams.tensor
    trained = np.flatnonzero(tensor < headers.num_trained)
    have = np.zeros(len(part.params), dtype=np.uint64)
    np.add.at(have, headers.param_of[tensor[trained]], digests[trained])
    own = np.arange(len(have)) if part.layout.slices is None else part.numbers()[part.layout.slices.has(shard.rank)]
    return tuple(BadPart(shard.rank, shard.path.name, p) for p in own[have[own] != want].tolist())


def _pass_over(headers: TagHeaders, path: FilePath, problem: str, left: int, progress: ProgressFunction) -> RankScan:
    """The scan of a file that cannot be read, or of which ``left`` bytes cannot.

    ``problem`` is a text, not the error, whose traceback would keep the files of the tag open until the collector runs.
    """
    progress(left)
    sentence = problem.replace(f"{path.parent}/", "")
    return replace(_nothing(headers), damage=(Damage(path.name, sentence),), unread=(path.name,))


def _nothing(headers: TagHeaders) -> RankScan:
    count = len(headers.streams.tensor)
    return RankScan(np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.int64))
