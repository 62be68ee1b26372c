"""Fill new files from saved ones, in one pass that moves, converts, digests and computes checksums.

``NewFiles`` are the files, whose layout is known; ``Archives`` are such files as torch.save writes. ``copy_tensors``
fills slots of them with whole tensors, which it gathers from the files of all saved ranks.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zeroelastic.checkpoint.extents import ExtentTable, stream_seeds
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.read_ranges import ArchivesOf, ReadFiles, check_files
from zeroelastic.checkpoint.saved_state import SavedState, SavedTensor
from zeroelastic.core.digest import ByteArray, UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import CheckpointError, DigestMismatchError
from zeroelastic.executors.dispatch import (
    Cast,
    CopyTable,
    DigestRows,
    UInt32Array,
    batches,
    join_crc32,
    join_crc32_groups,
    move_segments,
    read_segments,
    write_segments,
)
from zeroelastic.executors.numpy_executor import cast_bytes
from zeroelastic.executors.tables import ProgressFunction, cast_between, cast_itemsizes
from zeroelastic.io.atomic import write_at
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.archive import Archive
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.torch_file.tree import Storage
from zeroelastic.torch_file.zip_check import check_records
from zeroelastic.verbs.model_tensors import Buffer, ModelTensor, Place, read_buffer

MINIMUM_MEMORY = 16 << 20

logger = logging.getLogger(__name__)

_ROW_BYTES = 600  # of the tables that one row is in, and of what they are computed from
_NUMBERS = {
    "bool": "?",
    "uint8": "u1",
    "int8": "i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "float64": "<f8",
}
"""The dtypes that numpy converts to float32, as numpy calls them."""


class NewFiles:
    """Files that are there and get their payload: ``slots[i]`` is the file and the byte where slot i begins.

    With ``checksums`` the CRC-32 of what is written is computed.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        slots: Sequence[tuple[int, int]],
        *,
        checksums: bool = False,
        threads: int | None = None,
    ) -> None:
        self.paths = paths
        self._slots = np.array(slots, dtype=np.int64).reshape(len(slots), 2)
        self._checksums, self._threads = checksums, threads
        self._runs: list[tuple[Int64Array, Int64Array, Int64Array, UInt32Array]] = []

    def move(
        self,
        rows: ExtentTable,
        slots: Int64Array,
        *,
        cast: Cast = "none",
        digest: DigestRows | None = None,
        progress: ProgressFunction | None = None,
    ) -> UInt64Array | None:
        """Move rows of files: row i into slot ``slots[rows.target[i]]``; returns the digests that were asked for.

        Raises CheckpointError for a source, OSError for a destination, as ``move_segments``.
        """
        src_itemsize, dst_itemsize = cast_itemsizes(cast)
        begin = rows.target_offset * rows.itemsize // src_itemsize * dst_itemsize
        nbytes = rows.nbytes // src_itemsize * dst_itemsize
        file, offset, crc32 = self._place(slots[rows.target], begin, nbytes)
        table = CopyTable(rows.file, rows.file_offset, file, offset, rows.nbytes)
        return move_segments(
            table,
            rows.paths,
            self.paths,
            digest=digest,
            crc32=crc32,
            cast=cast,
            threads=self._threads,
            progress=progress,
        )

    def write_rows(
        self, data: ByteArray, offset: Int64Array, nbytes: Int64Array, slots: Int64Array, begin: Int64Array
    ) -> None:
        """Write runs of ``data``: run i into slot ``slots[i]``, from its byte ``begin[i]`` on."""
        file, dst_offset, crc32 = self._place(slots, begin, nbytes)
        table = CopyTable(np.zeros_like(file), offset, file, dst_offset, nbytes)
        write_segments(table, [data], self.paths, crc32=crc32)

    def write(self, slot: int, data: bytes) -> None:
        """Write a slot whose bytes are known."""
        file, offset = self._slots[slot].tolist()
        write_at(self.paths[file], data, offset)
        run, crc32 = np.array([slot, 0, len(data)], dtype=np.int64), np.array([zlib.crc32(data)], dtype=np.uint32)
        self._runs.append((run[:1], run[1:2], run[2:], crc32))

    def _place(
        self, slots: Int64Array, begin: Int64Array, nbytes: Int64Array
    ) -> tuple[Int64Array, Int64Array, UInt32Array | None]:
        """The file and the byte of each run that is about to be written, and where its checksum goes."""
        file, offset = np.ascontiguousarray(self._slots[slots].T)
        if not self._checksums:
            return file, offset + begin, None
        crc32 = np.zeros(len(slots), dtype=np.uint32)
        self._runs.append((slots, begin, nbytes, crc32))
        return file, offset + begin, crc32

    def checksums(self, nbytes: Sequence[int]) -> list[int]:
        """The CRC-32 of each slot, of ``nbytes[i]`` bytes: zeros where nothing was written."""
        slots = np.arange(len(nbytes), dtype=np.int64)
        ends = (slots, np.array(nbytes, dtype=np.int64), np.zeros_like(slots), np.zeros(len(nbytes), dtype=np.uint32))
        slot, begin, length, crc32 = (np.concatenate(column) for column in zip(*self._runs, ends, strict=True))
        order = np.lexsort((length, begin, slot))
        slot, begin, length, crc32 = slot[order], begin[order], length[order], crc32[order]
        before = np.concatenate(([0], (begin + length)[:-1]))
        before[np.flatnonzero(np.diff(slot, prepend=-1))] = 0  # of the first run of a slot
        gap = begin - before
        assert (gap >= 0).all(), "runs of a slot overlap"
        zeros = np.zeros_like(crc32)
        for i in np.flatnonzero(gap).tolist():
            zeros[i] = _zeros_crc32(int(gap[i]))
        joined = join_crc32_groups(
            np.repeat(slot, 2),
            np.column_stack((zeros, crc32)).reshape(-1),
            np.column_stack((gap, length)).reshape(-1),
            len(nbytes),
        )
        return [int(value) for value in joined]


