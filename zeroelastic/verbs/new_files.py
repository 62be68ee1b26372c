"""Fill new files from saved ones, in one pass that moves, converts, digests and computes checksums.

``NewFiles`` are the files, whose layout is known; ``NewArchives`` are such files as torch.save writes. ``copy_tensors``
fills slots of them with whole tensors, which it gathers from the files of all saved ranks.
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zeroelastic.checkpoint.extents import ExtentTable
from zeroelastic.core.digest import ByteArray, UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.executors.dispatch import (
    Cast,
    CopyTable,
    DigestRows,
    UInt32Array,
    join_crc32,
    join_crc32_groups,
    move_segments,
)
from zeroelastic.executors.numpy_executor import cast_bytes
from zeroelastic.executors.tables import ProgressFunction, cast_between, cast_itemsizes
from zeroelastic.io.atomic import write_at
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.archive import Archive
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.torch_file.tree import Storage
from zeroelastic.verbs.model_tensors import ModelTensor, PartTensor, StoredBuffer
from zeroelastic.verbs.reading import Reading

MINIMUM_MEMORY = 16 << 20

_ROW_BYTES = 600  # of the tables that one row is in, and of what they are computed from
_FLOATS = ("float32", "bfloat16", "float16")


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
        at = slots[rows.target]
        crc32 = np.zeros(rows.num_rows, dtype=np.uint32) if self._checksums else None
        if crc32 is not None:
            self._runs.append((at, begin, nbytes, crc32))
        file, offset = np.ascontiguousarray(self._slots[at].T)
        table = CopyTable(rows.file, rows.file_offset, file, offset + begin, rows.nbytes)
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

    def write(self, slot: int, data: bytes, begin: int = 0) -> None:
        """Write bytes of a slot, from its byte ``begin`` on."""
        file, offset = self._slots[slot].tolist()
        write_at(self.paths[file], data, offset + begin)
        run, crc32 = np.array([slot, begin, len(data)], dtype=np.int64), np.array([zlib.crc32(data)], dtype=np.uint32)
        self._runs.append((run[:1], run[1:2], run[2:], crc32))

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


class NewArchives(NewFiles):
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
    archives = NewArchives({path: root})
    archives.copy_rest()
    archives.finish(sync=sync)


class TensorCopy(NamedTuple):
    """One tensor to copy, the dtype to write, and the slot for it."""

    tensor: ModelTensor
    dtype: str
    slot: int

    @property
    def nbytes(self) -> int:
        """Bytes in the new file."""
        return self.tensor.numel * DTYPE_BYTES[self.dtype]


def copy_tensors(files: NewFiles, copies: Sequence[TensorCopy], reading: Reading) -> None:
    """Fill slots of files with whole tensors, converted to their dtypes.

    Memory: that of ``reading``, most of it tables where there are many small parameters and many ranks. Raises
    UnsupportedError for a buffer that needs more memory, CheckpointError and OSError as ``move_segments``.
    """
    classes: dict[tuple[int, str, str, str, int], list[TensorCopy]] = {}
    times: Counter[tuple[int, PartTensor]] = Counter()
    for copy in copies:
        tensor, place = copy.tensor, copy.tensor.source
        is_strided = isinstance(place, StoredBuffer) and place.stride is not None
        if is_strided or cast_between(tensor.dtype, copy.dtype) is None:
            _copy_through_memory(files, copy, reading)
        elif isinstance(place, StoredBuffer):
            _move_together(files, [copy], copy.tensor.rows(), reading)
        else:
            # Copies that are moved together have one conversion, and a parameter once.
            number = times[id(place.part), place]
            times[id(place.part), place] += 1
            kind = (id(place.part), place.key, tensor.dtype, copy.dtype, number)
            classes.setdefault(kind, []).append(copy)
    for members in classes.values():
        places = [copy.tensor.source for copy in members if isinstance(copy.tensor.source, PartTensor)]
        part, key = places[0].part, places[0].key
        # A parameter has one row of each rank that holds some of it.
        at_once = max(1, reading.max_memory // 2 // _ROW_BYTES // part.layout.world_size)
        for begin in range(0, len(members), at_once):
            params = [place.param for place in places[begin : begin + at_once]]
            rows = part.whole_rows(params, keys=(key,))[1]
            _move_together(files, members[begin : begin + at_once], rows, reading)


def _move_together(files: NewFiles, copies: Sequence[TensorCopy], rows: ExtentTable, reading: Reading) -> None:
    """Move rows of tensors, by ``rows.target``, from file to file, with one conversion."""
    slots = np.array([copy.slot for copy in copies], dtype=np.int64)
    tensors, cast = [copy.tensor for copy in copies], cast_between(copies[0].tensor.dtype, copies[0].dtype)
    assert cast is not None, "other conversions go through memory"
    digest = reading.digest_rows(rows, tensors)
    reading.add(tensors, files.move(rows, slots, cast=cast, digest=digest, progress=reading.progress))


def _copy_through_memory(files: NewFiles, copy: TensorCopy, reading: Reading) -> None:
    """Copy a tensor that is not contiguous, or that is converted in two steps, through float32, as torch does."""
    begin = 0
    for data in reading.windows(copy.tensor, reading.max_memory // 8):
        made = convert_elements(data, copy.tensor.dtype, copy.dtype)
        files.write(copy.slot, made.tobytes(), begin)
        begin += len(made)


def convertible(src: str, dst: str) -> bool:
    """Return whether ``convert_elements`` takes elements of one dtype to another."""
    return src == dst or (dst in _FLOATS and src in (*_FLOATS, "float64"))


def convert_elements(data: ByteArray, src: str, dst: str) -> ByteArray:
    """Elements of dtype ``src`` in dtype ``dst``, through float32 where no single conversion exists."""
    if src != dst and src == "float64":
        with np.errstate(over="ignore"):
            data, src = data.view("<f8").astype("<f4").view(np.uint8), "float32"
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
