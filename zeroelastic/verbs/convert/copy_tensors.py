"""Copy whole tensors from the files of all saved ranks into new files: one pass reads, converts and digests.

``executors.move_segments`` copies from file to file. Conversions in two steps (bfloat16 to float16, and from float64)
go through a buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zeroelastic.checkpoint.extents import ExtentTable, stream_seeds
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.saved_state import SavedPart
from zeroelastic.core.digest import ByteArray, UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import CheckpointError, DigestMismatchError, UnsupportedError
from zeroelastic.executors.cast import cast_bytes
from zeroelastic.executors.dispatch import (
    Cast,
    CopyTable,
    DigestRows,
    ReadTable,
    UInt32Array,
    batches,
    join_crc32_groups,
    move_segments,
    read_segments,
    write_segments,
)
from zeroelastic.executors.progress import ProgressFunction
from zeroelastic.executors.tables import cast_between, cast_itemsizes
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import DTYPE_BYTES

MINIMUM_MEMORY = 16 << 20

_ROW_BYTES = 600  # of the tables that one row is in, and of what they are computed from


class TensorCopy(NamedTuple):
    """One tensor to copy: parameter, state key, dtype to write, destination file, and byte offset there."""

    param: int
    key: str
    dtype: str
    file: int
    offset: int


class CopyResult(NamedTuple):
    """The result: how many digests were compared with the record, and the CRC-32 of each copy if asked for."""

    num_compared: int
    crc32: UInt32Array | None


def check_cast(src: str, dst: str, what: str) -> None:
    """Raise UnsupportedError for a conversion that is not supported; ``what`` names the tensor."""
    if src != dst and (src not in _FLOATS or dst not in _FLOATS[:3]):
        raise UnsupportedError(f"{what} is {src}, which is not converted to {dst}. Export it in the dtype it has.")


_FLOATS = ("float32", "bfloat16", "float16", "float64")


def copy_tensors(
    part: SavedPart,
    copies: Sequence[TensorCopy],
    paths: Sequence[Path],
    *,
    source: Checkpoint,
    max_memory: int,
    checksums: bool = False,
    progress: ProgressFunction | None = None,
) -> CopyResult:
    """Write tensors of one part of ``source`` into files that exist; compare digests with its record, if it has one.

    ``checksums`` asks for the CRC-32 of what was written of each, shape ``(num_copies,)``. ``progress`` is called
    with bytes of the source, from where Ctrl-C ends it. Memory: ``max_memory``, most of it tables where there are many
    small parameters and many ranks. Raises DigestMismatchError naming the parameter and the state key, CheckpointError
    and OSError as ``move_segments``.
    """
    digests = recorded_digests(source)
    crc32 = np.zeros(len(copies), dtype=np.uint32) if checksums else None
    compared = 0
    for members in _classes(part, copies):
        # A parameter has one row of each rank that holds some of it.
        at_once = max(1, max_memory // 2 // _ROW_BYTES // part.layout.world_size)
        for begin in range(0, len(members), at_once):
            numbers = members[begin : begin + at_once]
            some = [copies[number] for number in numbers]
            key, dtype = some[0].key, some[0].dtype
            saved = part.dtypes[some[0].param][key]
            tensors, rows = part.whole_rows([copy.param for copy in some], keys=(key,))
            move = _CopyBatch(rows, some, saved, dtype, paths, max_memory, progress)
            seeds = None if digests is None else stream_seeds([(tensor.param.name, key) for tensor in tensors])
            found, sums = move.run(seeds, checksums=checksums)
            if crc32 is not None:
                crc32[numbers] = sums
            if digests is not None:
                assert found is not None
                for tensor, digest in zip(tensors, found.tolist(), strict=True):
                    compare_digest(digests, tensor.param.name, key, saved, digest)
                compared += len(tensors)
    return CopyResult(compared, crc32)


@dataclass(frozen=True, slots=True)
class RecordedDigests:
    """The digests of a commit record: (parameter, state key) -> (dtype, digest)."""

    tag_dir: FilePath
    tensors: Mapping[tuple[str, str], tuple[str, int]]


def recorded_digests(source: Checkpoint) -> RecordedDigests | None:
    """Those of the commit record of a checkpoint, if it has one."""
    if source.record is None:
        return None
    return RecordedDigests(source.tag_dir, source.record.params.digests)


def compare_digest(digests: RecordedDigests, name: str, key: str, dtype: str, found: int) -> None:
    """Raise DigestMismatchError, or CheckpointError where the record does not have such a tensor."""
    expected = digests.tensors.get((name, key))
    if expected is None or expected[0] != dtype:
        raise CheckpointError(
            f"{digests.tag_dir}: {name}: the files hold {key} in {dtype}, the commit record "
            f"{'does not have it' if expected is None else f'says {expected[0]}'}. Files of two saves are mixed."
        )
    if expected[1] != found:
        raise DigestMismatchError(
            f"{digests.tag_dir}: {name}: {key} has digest {found:016x}; the commit record says {expected[1]:016x}. The "
            "files have changed since they were saved."
        )


def _classes(part: SavedPart, copies: Sequence[TensorCopy]) -> list[list[int]]:
    """Indices of copies with the same state key and dtypes; a class has each parameter at most once."""
    classes: dict[tuple[str, str, str, int], list[int]] = {}
    seen: dict[tuple[int, str], int] = {}
    for i, copy in enumerate(copies):
        number = seen[copy.param, copy.key] = seen.get((copy.param, copy.key), -1) + 1
        saved = part.dtypes[copy.param][copy.key]
        classes.setdefault((copy.key, saved, copy.dtype, number), []).append(i)
    return list(classes.values())


@dataclass(frozen=True, slots=True)
class _CopyBatch:
    """Rows of one dtype and where they go: row i of ``rows`` belongs to the copy ``rows.target[i]``."""

    rows: ExtentTable
    copies: Sequence[TensorCopy]
    saved: str
    dtype: str
    paths: Sequence[Path]
    max_memory: int
    progress: ProgressFunction | None

    def run(self, seeds: UInt64Array | None, *, checksums: bool) -> tuple[UInt64Array | None, list[int]]:
        """The digest of each copy if there are seeds, and its CRC-32 if asked for."""
        cast = cast_between(self.saved, self.dtype)
        if cast is None:
            assert not checksums, "checksums are of what is moved as it is"
            return self._through_memory(seeds), []
        rows = self.rows
        crc32 = np.zeros(rows.num_rows, dtype=np.uint32) if checksums else None
        dst, dst_offset = self._destinations(rows)
        found = move_segments(
            CopyTable(rows.file, rows.file_offset, dst, dst_offset, rows.nbytes),
            rows.paths,
            self.paths,
            digest=_digest_rows(rows, seeds),
            crc32=crc32,
            cast=cast,
            progress=self.progress,
        )
        return found, [] if crc32 is None else self._joined(crc32)

    def _destinations(self, rows: ExtentTable) -> tuple[Int64Array, Int64Array]:
        """The file of each row and the byte in it."""
        file = np.array([copy.file for copy in self.copies], dtype=np.int64)
        offset = np.array([copy.offset for copy in self.copies], dtype=np.int64)
        return file[rows.target], offset[rows.target] + rows.target_offset * DTYPE_BYTES[self.dtype]

    def _joined(self, crc32: UInt32Array) -> list[int]:
        """The checksum of each whole tensor from those of its rows."""
        rows = self.rows
        order = np.argsort(rows.target_offset)
        nbytes = rows.numel[order] * DTYPE_BYTES[self.dtype]
        joined = join_crc32_groups(rows.target[order], crc32[order], nbytes, len(self.copies))
        return [int(value) for value in joined]

    def _through_memory(self, seeds: UInt64Array | None) -> UInt64Array | None:
        """Convert through float32, which holds all 16-bit values; torch also rounds float64 to float32 first."""
        totals = None if seeds is None else np.zeros(len(seeds), dtype=np.uint64)
        first: Cast = cast_between(self.saved, "float32") or "none"
        second: Cast = cast_between("float32", self.dtype) or "none"
        itemsize = 4 if first != "none" else DTYPE_BYTES[self.saved]
        for batch in batches(self.rows.numel * itemsize, max(8, self.max_memory // 4)):
            rows = self.rows.pieces(batch.row, batch.start // itemsize, batch.nbytes // itemsize)
            buffer = np.empty(int(batch.offset[-1] + batch.nbytes[-1]), dtype=np.uint8)
            here = np.zeros(rows.num_rows, dtype=np.int64)
            read = ReadTable(rows.paths, rows.file, rows.file_offset, here, batch.offset, rows.nbytes)
            digest = _digest_rows(rows, seeds)
            found = read_segments(read, [buffer], digest=digest, cast=first, progress=self.progress).digests
            table = CopyTable(here, batch.offset // itemsize * 4, *self._destinations(rows), rows.numel * 4)
            write_segments(table, [_as_float32(buffer, self.saved)], self.paths, cast=second)
            if totals is not None and found is not None:
                totals += found
        return totals


def one_row(src_offset: int, dst_offset: int, nbytes: int) -> CopyTable:
    """The table that copies one run of bytes from file 0 to file 0."""
    return CopyTable(*(np.array([value], dtype=np.int64) for value in (0, src_offset, 0, dst_offset, nbytes)))


def _digest_rows(rows: ExtentTable, seeds: UInt64Array | None) -> DigestRows | None:
    return None if seeds is None else DigestRows(seeds, rows.target, rows.start, rows.itemsize)


def convert_elements(data: ByteArray, src: str, dst: str) -> ByteArray:
    """Elements of dtype ``src`` in dtype ``dst``, through float32 where no single conversion exists."""
    if src == dst:
        return data
    wide = _cast(_as_float32(data, src), (src, "float32"))
    return _cast(wide, ("float32", dst))


def _cast(data: ByteArray, dtypes: tuple[str, str]) -> ByteArray:
    cast = cast_between(*dtypes)
    if cast is None or cast == "none":
        return data
    src_itemsize, dst_itemsize = cast_itemsizes(cast)
    made = np.empty(len(data) // src_itemsize * dst_itemsize, dtype=np.uint8)
    cast_bytes(cast, data, made)
    return made


def _as_float32(buffer: ByteArray, saved: str) -> ByteArray:
    """float64 rounded to float32; elements of other dtypes as they are."""
    if saved != "float64":
        return buffer
    with np.errstate(over="ignore"):
        return buffer.view("<f8").astype("<f4").view(np.uint8)
