"""A run at another world size: the sizes that divide its global batch, and the seeds of its ranks.

This is arithmetic, which needs neither torch nor a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

_NAMED = 24


def world_sizes(global_batch: int) -> tuple[int, ...]:
    """Every world size at which each rank gets the same number of samples of a global batch, ascending."""
    low = [n for n in range(1, int(global_batch**0.5) + 2) if global_batch % n == 0]
    return tuple(sorted({*low, *(global_batch // n for n in low)}))


def listed_world_sizes(global_batch: int) -> str:
    """List choices for people; of many the first and the last."""
    sizes = world_sizes(global_batch)
    return ", ".join(map(str, sizes[:_NAMED])) + (f" ... {sizes[-1]}" if len(sizes) > _NAMED else "")


def misfit_notes(
    global_batch: int | None, world_size: int, saved_world_size: int, ds_config: Mapping[str, object] | None
) -> tuple[str, ...]:
    """A note where ``world_size`` ranks cannot share the saved global batch; DeepSpeed stops such a run at its start.

    None where the saved ranks did not share it either, as with sequence parallelism, whose groups take one batch.
    """
    if not global_batch or global_batch % world_size == 0 or global_batch % saved_world_size:
        return ()
    if (ds_config or {}).get("sequence_parallel_size", 1) != 1:
        return ()
    return (
        f"the saved global batch of {global_batch} cannot be shared evenly by {world_size} ranks: DeepSpeed stops "
        "at the start of training unless train_batch_size is changed. World sizes that divide it: "
        f"{listed_world_sizes(global_batch)}.",
    )


def derived_seed(identity: str, rank: int) -> int:
    """The seed of one rank's generators: 63 bits, another for each checkpoint and rank."""
    digest = hashlib.sha256(f"zeroelastic rng {identity} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
