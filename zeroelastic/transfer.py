"""Whole tensors from the files of all saved ranks into new files: each byte read once, cast and digested on the way.

The work is done by ``executors.move_segments``, file to file. What no single conversion does (bfloat16 to float16, and
float64) goes through a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zeroelastic.digest import ByteArray, UInt64Array
from zeroelastic.errors import CheckpointError, DigestMismatchError, UnsupportedError
from zeroelastic.executors import (
    Cast,
    DigestRows,
    ReadTable,
    SegmentTable,
    UInt32Array,
    join_crc32,
    move_segments,
    read_segments,
    write_segments,
)
from zeroelastic.layout import Int64Array
from zeroelastic.record import CommitRecord
from zeroelastic.rows import ByteRows, stream_seeds
from zeroelastic.state import SavedPart
from zeroelastic.torchfile import DTYPE_BYTES

Advance = Callable[[int], None]
"""Takes the number of bytes of the source that were moved since it was last called."""

MINIMUM_MEMORY = 16 << 20

_ROW_BYTES = 600  # of the tables that one row is in, and of what they are computed from

_DIRECT: dict[tuple[str, str], Cast] = {
    ("float32", "bfloat16"): "float32->bfloat16",
    ("float32", "float16"): "float32->float16",
    ("bfloat16", "float32"): "bfloat16->float32",
    ("float16", "float32"): "float16->float32",
}


class Delivery(NamedTuple):
    """One tensor of a part and where it goes: all elements of a state key, from a byte of a destination file on."""

    param: int
    key: str
    dtype: str
    file: int
    offset: int


class Delivered(NamedTuple):
    """What became of deliveries: how many digests agreed with the record's, and the CRC-32 of each if asked for."""

    num_compared: int
    crc32: UInt32Array | None


def check_cast(src: str, dst: str, what: str) -> None:
    """Raise UnsupportedError for a conversion that is not made; ``what`` is in which dtype."""
    if src != dst and (src not in _FLOATS or dst not in _FLOATS[:3]):
        raise UnsupportedError(f"{what} is {src}, which is not converted to {dst}. Export it in the dtype it has.")


_FLOATS = ("float32", "bfloat16", "float16", "float64")


