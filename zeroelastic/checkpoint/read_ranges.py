"""What was read of the files of a checkpoint, with its CRC-32, against the checksums that their archives state.

For files without digests: those of stock DeepSpeed and of FSDP2. Every rank reads parts of a record. Their checksums,
made in the pass that reads, are joined to that of the record, which torch.save writes and no reader of torch compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import CheckpointError, DigestMismatchError, some
from zeroelastic.executors.batches import join_crc32_groups
from zeroelastic.executors.dispatch import Executor, Ranges, scan_segments
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
        """All of several, each once: ranks that have copies of a tensor read the same."""
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


@dataclass(frozen=True, slots=True)
class Comparison:
    """Records whose content was compared with their checksums, and others of which a part was read.

    ``num_ranges`` ranges are of one of them. ``num_partial``: too much of them was not read. ``num_unstated``: their
    archives state no checksums. ``faults`` are sentences. ``bytes_read`` bytes were read for the comparison alone.
    """

    num_ranges: int = 0
    num_compared: int = 0
    num_partial: int = 0
    num_unstated: int = 0
    faults: tuple[str, ...] = ()
    bytes_read: int = 0

    def check(self) -> None:
        """Raise DigestMismatchError, naming the first records, where any has another checksum."""
        if self.faults:
            raise DigestMismatchError(some(self.faults, separator=" "))

    def plus(self, other: Comparison) -> Comparison:
        """Both together."""
        return Comparison(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def compare_file(
    path: FilePath, archives: Iterable[tuple[int, ZipRecords]], read: ReadRanges, executor: Executor = "auto"
) -> Comparison:
    """``compare`` with each archive of a file and the byte at which it begins.

    Raises CheckpointError where bytes were read that are in none of their records, and as ``scan_segments``.
    """
    total = Comparison()
    for begin, records in archives:
        total = total.plus(compare(path, records, begin, read, executor))
    if total.num_ranges != len(read.offset):
        outside = f"{len(read.offset) - total.num_ranges} of {len(read.offset)}"
        raise CheckpointError(
            f"{path}: {outside} ranges that were read are in no record of the file. It was changed while it was read."
        )
    return total


def compare_files(
    files: Mapping[FilePath, ReadRanges], archives: ArchivesOf, executor: Executor = "auto"
) -> Comparison:
    """``compare_file`` with each file, whose archives are ``Checkpoint.archives``. Raises as that."""
    total = Comparison()
    for path, read in files.items():
        total = total.plus(compare_file(path, archives(path), read, executor))
    return total


def compare(path: FilePath, records: ZipRecords, at: int, read: ReadRanges, executor: Executor = "auto") -> Comparison:
    """Compare what was read of an archive, which begins at byte ``at`` of a file, with its checksums.

    What lies between the ranges of a record, such as padding, is read here where it is little. ``read`` may have
    ranges of other archives, and the same range more than once. Raises as ``scan_segments``.
    """
    num_ranges, num_compared, num_partial, num_unstated = 0, 0, 0, 0
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
            faults.append(f"{path}: bytes at {contradicted[0]} were not the same for two ranks that read them.")
        low = np.concatenate(([begin], ends[chosen]))
        gaps = np.concatenate((read.offset[chosen], [begin + nbytes])) - low
        if not records.directory.states_checksums:
            num_unstated += 1
        elif int(gaps.sum()) > max(_FREE_GAPS, nbytes // _GAPS_SHARE):
            num_partial += 1
        else:
            num_compared += 1
            whole.append(_Whole(number, chosen, low, gaps))
    gap_sums, bytes_read = _scan(path, whole, executor) if whole else (iter(()), 0)
    for number, chosen, _, gaps in whole:
        # a gap, a range, a gap, ..., a gap
        sums, lengths = np.empty(2 * len(chosen) + 1, dtype=np.uint32), np.empty(2 * len(chosen) + 1, dtype=np.int64)
        sums[::2], lengths[::2] = next(gap_sums), gaps
        sums[1::2], lengths[1::2] = read.crc32[chosen], read.nbytes[chosen]
        found = int(join_crc32_groups(np.zeros(len(sums), dtype=np.int64), sums, lengths, 1)[0])
        if found != int(records.crc32[number]):
            faults.append(f"{path}: {records.contradiction(number, found, at=at)}")
    return Comparison(num_ranges, num_compared, num_partial, num_unstated, tuple(faults), bytes_read)


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


def _scan(path: FilePath, whole: Sequence[_Whole], executor: Executor) -> tuple[Iterator[UInt32Array], int]:
    """The checksums of the gaps of each record, and their bytes, which are read here."""
    bounds = np.cumsum([0, *(len(record.gap_bytes) for record in whole)])
    empty = np.empty(0, dtype=np.int64)
    begin = np.concatenate([empty, *(record.gap_begin for record in whole)])
    nbytes = np.concatenate([empty, *(record.gap_bytes for record in whole)])
    sums = np.zeros(len(nbytes), dtype=np.uint32)
    scan_segments(Ranges(np.zeros_like(begin), begin, nbytes), [path], crc32=sums, executor=executor)
    return (sums[low:high] for low, high in pairwise(bounds.tolist())), int(nbytes.sum())
