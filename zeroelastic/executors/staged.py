"""Memory of any device that torch knows, through host memory: a host engine does the work, torch copies bytes.

It needs no build for the device: this is how a GPU's memory is filled and saved where the CUDA engine is not built.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from zeroelastic.core.digest import ByteArray
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import ConfigError
from zeroelastic.executors.batches import PieceTotals, batches
from zeroelastic.executors.tables import (
    CopyTable,
    Endpoints,
    HostEngine,
    Moved,
    MoveOptions,
    Progress,
    Ranges,
    Table,
    cast_itemsizes,
    check_rows,
)

STAGING_BYTES = 16 << 20
"""Host memory for what comes from a device, and as much for what goes to one (twice that, if elements widen)."""


def bytes_of(buffer: ByteArray | torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, or of an array, as a flat uint8 tensor that shares its memory."""
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
    """Return the handle of the CUDA stream on which torch works on a device now."""
    return int(torch.cuda.current_stream(device).cuda_stream)


class _Rows(NamedTuple):
    """Ranges of bytes: row i is ``nbytes[i]`` bytes at ``offset[i]`` of buffer ``number[i]``."""

    number: Int64Array
    offset: Int64Array
    nbytes: Int64Array


def _copy(src: _Rows, sources: Sequence[torch.Tensor], dst: _Rows, targets: Sequence[torch.Tensor]) -> None:
    columns = (src.number, src.offset, dst.number, dst.offset, src.nbytes)
    for number, begin, target, to, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        targets[target][to : to + nbytes].copy_(sources[number][begin : begin + nbytes])


def run(table: Table, options: MoveOptions, *, sides: Endpoints[ByteArray | torch.Tensor], host: HostEngine) -> Moved:
    """Run a table whose buffers may be on any devices, ``STAGING_BYTES`` at a time; as ``tables.HostEngine``.

    A file is opened once for each of these batches, and with ``sync`` flushed as often.
    """
    assert all(isinstance(b, torch.Tensor) or b.flags.writeable for b in sides.dst or ()), "read-only destination"
    in_bytes = sides.having(lambda buffers: [bytes_of(buffer) for buffer in buffers])
    check_rows(table, options, in_bytes)
    src_itemsize, dst_itemsize = cast_itemsizes(options.cast)
    room = min(STAGING_BYTES, int(table.nbytes.sum()) + 8 * max(1, len(table.nbytes)))
    pinned = any(buffer.is_cuda for buffer in in_bytes.buffers)
    src = torch.empty(room if sides.src_paths is None else 0, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    made = room // src_itemsize * dst_itemsize if in_bytes.dst is not None else 0
    dst = torch.empty(made, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    progress, num_read = Progress(options.progress), 0
    totals = PieceTotals(replace(options, progress=None))
    staged = Endpoints(
        sides.src_paths, [src.numpy()] if sides.src_paths is None else (), sides.dst_paths,
        None if in_bytes.dst is None else [dst.numpy()],
    )  # fmt: skip
    for batch in batches(table.nbytes, room):
        row, zero = batch.row, np.zeros(len(batch.row), dtype=np.int64)
        at = _Rows(table.src[row], table.src_offset[row] + batch.start, batch.nbytes)
        own = at if sides.src_paths is not None else _Rows(zero, batch.offset, batch.nbytes)
        if sides.src_paths is None:
            _copy(at, in_bytes.src, own, [src])
        if not isinstance(table, CopyTable):
            piece: Table = Ranges(own.number, own.offset, own.nbytes)
        else:
            start, offset, nbytes = (
                column // src_itemsize * dst_itemsize for column in (batch.start, batch.offset, batch.nbytes)
            )
            to = _Rows(table.dst[row], table.dst_offset[row] + start, nbytes)
            into = to if in_bytes.dst is None else _Rows(zero, offset, nbytes)
            piece = CopyTable(own.number, own.offset, into.number, into.offset, batch.nbytes)
        num_read += totals.run(partial(host, piece, sides=staged), row, batch.start, batch.nbytes)
        if in_bytes.dst is not None:
            _copy(into, [dst], to, in_bytes.dst)
        progress.add(int(batch.nbytes.sum()))
    progress.finish()
    return totals.finish(), num_read