def deliver(
    part: SavedPart,
    deliveries: Sequence[Delivery],
    paths: Sequence[Path],
    *,
    record: CommitRecord | None,
    max_memory: int,
    checksums: bool = False,
    advance: Advance | None = None,
) -> Delivered:
    """Write tensors of one part into files that exist, and compare their digests with the record's where there is one.

    ``checksums`` asks for the CRC-32 of what was written of each, shape ``(num_deliveries,)``. ``advance`` is called
    with bytes of the source, from where Ctrl-C ends it. Memory: ``max_memory``, most of it tables where there are many
    small parameters and many ranks. Raises DigestMismatchError naming the parameter and the state key, CheckpointError
    and OSError as ``move_segments``.
    """
    digests = None if record is None else recorded_digests(record)
    crc32 = np.zeros(len(deliveries), dtype=np.uint32) if checksums else None
    compared = 0
    for members in _classes(part, deliveries):
        # A parameter has one row of each rank that holds some of it.
        at_once = max(1, max_memory // 2 // _ROW_BYTES // part.layout.world_size)
        for begin in range(0, len(members), at_once):
            numbers = members[begin : begin + at_once]
            some = [deliveries[number] for number in numbers]
            key, dtype = some[0].key, some[0].dtype
            saved = part.dtypes[some[0].param][key]
            tensors, rows = part.whole_rows([delivery.param for delivery in some], keys=(key,))
            move = _Move(rows, some, saved, dtype, paths, max_memory, advance)
            seeds = None if digests is None else stream_seeds([(tensor.param.name, key) for tensor in tensors])
            found, sums = move.run(seeds, checksums=checksums)
            if crc32 is not None:
                crc32[numbers] = sums
            if digests is not None:
                assert found is not None
                for tensor, digest in zip(tensors, found.tolist(), strict=True):
                    compare_digest(digests, tensor.param.name, key, saved, digest)
                compared += len(tensors)
    return Delivered(compared, crc32)


def recorded_digests(record: CommitRecord) -> dict[tuple[str, str], tuple[str, int]]:
    """(parameter, state key) -> (dtype, digest)."""
    return {
        (param.name, key): (tensor.dtype, int(tensor.digest, 16))
        for param in record.params
        for key, tensor in param.tensors.items()
    }


def compare_digest(
    digests: Mapping[tuple[str, str], tuple[str, int]], name: str, key: str, dtype: str, found: int
) -> None:
    """Raise DigestMismatchError, or CheckpointError where the record does not have such a tensor."""
    expected = digests.get((name, key))
    if expected is None or expected[0] != dtype:
        raise CheckpointError(
            f"{name}: the files hold {key} in {dtype}, the commit record "
            f"{'does not have it' if expected is None else f'says {expected[0]}'}. Files of two saves are mixed."
        )
    if expected[1] != found:
        raise DigestMismatchError(
            f"{name}: {key} has digest {found:016x}; the commit record says {expected[1]:016x}. The files have changed "
            "since they were saved; use another checkpoint."
        )


def _classes(part: SavedPart, deliveries: Sequence[Delivery]) -> list[list[int]]:
    """Numbers of deliveries that are moved alike, each parameter once in a class."""
    classes: dict[tuple[str, str, str, int], list[int]] = {}
    seen: dict[tuple[int, str], int] = {}
    for i, delivery in enumerate(deliveries):
        number = seen[delivery.param, delivery.key] = seen.get((delivery.param, delivery.key), -1) + 1
        saved = part.dtypes[delivery.param][delivery.key]
        classes.setdefault((delivery.key, saved, delivery.dtype, number), []).append(i)
    return list(classes.values())


@dataclass(frozen=True, slots=True)
class _Move:
    """Rows of one dtype and where they go: row i of ``rows`` belongs to the delivery ``rows.target[i]``."""

    rows: ByteRows
    deliveries: Sequence[Delivery]
    saved: str
    dtype: str
    paths: Sequence[Path]
    max_memory: int
    advance: Advance | None

    def run(self, seeds: UInt64Array | None, *, checksums: bool) -> tuple[UInt64Array | None, list[int]]:
        """The digest of each delivery if there are seeds, and its CRC-32 if asked for."""
        cast: Cast | None = "none" if self.saved == self.dtype else _DIRECT.get((self.saved, self.dtype))
        if cast is None:
            assert not checksums, "checksums are of what is moved as it is"
            return self._through_memory(seeds), []
        rows = self.rows
        crc32 = np.zeros(rows.num_rows, dtype=np.uint32) if checksums else None
        dst, dst_offset = self._destinations(rows)
        found = move_segments(
            SegmentTable(rows.file, rows.file_offset, dst, dst_offset, rows.nbytes),
            rows.paths,
            self.paths,
            digest=_digest_rows(rows, seeds),
            crc32=crc32,
            cast=cast,
            progress=self.advance,
        )
        return found, [] if crc32 is None else self._joined(crc32)

    def _destinations(self, rows: ByteRows) -> tuple[Int64Array, Int64Array]:
        """The file of each row and the byte in it."""
        file = np.array([delivery.file for delivery in self.deliveries], dtype=np.int64)
        offset = np.array([delivery.offset for delivery in self.deliveries], dtype=np.int64)
        return file[rows.target], offset[rows.target] + rows.target_offset * DTYPE_BYTES[self.dtype]

    def _joined(self, crc32: UInt32Array) -> list[int]:
        """The checksum of each whole tensor from those of its rows."""
        rows = self.rows
        order = np.lexsort((rows.target_offset, rows.target))
        nbytes = rows.numel[order] * DTYPE_BYTES[self.dtype]
        bounds = np.searchsorted(rows.target[order], np.arange(len(self.deliveries) + 1))
        return [
            join_crc32(crc32[order][begin:end], nbytes[begin:end])
            for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]

    def _through_memory(self, seeds: UInt64Array | None) -> UInt64Array | None:
        """Through float32, in which 16-bit values have their place; torch rounds float64 to it first as well."""
        totals = None if seeds is None else np.zeros(len(seeds), dtype=np.uint64)
        first: Cast = _DIRECT.get((self.saved, "float32"), "none")
        second: Cast = _DIRECT.get(("float32", self.dtype), "none")
        itemsize = 4 if first != "none" else DTYPE_BYTES[self.saved]
        for rows in _batches(self.rows, self.max_memory // 4 // max(4, itemsize)):
            buffer = np.empty(int(rows.numel.sum()) * itemsize, dtype=np.uint8)
            begin = np.cumsum(rows.numel) - rows.numel
            here = np.zeros(rows.num_rows, dtype=np.int64)
            read = ReadTable(rows.paths, rows.file, rows.file_offset, here, begin * itemsize, rows.nbytes)
            digest = _digest_rows(rows, seeds)
            found = read_segments(read, [buffer], digest=digest, cast=first, progress=self.advance).digests
            table = SegmentTable(here, begin * 4, *self._destinations(rows), rows.numel * 4)
            write_segments(table, [_as_float32(buffer, self.saved)], self.paths, cast=second)
            if totals is not None and found is not None:
                totals += found
        return totals


def _digest_rows(rows: ByteRows, seeds: UInt64Array | None) -> DigestRows | None:
    return None if seeds is None else DigestRows(seeds, rows.target, rows.start, rows.itemsize)


def _batches(rows: ByteRows, most: int) -> Iterator[ByteRows]:
    """The rows, in file order, by at most ``most`` elements; a longer row is cut."""
    count = -(-rows.numel // most)
    if (count > 1).any():
        index = np.repeat(np.arange(rows.num_rows, dtype=np.int64), count)
        begin = (np.arange(len(index), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)) * most
        cut = rows.take(index)
        rows = replace(
            cut,
            file_offset=cut.file_offset + begin * cut.itemsize,
            target_offset=cut.target_offset + begin,
            start=cut.start + begin,
            numel=np.minimum(most, cut.numel - begin),
        )
    ends = np.cumsum(rows.numel)
    at = 0
    while at < rows.num_rows:
        done = int(ends[at - 1]) if at else 0
        end = int(np.searchsorted(ends, done + most, side="right"))
        yield rows.take(np.arange(at, end, dtype=np.int64))
        at = end


def _as_float32(buffer: ByteArray, saved: str) -> ByteArray:
    if saved != "float64":
        return buffer
    with np.errstate(over="ignore"):
        return buffer.view("<f8").astype("<f4").view(np.uint8)
