"""Values of every rank, whatever the sizes of their pickles."""

from __future__ import annotations

import torch.distributed as dist

from zeroelastic.distributed.collective import all_gather
from zeroelastic.testing import RankPool

LENGTHS = (0, 1, 480, 490, 491, 492, 493, 494, 500, 520, 5000)
"""Of byte strings; the pickle of one is some bytes longer, and the first exchange takes 504."""


def value_of(rank: int, length: int) -> tuple[int, bytes]:
    return rank, bytes([rank + 1]) * length


def gather_all() -> bool:
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    for length in LENGTHS:
        assert all_gather(value_of(rank, length)) == [value_of(other, length) for other in ranks]
        # one long, the others short
        found = all_gather(value_of(rank, length if rank == 1 else 3))
        assert found == [value_of(other, length if other == 1 else 3) for other in ranks]
    assert all_gather(None) == [None for _ in ranks]
    return True


def test_values_of_any_size_arrive(rank_pool: RankPool) -> None:
    for world_size in (1, 2, 3):
        assert all(rank_pool.run(gather_all, world_size))
