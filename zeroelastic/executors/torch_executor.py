"""The torch executor: narrow views and ``Tensor.copy_`` between any two devices that torch knows.

It needs no build of ours, and moves a GPU's memory where the CUDA engine is not built. A side is a tensor, of which the
bytes are meant, or plain bytes. Bits are those of the numpy executor, except for a NaN that a GPU narrows to float16.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from zeroelastic.core.digest import BLOCK, ByteArray, UInt64Array, block_weights, element_weights
from zeroelastic.errors import ConfigError
from zeroelastic.executors.batches import PieceTotals, batches
from zeroelastic.executors.numpy_executor import BFLOAT16_NAN
from zeroelastic.executors.tables import (
    Cast,
    CopyTable,
    DigestRows,
    HostEngine,
    Moved,
    Options,
    Progress,
    Sides,
    Table,
    cast_itemsizes,
    check_rows,
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


def run(table: Table, options: Options, *, sides: Sides[ByteArray | torch.Tensor], host: HostEngine) -> Moved:
    """As ``tables.HostEngine``, for memory on any devices; it neither moves nor scans files.

    ``host`` reads and writes files by ``STAGING_BYTES`` of host memory, torch copies to and from it. A file is opened
    once for each of these batches, and with ``sync`` flushed as often. Digests of memory are taken where it is: they
    cost a few MiB there, and a synchronization in the end.
    """
    assert all(isinstance(b, torch.Tensor) or b.flags.writeable for b in sides.dst or ()), "read-only destination"
    in_bytes = sides.having(lambda buffers: [bytes_of(buffer) for buffer in buffers])
    sources, targets = in_bytes.src, in_bytes.dst
    check_rows(table, options, in_bytes)
    src_paths = sides.src_paths
    if src_paths is None and sides.dst_paths is None:
        assert options.crc32 is None, "torch makes digests, not checksums"
        return _copy_rows(table, sources, targets, options.cast, options.digest), 0
    assert isinstance(table, CopyTable)
    src_itemsize, dst_itemsize = cast_itemsizes(options.cast)
    room = min(STAGING_BYTES, int(table.nbytes.sum()) + 8 * max(1, len(table.nbytes)))
    staging = torch.empty(room, dtype=torch.uint8, pin_memory=any(source.is_cuda for source in sources))
    memory, progress, num_read = staging.numpy(), Progress(options.progress), 0
    by_host = replace(options, progress=None, cast=options.cast if src_paths is None else "none")
    totals = PieceTotals(by_host)
    for batch in batches(table.nbytes, len(staging)):
        row, zero = batch.row, np.zeros(len(batch.row), dtype=np.int64)
        to = table.dst_offset[row] + batch.start // src_itemsize * dst_itemsize
        stage = CopyTable(table.src[row], table.src_offset[row] + batch.start, zero, batch.offset, batch.nbytes)
        unstage = CopyTable(zero, batch.offset, table.dst[row], to, batch.nbytes)
        if src_paths is not None:
            read = partial(host, stage, sides=Sides(src_paths, dst=[memory]))
            num_read += totals.run(read, row, batch.start, batch.nbytes)
            _copy_rows(unstage, [staging], targets, options.cast)
        else:
            _copy_rows(stage, sources, [staging])
            write = partial(host, unstage, sides=Sides(src=[memory], dst_paths=sides.dst_paths))
            totals.run(write, row, batch.start, batch.nbytes)
        progress.add(int(batch.nbytes.sum()))
    progress.finish()
    return totals.finish(), num_read


def _copy_rows(
    table: Table,
    src: Sequence[torch.Tensor],
    dst: Sequence[torch.Tensor] | None,
    cast: Cast = "none",
    digest: DigestRows | None = None,
) -> UInt64Array | None:
    """Copy row by row with ``Tensor.copy_``, where there is a destination. Returns the digests, when asked."""
    src_itemsize, dst_itemsize = cast_itemsizes(cast)
    parts: list[tuple[int, torch.Tensor]] = []
    columns = (table.src, table.src_offset, table.nbytes)
    for i, (number, offset, nbytes) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        data = src[number][offset : offset + nbytes]
        if dst is not None and isinstance(table, CopyTable):
            begin = int(table.dst_offset[i])
            _copy(data, dst[int(table.dst[i])][begin : begin + nbytes // src_itemsize * dst_itemsize], cast)
        if digest is not None:
            stream = int(digest.stream[i])
            seed, start, itemsize = int(digest.seeds[stream]), int(digest.start[i]), int(digest.itemsize[i])
            parts += [(stream, part) for part in _digests(data, itemsize, seed, start)]
    return None if digest is None else _added_up(parts, len(digest.seeds))


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
