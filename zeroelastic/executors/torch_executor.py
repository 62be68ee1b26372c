"""The torch executor: narrow views and ``Tensor.copy_`` between any two devices that torch knows.

It needs no build of ours, and moves a GPU's memory where the CUDA engine is not built. A side is a tensor, of which the
bytes are meant, or plain bytes. Bits are those of the numpy executor, except for a NaN that a GPU narrows to float16.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from zeroelastic.core.digest import BLOCK, ByteArray, UInt64Array, block_weights, element_weights
from zeroelastic.errors import ConfigError
from zeroelastic.executors.batches import DigestTotals, RowChecksums, batches
from zeroelastic.executors.cast import BFLOAT16_NAN
from zeroelastic.executors.engine import PLAIN, FileEngine, HostEngine, Options
from zeroelastic.executors.progress import Progress
from zeroelastic.executors.tables import (
    ByteBuffer,
    Cast,
    CopyTable,
    DigestRows,
    MemoryRanges,
    ReadResult,
    ReadTable,
    cast_itemsizes,
    check_crc32,
)

STAGING_BYTES = 16 << 20
"""Host memory that reads and writes go through."""

_CHUNK_NUMEL = 256 * BLOCK
_DTYPES: dict[Cast, tuple[torch.dtype, torch.dtype]] = {
    "none": (torch.uint8, torch.uint8),
    "float32->bfloat16": (torch.float32, torch.bfloat16),
    "float32->float16": (torch.float32, torch.float16),
    "bfloat16->float32": (torch.bfloat16, torch.float32),
    "float16->float32": (torch.float16, torch.float32),
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bytes_of(buffer: ByteArray | torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, or of an array, as a flat uint8 tensor that shares its memory."""
    if isinstance(buffer, torch.Tensor):
        if not buffer.is_contiguous():
            raise ConfigError(
                f"a tensor of shape {tuple(buffer.shape)} is not contiguous; its bytes are no range. Call "
                "contiguous() first."
            )
        flat = buffer.detach().view(-1)
        return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():  # an array that is read-only; no source is written to
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(buffer)