class Archives(NewFiles):
    """torch.save files that are being written: each path with its graph, whose storages are the slots.

    Raises OSError, UnsupportedError as ``Archive``.
    """

    def __init__(self, graphs: Mapping[Path, object], *, threads: int | None = None) -> None:
        self._archives = [Archive(path, graph) for path, graph in graphs.items()]
        places = {
            storage: (number, offset)
            for number, archive in enumerate(self._archives)
            for storage, offset in archive.offsets.items()
        }
        self._numbers = {storage: i for i, storage in enumerate(places)}
        super().__init__(list(graphs), list(places.values()), checksums=True, threads=threads)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each finished file, by its name."""
        return {archive.path.name: archive.nbytes for archive in self._archives}

    def slots(self, storages: Sequence[Storage]) -> Int64Array:
        """The slots of some storages: shape ``(num_storages,)``."""
        return np.array([self._numbers[storage] for storage in storages], dtype=np.int64)

    def copy_rest(self) -> None:
        """Write the storages whose bytes are known, and copy those that were read from other files."""
        kept: list[int] = []
        paths: dict[FilePath, int] = {}
        runs: list[tuple[int, int, int]] = []
        for storage, slot in self._numbers.items():
            if storage.nbytes == 0:
                continue
            if storage.data is not None:
                self.write(slot, storage.data)
            elif (extent := storage.extent) is not None:
                kept.append(slot)
                runs.append((paths.setdefault(extent.path, len(paths)), extent.offset, extent.nbytes))
        if runs:
            file, offset, nbytes = np.ascontiguousarray(np.array(runs, dtype=np.int64).T)
            number, zero = np.arange(len(kept), dtype=np.int64), np.zeros_like(file)
            rows = ExtentTable(tuple(paths), file, offset, number, zero, nbytes, zero + 1, zero, zero)
            self.move(rows, np.array(kept, dtype=np.int64))

    def finish(self, *, sync: bool = False) -> None:
        """Write the headers and checksums of all files; ``sync`` flushes them to their device. Raises OSError."""
        checksums = self.checksums([storage.nbytes for storage in self._numbers])
        for archive in self._archives:
            own = {storage: checksums[self._numbers[storage]] for storage in archive.offsets if storage.nbytes > 0}
            archive.finish(own, sync=sync)


def write_archive(path: Path, root: object, *, sync: bool = False) -> None:
    """Write a torch.save file whose payload is known, or in other files. Raises OSError, CheckpointError."""
    archives = Archives({path: root})
    archives.copy_rest()
    archives.finish(sync=sync)


class RecordedDigests:
    """The digests of a checkpoint's commit record, if it is ``known``; ``num_compared`` agreed with what was read."""

    def __init__(self, source: Checkpoint) -> None:
        self.known, self.num_compared = source.record is not None, 0
        self._tag_dir = source.tag_dir
        self._digests = {} if source.record is None else source.record.params.digests

    def seeds(self, tensors: Sequence[SavedTensor]) -> UInt64Array | None:
        """The seeds with which tensors are digested while they are read; None where there is no record."""
        return stream_seeds([(tensor.param.name, tensor.key) for tensor in tensors]) if self.known else None

    def compare(self, tensors: Sequence[SavedTensor], found: Sequence[int]) -> None:
        """Compare the digests of tensors. Raises DigestMismatchError; CheckpointError for one that has no digest."""
        for (param, key, dtype), digest in zip(tensors, found, strict=True):
            expected = self._digests.get((param.name, key))
            if expected is None or expected[0] != dtype:
                raise CheckpointError(
                    f"{self._tag_dir}: {param.name}: the files hold {key} in {dtype}, the commit record "
                    f"{'does not have it' if expected is None else f'says {expected[0]}'}. Files of two saves are "
                    "mixed."
                )
            if expected[1] != digest:
                raise DigestMismatchError(
                    f"{self._tag_dir}: {param.name}: {key} has digest {digest:016x}; the commit record says "
                    f"{expected[1]:016x}. The files have changed since they were saved."
                )
        self.num_compared += len(tensors)


