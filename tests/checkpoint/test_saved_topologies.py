"""Files of real runs at every topology hold, where the layout over all ranks says, what an independent gather found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import topologies
import torch
from saved_files import flip
from topologies import TopologyJob

from zeroelastic import verify
from zeroelastic.checkpoint.checker import check_headers
from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.open import Checkpoint, open_checkpoint
from zeroelastic.checkpoint.optimizer_file import FROZEN
from zeroelastic.core.layout import Layout
from zeroelastic.core.plan import held_plan
from zeroelastic.testing import RankPool
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.verbs.verify.verify import verify_from_headers

TAG = "t"


def save(job: TopologyJob, directory: str) -> dict[str, Any]:
    """Train a step, save without zeroelastic, and gather the logical state."""
    engine = topologies.build(job)
    topologies.train(engine, 0, 1)
    engine.save_checkpoint(directory, tag=TAG)
    return topologies.logical_state(engine)


Pieces = dict[tuple[str, str], np.ndarray]
"""The bytes of whole tensors by name and state key."""


def put_together(layout: Layout, extents: Mapping[int, Mapping[str, TensorExtents]]) -> Pieces:
    """The whole tensors of what each rank's files hold. Every element is there, and all copies of it are equal."""
    whole: Pieces = {}
    held: Pieces = {}
    for rank, keys in extents.items():
        plan = held_plan(layout, rank).run_by_run()
        for key, places in keys.items():
            rows = (plan.src_param, plan.src_offset, plan.start, plan.length)
            for param, offset, start, length in zip(*(column.tolist() for column in rows), strict=True):
                tensor, size = layout.tensors[param], DTYPE_BYTES[places.dtype[int(layout.sub_group[param])]]
                path = places.path if places.param_paths is None else places.param_paths[param]
                at = int(places.offset[param]) + (offset - int(layout.offset[param])) * size
                with Path(path).open("rb") as file:
                    file.seek(at)
                    data = np.frombuffer(file.read(length * size), dtype=np.uint8)
                name = (tensor.name, key)
                into = whole.setdefault(name, np.zeros(tensor.numel * size, dtype=np.uint8))
                seen = held.setdefault(name, np.zeros(tensor.numel * size, dtype=bool))
                here = slice(start * size, (start + length) * size)
                assert (into[here][seen[here]] == data[seen[here]]).all(), f"copies of {name} differ"
                into[here], seen[here] = data, True
    assert all(seen.all() for seen in held.values())
    return whole


def trained_and_frozen(checkpoint: Checkpoint) -> Pieces:
    found = put_together(checkpoint.layout, {rank: checkpoint.extents(rank) for rank in range(checkpoint.world_size)})
    frozen = checkpoint.frozen_layout
    if frozen is not None:
        extents = ((rank, checkpoint.frozen_extents(rank)) for rank in range(frozen.world_size))
        found |= put_together(frozen, {rank: {FROZEN: places} for rank, places in extents if places is not None})
    return found


def check_holds(checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
    """The files hold the trained state, and the frozen weights."""
    found = trained_and_frozen(checkpoint)
    trained = {key.removesuffix("/fp32") for key in state if key.endswith("/fp32")}
    want = {
        (name, FROZEN if key == "weight" else key): value
        for name, _, key in (entry.rpartition("/") for entry in state)
        if torch.is_tensor(value := state[f"{name}/{key}"])
        and (key == "weight") != (name in trained)
        and not name.startswith("buffer/")
    }
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert found[name].tobytes() == value.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), name
    shapes = {name: tuple(value.shape) for (name, _), value in want.items()}
    layouts = [layout for layout in (checkpoint.layout, checkpoint.frozen_layout) if layout is not None]
    assert {tensor.name: tensor.shape for layout in layouts for tensor in layout.whole_tensors} == shapes


