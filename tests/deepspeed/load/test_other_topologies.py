"""What stock DeepSpeed saved is loaded at other data, tensor and expert parallel sizes, bit by bit, and trains on.

The referee is ``topologies.logical_state``, which shares no code with what saves and loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import topologies
from topologies import TopologyJob

from zeroelastic.testing import RankPool


@pytest.fixture(scope="module")
def topology_pool() -> Iterator[RankPool]:
    with RankPool(4, preload=topologies.PRELOADED) as pool:
        yield pool


class Trained(NamedTuple):
    """The state of a save, or after a load, and the losses of the steps behind it; the report of a load as text."""

    state: dict[str, Any]
    losses: list[float]
    report: str = ""


def save(job: TopologyJob, directory: str) -> Trained:
    engine = topologies.build(job)
    topologies.train(engine, 0, 2)
    engine.save_checkpoint(directory, tag="two")
    return Trained(topologies.logical_hashes(engine), topologies.train(engine, 2, 2))


def load(job: TopologyJob, directory: str, flags: dict[str, Any]) -> Trained:
    from zeroelastic.deepspeed.live import topology

    topology.COVERED = True
    engine = topologies.build(job)
    engine.load_checkpoint(directory, tag="two", **flags)
    return Trained(topologies.logical_hashes(engine), topologies.train(engine, 2, 2), engine.zeroelastic_report.text())


TP = [(2, 1), (2, 2), (4, 2), (4, 4)]
EP = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]
"""Ranks, and the tensor or expert parallel size."""

SAVES = [
    (4, TopologyJob("llama", tp=2, stage=3, precision="bf16"), TP),
    (4, TopologyJob("qwen3", tp=2, stage=2, frozen=True, offload=True), TP),
    (4, TopologyJob("autoep", ep=2, stage=3), EP),
    (4, TopologyJob("autoep", ep=4, stage=1, precision="bf16"), EP),
    (4, TopologyJob("moe", ep=2, stage=2), EP),
]
MORE_SAVES = [
    (2, TopologyJob("llama", tp=1, stage=1), TP),
    (4, TopologyJob("llama", tp=4, stage=2, adapters=True), TP),
    (4, TopologyJob("neox", tp=2, stage=1), TP),
    (4, TopologyJob("mixtral", tp=2, stage=3, frozen=True), TP),
    (2, TopologyJob("autoep", ep=1, stage=2), EP),
    (4, TopologyJob("moe", ep=4, stage=1), EP),
]


def case(save: tuple[int, TopologyJob, list[tuple[int, int]]], *marks: pytest.MarkDecorator) -> Any:
    job = save[1]
    return pytest.param(*save, marks=marks, id=f"{job.model}-{job.stage}-{job.tp}-{job.ep}")


@pytest.mark.parametrize(
    ("ranks", "job", "others"), [*map(case, SAVES), *(case(save, pytest.mark.extended) for save in MORE_SAVES)]
)
def test_a_stock_save_loads_at_other_sizes(
    topology_pool: RankPool, tmp_path: Any, ranks: int, job: TopologyJob, others: list[tuple[int, int]]
) -> None:
    saved = topology_pool.run(save, ranks, replace(job, installed=False, elastic=False), str(tmp_path))[0]
    axis = "ep" if others is EP else "tp"
    tolerance = topologies.LOSS_RTOL[job.precision]
    for other_ranks, size in others:
        run = job.other(elastic=False, **{axis: size})
        loaded = topology_pool.run(load, other_ranks, run, str(tmp_path), {})[0]
        assert topologies.differences(saved.state, loaded.state) == [], (other_ranks, size)
        assert loaded.losses == pytest.approx(saved.losses, rel=tolerance)
        own = getattr(job, axis)
        if {own, size} != {1}:
            what = {"tp": "tensor", "ep": "expert"}[axis]
            assert f"{what} parallel {own} -> {size}" in loaded.report
