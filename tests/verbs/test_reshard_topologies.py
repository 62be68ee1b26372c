"""Resharded checkpoints of experts and tensor parallelism in stock DeepSpeed: the whole state is the saved one.

The referee is ``topologies.logical_state``. zeroelastic is not installed in the ranks that load, and in those that save
only where the case says so; every load trains on with the losses of the run that was saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import topologies
from topologies import LOSS_RTOL, TopologyJob, build, differences, logical_hashes, train

import zeroelastic
from zeroelastic.testing import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, preload=topologies.PRELOADED) as pool:
        yield pool


class Seen(NamedTuple):
    """A run's logical state after training or a load, and the losses that follow."""

    state: dict[str, Any]
    losses: list[float]


def save(job: TopologyJob, directory: str) -> Seen:
    engine = build(job)
    train(engine, 0, 2)
    engine.save_checkpoint(directory, tag="t")
    return Seen(logical_hashes(engine), train(engine, 2, 2))


def load(job: TopologyJob, directory: str) -> Seen:
    engine = build(job)
    path, _ = engine.load_checkpoint(directory, tag="t")
    assert path is not None
    return Seen(logical_hashes(engine), train(engine, 2, 2))


@dataclass(frozen=True)
class Case:
    """A run of ``job`` on ``ranks``, and stock runs that load what is made of its checkpoint: ranks and changes."""

    ranks: int
    job: TopologyJob
    others: tuple[tuple[int, dict[str, Any]], ...]


def stock(model: str, **options: Any) -> TopologyJob:
    return TopologyJob(model, installed=False, elastic=False, **options)


CASES = {
    "llama 3": Case(
        4, stock("llama", tp=2, precision="bf16"), ((2, {"tp": 1}), (4, {"tp": 4}), (2, {"tp": 2, "stage": 1}))
    ),
    "qwen3 2": Case(
        2, stock("qwen3", tp=2, stage=2, frozen=True), ((3, {"tp": 1}), (4, {"tp": 2}), (4, {"tp": 4, "stage": 3}))
    ),
    "neox 1": Case(4, stock("neox", tp=4, stage=1), ((4, {"tp": 2, "stage": 2}), (1, {"tp": 1}))),
    "autoep 3": Case(
        4, stock("autoep", ep=2, precision="bf16"), ((4, {"ep": 4}), (3, {"ep": 1}), (2, {"ep": 2, "stage": 2}))
    ),
    "autoep 2": Case(4, stock("autoep", ep=4, stage=2), ((2, {"ep": 2}), (4, {"ep": 1, "stage": 3}))),
    "autoep 1": Case(2, stock("autoep", ep=1, stage=1), ((4, {"ep": 2}),)),
    "moe 2": Case(4, stock("moe", ep=2, stage=2, precision="bf16"), ((2, {"ep": 2}), (4, {"ep": 4}), (3, {"ep": 1}))),
    "moe 1": Case(2, stock("moe", ep=1, stage=1), ((4, {"ep": 2, "stage": 2}), (4, {"ep": 4}))),
}


@pytest.mark.support(
    "Using it", "`zeroelastic reshard --tp`, `--ep`: AutoTP, AutoEP and DeepSpeed's own MoE layers", "exact"
)
@pytest.mark.parametrize("name", CASES)
def test_stock_deepspeed_goes_on_at_another_topology(name: str, pool: RankPool, tmp_path: Path) -> None:
    case = CASES[name]
    saved = pool.run(save, case.ranks, case.job, str(tmp_path / "saved"))[0]
    roots: set[str | None] = set()
    for number, (ranks, changes) in enumerate(case.others):
        job = replace(case.job.other(), **changes)
        given: dict[str, Any] = {"tp": job.tp} if "tp" in changes else {"ep": job.ep}
        if job.stage == 3:
            given["sub_group_size"] = topologies.ds_config(job)["zero_optimization"]["sub_group_size"]
        target = tmp_path / str(number)
        report = zeroelastic.reshard(tmp_path / "saved", target, world_size=ranks, stage=job.stage, **given)
        roots.add(report.content_root)
        found = pool.run(load, ranks, job, str(target))[0]
        assert not differences(saved.state, found.state), changes
        assert found.losses == pytest.approx(saved.losses, rel=LOSS_RTOL[job.precision])
    assert len(roots) == 1
