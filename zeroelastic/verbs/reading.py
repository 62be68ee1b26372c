"""Read the tensors of a checkpoint, and compare them with the commit record, or the files with their CRC-32.

Files without digests are those that stock DeepSpeed and FSDP2 write. A record of such a file is read in parts, whose
checksums, made in the pass that reads, are joined to that of the record, which torch.save writes and no reader of torch
compares.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zeroelastic.checkpoint.extents import ExtentTable, stream_seeds
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.saved_state import TensorSet
from zeroelastic.core.digest import ByteArray, UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import CheckpointError, DigestMismatchError, UnsupportedError, some
from zeroelastic.executors.batches import join_crc32_groups
from zeroelastic.executors.dispatch import CopyTable, DigestRows, Ranges, read_segments, scan_segments
from zeroelastic.executors.tables import ProgressFunction, UInt32Array
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.torch_file.zip_check import ZipRecords, check_records
from zeroelastic.verbs.model_tensors import ModelTensor, PartTensor, StoredBuffer

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


NO_LIMIT = 1 << 62

logger = logging.getLogger(__name__)


class Reading:
    """Reads tensors of a checkpoint, of which each is read whole, once or in parts, but where ``check`` is False.

    ``end`` compares their digests with the commit record. Without digests, the records of the files are compared with
    their CRC-32, unless ``by_checksum`` is False. ``max_memory`` is what a verb may use; ``progress`` is
    called with bytes of the files. ``num_compared`` tensors have the recorded digests.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        max_memory: int = NO_LIMIT,
        progress: ProgressFunction | None = None,
        by_checksum: bool = True,
        archives: ArchivesOf | None = None,
    ) -> None:
        self.max_memory, self.progress, self.num_compared = max_memory, progress, 0
        self.is_recorded = checkpoint.inventory.is_recorded
        self._tag_dir, self._inventory = checkpoint.tag_dir, checkpoint.inventory
        self._by_checksum, self._archives = by_checksum, archives or checkpoint.archives
        self._digests: Counter[ModelTensor] = Counter()
        self._read = ReadFiles()

    def read(self, tensor: ModelTensor, start: int = 0, stop: int | None = None, *, check: bool = True) -> ByteArray:
        """The elements of a flattened tensor from ``start`` to ``stop``: shape ``(nbytes,)``.

        Raises UnsupportedError for a buffer that needs too much memory, CheckpointError for a file that has ended.
        """
        source, size = tensor.source, DTYPE_BYTES[tensor.dtype]
        stop = tensor.numel if stop is None else stop
        if isinstance(source, StoredBuffer) and max(tensor.nbytes, source.extent.nbytes) > self.max_memory // 4:
            raise UnsupportedError(
                f"buffer {tensor.name}: has {max(tensor.nbytes, source.extent.nbytes)} bytes, which go through memory. "
                "Give --max-memory at least 4 times as many."
            )
        if stop <= start:
            return np.empty(0, dtype=np.uint8)
        if isinstance(source, PartTensor) or source.stride is None:
            return self._rows(tensor, tensor.rows(start, stop), check, self.progress)
        data = self._rows(tensor, tensor.rows(), check, None)
        if self.progress is not None:
            self.progress((stop - start) * size)
        strides = [stride * size for stride in source.stride]
        view = np.lib.stride_tricks.as_strided(data.view(f"V{size}"), tensor.shape, strides)
        return np.ascontiguousarray(view).reshape(-1).view(np.uint8)[start * size : stop * size]

    def windows(self, tensor: ModelTensor, nbytes: int) -> Iterator[ByteArray]:
        """Yield the bytes of a tensor, of a parameter at most ``nbytes`` at a time."""
        size = DTYPE_BYTES[tensor.dtype]
        step = max(1, tensor.numel if tensor.kind == "buffer" else nbytes // size)
        for start in range(0, tensor.numel, step):
            yield self.read(tensor, start, min(start + step, tensor.numel))

    def _rows(
        self, tensor: ModelTensor, rows: ExtentTable, check: bool, progress: ProgressFunction | None
    ) -> ByteArray:
        data = np.empty(int(rows.nbytes.sum()), dtype=np.uint8)
        zeros, begin = np.zeros_like(rows.file), rows.target_offset * rows.itemsize
        table = CopyTable(rows.file, rows.file_offset, zeros, begin, rows.nbytes)
        digest = self.digest_rows(rows, [tensor]) if check else None
        crc32 = np.zeros(rows.num_rows, dtype=np.uint32) if check and digest is None and self._by_checksum else None
        found = read_segments(table, rows.paths, [data], digest=digest, crc32=crc32, progress=progress).digests
        self.add([tensor], found)
        if crc32 is not None:
            self._read.add(rows.paths, rows.file, rows.file_offset, rows.nbytes, crc32)
        return data

    def digest_rows(self, rows: ExtentTable, tensors: Sequence[ModelTensor]) -> DigestRows | None:
        """How rows of ``tensors``, by ``rows.target``, are digested while they are read; None without digests."""
        names = [tensor.digest_name for tensor in tensors if tensor.kind != "buffer"]
        if not self.is_recorded or not names:
            return None
        return DigestRows(stream_seeds(names), rows.target, rows.start, rows.itemsize)

    def add(self, tensors: Sequence[ModelTensor], digests: UInt64Array | None) -> None:
        """Add the digests of parts of tensors that were read."""
        if digests is not None:
            self._digests.update(dict(zip(tensors, digests.tolist(), strict=True)))

    def end(self) -> None:
        """Raise DigestMismatchError where a tensor or a record is not what was saved; CheckpointError."""
        recorded = self._inventory.digests
        for tensor, total in self._digests.items():
            (name, key), digest = tensor.digest_name, total % (1 << 64)
            expected = recorded.get((name, key))
            if expected is None or expected[0] != tensor.dtype:
                raise CheckpointError(
                    f"{self._tag_dir}: {name}: the files hold {key} in {tensor.dtype}, the commit record "
                    f"{'does not have it' if expected is None else f'says {expected[0]}'}. Files of two saves are "
                    "mixed."
                )
            if expected[1] != digest:
                raise DigestMismatchError(
                    f"{self._tag_dir}: {name}: {key} has digest {digest:016x}; the commit record says "
                    f"{expected[1]:016x}. The files have changed since they were saved."
                )
        self.num_compared += len(self._digests)
        check_files(self._read, self._archives)


def check_source_checksums(checkpoint: Checkpoint, parts: Sequence[TensorSet]) -> None:
    """Compare the files of a checkpoint without a commit record with the CRC-32 that they state.

    They have no digests that could be compared in the pass that copies, so they are read once more. A file that states
    no checksums is named in a warning. Raises CheckpointError with the file and the record.
    """
    if checkpoint.inventory.is_recorded:
        return
    experts = (checkpoint.tag_dir / name for name in checkpoint.expert_files)
    files: dict[FilePath, None] = dict.fromkeys((*checkpoint.optim_files, *checkpoint.model_files, *experts))
    for places in (places for part in parts for rank in part.extents for places in part.extents[rank].values()):
        files.update(dict.fromkeys(places.param_paths or (places.path,)))

    for path in files:
        for begin, records in checkpoint.archives(path):
            check_records(path, records, np.arange(len(records)), at=begin)
            if not records.directory.states_checksums:
                logger.warning("%s: states no CRC-32, so what is read of it is not checked", path)
