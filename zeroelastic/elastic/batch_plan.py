"""Batch plans: the micro batch and the accumulation that keep a global batch at another world size.

Every rank takes the same number of micro steps: at ZeRO stage 3 a forward pass gathers parameters, so a rank that took
one step fewer would leave the others waiting.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from zeroelastic.core.world_size import listed_world_sizes, world_sizes
from zeroelastic.errors import ConfigError

Misfit = Literal["error", "pad"]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How one global batch is divided: ``accumulation`` micro steps of ``micro_batch`` samples on each rank.

    ``padding`` is more than 0 where the last micro steps have room for more samples than there are: ``num_samples`` and
    ``loss_weight`` then say how many are real and what keeps the gradient that of the global batch.
    """

    global_batch: int
    world_size: int
    micro_batch: int
    accumulation: int

    @property
    def padding(self) -> int:
        """Places of a global batch that no sample fills; 0 unless padding was requested and is needed."""
        return self.micro_batch * self.accumulation * self.world_size - self.global_batch

    def num_samples(self, rank: int, micro_step: int) -> int:
        """How many samples a rank has in a micro step of a global batch: ``micro_batch``, or fewer with padding."""
        first = micro_step % self.accumulation * self.micro_batch
        mine = len(range(rank, self.global_batch, self.world_size))
        return min(max(mine - first, 0), self.micro_batch)

    def loss_weight(self, rank: int, micro_step: int) -> float:
        """The factor for the mean loss of a micro step over its ``num_samples``; 1.0 without padding.

        DeepSpeed averages over micro steps and over ranks, so a micro step with fewer samples would count too much:
        with this weight the gradient is exactly that of the mean over the global batch. The weight is 0.0 where a rank
        has no sample; it takes the step all the same, on any sample.
        """
        return self.num_samples(rank, micro_step) * self.accumulation * self.world_size / self.global_batch

    def apply(self, ds_config: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a DeepSpeed configuration with this plan's three batch settings in place of the configured ones."""
        config = copy.deepcopy(dict(ds_config))
        config["train_batch_size"] = self.micro_batch * self.accumulation * self.world_size
        config["train_micro_batch_size_per_gpu"] = self.micro_batch
        config["gradient_accumulation_steps"] = self.accumulation
        return config

    def text(self) -> str:
        """The plan as one line."""
        line = (
            f"global batch {self.global_batch} = {self.world_size} ranks x micro batch {self.micro_batch} x "
            f"{self.accumulation} accumulated"
        )
        if self.padding:
            line += f", {self.padding} places of it empty"
        return line


def batch_plan(
    global_batch: int, world_size: int | None = None, max_micro: int | None = None, *, misfit: Misfit = "error"
) -> BatchPlan:
    """The plan with the fewest micro steps that keeps ``global_batch`` on ``world_size`` ranks.

    ``world_size`` defaults to that of the process group or of torchrun's environment. ``max_micro`` is the largest
    micro batch that fits in memory; by default there is no limit. When the world size does not divide the global batch,
    ``misfit`` decides: "error", or "pad", which leaves places of the last micro step empty. Raises ConfigError, listing
    the world sizes that work::

        plan = batch_plan(global_batch=512, max_micro=8)
        engine, *_ = deepspeed.initialize(model=model, config=plan.apply(ds_config))
    """
    size = current_world_size() if world_size is None else world_size
    for what, value in (("global_batch", global_batch), ("world_size", size), ("max_micro", max_micro)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{what} is {value!r}; give a whole number of 1 or more.")
    if misfit not in ("error", "pad"):
        raise ConfigError(f'misfit is {misfit!r}; give "error" or "pad". {_working_sizes(global_batch)}')
    limit = global_batch if max_micro is None else max_micro
    if global_batch % size == 0:
        quota = global_batch // size
        micro = max(n for n in world_sizes(quota) if n <= limit)
        return BatchPlan(global_batch, size, micro, quota // micro)
    if misfit == "pad" and size < global_batch:
        quota = -(-global_batch // size)
        accumulation = -(-quota // limit)
        return BatchPlan(global_batch, size, -(-quota // accumulation), accumulation)
    raise ConfigError(
        f"a global batch of {global_batch} cannot be divided evenly among {size} ranks. {_working_sizes(global_batch)}"
    )


def _working_sizes(global_batch: int) -> str:
    return (
        f"World sizes that work: {listed_world_sizes(global_batch)}. "
        'misfit="pad" leaves places of the last micro step empty at any other.'
    )


def current_world_size() -> int:
    """The size of the process group; without one, torchrun's ``WORLD_SIZE``, or 1."""
    return _current("WORLD_SIZE", 1, "get_world_size")


def current_rank() -> int:
    """The rank in the process group; without one, torchrun's ``RANK``, or 0."""
    return _current("RANK", 0, "get_rank")


def _current(variable: str, alone: int, function: str) -> int:
    if dist.is_available() and dist.is_initialized():
        return int(getattr(dist, function)())
    text = os.environ.get(variable, str(alone))
    if not text.isdecimal():
        raise ConfigError(f"the environment has {variable}={text!r}, which is not a number. Set it as torchrun does.")
    return int(text)
