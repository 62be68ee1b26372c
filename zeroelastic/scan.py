"""One saved rank's files read to the last byte: digests of what they hold, checksums of every record.

Each byte is read once. What the scans of several ranks found adds up (``combine``), whoever made them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zeroelastic.checkpoint import saved_as
from zeroelastic.digest import UInt64Array
from zeroelastic.errors import CheckpointError
from zeroelastic.executors import DigestRows, FileRows, UInt32Array, join_crc32, scan_segments
from zeroelastic.inventory import Inventory
from zeroelastic.layout import Int64Array
from zeroelastic.rows import ByteRows
from zeroelastic.shard import Shard
from zeroelastic.storage import FilePath, read_range
from zeroelastic.zip_records import Fault, ZipRecord, read_zip_records

Progress = Callable[[int], None]
"""Takes the number of bytes done since it was last called."""


class BadRecord(NamedTuple):
    """A record of a file whose payload does not have its checksum: ``rank`` is whose file, ``found`` what it has."""

    rank: int
    file: str
    record: ZipRecord
    found: int


class BadPart(NamedTuple):
    """A rank's part of a parameter that does not have the digest which its own file keeps for it."""

    rank: int
    file: str
    param: int


class Damage(NamedTuple):
    """A file that contradicts itself in a way that concerns no record: a sentence, and the bytes where known."""

    file: str
    sentence: str
    offset: int | None = None
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class RankScan:
    """What reading some ranks' files found.

    ``digests`` and ``covered`` run parallel to the inventory's tensors: the sum of the partial digests of what was
    read, and how many elements that were. ``unread`` are files that could not be read to their end. ``tables`` are the
    files whose own digests were compared with what they hold.
    """

    digests: UInt64Array
    covered: Int64Array
    bad_records: tuple[BadRecord, ...] = ()
    bad_parts: tuple[BadPart, ...] = ()
    damage: tuple[Damage, ...] = ()
    unread: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    num_files: int = 0
    num_records: int = 0
    nbytes: int = 0


def combine(scans: Iterable[RankScan], inventory: Inventory) -> RankScan:
    """What several scans of different ranks found, as one."""
    total = _nothing(inventory)
    for scan in scans:
        total = RankScan(
            digests=total.digests + scan.digests,
            covered=total.covered + scan.covered,
            bad_records=total.bad_records + scan.bad_records,
            bad_parts=total.bad_parts + scan.bad_parts,
            damage=total.damage + scan.damage,
            unread=total.unread + scan.unread,
            num_files=total.num_files + scan.num_files,
            num_records=total.num_records + scan.num_records,
            tables=total.tables + scan.tables,
            nbytes=total.nbytes + scan.nbytes,
        )
    return total


def scan_rank(inventory: Inventory, rank: int, *, progress: Progress | None = None) -> RankScan:
    """Read every byte of the files of one saved rank. What is wrong with them is in the result, not raised."""
    scans = [
        _scan_file(inventory, rank, path, inventory.sizes[path.name], progress or _ignore)
        for path in inventory.files(rank)
    ]
    return combine(scans, inventory)


class RankRows(NamedTuple):
    """The runs of one file that belong to tensors, in file order; ``tensor`` is an index into the inventory's."""

    offset: Int64Array
    nbytes: Int64Array
    tensor: Int64Array
    start: Int64Array
    itemsize: Int64Array

    def take(self, index: Int64Array) -> RankRows:
        """Some of the rows."""
        return RankRows(*(column[index] for column in self))


