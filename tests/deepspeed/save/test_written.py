"""What ranks say of their files reaches every rank; a commit is later than any save before it."""

from __future__ import annotations

import torch.distributed as dist

from zeroelastic.deepspeed.engine_state import LastSave
from zeroelastic.deepspeed.save.commit import Written, gather_written
from zeroelastic.testing import RankPool


def written(rank: int, unreadable: str | None = None) -> Written:
    names = (f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    directories = {} if unreadable else {name: 32 * f"{i:02x}" for i, name in enumerate(names)}
    return Written({name: (1 << 62) + i for i, name in enumerate(names)}, directories, unreadable)


def gathered() -> list[tuple[float, list[Written]]]:
    """As it is usually, and where rank 1 has written a file that only DeepSpeed reads."""
    rank = dist.get_rank()
    unreadable = "only DeepSpeed reads it" if rank == 1 else None
    return [
        gather_written(written(rank), LastSave()),
        gather_written(written(rank, unreadable), LastSave(committed_at=4e9 + rank)),
    ]


def test_what_every_rank_has_written_is_gathered(rank_pool: RankPool) -> None:
    for (_, usual), (committed_at, unreadable) in rank_pool.run(gathered, 3):
        assert usual == [written(rank) for rank in range(3)]
        assert committed_at > 4e9 + 2
        assert [one.unreadable for one in unreadable] == [None, "only DeepSpeed reads it", None]