class SourceCheck:
    """What is read of a checkpoint, against its digests, and where it has none, against the CRC-32 of its files."""

    def __init__(self, digests: RecordedDigests, archives: ArchivesOf) -> None:
        self._digests, self._archives = digests, archives
        self.read = ReadFiles()
        self._sums: Counter[SavedTensor] = Counter()

    def fill(
        self,
        buffer: ByteArray,
        rows: ExtentTable,
        begin: Int64Array,
        tensors: Sequence[SavedTensor],
        progress: ProgressFunction | None = None,
    ) -> None:
        """Read rows to the bytes ``begin`` of a buffer: of ``tensors``, by ``rows.target``; without these unchecked."""
        table = CopyTable(rows.file, rows.file_offset, np.zeros_like(begin), begin, rows.nbytes)
        digest = _digest_rows(rows, self._digests.seeds(tensors) if tensors else None)
        crc32 = np.zeros(rows.num_rows, dtype=np.uint32) if tensors and digest is None else None
        found = read_segments(table, rows.paths, [buffer], digest=digest, crc32=crc32, progress=progress).digests
        if crc32 is not None:
            self.read.add(rows.paths, rows.file, rows.file_offset, rows.nbytes, crc32)
        elif found is not None:
            self._sums.update({tensors[i]: int(found[i]) for i in np.unique(rows.target).tolist()})

    def end(self) -> None:
        """Raise DigestMismatchError where a tensor, all of which was read, or a record is not what was saved."""
        self._digests.compare([*self._sums], [number % (1 << 64) for number in self._sums.values()])
        check_files(self.read, self._archives)


def check_source_checksums(state: SavedState) -> None:
    """Compare the files of a checkpoint without a commit record with the CRC-32 that they state.

    They have no digests that could be compared in the pass that copies, so they are read once more. A file that states
    no checksums is named in a warning. Raises CheckpointError with the file and the record.
    """
    checkpoint = state.checkpoint
    if checkpoint.record is not None:
        return
    experts = (checkpoint.tag_dir / name for name in checkpoint.expert_files)
    files: dict[FilePath, None] = dict.fromkeys((*checkpoint.optim_files, *checkpoint.model_files, *experts))
    for places in (places for part in state.parts for rank in part.extents for places in part.extents[rank].values()):
        files.update(dict.fromkeys(places.param_paths or (places.path,)))

    for path in files:
        for begin, records in checkpoint.archives(path):
            check_records(path, records, np.arange(len(records)), at=begin)
            if not records.directory.states_checksums:
                logger.warning("%s: states no CRC-32, so what is read of it is not checked", path)


@dataclass(frozen=True, slots=True)
class Reading:
    """How the tensors of a checkpoint are read: in ``max_memory`` bytes, and compared with ``digests``.

    ``progress`` is called with bytes of the sources.
    """

    state: SavedState
    digests: RecordedDigests
    max_memory: int
    progress: ProgressFunction | None


class TensorCopy(NamedTuple):
    """One tensor to copy, the dtype to write, and the slot for it."""

    tensor: ModelTensor
    dtype: str
    slot: int


