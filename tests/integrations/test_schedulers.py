"""Every learning rate scheduler of torch, and one of a user's own, goes on at another number of ranks.

Under DeepSpeed, accelerate, Lightning and the Trainer: the rates of the steps after the resume are those of the run
that was saved.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from scheduler_jobs import MAKE, rates_of
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
    names = list(MAKE)
    whole = frameworks_pool.run(rates_of, 2, framework, str(tmp_path), names, True, timeout=LIMIT_S)[0]
    seen = frameworks_pool.run(rates_of, 3, framework, str(tmp_path), names, False, timeout=LIMIT_S)
    for name in names:
        assert len({*whole[name]}) > 1, name
        for rank in seen:
            assert rank[name] == pytest.approx(whole[name], rel=1e-9), (name, rank[name], whole[name])
