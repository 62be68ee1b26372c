"""Compare the bytes that were read of a checkpoint's files with the CRC-32 that their archives state.

For files without digests, which stock DeepSpeed and FSDP2 write. A record is read in parts, whose checksums, made in
the pass that reads, are joined to that of the record, which torch.save writes and no reader of torch compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import CheckpointError, DigestMismatchError, some
from zeroelastic.executors.batches import join_crc32_groups
from zeroelastic.executors.dispatch import Ranges, scan_segments
from zeroelastic.executors.tables import UInt32Array
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.zip_check import ZipRecords

_FREE_GAPS = 64 << 10
_GAPS_SHARE = 8

ArchivesOf = Callable[[FilePath], Iterable[tuple[int, ZipRecords]]]
"""The archives of a file: the byte at which each begins, and its records."""


class ReadRanges(NamedTuple):
    """Ranges of a file that were read: columns of shape ``(num_ranges,)``, in bytes, by offset, the longest first."""

    offset: Int64Array
    nbytes: Int64Array
    crc32: UInt32Array

    @classmethod
    def joined(cls, parts: Sequence[ReadRanges]) -> ReadRanges:
        """All of several, each once: a copy of a tensor may be read again."""
        offset, nbytes, crc32 = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((crc32, -nbytes, offset))
        offset, nbytes, crc32 = offset[order], nbytes[order], crc32[order]
        again = (np.diff(offset) == 0) & (np.diff(nbytes) == 0) & (crc32[1:] == crc32[:-1])
        if again.any():
            kept = np.flatnonzero(~np.concatenate(([False], again)))
            offset, nbytes, crc32 = offset[kept], nbytes[kept], crc32[kept]
        return cls(offset, nbytes, crc32)


class ReadFiles(dict[FilePath, ReadRanges]):
    """By file, the ranges that were read of it."""

    def add(
        self, paths: Sequence[FilePath], file: Int64Array, offset: Int64Array, nbytes: Int64Array, crc32: UInt32Array
    ) -> None:
        """Add rows: ``nbytes[i]`` bytes at ``offset[i]`` of ``paths[file[i]]``, whose CRC-32 is ``crc32[i]``."""
        order = np.argsort(file, kind="stable")
        order = order[nbytes[order] > 0]
        bounds = np.flatnonzero(np.diff(file[order], prepend=-1, append=-1))
        for begin, end in pairwise(bounds.tolist()):
            some = order[begin:end]
            path = paths[int(file[some[0]])]
            found = ReadRanges(offset[some], nbytes[some], crc32[some])
            self[path] = ReadRanges.joined([self[path], found] if path in self else [found])


def check_files(files: Mapping[FilePath, ReadRanges], archives: ArchivesOf) -> None:
    """Compare what was read of files with the checksums of their records; ``archives`` is ``Checkpoint.archives``.

    Raises DigestMismatchError, naming the first records that have another checksum, and what ``faults_of_file`` raises.
    """
    faults = [fault for path, read in files.items() for fault in faults_of_file(path, archives(path), read)]
    if faults:
        raise DigestMismatchError(some(faults, separator=" "))


def faults_of_file(path: FilePath, archives: Iterable[tuple[int, ZipRecords]], read: ReadRanges) -> list[str]:
    """Sentences about records of a file that have another checksum; of its archives, and the bytes where they begin.

    Raises CheckpointError where bytes were read that are in none of their records, and as ``scan_segments``.
    """
    faults: list[str] = []
    left = len(read.offset)
    for begin, records in archives:
        some, found = faults_of_archive(path, records, begin, read)
        left -= some
        faults += found
    if left:
        raise CheckpointError(
            f"{path}: {left} of {len(read.offset)} ranges that were read are in no record of the file. It was changed "
            "while it was read."
        )
    return faults


def faults_of_archive(path: FilePath, records: ZipRecords, at: int, read: ReadRanges) -> tuple[int, list[str]]:
    """How many ranges are of an archive, which begins at byte ``at`` of a file, and sentences about damaged records.

    What lies between the ranges of a record, such as padding, is read here where it is little; a record of which more
    was not read is not compared. ``read`` may have ranges of other archives, and the same range more than once. Raises
    as ``scan_segments``.
    """
    num_ranges = 0
    faults: list[str] = []
    whole: list[_Whole] = []
    ends = read.offset + read.nbytes
    begins = records.offset + at
    first = np.searchsorted(read.offset, begins)
    last = np.searchsorted(read.offset, begins + records.nbytes)
    for number in np.flatnonzero(last > first).tolist():
        some = slice(int(first[number]), int(last[number]))
        num_ranges += some.stop - some.start
        begin, nbytes = int(begins[number]), int(records.nbytes[number])
        chosen, contradicted = _without_overlap(read, some, begin)
        if contradicted:
            faults.append(f"{path}: bytes at {contradicted[0]} were not the same the second time that they were read.")
        low = np.concatenate(([begin], ends[chosen]))
        gaps = np.concatenate((read.offset[chosen], [begin + nbytes])) - low
        if records.directory.states_checksums and int(gaps.sum()) <= max(_FREE_GAPS, nbytes // _GAPS_SHARE):
            whole.append(_Whole(number, chosen, low, gaps))
    gap_sums = _scan(path, whole) if whole else iter(())
    for number, chosen, _, gaps in whole:
        # a gap, a range, a gap, ..., a gap
        sums, lengths = np.empty(2 * len(chosen) + 1, dtype=np.uint32), np.empty(2 * len(chosen) + 1, dtype=np.int64)
        sums[::2], lengths[::2] = next(gap_sums), gaps
        sums[1::2], lengths[1::2] = read.crc32[chosen], read.nbytes[chosen]
        found = int(join_crc32_groups(np.zeros(len(sums), dtype=np.int64), sums, lengths, 1)[0])
        if found != int(records.crc32[number]):
            faults.append(f"{path}: {records.contradiction(number, found, at=at)}")
    return num_ranges, faults


class _Whole(NamedTuple):
    """A record: its number, the ranges of it that were read, and what lies before each of them and behind the last."""

    number: int
    ranges: Int64Array
    gap_begin: Int64Array
    gap_bytes: Int64Array


def _without_overlap(read: ReadRanges, some: slice, begin: int) -> tuple[Int64Array, list[int]]:
    """Ranges that do not overlap, from ``begin`` on, and where two that are the same have other checksums."""
    offsets, lengths, _ = (column[some] for column in read)
    if (offsets[1:] >= (offsets + lengths)[:-1]).all():
        return np.arange(some.start, some.stop), []
    chosen: list[int] = []
    contradicted: list[int] = []
    end = begin
    columns = zip(*(column[some].tolist() for column in read), strict=True)
    for number, (offset, nbytes, crc32) in enumerate(columns, some.start):
        if offset >= end:
            chosen.append(number)
            end = offset + nbytes
        elif (offset, nbytes) == (int(read.offset[chosen[-1]]), int(read.nbytes[chosen[-1]])):
            contradicted += [offset] if crc32 != int(read.crc32[chosen[-1]]) else []
    return np.array(chosen, dtype=np.int64), contradicted


def _scan(path: FilePath, whole: Sequence[_Whole]) -> Iterator[UInt32Array]:
    """The checksums of the gaps of each record, which are read here."""
    bounds = np.cumsum([0, *(len(record.gap_bytes) for record in whole)])
    begin = np.concatenate([record.gap_begin for record in whole])
    nbytes = np.concatenate([record.gap_bytes for record in whole])
    sums = np.zeros(len(nbytes), dtype=np.uint32)
    scan_segments(Ranges(np.zeros_like(begin), begin, nbytes), [path], crc32=sums)
    return (sums[low:high] for low, high in pairwise(bounds.tolist()))
