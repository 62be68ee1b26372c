"""What ranks say of their files reaches the rank that writes the record in few bytes, and none of it is lost."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from zeroelastic.deepspeed.engine_state import LastSave
from zeroelastic.deepspeed.save.commit import Written, _pack, _unpack, gather_written
from zeroelastic.testing import RankPool

NAMES = [
    ("zero_pp_rank_0_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    ("zero_pp_rank_16383_mp_rank_07_model_states.pt", "zero_pp_rank_16383_mp_rank_07_optim_states.pt"),
    ("mp_rank_01_model_states.pt", "zero_pp_rank_3_mp_rank_01_optim_states.pt"),
]


def written(names: tuple[str, ...], digests: tuple[str, ...], unreadable: str | None = None) -> Written:
    sizes = {name: (1 << 62) + i for i, name in enumerate(names)}
    return Written(sizes, {name: 32 * f"{i:02x}" for i, name in enumerate(digests)}, unreadable)


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[1])
@pytest.mark.parametrize("which", [slice(0, 2), slice(0, 1), slice(1, 2), slice(0, 0)], ids=str)
def test_what_fits_in_few_bytes_comes_back(names: tuple[str, str], which: slice) -> None:
    for own in (written(names[which], names[which]), written(names, names[which])):
        packed = _pack(own, names)
        assert packed is not None and len(packed) == 88 and _unpack(packed) == own


@pytest.mark.parametrize(
    ("own", "names"),
    [
        (written(NAMES[0], (), "only DeepSpeed reads it"), NAMES[0]),
        (written((*NAMES[0], "more.pt"), ()), NAMES[0]),
        (written(("model.pt", "optim.pt"), ()), ("model.pt", "optim.pt")),
        (written(NAMES[0][:1], NAMES[0][1:]), (NAMES[0][0], "zero_pp_rank_0_mp_rank_00optim_states.pt")),
        (written((NAMES[0][0], NAMES[1][1]), ()), (NAMES[0][0], NAMES[1][1])),
    ],
)
def test_what_does_not_fit_is_not_packed(own: Written, names: tuple[str, str]) -> None:
    assert _pack(own, names) is None


def gathered() -> list[tuple[float, bool, list[Written]]]:
    """As it is usually, and where rank 1 has written a file that only DeepSpeed reads."""
    rank = dist.get_rank()
    names = (f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    unreadable = "only DeepSpeed reads it" if rank == 1 else None
    return [
        gather_written(written(names, names), names, LastSave()),
        gather_written(written(names, (), unreadable), names, LastSave(committed_at=4e9 + rank)),
    ]


def test_what_every_rank_has_written_is_gathered(rank_pool: RankPool) -> None:
    for (_, only_stock, usual), (committed_at, not_ours, unreadable) in rank_pool.run(gathered, 3):
        assert not only_stock and not_ours and committed_at > 4e9 + 2
        assert [sorted(one.sizes)[0].split("_")[3] for one in usual] == ["0", "1", "2"]
        assert [len(one.directories) for one in usual] == [2, 2, 2]
        assert [one.unreadable for one in unreadable] == [None, "only DeepSpeed reads it", None]
