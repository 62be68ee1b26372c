"""Tensors of this rank that outlive their engine: its parts of master weights, optimizer state and frozen parameters.

They are kept by reference, not copied: until the next engine is filled, a process holds its part of both worlds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN
from zeroelastic.core.layout import Layout
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.errors import UnsupportedError

Tensors = Mapping[str, Sequence[torch.Tensor | None]]
"""The flat tensor of each buffer of a layout, by state key; None where a buffer has no such key."""


@dataclass(frozen=True, slots=True)
class HeldState:
    """What ``rank`` of the old world has: flat tensors, padding included, in the buffers of two layouts."""

    rank: int
    layout: Layout
    tensors: Tensors
    frozen: Layout
    frozen_tensors: Tensors


def hold(live: LiveOptimizer) -> HeldState:
    """Keep what this rank has. Raises UnsupportedError for state that is not all in memory."""
    if live.on_nvme:
        raise UnsupportedError(
            "state on NVMe does not move from memory to memory: save, and start at the other size, or keep the "
            "optimizer on the CPU."
        )
    if live.tp.size > 1:
        raise UnsupportedError("tensor parallel ranks do not change in number while a job runs: start it again.")
    num_sub_groups = live.layout.num_sub_groups
    states = [{FP32: live.fp32(i), **live.split_state(i)[0]} for i in range(num_sub_groups)]
    keys = sorted({key for state in states for key in state})
    tensors = {key: tuple(state.get(key) for state in states) for key in keys}
    frozen = tuple(live.frozen_tensor(p).detach().view(-1) for p in range(live.frozen.num_params))
    return HeldState(live.rank, live.layout, tensors, live.frozen, {FROZEN: frozen})
