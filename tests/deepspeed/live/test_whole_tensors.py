"""The live layouts of runs with experts and tensor parallelism: whole tensors are put together from the ranks by them.

The referee gathers the same state from DeepSpeed's own buffers, by the unsharded shapes that the model had.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from extended import with_swept
from topologies import TopologyJob, build, differences, logical_state, train

from zeroelastic.core.layout import Layout
from zeroelastic.core.plan import held_plan
from zeroelastic.core.slice_plan import check_slices
from zeroelastic.testing import RankPool


def put_together(layout: Layout, rank: int, buffers: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The whole tensors of a layout over all ranks, by name and state key; copies agree. Collective."""
    plan = held_plan(layout, rank).run_by_run()
    columns = (plan.param, plan.start, plan.length, plan.src_sub_group, plan.src_offset)
    own = [
        (layout.tensors[param].name, key, start, flat[at : at + length].clone())
        for param, start, length, buffer, at in zip(*(column.tolist() for column in columns), strict=True)
        for key, flat in buffers[buffer].items()
    ]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    found: dict[str, torch.Tensor] = {}
    for name, key, start, part in (row for rows in ranks for row in rows):
        whole = found.setdefault(f"{name}/{key}", torch.full(shapes[name], float("nan"), dtype=part.dtype))
        there = whole.view(-1)[start : start + len(part)]
        assert bool((torch.isnan(there) | (there == part)).all()), f"copies of {name}/{key} differ"
        there.copy_(part)
    return found


def compare(job: TopologyJob) -> list[str]:
    """The keys in which the state by the live layouts differs from that of the referee, after two steps."""
    from zeroelastic.deepspeed.live.kinds import param_names, read_live

    engine = build(job)
    train(engine, 0, 2)
    live = read_live(engine.optimizer, param_names(engine))
    assert live.whole.slices is not None, "the run is not described"
    check_slices(live.whole)
    check_slices(live.whole_frozen)
    for whole, own in ((live.whole, live.layout), (live.whole_frozen, live.frozen)):
        there = whole.on_rank(dist.get_rank())
        assert there.params == own.params and (there.sub_group_numel == own.sub_group_numel).all()
    names = dict(engine.module.named_parameters())
    assert {live.local_name(param.name) for param in (*live.layout.params, *live.frozen.params)} == names.keys()
    flats = [{"fp32": live.fp32(i), **live.split_state(i)[0]} for i in range(live.layout.num_sub_groups)]
    frozen: list[dict[str, torch.Tensor]] = [{} for _ in range(live.whole_frozen.num_sub_groups)]
    for i, buffer in enumerate(live.frozen.sub_group.tolist()):
        frozen[buffer] = {"weight": live.frozen_tensor(i).reshape(-1)}
    found = put_together(live.whole, live.rank, flats) | put_together(live.whole_frozen, live.rank, frozen)
    wanted = {
        key: value
        for key, value in logical_state(engine).items()
        if torch.is_tensor(value) and not key.startswith("buffer/") and (key in found or not key.endswith("/weight"))
    }
    assert {tensor.name for tensor in live.whole_frozen.whole_tensors} == {
        key.removesuffix("/weight") for key in found if key.endswith("/weight")
    }
    return differences(wanted, found)


JOBS = {
    "llama, tp 2, stage 3": (TopologyJob("llama", tp=2), 4),
    "llama, tp 2, stage 2": (TopologyJob("llama", tp=2, stage=2, frozen=True), 4),
    "qwen3, tp 2, stage 1, bf16": (TopologyJob("qwen3", tp=2, stage=1, precision="bf16"), 2),
    "neox, tp 2, stage 3, frozen": (TopologyJob("neox", tp=2, frozen=True), 2),
    "llama, tp 4, stage 3, adapters": (TopologyJob("llama", tp=4, adapters=True), 4),
    "mixtral, tp 2, stage 2": (TopologyJob("mixtral", tp=2, stage=2, zero={"round_robin_gradients": True}), 4),
    "autoep 2, stage 3": (TopologyJob("autoep", ep=2), 4),
    "autoep 4, stage 3, bf16": (TopologyJob("autoep", ep=4, precision="bf16"), 4),
    "autoep 2, stage 2": (TopologyJob("autoep", ep=2, stage=2), 4),
    "autoep 2, stage 1": (TopologyJob("autoep", ep=2, stage=1, precision="bf16"), 2),
    "moe 2, stage 2": (TopologyJob("moe", ep=2, stage=2), 4),
    "moe 2, stage 1": (TopologyJob("moe", ep=2, stage=1), 4),
    "moe 4, stage 2, dealt": (TopologyJob("moe", ep=4, stage=2, zero={"round_robin_gradients": True}), 4),
    "moe 2, data before experts": (
        TopologyJob("moe", ep=2, stage=2, config={"use_data_before_expert_parallelism": True}),
        4,
    ),
    "moe 2, stage 1, fp32 accumulation": (
        TopologyJob("moe", ep=2, stage=1, precision="bf16", config={"data_types": {"grad_accum_dtype": "fp32"}}),
        4,
    ),
}
SWEPT = {"llama, tp 2, stage 3", "autoep 2, stage 3", "moe 2, stage 1"}
"""Others have these models, sizes and stages, in other pairs."""


@pytest.mark.parametrize("name", with_swept(JOBS, SWEPT))
def test_whole_tensors_are_put_together_by_the_live_layouts(topology_pool: RankPool, name: str) -> None:
    job, ranks = JOBS[name]
    for differing in topology_pool.run(compare, ranks, replace(job, elastic=False), timeout=180):
        assert differing == []