def copy_tensors(files: NewFiles, copies: Sequence[TensorCopy], reading: Reading) -> None:
    """Fill slots of files with whole tensors, converted to their dtypes; compare what is read with the digests.

    Memory: that of ``reading``, most of it tables where there are many small parameters and many ranks. Raises
    DigestMismatchError naming the parameter and the state key, UnsupportedError for a buffer that needs more memory,
    CheckpointError and OSError as ``move_segments``.
    """
    classes: dict[tuple[int, str, str, str, int], list[TensorCopy]] = {}
    times: dict[Place, int] = {}
    for copy in copies:
        place = copy.tensor.source
        if isinstance(place, Place):
            # Copies that are moved together have one conversion, and a parameter once.
            number = times[place] = times.get(place, -1) + 1
            kind = (place.part, place.key, copy.tensor.dtype, copy.dtype, number)
            classes.setdefault(kind, []).append(copy)
        elif copy.tensor.numel:
            _copy_buffer(files, copy, place, reading)
    for (part_number, key, saved, dtype, _), members in classes.items():
        part = reading.state.parts[part_number]
        # A parameter has one row of each rank that holds some of it.
        at_once = max(1, reading.max_memory // 2 // _ROW_BYTES // part.layout.world_size)
        for begin in range(0, len(members), at_once):
            together = members[begin : begin + at_once]
            params = [copy.tensor.source.param for copy in together if isinstance(copy.tensor.source, Place)]
            tensors, rows = part.whole_rows(params, keys=(key,))
            seeds = reading.digests.seeds(tensors)
            slots = np.array([copy.slot for copy in together], dtype=np.int64)
            cast = cast_between(saved, dtype)
            if cast is None:
                found = _move_through_memory(files, rows, slots, (saved, dtype), seeds, reading)
            else:
                digest = _digest_rows(rows, seeds)
                found = files.move(rows, slots, cast=cast, digest=digest, progress=reading.progress)
            if found is not None:
                reading.digests.compare(tensors, found.tolist())


def _copy_buffer(files: NewFiles, copy: TensorCopy, place: Buffer, reading: Reading) -> None:
    """Copy one buffer of the module; through memory where it is not one run, or no executor converts it."""
    tensor, cast = copy.tensor, cast_between(copy.tensor.dtype, copy.dtype)
    if cast is None or place.stride is not None:
        data = convert_elements(read_buffer(tensor, limit=reading.max_memory // 4), tensor.dtype, copy.dtype)
        files.write(copy.slot, data.tobytes())
        if reading.progress is not None:
            reading.progress(tensor.nbytes)
        return
    row = (0, place.extent.offset, 0, 0, tensor.numel, DTYPE_BYTES[tensor.dtype], 0, 0)
    rows = ExtentTable((place.extent.path,), *(np.array([value], dtype=np.int64) for value in row))
    files.move(rows, np.array([copy.slot], dtype=np.int64), cast=cast, progress=reading.progress)


def _move_through_memory(
    files: NewFiles,
    rows: ExtentTable,
    slots: Int64Array,
    dtypes: tuple[str, str],
    seeds: UInt64Array | None,
    reading: Reading,
) -> UInt64Array | None:
    """Convert rows in two steps, through float32, as torch does."""
    totals = None if seeds is None else np.zeros(len(seeds), dtype=np.uint64)
    src_itemsize, dst_itemsize = (DTYPE_BYTES[dtype] for dtype in dtypes)
    for batch in batches(rows.nbytes, max(8, reading.max_memory // 8)):
        some = rows.pieces(batch.row, batch.start // src_itemsize, batch.nbytes // src_itemsize)
        buffer = np.empty(int(batch.offset[-1] + batch.nbytes[-1]), dtype=np.uint8)
        zero = np.zeros(some.num_rows, dtype=np.int64)
        table = CopyTable(some.file, some.file_offset, zero, batch.offset, some.nbytes)
        digest = _digest_rows(some, seeds)
        found = read_segments(table, some.paths, [buffer], digest=digest, progress=reading.progress).digests
        made = convert_elements(buffer, *dtypes)
        offset, numel = batch.offset // src_itemsize * dst_itemsize, some.numel * dst_itemsize
        files.write_rows(made, offset, numel, slots[some.target], some.target_offset * dst_itemsize)
        if totals is not None and found is not None:
            totals += found
    return totals


def _digest_rows(rows: ExtentTable, seeds: UInt64Array | None) -> DigestRows | None:
    return None if seeds is None else DigestRows(seeds, rows.target, rows.start, rows.itemsize)


def convertible(src: str, dst: str) -> bool:
    """Whether ``convert_elements`` takes elements of one dtype to another."""
    floats = ("float32", "bfloat16", "float16")
    return src == dst or (dst in floats and (src in floats or src in _NUMBERS))


def convert_elements(data: ByteArray, src: str, dst: str) -> ByteArray:
    """Elements of dtype ``src`` in dtype ``dst``, through float32 where no single conversion exists."""
    if src != dst and src in _NUMBERS:
        with np.errstate(over="ignore"):
            data, src = data.view(_NUMBERS[src]).astype("<f4").view(np.uint8), "float32"
    for step in ("float32", dst):
        if src == dst:
            break
        cast = cast_between(src, step)
        assert cast is not None, f"no conversion of {src} to {step}"
        if cast != "none":
            src_itemsize, dst_itemsize = cast_itemsizes(cast)
            made = np.empty(len(data) // src_itemsize * dst_itemsize, dtype=np.uint8)
            cast_bytes(cast, data, made)
            data, src = made, step
    return data


@functools.lru_cache(maxsize=4096)
def _zeros_crc32(count: int) -> int:
    """The checksum of ``count`` zero bytes."""
    if count <= 1 << 16:
        return zlib.crc32(bytes(count))
    half = _zeros_crc32(count // 2)
    rest = _zeros_crc32(count - count // 2)
    lengths = np.array([count // 2, count - count // 2], dtype=np.int64)
    return join_crc32(np.array([half, rest], dtype=np.uint32), lengths)
