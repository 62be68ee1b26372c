"""Moves the tensors of one world into those of the next, by plan, each element once, from memory to memory.

A member asks the others for the runs of elements that it lacks, and serves what is asked of it: it flattens them into
one buffer for all peers, which are sent in rounds of bounded size, and unflattens what comes into the new partitions
(``copy_segments``: on the device where the tensors are). What it has already, it copies. Memory: the two buffers of a
round. The tensors of the old world outlive their engine: they are kept by reference, so until the next engine is filled
a process holds its part of both worlds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN
from zeroelastic.core.layout import Int64Array, Layout
from zeroelastic.core.plan import make_plan
from zeroelastic.deepspeed.engine import refuse_merged
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.replicated import refuse_common_state
from zeroelastic.distributed.exchange import Arrived, RoundBuffer, device_of, exchange_rows
from zeroelastic.distributed.peers import Peers
from zeroelastic.errors import UnsupportedError
from zeroelastic.executors.dispatch import CopyTable, copy_segments

Tensors = Mapping[str, Sequence[torch.Tensor | None]]
"""The flat tensor of each buffer, by state key, ``FROZEN`` included; None where a buffer has no such key."""


@dataclass(frozen=True, slots=True)
class HeldState:
    """What ``rank`` of the old world has: flat tensors, padding included, of trained and of frozen parameters."""

    rank: int
    layout: Layout
    frozen: Layout
    tensors: Tensors


def hold(live: LiveOptimizer) -> HeldState:
    """Keep what this rank has. Raises UnsupportedError for state that is not all in memory, or of no parameter."""
    if live.on_nvme:
        raise UnsupportedError(
            "state on NVMe does not move from memory to memory: save, and start at the other size, or keep the "
            "optimizer on the CPU."
        )
    if live.sharing.place[1].size > 1:
        raise UnsupportedError("tensor parallel ranks do not change in number while a job runs: start it again.")
    if live.sharing.has_slices:
        raise UnsupportedError("jobs with mixture-of-experts layers do not change size while they run: start it again.")
    refuse_merged(live.module, "state does not move from memory to memory")
    refuse_common_state(live)
    num_sub_groups = live.layout.num_sub_groups
    states = [{FP32: live.fp32(i), **live.split_state(i)[0]} for i in range(num_sub_groups)]
    keys = sorted({key for state in states for key in state})
    tensors = {key: tuple(state.get(key) for state in states) for key in keys}
    frozen = tuple(live.frozen_tensor(p).detach().view(-1) for p in range(live.frozen.num_params))
    return HeldState(live.rank, live.layout, live.frozen, {**tensors, FROZEN: frozen})


class MoveCost(NamedTuple):
    """Bytes of state that a member had already, that it sent, and that it received."""

    kept: int
    sent: int
    received: int


class Runs(NamedTuple):
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


NO_RUNS = Runs(*np.empty((6, 0), dtype=np.int64))


def buffers_of(keys: Sequence[str], tensors: Tensors, num_sub_groups: int) -> list[torch.Tensor | None]:
    """The flat tensors by number: key by key, each with one for every sub-group; then those of frozen parameters."""
    return [tensor for key in (*keys, FROZEN) for tensor in tensors.get(key, (None,) * num_sub_groups)]


def runs_of(keys: Sequence[str], old: tuple[Layout, Layout], live: LiveOptimizer, tensors: Tensors) -> Runs:
    """What this rank needs for ``tensors`` of the new world, in which ``keys`` number the buffers.

    ``old`` are the layouts of trained and of frozen parameters in the old world.
    """
    parts = [NO_RUNS]
    plans = [make_plan(src, dst, live.rank) for src, dst in zip(old, (live.layout, live.frozen), strict=True)]
    for number, key in enumerate((*keys, FROZEN)):
        plan, flats = plans[key == FROZEN], tensors.get(key, ())
        itemsize = np.array([0 if flat is None else flat.element_size() for flat in flats], dtype=np.int64)
        if not itemsize.any():
            continue
        rows = np.flatnonzero(itemsize[plan.dst_sub_group] > 0)
        size = itemsize[plan.dst_sub_group[rows]]
        parts.append(
            Runs(
                plan.src_rank[rows],
                number * old[0].num_sub_groups + plan.src_sub_group[rows],
                plan.src_offset[rows] * size,
                number * live.layout.num_sub_groups + plan.dst_sub_group[rows],
                plan.dst_offset[rows] * size,
                plan.length[rows] * size,
            )
        )
    return Runs(*map(np.concatenate, zip(*parts, strict=True)))


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
    _copy(CopyTable(*(column[local] for column in runs[1:])), sources, targets)  # what this member has already
    away = np.setdiff1d(np.arange(len(runs.nbytes)), local)
    rows = np.stack((runs.src, runs.src_offset, runs.nbytes), 1)[away]

    def serve(asked: Int64Array, parts: Arrived, buffer: RoundBuffer) -> None:
        src, zero = asked[:, 0], np.zeros_like(parts.at)
        _copy(CopyTable(src, asked[:, 1] + parts.skip, zero, parts.at, parts.nbytes), sources, [buffer])

    def put(arrived: Arrived, buffer: RoundBuffer) -> None:
        row, zero = away[arrived.row], np.zeros_like(arrived.at)
        at = runs.dst_offset[row] + arrived.skip
        _copy(CopyTable(zero, arrived.at, runs.dst[row], at, arrived.nbytes), [buffer], targets)

    cost = exchange_rows(
        rows,
        np.array(peer_of, dtype=np.int64)[runs.src_rank[away]],
        serve,
        put,
        peers=peers,
        filled_on=device_of(sources),
        taken_on=device_of(targets),
    )
    return MoveCost(int(runs.nbytes[local].sum()), cost.sent, cost.received)


def _copy(table: CopyTable, sources: Sequence[RoundBuffer | None], targets: Sequence[RoundBuffer | None]) -> None:
    """Copy between buffers, of which those that the table names are there."""
    sides: list[list[RoundBuffer]] = []
    numbers: list[Int64Array] = []
    for column, buffers in ((table.src, sources), (table.dst, targets)):
        used, number = np.unique(column, return_inverse=True)
        there = [buffer for i in used.tolist() if (buffer := buffers[i]) is not None]
        assert len(there) == len(used), "both sides list the same keys of the same buffers"
        sides.append(there)
        numbers.append(number.reshape(-1))
    copy_segments(replace(table, src=numbers[0], dst=numbers[1]), *sides)
