"""Saved ranks' files read to the last byte: a digest per tensor, and the CRC-32 of every record.

Each byte is read once; while one file is read, a thread prepares the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from zeroelastic.checkpoint.optimizer_file import OptimizerHeader
from zeroelastic.checkpoint.saved_state import whole_numbers
from zeroelastic.checkpoint.tag_files import saved_as
from zeroelastic.checkpoint.tag_headers import Problem, TagHeaders
from zeroelastic.core.digest import UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import CheckpointError
from zeroelastic.executors.dispatch import DigestRows, Ranges, join_crc32_groups, scan_segments
from zeroelastic.executors.tables import ProgressFunction
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import read_range
from zeroelastic.torch_file.zip_check import ZipRecord, read_zip_records


class BadRecord(NamedTuple):
    """A record whose payload has CRC-32 ``found`` instead of the recorded one, in a file of ``rank``."""

    rank: int
    file: str
    record: ZipRecord
    found: int


@dataclass(slots=True)
class RankScan:
    """The result of reading some ranks' files.

    ``digests`` and ``covered`` run parallel to ``TagHeaders.streams``: the sum of the partial digests of the elements
    that were read, and their number. By rank and file, ``bad_parts`` are the numbers of the trained parameters whose
    part has another digest than the file says. ``damage`` is outside of records. ``unread`` are files that could not be
    read to their end. ``tables`` are the files whose own digests were compared with what they hold, ``unstated`` those
    that state no checksums.
    """

    digests: UInt64Array
    covered: Int64Array
    bad_records: dict[tuple[int, str], list[BadRecord]] = field(default_factory=dict)
    bad_parts: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    damage: list[Problem] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    unstated: list[str] = field(default_factory=list)
    num_files: int = 0
    num_records: int = 0
    nbytes: int = 0


def scan_ranks(headers: TagHeaders, *, progress: ProgressFunction | None = None) -> RankScan:
    """Read every byte of the files of all saved ranks. Damage is returned, not raised."""
    count = len(headers.streams.tensor)
    scan = RankScan(np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.int64))
    for read in _reads(headers):
        read(scan, progress or (lambda nbytes: None))
    return scan


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


_Read: TypeAlias = Callable[[RankScan, ProgressFunction], None]
"""Reads a file, and adds what it finds."""


def _reads(headers: TagHeaders) -> Iterator[_Read]:
    """Yield a function that reads each file, prepared while the caller reads the file before."""
    prepared = [partial(_prepare, headers, rank, path) for rank in headers.ranks for path in headers.files(rank)]
    with ThreadPoolExecutor(1) as worker:
        found: Future[_Read] | None = None
        for prepare in prepared:
            following = worker.submit(copy_context().run, prepare)
            if found is not None:
                yield found.result()
            found = following
        if found is not None:
            yield found.result()


def _prepare(headers: TagHeaders, rank: int, path: FilePath) -> _Read:
    """Find out what a file holds; the function that is returned reads its payload."""
    name, size = path.name, headers.sizes[path.name]
    try:
        records = read_zip_records(path, size)
    except CheckpointError as error:
        return partial(_pass_over, path, str(error), size)
    rows = file_rows(headers, rank, path)
    filled = np.flatnonzero(records.nbytes)
    begin = records.offset[filled]
    table = cover(begin, begin + records.nbytes[filled], rows)

    def read(scan: RankScan, progress: ProgressFunction) -> None:
        num_streams, left = len(scan.digests), size
        seeds = np.append(headers.seeds[headers.streams.tensor], np.uint64(0))
        digest = DigestRows(seeds, np.where(table.tensor < 0, num_streams, table.tensor), table.start, table.itemsize)
        crc32 = np.zeros(len(table.nbytes), dtype=np.uint32)

        def advance(nbytes: int) -> None:
            nonlocal left
            nbytes = min(nbytes, left)
            left -= nbytes
            progress(nbytes)

        ranges = Ranges(np.zeros_like(table.offset), table.offset, table.nbytes)
        try:
            sums = scan_segments(ranges, [path], digest=digest, crc32=crc32, progress=advance)
        except CheckpointError as error:
            return _pass_over(path, str(error), left, scan, progress)
        progress(left)
        assert sums is not None
        scan.digests += sums[:num_streams]
        np.add.at(scan.covered, rows.tensor, rows.nbytes // rows.itemsize)
        scan.num_files, scan.nbytes = scan.num_files + 1, scan.nbytes + size
        scan.damage += [
            Problem(name, f"{name}: {fault.what}. The file is damaged.", offset=fault.offset, bytes=fault.nbytes)
            for fault in records.faults
        ]
        if (folder := saved_as(records.directory.folder, name)) is not None:
            scan.damage.append(Problem(name, f"{name}: was written as {folder}. The file is in the wrong place."))
        bad: list[BadRecord] = []
        if records.directory.states_checksums:
            found = join_crc32_groups(table.record, crc32, table.nbytes, len(filled))
            wrong = np.flatnonzero(found != records.crc32[filled]).tolist()
            bad = [BadRecord(rank, name, records[int(filled[number])], int(found[number])) for number in wrong]
            scan.num_records += len(records)
        else:
            scan.unstated.append(name)
        scan.bad_records[rank, name] = bad
        shard = headers.shards.get(rank)
        parts = (
            _bad_parts(headers, shard, sums[:num_streams], bad) if shard is not None and shard.path == path else None
        )
        if parts is not None:
            scan.tables.append(name)
            scan.bad_parts[rank, name] = parts

    return read


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
    headers: TagHeaders, shard: OptimizerHeader, digests: UInt64Array, bad: Sequence[BadRecord]
) -> list[int] | None:
    """The parameters whose part contradicts the file's own digests; None where these are damaged, or it has none."""
    place = shard.digests
    if place is None or any(
        found.record.offset <= place.offset < found.record.offset + found.record.nbytes for found in bad
    ):
        return None
    want = np.frombuffer(read_range(shard.path, place.offset, place.nbytes), dtype="<u8")
    part, tensor = headers.parts[0], headers.streams.tensor
    trained = np.flatnonzero(tensor < headers.num_trained)
    have = np.zeros(len(part.params), dtype=np.uint64)
    np.add.at(have, headers.param_of[tensor[trained]], digests[trained])
    own = whole_numbers(part.layout.on_rank(shard.rank), part.params)
    wrong: list[int] = own[have[own] != want].tolist()
    return wrong


def _pass_over(path: FilePath, problem: str, left: int, scan: RankScan, progress: ProgressFunction) -> None:
    """Note that a file cannot be read, or ``left`` bytes of it.

    ``problem`` is a text, not the error, whose traceback would keep the files of the tag open until the collector runs.
    """
    progress(left)
    scan.damage.append(Problem(path.name, problem.replace(f"{path.parent}/", "")))
    scan.unread.append(path.name)
