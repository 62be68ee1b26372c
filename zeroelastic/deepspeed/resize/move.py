"""Moves the tensors of one world into those of the next, by plan, each element once, from memory to memory.

A member asks the others for the runs of elements that it lacks, and serves what is asked of it: it flattens them into
one buffer for all peers, which are sent in rounds of bounded size, and unflattens what comes into the new partitions
(``copy_segments``: on the device where the tensors are). What it has already, it copies. Memory: the two buffers of a
round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from zeroelastic.core.layout import Int64Array, Layout
from zeroelastic.core.plan import make_plan
from zeroelastic.deepspeed.node_local.all_to_all import (
    Piece,
    RoundBuffer,
    all_to_all_bytes,
    all_to_all_stream,
    device_of,
)
from zeroelastic.deepspeed.node_local.row_stream import RowStream
from zeroelastic.deepspeed.resize.held import HeldState, Tensors
from zeroelastic.distributed.peers import Peers
from zeroelastic.executors.dispatch import CopyTable, copy_segments


class MoveCost(NamedTuple):
    """Bytes of state that a member had already, that it sent, and that it received."""

    kept: int
    sent: int
    received: int


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of bytes: row i is ``nbytes[i]`` at ``src_offset[i]`` of buffer ``src[i]`` of old rank ``src_rank[i]``.

    It goes to ``dst_offset[i]`` of the new buffer ``dst[i]``. Buffers are numbered as ``buffers_of`` lists them. Each
    array has shape ``(num_rows,)``.
    """

    src_rank: Int64Array
    src: Int64Array
    src_offset: Int64Array
    dst: Int64Array
    dst_offset: Int64Array
    nbytes: Int64Array

    def take(self, index: Int64Array) -> Runs:
        """Some of the rows."""
        return Runs(*(getattr(self, name)[index] for name in self.__slots__))

    @staticmethod
    def joined(parts: Sequence[Runs]) -> Runs:
        """All rows of several; none of none."""
        none = np.empty(0, dtype=np.int64)
        return Runs(*(np.concatenate([none, *(getattr(part, name) for part in parts)]) for name in Runs.__slots__))


def buffers_of(keys: Sequence[str], tensors: Tensors, num_buffers: int) -> list[torch.Tensor | None]:
    """The flat tensors by number: key by key, each with one for every buffer of the layout."""
    return [tensor for key in keys for tensor in tensors.get(key, (None,) * num_buffers)]


def runs_of(
    keys: Sequence[str], src: Layout, dst: Layout, rank: int, tensors: Tensors, *, src_first: int, dst_first: int
) -> Runs:
    """What ``rank`` of ``dst`` needs for ``tensors``, from the ranks of ``src``.

    ``src_first`` and ``dst_first`` are the numbers of the first buffers of the two layouts.
    """
    plan = make_plan(src, dst, rank)
    parts = []
    for number, key in enumerate(keys):
        flats = tensors.get(key, ())
        itemsize = np.array([0 if flat is None else flat.element_size() for flat in flats], dtype=np.int64)
        if not itemsize.any():
            continue
        rows = np.flatnonzero(itemsize[plan.dst_sub_group] > 0)
        size = itemsize[plan.dst_sub_group[rows]]
        parts.append(
            Runs(
                plan.src_rank[rows],
                src_first + number * src.num_sub_groups + plan.src_sub_group[rows],
                plan.src_offset[rows] * size,
                dst_first + number * dst.num_sub_groups + plan.dst_sub_group[rows],
                plan.dst_offset[rows] * size,
                plan.length[rows] * size,
            )
        )
    return Runs.joined(parts)


def move(
    runs: Runs,
    targets: Sequence[torch.Tensor | None],
    held: HeldState | None,
    sources: Sequence[torch.Tensor | None],
    peers: Peers,
    peer_of: Sequence[int],
) -> MoveCost:
    """Fill ``targets`` as ``runs`` say, and serve the other members from ``sources``. Collective over ``peers``.

    ``peer_of[rank]`` is the peer that was ``rank`` in the old world. Raises what this member failed with, after the
    last round, so that no other waits for it.
    """
    local = np.flatnonzero(runs.src_rank == held.rank) if held is not None else np.empty(0, dtype=np.int64)
    _copy(runs.take(local), sources, targets)
    away = np.setdiff1d(np.arange(len(runs.src_rank)), local)
    peer = np.array(peer_of, dtype=np.int64)[runs.src_rank[away]]
    mine = {int(other): away[peer == other] for other in np.unique(peer)}
    asked = {other: np.stack((runs.src, runs.src_offset, runs.nbytes), 1)[rows] for other, rows in mine.items()}
    wanted = {other: RowStream.of(rows) for other, rows in asked.items()}
    arrived = all_to_all_bytes({other: rows.tobytes() for other, rows in asked.items()}, peers=peers)
    served = {
        other: RowStream.of(np.frombuffer(data, dtype=np.int64).reshape(-1, 3)) for other, data in arrived.items()
    }

    def fill(pieces: Sequence[Piece], buffer: RoundBuffer) -> None:
        cuts = [(served[piece.peer].rows, served[piece.peer].cut(piece)) for piece in pieces]
        src = np.concatenate([rows[cut.row, 0] for rows, cut in cuts])
        offset = np.concatenate([rows[cut.row, 1] + cut.skip for rows, cut in cuts])
        at, nbytes = (np.concatenate([getattr(cut, name) for _, cut in cuts]) for name in ("at", "nbytes"))
        numbers, src = np.unique(src, return_inverse=True)
        flats = [_there(sources[number]) for number in numbers.tolist()]
        copy_segments(CopyTable(src.reshape(-1), offset, np.zeros_like(at), at, nbytes), flats, [buffer])

    def take(pieces: Sequence[Piece], buffer: RoundBuffer) -> None:
        cuts = [(mine[piece.peer], wanted[piece.peer].cut(piece)) for piece in pieces]
        row = np.concatenate([rows[cut.row] for rows, cut in cuts])
        skip, at, nbytes = (
            np.concatenate([getattr(cut, name) for _, cut in cuts]) for name in ("skip", "at", "nbytes")
        )
        numbers, dst = np.unique(runs.dst[row], return_inverse=True)
        flats = [_there(targets[number]) for number in numbers.tolist()]
        copy_segments(
            CopyTable(np.zeros_like(at), at, dst.reshape(-1), runs.dst_offset[row] + skip, nbytes), [buffer], flats
        )

    cost = all_to_all_stream(
        {other: stream.nbytes for other, stream in served.items()},
        fill,
        take,
        peers=peers,
        filled_on=device_of(sources),
        taken_on=device_of(targets),
    )
    return MoveCost(int(runs.nbytes[local].sum()), cost.sent, cost.received)


def _copy(runs: Runs, sources: Sequence[torch.Tensor | None], targets: Sequence[torch.Tensor | None]) -> None:
    """Copy what this member has already."""
    if not len(runs.nbytes):
        return
    src_numbers, src = np.unique(runs.src, return_inverse=True)
    dst_numbers, dst = np.unique(runs.dst, return_inverse=True)
    copy_segments(
        CopyTable(src.reshape(-1), runs.src_offset, dst.reshape(-1), runs.dst_offset, runs.nbytes),
        [_there(sources[number]) for number in src_numbers.tolist()],
        [_there(targets[number]) for number in dst_numbers.tolist()],
    )


def _there(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "both sides list the same keys of the same buffers"
    return tensor
