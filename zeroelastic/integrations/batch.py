"""The global batch at any world size: micro batch and accumulation steps that multiply to it. Pure arithmetic."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from zeroelastic.errors import UsageError


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How one global batch is cut: ``micro * accumulation * world_size`` samples, the same on every rank.

    Every rank runs the same number of micro steps: ZeRO-3 gathers parameters in each, so a rank with fewer would leave
    the others waiting.
    """

    micro: int
    accumulation: int
    world_size: int

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.micro * self.accumulation * self.world_size


def plan_batch(global_batch: int, *, world_size: int, max_micro: int) -> BatchPlan:
    """The largest micro batch up to ``max_micro`` that keeps the global batch, and its accumulation steps.

    Raises UsageError, listing the world sizes that work, when the ranks cannot share the batch evenly.

    >>> plan_batch(24, world_size=3, max_micro=6)
    BatchPlan(micro=4, accumulation=2, world_size=3)
    """
    for name, value in (("global_batch", global_batch), ("world_size", world_size), ("max_micro", max_micro)):
        if value < 1:
            raise UsageError(f"{name} is {value}; it must be at least 1.")
    if global_batch % world_size:
        raise UsageError(
            f"a global batch of {global_batch} cannot be shared evenly by {world_size} ranks. World sizes that can: "
            f"{', '.join(map(str, world_sizes(global_batch)))}."
        )
    per_rank = global_batch // world_size
    micro = max(size for size in range(1, min(max_micro, per_rank) + 1) if per_rank % size == 0)
    return BatchPlan(micro, per_rank // micro, world_size)


def world_sizes(global_batch: int) -> tuple[int, ...]:
    """The world sizes at which a global batch can be kept: its divisors."""
    small = [size for size in range(1, int(global_batch**0.5) + 1) if global_batch % size == 0]
    return tuple(sorted({*small, *(global_batch // size for size in small)}))


def launched_world_size(environment: Mapping[str, str] = os.environ) -> int:
    """The world size that the launcher announced, 1 without one. Raises UsageError when it is not a number."""
    text = environment.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"WORLD_SIZE is {text!r} in the environment, which is no number of ranks.")
    return int(text)
