"""Runs with experts and tensor parallelism resume at other data, tensor and expert parallel sizes.

The referee is ``topologies.logical_state``, which shares no code with what saves and loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import topologies
import torch
from topologies import TopologyJob

from zeroelastic.testing import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, preload=topologies.PRELOADED) as pool:
        yield pool


def gather_at_the_start(job: TopologyJob) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[float]]:
    """The weights before DeepSpeed sliced them, the state that is gathered behind it, and losses."""
    engine = topologies.build(job)
    state = topologies.logical_state(engine)
    return engine.built.weights, state, topologies.train(engine, 0, 3)


GATHERED = [
    (4, TopologyJob("llama", tp=4, stage=3)),
    (4, TopologyJob("qwen3", tp=2, stage=2, frozen=True)),
    (2, TopologyJob("neox", tp=2, stage=1)),
    (2, TopologyJob("mixtral", tp=2, stage=3)),
    (2, TopologyJob("llama", tp=2, stage=2, adapters=True)),
    (4, TopologyJob("autoep", ep=2, stage=3, elastic=False)),
    (4, TopologyJob("autoep", ep=4, stage=2, elastic=False)),
    (4, TopologyJob("moe", ep=2, stage=2, elastic=False)),
]


@pytest.mark.parametrize(("ranks", "job"), GATHERED, ids=[f"{job.model}-{job.stage}" for _, job in GATHERED])
def test_the_referee_gathers_the_unsharded_model_at_every_topology(
    pool: RankPool, ranks: int, job: TopologyJob
) -> None:
    """It finds the weights that were there before, and the losses are those of one rank without parallelism."""
    weights, state, losses = pool.run(gather_at_the_start, ranks, job)[0]
    assert {key.removesuffix("/weight") for key in state if key.endswith("/weight")} == {*weights}
    for name, weight in weights.items():
        for key in (f"{name}/weight", f"{name}/fp32"):
            assert key not in state or torch.equal(state[key], weight), key
    alone = TopologyJob(job.model, stage=job.stage, frozen=job.frozen, adapters=job.adapters, elastic=False)
    assert losses == pytest.approx(pool.run(gather_at_the_start, 1, alone)[0][2], rel=1e-5)