def check_groups(checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
    """Every rank's file gives the same groups of whole tensors, with their hyper-parameters."""
    groups = checkpoint.groups(checkpoint.shard(0))
    names = [name for group in groups for name in group.params]
    assert sorted(names) == sorted(tensor.name for tensor in checkpoint.layout.whole_tensors)
    for group in groups:
        for name in group.params:
            assert group.options["lr"] == state[f"{name}/group/lr"], name
    for rank in range(1, checkpoint.world_size):
        assert checkpoint.groups(checkpoint.shard(rank)) == groups


STOCK = TopologyJob(installed=False, elastic=False)
RUNS = [
    (4, replace(STOCK, model="llama", tp=2, stage=3, frozen=True)),
    (4, replace(STOCK, model="llama", tp=4, stage=2, precision="bf16")),
    (4, replace(STOCK, model="llama", tp=2, stage=2, adapters=True)),
    (4, replace(STOCK, model="qwen3", tp=2, stage=1)),
    (4, replace(STOCK, model="neox", tp=2, stage=2, frozen=True, zero={"round_robin_gradients": True})),
    (2, replace(STOCK, model="mixtral", tp=2, stage=3)),
    (4, replace(STOCK, model="autoep", ep=2, stage=3)),
    (4, replace(STOCK, model="autoep", ep=2, stage=2, frozen=True, frozen_experts=True)),
    (4, replace(STOCK, model="autoep", ep=4, stage=1)),
    (2, replace(STOCK, model="autoep", ep=1, stage=3)),
    (4, replace(STOCK, model="moe", ep=2, stage=2)),
    (4, replace(STOCK, model="moe", ep=2, stage=2, frozen=True, frozen_experts=True)),
    (2, replace(STOCK, model="moe", ep=2, stage=1, frozen=True, frozen_experts=True)),
    (4, replace(STOCK, model="moe", ep=2, stage=1, config={"use_data_before_expert_parallelism": 1})),  # as true
    (2, replace(STOCK, model="moe", ep=1, stage=2)),
]


def label(ranks: int, job: TopologyJob) -> str:
    parts = [job.model, f"{ranks} ranks", f"tp {job.tp}" if job.tp > 1 else f"ep {job.ep}", f"stage {job.stage}"]
    return ", ".join([*parts, *(["frozen"] if job.frozen else []), *(["adapters"] if job.adapters else [])])


@pytest.mark.parametrize(("ranks", "job"), RUNS, ids=[label(*run) for run in RUNS])
def test_files_hold_what_was_gathered(topology_pool: RankPool, tmp_path: Path, ranks: int, job: TopologyJob) -> None:
    state = topology_pool.run(save, ranks, job, str(tmp_path))[0]
    checkpoint = open_checkpoint(tmp_path / TAG, near_rank=ranks - 1)
    assert (checkpoint.world_size, checkpoint.topology.tensor_size) == (ranks, job.tp)
    assert (checkpoint.layout.slices is not None) == (job.tp > 1 or job.ep > 1)
    for rank in range(ranks):
        shard = checkpoint.shard(rank)
        assert shard.rank == rank and shard.layout.params == checkpoint.layout.on_rank(rank).params
    check_holds(checkpoint, state)
    check_groups(checkpoint, state)
    assert not checkpoint.stale_files
    checked = check_headers(tmp_path / TAG)
    assert checked.problems == [] and checked.unsupported == [] and checked.topology == checkpoint.topology
    report = verify_from_headers(checked)
    assert report.valid and report.content_root is not None and report.unsupported == ()


def damage(path: Path) -> None:
    flip(path)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", [Path.unlink, damage, lambda path: path.write_bytes(b"")], ids=["gone", "bit", "empty"])
def test_a_file_of_an_expert_that_is_not_whole_is_found_and_named(
    topology_pool: RankPool, tmp_path: Path, frozen: bool, how: Callable[[Path], object]
) -> None:
    topology_pool.run(save, 2, replace(STOCK, model="autoep", ep=2, stage=2, frozen=frozen), str(tmp_path))
    expert = tmp_path / TAG / "layer_1_expert_0_mp_rank_00_model_states.pt"
    how(expert)
    report = verify(tmp_path)
    assert {problem.file for problem in report.problems} == {expert.name}
