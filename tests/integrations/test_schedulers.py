"""Every learning rate scheduler of torch, and one of a user's own, goes on at another number of ranks.

Under DeepSpeed, accelerate, Lightning and the Trainer: the rates of the steps after the resume are those of the run
that was saved.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from scheduler_jobs import AGAIN, MAKE, SAVED, rates_of
from torch.optim import lr_scheduler as schedulers

from zeroelastic.testing import RankPool

LIMIT_S = 400.0


def test_the_table_has_every_scheduler_of_torch() -> None:
    named = {name for name in schedulers.__all__ if isinstance(getattr(schedulers, name), type)}
    assert named - {"LRScheduler"} <= set(MAKE)


SHOWN = pytest.mark.support(
    "Frameworks", "accelerate: learning rate schedulers", "exact", "LambdaLR and those of torch"
)


@pytest.mark.parametrize("framework", ["DeepSpeed", pytest.param("accelerate", marks=SHOWN), "Lightning", "Trainer"])
def test_every_scheduler_goes_on(frameworks_pool: RankPool, tmp_path: Path, framework: str) -> None:
    """And once more, back at the first number."""
    names = list(MAKE)
    whole = frameworks_pool.run(rates_of, 2, framework, str(tmp_path), names, 0, timeout=LIMIT_S)[0]
    for world_size, start in ((3, SAVED), (2, AGAIN)):
        seen = frameworks_pool.run(rates_of, world_size, framework, str(tmp_path), names, start, timeout=LIMIT_S)
        for name in names:
            assert not isinstance(whole[name], str) and len({*whole[name]}) > 1, (name, whole[name])
            for rank in seen:
                assert rank[name] == pytest.approx(whole[name][start:], rel=1e-9), (name, rank[name], whole[name])
