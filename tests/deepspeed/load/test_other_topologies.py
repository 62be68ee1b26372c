"""What stock DeepSpeed saved is loaded at other data, tensor and expert parallel sizes, bit by bit, and trains on.

The referee is ``topologies.logical_state``, which shares no code with what saves and loads.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import topologies
import torch
from saved_files import flip
from topologies import TopologyJob, load_run, save_run

from zeroelastic.checkpoint.open import Checkpoint, open_checkpoint
from zeroelastic.errors import UnsupportedError
from zeroelastic.testing import RankPool

SAVES = [
    (4, TopologyJob("llama", tp=2, stage=3, precision="bf16"), [(2, 1), (4, 4)]),
    (4, TopologyJob("qwen3", tp=2, stage=2, frozen=True, offload=True), [(2, 2), (4, 2)]),
    (4, TopologyJob("autoep", ep=2, stage=3), [(1, 1), (4, 4)]),
    (4, TopologyJob("autoep", ep=4, stage=1, precision="bf16"), [(2, 1), (4, 2)]),
    (4, TopologyJob("moe", ep=2, stage=2), [(2, 2), (4, 4)]),
]
"""Each with the ranks, and the tensor or expert parallel size, of the runs that load it."""


def case(save: tuple[int, TopologyJob, list[tuple[int, int]]]) -> Any:
    job = save[1]
    return pytest.param(*save, id=f"{job.model}-{job.stage}-{job.tp}-{job.ep}-on {len(save[2])}")


@pytest.mark.parametrize(("ranks", "job", "others"), [*map(case, SAVES)])
def test_a_stock_save_loads_at_other_sizes(
    topology_pool: RankPool, tmp_path: Any, ranks: int, job: TopologyJob, others: list[tuple[int, int]]
) -> None:
    saved = topology_pool.run(save_run, ranks, replace(job, installed=False, elastic=False), str(tmp_path))[0]
    axis = "ep" if job.model in ("autoep", "moe") else "tp"
    tolerance = topologies.LOSS_RTOL[job.precision]
    for other_ranks, size in others:
        run = job.other(elastic=False, **{axis: size})
        loaded = topology_pool.run(load_run, other_ranks, run, str(tmp_path))[0]
        assert topologies.differences(saved.state, loaded.state) == [], (other_ranks, size)
        assert loaded.losses == pytest.approx(saved.losses, rel=tolerance)
        own = getattr(job, axis)
        if {own, size} != {1}:
            what = {"tp": "tensor", "ep": "expert"}[axis]
            assert f"{what} parallel {own} -> {size}" in loaded.report


def alter_a_copy(tag: Path) -> None:
    """One byte of what the second tensor parallel rank has of a norm, which both ranks are to have alike."""
    checkpoint = open_checkpoint(tag)
    rank = next(rank for rank in (1, 3) if checkpoint.shard(rank).layout.owned(rank)[1][norm_of(checkpoint, rank)])
    shard, norm = checkpoint.shard(rank), norm_of(checkpoint, rank)
    in_buffer = int(shard.layout.buffer_offset(rank)[norm] - shard.layout.offset[norm])
    offset = int(shard.extents["exp_avg"].offset[norm]) + 4 * in_buffer
    path = tag / shard.path.name
    flip(path, offset + 1)
    torch.save(torch.load(path, weights_only=False), path)  # as a rank that had it so would have saved it


def norm_of(checkpoint: Checkpoint, rank: int) -> int:
    return checkpoint.shard(rank).layout.index()["model.norm.weight"]


def refused(job: TopologyJob, directory: str) -> str:
    engine = topologies.build(job)
    try:
        engine.load_checkpoint(directory, tag="t")
    except UnsupportedError as error:
        return str(error)
    return ""


def test_copies_that_differ_are_not_taken_silently(topology_pool: RankPool, tmp_path: Path) -> None:
    job = TopologyJob("llama", tp=2, stage=2)
    topology_pool.run(save_run, 4, replace(job, installed=False, elastic=False), str(tmp_path))
    assert topology_pool.run(refused, 2, job.other(tp=1), str(tmp_path)) == ["", ""]
    alter_a_copy(tmp_path / "t")
    for said in topology_pool.run(refused, 2, job.other(tp=1), str(tmp_path)):
        assert "different copies of the same values: model.norm.weight: exp_avg" in said
    assert topology_pool.run(refused, 4, job.other(), str(tmp_path)) == [""] * 4, "each rank takes its own"
