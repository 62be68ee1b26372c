"""Whole tensors from the files of all saved ranks into new files: each byte read once, cast and digested on the way.

The work is done by ``executors.move_segments``, file to file, in calls that are short enough to be interrupted. What
no single conversion does (bfloat16 to float16, float64) goes through a buffer.
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
    move_segments,
    read_segments,
    write_segments,
)
from zeroelastic.layout import Int64Array
from zeroelastic.record import CommitRecord
from zeroelastic.rows import ByteRows, stream_seeds
from zeroelastic.state import SavedPart
from zeroelastic.storage import local_paths
from zeroelastic.torchfile import DTYPE_BYTES

Advance = Callable[[int], None]
"""Takes the number of bytes of the source that were moved since it was last called."""

MINIMUM_MEMORY = 16 << 20

_CALL_BYTES = 256 << 20
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


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows of one call. ``dst`` and ``dst_offset`` say where they go, in elements of the destination's dtype."""

    rows: ByteRows
    dst: Int64Array
    dst_offset: Int64Array


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
    advance: Advance,
) -> int:
    """Write tensors of one part into files that exist; returns how many digests were compared with the record's.

    Memory: ``max_memory``, of which most is tables where there are many small parameters and many ranks. Raises
    DigestMismatchError naming the parameter and the state key, CheckpointError and OSError as ``move_segments``.
    """
    digests = None if record is None else recorded_digests(record)
    compared = 0
    for chosen in _classes(part, deliveries):
        key, dtype = chosen[0].key, chosen[0].dtype
        saved = part.dtypes[chosen[0].param][key]
        # A parameter has one row of each rank that holds some of it.
        at_once = max(1, max_memory // 2 // _ROW_BYTES // part.layout.world_size)
        for begin in range(0, len(chosen), at_once):
            some = chosen[begin : begin + at_once]
            tensors, rows = part.whole_rows([delivery.param for delivery in some], keys=(key,))
            seeds = None if digests is None else stream_seeds([(tensor.param.name, key) for tensor in tensors])
            totals = np.zeros(len(some), dtype=np.uint64)
            for batch in _batches(rows, some, min(_CALL_BYTES, max_memory // 4)):
                found = _move(batch, saved, dtype, paths, seeds)
                if found is not None:
                    totals += found
                advance(int(batch.rows.nbytes.sum()))
            if digests is not None:
                for tensor, total in zip(tensors, totals.tolist(), strict=True):
                    _compare(digests, tensor.param.name, key, saved, total)
                compared += len(tensors)
    return compared


def recorded_digests(record: CommitRecord) -> dict[tuple[str, str], tuple[str, int]]:
    """(parameter, state key) -> (dtype, digest)."""
    return {
        (param.name, key): (tensor.dtype, int(tensor.digest, 16))
        for param in record.params
        for key, tensor in param.tensors.items()
    }


def _compare(digests: Mapping[tuple[str, str], tuple[str, int]], name: str, key: str, dtype: str, found: int) -> None:
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


def _classes(part: SavedPart, deliveries: Sequence[Delivery]) -> list[list[Delivery]]:
    """Deliveries that are moved alike, each parameter once in a class."""
    classes: dict[tuple[str, str, str, int], list[Delivery]] = {}
    seen: dict[tuple[int, str], int] = {}
    for delivery in deliveries:
        number = seen[delivery.param, delivery.key] = seen.get((delivery.param, delivery.key), -1) + 1
        saved = part.dtypes[delivery.param][delivery.key]
        classes.setdefault((delivery.key, saved, delivery.dtype, number), []).append(delivery)
    return list(classes.values())


def _batches(rows: ByteRows, deliveries: Sequence[Delivery], most: int) -> Iterator[_Batch]:
    """The rows in file order, in calls of about ``most`` bytes."""
    rows = _cut(rows, most)
    file = np.array([delivery.file for delivery in deliveries], dtype=np.int64)
    offset = np.array([delivery.offset for delivery in deliveries], dtype=np.int64)
    itemsize = DTYPE_BYTES[deliveries[0].dtype]
    ends = np.cumsum(rows.nbytes)
    begin = 0
    while begin < rows.num_rows:
        done = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + most, side="right")))
        some = rows.take(np.arange(begin, end, dtype=np.int64))
        yield _Batch(some, file[some.target], offset[some.target] + some.target_offset * itemsize)
        begin = end


def _cut(rows: ByteRows, most: int) -> ByteRows:
    """The same bytes in rows of at most ``most`` bytes each."""
    step = most // 8 * 8 // rows.itemsize
    count = -(-rows.numel // np.maximum(step, 1))
    if (count <= 1).all():
        return rows
    index = np.repeat(np.arange(rows.num_rows, dtype=np.int64), count)
    begin = (np.arange(len(index), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)) * step[index]
    cut = rows.take(index)
    return replace(
        cut,
        file_offset=cut.file_offset + begin * cut.itemsize,
        target_offset=cut.target_offset + begin,
        start=cut.start + begin,
        numel=np.minimum(step[index], cut.numel - begin),
    )


def _move(
    batch: _Batch, saved: str, dtype: str, paths: Sequence[Path], seeds: UInt64Array | None
) -> UInt64Array | None:
    rows = batch.rows
    digest = None if seeds is None else DigestRows(seeds, rows.target, rows.start, rows.itemsize)
    sources = local_paths(rows.paths)
    cast: Cast | None = "none" if saved == dtype else _DIRECT.get((saved, dtype))
    if cast is not None:
        table = SegmentTable(rows.file, rows.file_offset, batch.dst, batch.dst_offset, rows.nbytes)
        return move_segments(table, sources, paths, digest=digest, cast=cast)
    # Through float32, in which each of the others has its place but float64, which torch rounds to it first as well.
    buffer = np.empty(int(rows.numel.sum()) * max(4, DTYPE_BYTES[saved]), dtype=np.uint8)
    here = np.zeros(rows.num_rows, dtype=np.int64)
    begin = np.cumsum(rows.numel) - rows.numel
    first: Cast = _DIRECT.get((saved, "float32"), "none")
    at = begin * (4 if first != "none" else DTYPE_BYTES[saved])
    table = SegmentTable(here, begin * 4, batch.dst, batch.dst_offset, rows.numel * 4)
    read = ReadTable(sources, rows.file, rows.file_offset, here, at, rows.nbytes)
    found = read_segments(read, [buffer], digest=digest, cast=first).digests
    write_segments(table, [_as_float32(buffer, saved)], paths, cast=_DIRECT.get(("float32", dtype), "none"))
    return found


def _as_float32(buffer: ByteArray, saved: str) -> ByteArray:
    if saved != "float64":
        return buffer
    with np.errstate(over="ignore"):
        return buffer.view("<f8").astype("<f4").view(np.uint8)
