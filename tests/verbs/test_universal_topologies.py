"""Universal checkpoints of runs with experts and tensor parallelism, which stock DeepSpeed loads at other topologies.

The referee is ``topologies.logical_state``; zeroelastic is not installed in the ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from extended import with_swept
from topologies import TopologyJob, differences, load_and_gather, save_trained

import zeroelastic
from zeroelastic.errors import UnsupportedError
from zeroelastic.testing import RankPool

UNIVERSAL: dict[str, Any] = {"checkpoint": {"load_universal": True}}
RESTORED = ("weight", "fp32", "exp_avg", "exp_avg_sq", "step")
"""What DeepSpeed's loader restores of each parameter."""


def restored(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key.rpartition("/")[2] in RESTORED}


class Case(NamedTuple):
    """A run of ``job`` on ``ranks``, and the ranks and changes of runs that load its Universal checkpoint."""

    ranks: int
    job: TopologyJob
    others: tuple[tuple[int, dict[str, Any]], ...]


def stock(model: str, **options: Any) -> TopologyJob:
    return TopologyJob(model, installed=False, elastic=False, **options)


CASES = {
    "llama 3": Case(4, stock("llama", tp=2, precision="bf16"), ((2, {"tp": 1}), (4, {"tp": 4}), (4, {"tp": 2}))),
    "qwen3 2": Case(4, stock("qwen3", tp=2, stage=2), ((3, {"tp": 1}), (4, {"tp": 4}))),
    "autoep 3": Case(4, stock("autoep", ep=2), ((4, {"ep": 4}), (3, {"ep": 1}))),
    "autoep 2": Case(4, stock("autoep", ep=2, stage=2), ((4, {"ep": 4}), (2, {"ep": 1}))),
    "moe 2": Case(4, stock("moe", ep=2, stage=2), ((3, {"ep": 1}),)),
}


@pytest.mark.support(
    "Using it", "`zeroelastic convert --to universal`: AutoTP, AutoEP; DeepSpeed's own MoE layers for ep 1", "exact"
)
@pytest.mark.parametrize("name", with_swept(CASES, {"autoep 2"}))
def test_stock_deepspeed_loads_it_at_another_topology(name: str, topology_pool: RankPool, tmp_path: Path) -> None:
    ranks, job, others = CASES[name]
    saved = topology_pool.run(save_trained, ranks, job, str(tmp_path / "saved"))[0]
    report = zeroelastic.convert(tmp_path / "saved", tmp_path / "universal", to="universal")
    assert any("load it with expert parallel size 1" in note for note in report.notes) == (job.model == "moe")
    with pytest.raises(UnsupportedError, match=r"cannot be taken yet.*zeroelastic reshard"):
        zeroelastic.convert(tmp_path / "universal", tmp_path / "native", from_="universal", world_size=2)
    for other_ranks, changes in others:
        other = replace(job.other(), **changes, config=UNIVERSAL)
        found = topology_pool.run(load_and_gather, other_ranks, other, str(tmp_path / "universal"))[0]
        assert not differences(restored(saved), restored(found)), changes
