"""Payload of files that a rank does not see: read once by a rank that sees them, sent, and written as the plan says.

Every rank asks the readers of its files for byte ranges and serves the requests of others. The requests to one reader
are one stream, row after row, in the rounds of ``exchange_rows``; its buffers are all the memory that this needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from zeroelastic.checkpoint.extents import ExtentTable
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.core.digest import ByteArray, UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.deepspeed.fill import FillJob, RowStreams
from zeroelastic.distributed.collective import all_or_raise
from zeroelastic.distributed.exchange import Arrived, RoundBuffer, device_of, exchange_rows
from zeroelastic.executors.dispatch import CopyTable, Ranges, copy_segments, host_executor, read_segments, sum_segments
from zeroelastic.io.paths import FilePath


@dataclass(slots=True)
class LoadCost:
    """The cost of a load to this rank so far; ``header_bytes`` are all bytes read but payload."""

    bytes_owned: int = 0
    bytes_read: int = 0
    header_bytes: int = 0
    files: set[FilePath] = field(default_factory=set)
    bytes_sent: int = 0
    bytes_received: int = 0


def fill_from_others(checkpoint: Checkpoint, filled: Sequence[FillJob], cost: LoadCost) -> None:
    """Fill the rows that ``fill`` left unread because this rank does not see their files. Collective.

    Raises the same error on every rank. Adds the digests as ``fill`` does, and what it took, also to read for other
    ranks, to ``cost``.
    """
    executor = filled[0].executor
    inventory = checkpoint.inventory
    names = sorted(inventory.readers_of)  # a number for each that means the same on every rank
    numbers = {name: number for number, name in enumerate(names)}
    paths = tuple(checkpoint.tag_dir / name for name in names)
    tables: list[Int64Array] = [np.empty((0, 4), dtype=np.int64)]  # number of the file, offset, nbytes, reader
    first_row = [0]
    for one in filled:
        unread = one.unread
        count = 0 if unread is None else unread.num_rows
        if unread is not None and count:
            file = np.array([numbers[path.name] for path in unread.paths], dtype=np.int64)
            reader = np.array([inventory.reader(path.name, inventory.rank) for path in unread.paths], dtype=np.int64)
            columns = (file[unread.file], unread.file_offset, unread.nbytes, reader[unread.file])
            tables.append(np.stack(columns, axis=1))
        first_row.append(first_row[-1] + count)

    def read(asked: Int64Array, parts: Arrived, buffer: ByteArray) -> None:
        """Read what other ranks want; a range that several ask for is read once."""
        file, offset, nbytes, at = asked[:, 0], asked[:, 1] + parts.skip, parts.nbytes, parts.at
        _, first, same = np.unique(np.stack((file, offset, nbytes), 1), axis=0, return_index=True, return_inverse=True)
        same = same.reshape(-1)
        table = CopyTable(file[first], offset[first], np.zeros_like(first), at[first], nbytes[first])
        result = read_segments(table, paths, [buffer], executor=host_executor(executor))
        for i in np.flatnonzero(first[same] != np.arange(len(same))).tolist():
            source, count = int(at[first[same[i]]]), int(nbytes[i])
            buffer[int(at[i]) : int(at[i]) + count] = buffer[source : source + count]
        cost.bytes_read += result.bytes_read
        cost.files |= {*result.files}

    def put(arrived: Arrived, buffer: RoundBuffer) -> None:
        owner = np.searchsorted(first_row, arrived.row, side="right") - 1
        for number in np.unique(owner).tolist():
            here = owner == number
            some = Arrived(*(column[here] for column in arrived))
            part = filled[number]
            assert part.unread is not None
            row = some.row - first_row[number]
            rows = part.unread.take(row)
            pieces = rows.pieces(np.arange(len(row)), some.skip // rows.itemsize, some.nbytes // rows.itemsize)
            _put(part, pieces, some.at, buffer)
            is_cast = np.array([target.cast for target in part.targets], dtype=bool)[pieces.target]
            cast, read = np.flatnonzero(is_cast), np.flatnonzero(part.digest & ~is_cast)
            if len(cast):
                streams, totals = _digest(part, pieces.take(cast), some.at[cast], buffer)
                streams.add_cast(totals, part.cast_digests)
            if len(read):
                streams, totals = _digest(part, pieces.take(read), some.at[read], buffer)
                streams.add_read(totals, part.read_digests)

    rows = np.concatenate(tables)
    # Where a host engine is named, it moves what arrives; nothing of ours moves a GPU's memory then.
    filled_there = () if executor in ("numpy", "native") else (t.tensor for part in filled for t in part.targets)
    taken_on = device_of(filled_there)
    moved = all_or_raise(lambda: exchange_rows(rows[:, :3], rows[:, 3], read, put, taken_on=taken_on))
    cost.bytes_sent += moved.sent
    cost.bytes_received += moved.received


def _put(part: FillJob, pieces: ExtentTable, at: Int64Array, buffer: RoundBuffer) -> None:
    """Copy bytes that arrived, piece i of them at ``at[i]`` of a buffer, into the tensors of one part."""
    values = torch.from_numpy(buffer) if isinstance(buffer, np.ndarray) else buffer
    direct = np.array([each.in_place and each.tensor.device == values.device for each in part.targets], dtype=bool)
    quick = np.flatnonzero(direct[pieces.target])
    members, dst = np.unique(pieces.target[quick], return_inverse=True)
    begin = pieces.target_offset[quick] * pieces.itemsize[quick]
    copy_segments(
        CopyTable(np.zeros_like(quick), at[quick], dst.reshape(-1), begin, pieces.nbytes[quick]),
        [buffer],
        [part.targets[t].tensor for t in members.tolist()],
        executor=host_executor(part.executor) if isinstance(buffer, np.ndarray) else part.executor,
    )
    for i in np.flatnonzero(~direct[pieces.target]).tolist():
        target, place = part.targets[int(pieces.target[i])], int(pieces.target_offset[i])
        data = values[int(at[i]) : int(at[i] + pieces.nbytes[i])].view(getattr(torch, target.dtype))
        target.tensor[place : place + len(data)].copy_(data)


def _digest(part: FillJob, pieces: ExtentTable, at: Int64Array, buffer: RoundBuffer) -> tuple[RowStreams, UInt64Array]:
    """Digest pieces, each of which is at ``at`` in a buffer, and return the streams that they belong to."""
    streams = RowStreams.of(part.plan, pieces, part.targets)
    totals = sum_segments(Ranges(np.zeros_like(at), at, pieces.nbytes), [buffer], digest=streams.table)
    assert totals is not None
    return streams, totals
