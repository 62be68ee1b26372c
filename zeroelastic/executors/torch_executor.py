"""The torch executor: narrow views and ``Tensor.copy_`` between any two devices that torch knows.

It needs no build of ours, and moves a GPU's memory where the CUDA engine is not built. A side is a tensor, of which the
bytes are meant, or plain bytes. Bits are those of the numpy executor, except for a NaN that a GPU narrows to float16.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import numpy as np
import torch

from zeroelastic.core.digest import BLOCK, ByteArray, UInt64Array, block_weights, combine, element_weights
from zeroelastic.errors import ConfigError
from zeroelastic.executors.batches import DigestTotals, batches
from zeroelastic.executors.cast import BFLOAT16_NAN
from zeroelastic.executors.engine import PLAIN, FileEngine, Options
from zeroelastic.executors.progress import Progress
from zeroelastic.executors.tables import (
    ByteBuffer,
    Cast,
    CopyTable,
    ReadResult,
    ReadTable,
    cast_itemsizes,
)

STAGING_BYTES = 16 << 20
"""Host memory that a read goes through."""

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
        return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=flat.device)
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
    totals = [0] * (0 if digest is None else len(digest.seeds))
    parts: list[tuple[int, torch.Tensor]] = []
    for i, (s, s_offset, d, d_offset, nbytes) in enumerate(zip(*(c.tolist() for c in table.columns), strict=True)):
        data = from_bytes[s][s_offset : s_offset + nbytes]
        made = to_bytes[d][d_offset : d_offset + nbytes // src_itemsize * dst_itemsize]
        _copy(data, made, cast)
        if digest is not None and nbytes:
            seed, start, itemsize = int(digest.seeds[digest.stream[i]]), int(digest.start[i]), int(digest.itemsize[i])
            parts += [(int(digest.stream[i]), part) for part in _digests(data, itemsize, seed, start)]
    if digest is None:
        return None
    for stream, part in parts:
        totals[stream] = combine(totals[stream], int(part) & ((1 << 64) - 1))
    return np.array(totals, dtype=np.uint64)


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