def current_stream(device: torch.device) -> int:
    """The handle of the CUDA stream on which torch works on a device now."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def copy_segments(
    table: CopyTable,
    src: Sequence[ByteArray | torch.Tensor],
    dst: Sequence[ByteBuffer | torch.Tensor],
    options: Options = PLAIN,
) -> UInt64Array | None:
    """Copy row by row with ``Tensor.copy_``, on whatever devices the sides are. Returns the digests, when asked.

    Digests are taken where the source is; they cost a few MiB of its memory, and end with a synchronization.
    """
    from_bytes, to_bytes = [bytes_of(buffer) for buffer in src], [bytes_of(buffer) for buffer in dst]
    assert all(isinstance(b, torch.Tensor) or b.flags.writeable for b in dst), "a destination is read-only"
    sizes = [b.numel() for b in from_bytes], [b.numel() for b in to_bytes]
    digest, cast = options.digest, options.cast
    table.check(len(src), sizes[0], len(dst), sizes[1], digest=digest, cast=cast)
    src_itemsize, dst_itemsize = cast_itemsizes(cast)
    parts: list[tuple[int, torch.Tensor]] = []
    for i, (s, s_offset, d, d_offset, nbytes) in enumerate(zip(*(c.tolist() for c in table.columns), strict=True)):
        data = from_bytes[s][s_offset : s_offset + nbytes]
        made = to_bytes[d][d_offset : d_offset + nbytes // src_itemsize * dst_itemsize]
        _copy(data, made, cast)
        if digest is not None:
            parts += _row_digests(digest, i, data)
    return None if digest is None else _added_up(parts, len(digest.seeds))


def read_segments(
    table: ReadTable,
    buffers: Sequence[ByteBuffer | torch.Tensor],
    options: Options = PLAIN,
    *,
    host: FileEngine,
) -> ReadResult:
    """Fill tensors on any device from files: ``host`` reads into ``STAGING_BYTES`` of host memory, torch copies on.

    Raises what ``host`` raises. A file is opened once for each batch that needs it.
    """
    targets = [bytes_of(buffer) for buffer in buffers]
    table.check([target.numel() for target in targets], digest=options.digest, cast=options.cast)
    src_itemsize, dst_itemsize = cast_itemsizes(options.cast)
    staging = np.empty(min(STAGING_BYTES, int(table.nbytes.sum()) + 8 * max(1, len(table.nbytes))), dtype=np.uint8)
    totals, total, progress = DigestTotals(options.digest), 0, Progress(options.progress)
    for batch in batches(table.nbytes, len(staging)):
        row, zero = batch.row, np.zeros(len(batch.row), dtype=np.int64)
        reads = ReadTable(
            table.paths, table.file[row], table.file_offset[row] + batch.start, zero, batch.offset, batch.nbytes
        )
        digest = totals.rows(row, batch.start)
        result = host.read_segments(reads, [staging], Options(digest, threads=options.threads))
        total += result.bytes_read
        totals.add(row, result.digests)
        to = table.buffer_offset[row] + batch.start // src_itemsize * dst_itemsize
        copies = CopyTable(zero, batch.offset, table.buffer[row], to, batch.nbytes)
        copy_segments(copies, [staging], targets, Options(cast=options.cast))
        progress.add(result.bytes_read)
    progress.finish()
    return ReadResult(total, table.files, totals.totals)


def write_segments(
    table: CopyTable,
    src: Sequence[ByteArray | torch.Tensor],
    paths: Sequence[Path],
    options: Options = PLAIN,
    *,
    host: HostEngine,
) -> UInt64Array | None:
    """Write tensors on any device into files: torch copies into ``STAGING_BYTES`` of host memory, ``host`` writes on.

    Raises what ``host`` raises. With ``sync`` a file is flushed after each batch that fills the staging memory.
    """
    sources = [bytes_of(buffer) for buffer in src]
    sizes = [source.numel() for source in sources]
    table.check(len(src), sizes, len(paths), None, digest=options.digest, cast=options.cast)
    check_crc32(options.crc32, len(table.nbytes))
    src_itemsize, dst_itemsize = cast_itemsizes(options.cast)
    room = min(STAGING_BYTES, int(table.nbytes.sum()) + 8 * max(1, len(table.nbytes)))
    staging = torch.empty(room, dtype=torch.uint8, pin_memory=any(source.is_cuda for source in sources))
    totals, progress, checksums = DigestTotals(options.digest), Progress(options.progress), RowChecksums()
    for batch in batches(table.nbytes, len(staging)):
        row, zero = batch.row, np.zeros(len(batch.row), dtype=np.int64)
        begin = table.src_offset[row] + batch.start
        copy_segments(CopyTable(table.src[row], begin, zero, batch.offset, batch.nbytes), sources, [staging])
        to = table.dst_offset[row] + batch.start // src_itemsize * dst_itemsize
        crc32 = None if options.crc32 is None else np.zeros(len(row), dtype=np.uint32)
        some = replace(options, digest=totals.rows(row, batch.start), crc32=crc32, progress=None)
        writes = CopyTable(zero, batch.offset, table.dst[row], to, batch.nbytes)
        totals.add(row, host.write_segments(writes, [staging.numpy()], paths, some))
        if crc32 is not None:
            checksums.add(row, batch.nbytes // src_itemsize * dst_itemsize, crc32)
        progress.add(int(batch.nbytes.sum()))
    progress.finish()
    if options.crc32 is not None:
        options.crc32[:] = checksums.joined(len(table.nbytes))
    return totals.totals


def sum_segments(table: MemoryRanges, src: Sequence[ByteArray | torch.Tensor], options: Options) -> UInt64Array | None:
    """The digests of tensors, made where they are; a few MiB of memory there, and a synchronization in the end."""
    assert options.crc32 is None, "torch makes digests, not checksums"
    sources = [bytes_of(buffer) for buffer in src]
    table.check([source.numel() for source in sources], digest=options.digest)
    digest = options.digest
    if digest is None:
        return None
    parts: list[tuple[int, torch.Tensor]] = []
    columns = (table.buffer, table.offset, table.nbytes)
    for i, (buffer, offset, nbytes) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        parts += _row_digests(digest, i, sources[buffer][offset : offset + nbytes])
    return _added_up(parts, len(digest.seeds))


def _row_digests(digest: DigestRows, row: int, data: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """What a row adds to its digest: (number of the digest, int64 scalar on the data's device)."""
    stream = int(digest.stream[row])
    seed, start, itemsize = int(digest.seeds[stream]), int(digest.start[row]), int(digest.itemsize[row])
    return [(stream, part) for part in _digests(data, itemsize, seed, start)]


def _added_up(parts: Sequence[tuple[int, torch.Tensor]], num_streams: int) -> UInt64Array:
    """The digests of parts, with one wait for the device."""
    totals = np.zeros(num_streams, dtype=np.uint64)
    if parts:
        streams, values = zip(*parts, strict=True)
        found = torch.stack([value.to(values[0].device) for value in values]).cpu().numpy().view(np.uint64)
        np.add.at(totals, list(streams), found)  # modulo 2**64
    return totals


def _copy(src: torch.Tensor, dst: torch.Tensor, cast: Cast) -> None:
    if cast == "none" or not src.numel():
        dst.copy_(src)
        return
    from_dtype, to_dtype = _DTYPES[cast]
    values = _aligned(src, from_dtype.itemsize).view(from_dtype)
    if _is_aligned(dst, to_dtype.itemsize):
        made = dst.view(to_dtype).copy_(values)
    else:
        made = torch.empty(values.shape, dtype=to_dtype, device=dst.device).copy_(values)
    if to_dtype == torch.bfloat16:  # torch makes another NaN on each kind of device and vector unit
        made.view(torch.int16).masked_fill_(made.isnan(), BFLOAT16_NAN)
    if made.data_ptr() != dst.data_ptr():
        dst.copy_(made.view(torch.uint8))


def _is_aligned(data: torch.Tensor, itemsize: int) -> bool:
    return data.storage_offset() % itemsize == 0 and data.data_ptr() % itemsize == 0


def _aligned(data: torch.Tensor, itemsize: int) -> torch.Tensor:
    return data if _is_aligned(data, itemsize) else data.clone()


def _digests(data: torch.Tensor, itemsize: int, seed: int, start: int) -> list[torch.Tensor]:
    """Partial digests of a range, one int64 scalar per chunk, on the data's device; integers wrap as they should."""
    bits = _aligned(data, itemsize).view(_BITS[itemsize])
    parts: list[torch.Tensor] = []
    done = 0
    while done < len(bits):
        lead = (start + done) % BLOCK
        count = min(len(bits) - done, _CHUNK_NUMEL - lead)
        num_blocks = -(-(lead + count) // BLOCK)
        wide = torch.zeros(num_blocks * BLOCK, dtype=torch.int64, device=data.device)
        wide[lead : lead + count] = bits[done : done + count]
        if itemsize < 8:
            wide &= (1 << 8 * itemsize) - 1
        sums = (wide.view(num_blocks, BLOCK) * _element_weights(data.device)).sum(1)
        blocks = _signed(block_weights(seed, (start + done) // BLOCK, num_blocks)).to(data.device)
        parts.append((sums * blocks).sum())
        done += count
    return parts


@functools.lru_cache(maxsize=8)
def _element_weights(device: torch.device) -> torch.Tensor:
    return _signed(element_weights()).to(device)


def _signed(values: UInt64Array) -> torch.Tensor:
    return torch.from_numpy(values.view(np.int64))