def file_rows(inventory: Inventory, rank: int, path: FilePath) -> RankRows:
    """Which bytes of a rank's file hold which elements of which tensor, as its header says; none without a header."""
    base = 0
    found: list[RankRows] = []
    for part in inventory.parts:
        if rank in part.pieces:
            _, rows = part.rank_rows(rank)
            if path in rows.paths:
                found.append(_of_file(rows, rows.paths.index(path), base))
        base += sum(len(dtypes) for dtypes in part.dtypes)
    if not found:
        empty = np.empty(0, dtype=np.int64)
        return RankRows(empty, empty, empty, empty, empty)
    rows_of_file = RankRows(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
    return rows_of_file.take(np.argsort(rows_of_file.offset, kind="stable"))


def _of_file(rows: ByteRows, number: int, base: int) -> RankRows:
    mine = np.flatnonzero((rows.file == number) & (rows.numel > 0))
    return RankRows(
        rows.file_offset[mine], rows.nbytes[mine], rows.target[mine] + base, rows.start[mine], rows.itemsize[mine]
    )


def _scan_file(inventory: Inventory, rank: int, path: FilePath, size: int, progress: Progress) -> RankScan:
    name = path.name
    nothing = _nothing(inventory)
    try:
        archive = read_zip_records(path, size)
    except CheckpointError as error:
        progress(size)
        return _unread(nothing, path, error)
    damage = [_fault(name, fault) for fault in archive.faults]
    if (folder := saved_as(archive.folder, name)) is not None:
        damage.append(Damage(name, f"{name}: was written as {folder}. The file is in the wrong place."))
    rows = file_rows(inventory, rank, path)
    records = [record for record in archive.records if record.nbytes]
    table = _cut(records, rows)
    crc32 = np.zeros(len(table.nbytes), dtype=np.uint32)
    num_tensors = len(inventory.tensors)
    seeds = np.append(inventory.seeds, np.uint64(0))
    digest = DigestRows(seeds, np.where(table.tensor < 0, num_tensors, table.tensor), table.start, table.itemsize)
    zeros = np.zeros(len(table.nbytes), dtype=np.int64)
    left = size

    def told(nbytes: int) -> None:
        nonlocal left
        nbytes = min(nbytes, left)
        left -= nbytes
        progress(nbytes)

    try:
        sums = scan_segments(
            FileRows((path,), zeros, table.offset, table.nbytes),
            digest=digest,
            crc32=crc32,
            progress=told,
        )
    except CheckpointError as error:
        progress(left)
        return _unread(nothing, path, error)
    progress(left)
    assert sums is not None
    digests = sums[:num_tensors]
    covered = np.zeros(num_tensors, dtype=np.int64)
    np.add.at(covered, rows.tensor, rows.nbytes // rows.itemsize)
    bad = [
        BadRecord(rank, name, record, found)
        for record, found in zip(records, _record_sums(table, crc32, len(records)), strict=True)
        if record.crc32 != found
    ]
    shard = inventory.shards.get(rank)
    parts: tuple[BadPart, ...] | None = None
    if shard is not None and shard.path == path and shard.digests is not None:
        parts = _bad_parts(inventory, shard, digests, bad)
    return RankScan(
        digests=digests,
        covered=covered,
        bad_records=tuple(bad),
        bad_parts=parts or (),
        damage=tuple(damage),
        num_files=1,
        num_records=len(archive.records),
        tables=() if parts is None else (name,),
        nbytes=size,
    )


class _Cut(NamedTuple):
    """Rows that cover every record: its tensors' runs and what lies between. ``tensor`` is -1 for bytes of none.

    ``record`` is -1 for a run whose bytes another row covers too: only its digest counts.
    """

    offset: Int64Array
    nbytes: Int64Array
    tensor: Int64Array
    start: Int64Array
    itemsize: Int64Array
    record: Int64Array


def _cut(records: list[ZipRecord], rows: RankRows) -> _Cut:
    begin = np.array([record.offset for record in records], dtype=np.int64)
    end = begin + np.array([record.nbytes for record in records], dtype=np.int64)
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
    return _Cut(*(column[order] for column in (offset, nbytes, tensor, start, itemsize, record)))


def _record_sums(table: _Cut, crc32: UInt32Array, count: int) -> list[int]:
    """The checksum of each record, from those of its rows."""
    bounds = np.searchsorted(table.record, np.arange(count + 1)).tolist()
    return [
        int(crc32[first]) if last - first == 1 else join_crc32(crc32[first:last], table.nbytes[first:last])
        for first, last in pairwise(bounds)
    ]


def _bad_parts(
    inventory: Inventory, shard: Shard, digests: UInt64Array, bad: list[BadRecord]
) -> tuple[BadPart, ...] | None:
    """The parameters whose part is not what the file's own table says; None where that table itself is damaged."""
    place = shard.digests
    assert place is not None
    if any(found.record.offset <= place.offset < found.record.offset + found.record.nbytes for found in bad):
        return None
    want = np.frombuffer(read_range(shard.path, place.offset, place.nbytes), dtype="<u8")
    counts = np.array([len(dtypes) for dtypes in inventory.parts[0].dtypes], dtype=np.int64)
    have = np.zeros(len(counts), dtype=np.uint64)
    np.add.at(have, np.repeat(np.arange(len(counts)), counts), digests[: inventory.num_trained])
    return tuple(BadPart(shard.rank, shard.path.name, p) for p in np.flatnonzero(have != want).tolist())


def _fault(name: str, fault: Fault) -> Damage:
    return Damage(name, f"{name}: {fault.what}. The file is damaged.", fault.offset, fault.nbytes)


def _unread(nothing: RankScan, path: FilePath, error: CheckpointError) -> RankScan:
    sentence = str(error).replace(f"{path.parent}/", "")
    return RankScan(nothing.digests, nothing.covered, damage=(Damage(path.name, sentence),), unread=(path.name,))


def _nothing(inventory: Inventory) -> RankScan:
    count = len(inventory.tensors)
    return RankScan(np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.int64))


def _ignore(nbytes: int) -> None:
    pass
