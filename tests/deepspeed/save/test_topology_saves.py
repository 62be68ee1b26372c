"""Saves of runs with experts and tensor parallelism: the commit record is of whole tensors, DeepSpeed loads the files.

Some save in the background. That the content root does not depend on the topology: load/test_topologies.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from saved_files import logged, record_of
from topologies import TopologyJob, build, differences, hashed, logical_state, train

import zeroelastic
from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.core.digest import stream_seed
from zeroelastic.errors import SaveError, UnsupportedError
from zeroelastic.executors.dispatch import digest_range
from zeroelastic.testing import RankPool


class Made(NamedTuple):
    """The hashes of the logical state of a run when its save was called, and the digests of its whole tensors."""

    state: dict[str, Any]
    digests: dict[tuple[str, str], tuple[str, int]]


def save(job: TopologyJob, directory: str, **options: Any) -> Made:
    engine = build(job)
    train(engine, 0, 2)
    logical = logical_state(engine)
    engine.save_checkpoint(directory, tag="t", **options)
    if job.config == BACKGROUND:
        train(engine, 2, 1)
        zeroelastic.wait_for_save(engine)
    digests: dict[tuple[str, str], tuple[str, int]] = {}
    trained = {key.rpartition("/")[0] for key in logical if key.endswith("/fp32")}
    for place, value in logical.items():
        name, _, key = place.rpartition("/")
        key = "frozen" if key == "weight" and name not in trained else key
        if not torch.is_tensor(value) or key == "weight" or place.startswith("buffer/"):
            continue
        raw = value.contiguous().view(-1).view(torch.uint8).numpy()
        digest = digest_range(raw, value.element_size(), seed=stream_seed(name, key), start=0)
        digests[name, key] = str(value.dtype).removeprefix("torch."), digest
    return Made({key: hashed(value) for key, value in logical.items()}, digests)


def load_by_deepspeed(job: TopologyJob, directory: str) -> dict[str, Any]:
    engine = build(replace(job.other(), installed=False))
    assert engine.load_checkpoint(directory, tag="t")[0] is not None
    return {key: hashed(value) for key, value in logical_state(engine).items()}


BACKGROUND = {"zeroelastic": {"async_save": True}}
JOBS = {
    "llama, tp 2, stage 3": (TopologyJob("llama", tp=2), 4),
    "qwen3, tp 2, stage 2, background": (TopologyJob("qwen3", tp=2, stage=2, frozen=True, config=BACKGROUND), 4),
    "neox, tp 4, stage 3, bf16": (TopologyJob("neox", tp=4, precision="bf16"), 4),
    "llama, tp 2, stage 1, adapters": (TopologyJob("llama", tp=2, stage=1, adapters=True), 2),
    "autoep 4, stage 3, bf16, background": (TopologyJob("autoep", ep=4, precision="bf16", config=BACKGROUND), 4),
    "moe 2, stage 2, background": (TopologyJob("moe", ep=2, stage=2, config=BACKGROUND), 4),
    "moe 4, stage 1": (TopologyJob("moe", ep=4, stage=1, precision="bf16"), 4),
    "mixtral, tp 2, stage 2, dealt": (
        TopologyJob("mixtral", tp=2, stage=2, zero={"round_robin_gradients": True}),
        4,
    ),
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


@pytest.mark.parametrize("name", JOBS)
def test_the_record_is_of_whole_tensors_and_deepspeed_loads_the_files(
    topology_pool: RankPool, tmp_path: Path, name: str
) -> None:
    job, ranks = JOBS[name]
    made = topology_pool.run(save, ranks, job, str(tmp_path), timeout=180)[0]
    record = record_of(tmp_path / "t")
    assert (record.world_size, record.tp_size) == (ranks // job.tp, job.tp)
    assert record.params.digests == made.digests
    assert {content.tp_rank for content in record.contents()} == {0}
    there = {path.name: path.stat().st_size for path in (tmp_path / "t").iterdir()}
    there.pop("zeroelastic.json")
    assert dict(record.files) == there and set(record.directories) == there.keys()
    assert any(name.startswith("layer_") for name in there) == (job.ep > 1 and job.stage < 3)
    checkpoint = open_checkpoint(tmp_path / "t")
    assert checkpoint.world_size == ranks and checkpoint.topology.tensor_size == job.tp
    assert {tensor.name for tensor in checkpoint.layout.whole_tensors} == set(record.params.trained)
    for state in topology_pool.run(load_by_deepspeed, ranks, job, str(tmp_path), timeout=180):
        assert differences(made.state, state) == []


def save_untrained(job: TopologyJob, directory: str) -> str:
    engine = build(job)
    engine.save_checkpoint(directory, tag="t")
    return record_of(Path(directory) / "t").content_root


def save_differing(job: TopologyJob, directory: str) -> tuple[str, list[str]]:
    """The error of a save whose copies differ, and what was logged."""
    engine = build(job)
    train(engine, 0, 1)
    param = dict(engine.module.named_parameters())["model.norm.weight"]
    optimizer = engine.optimizer
    if dist.get_rank() == 1 and job.stage == 3:
        at, offset, _ = optimizer.grad_position[optimizer.get_param_id(param)]
        optimizer.fp32_partitioned_groups_flat[at].data[offset] += 1
    elif dist.get_rank() in (1, 3) and job.stage != 3:
        optimizer.single_partition_of_fp32_groups[1].data.add_(1)
    records = logged("")
    try:
        engine.save_checkpoint(directory, tag="t")
    except SaveError as error:
        return str(error), records
    return "", records


@pytest.mark.parametrize("stage", [2, 3])
def test_copies_that_differ_are_saved_for_the_same_tensor_parallel_size(
    topology_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    job = TopologyJob("llama", tp=2, stage=stage, elastic=stage == 3)
    results = topology_pool.run(save_differing, 4, job, str(tmp_path), timeout=180)
    assert {error for error, _ in results} == {""}
    assert sum("copies that tensor parallel ranks have of the same values differ" in t for t in results[0][1]) == 1
    record = read_record(tmp_path / "t")
    if stage == 2:
        assert record is None
    else:
        assert record is not None and {content.tp_rank for content in record.contents()} == {0, 1}
        assert (record.world_size, record.tp_size) == (2, 2)


def save_over_a_full_disk(job: TopologyJob, directory: str) -> str:
    """The error of a save during which one rank cannot write the file of an expert."""
    from zeroelastic.deepspeed.save import shard_writer

    engine, module = build(job), cast(Any, shard_writer)
    original = module.write_torch_file

    def write(state: Any, path: Path, **options: Any) -> Any:
        if path.name == "layer_0_expert_3_mp_rank_00_model_states.pt":
            raise OSError(28, "No space left on device", str(path))
        return original(state, path, **options)

    module.write_torch_file = write
    try:
        engine.save_checkpoint(directory, tag="t")
    except SaveError as error:
        return str(error)
    finally:
        module.write_torch_file = original
    return ""


@pytest.mark.parametrize("model", ["moe", "autoep"])
def test_a_file_of_an_expert_that_cannot_be_written_leaves_no_tag(
    topology_pool: RankPool, tmp_path: Path, model: str
) -> None:
    job = TopologyJob(model, ep=2, stage=2)
    errors = topology_pool.run(save_over_a_full_disk, 2, job, str(tmp_path), timeout=180)
    assert len({*errors}) == 1 and "layer_0_expert_3" in errors[0] and "No space left" in errors[0]
    assert not (tmp_path / "t").exists() and not (tmp_path / "latest").exists()


def test_a_tag_that_is_saved_again_has_no_files_of_experts_of_the_save_before(
    topology_pool: RankPool, tmp_path: Path
) -> None:
    for job in (TopologyJob("autoep", ep=2, stage=2), TopologyJob("autoep", ep=2)):
        topology_pool.run(save_untrained, 2, job, str(tmp_path), timeout=180)
    record = record_of(tmp_path / "t")
    names = {path.name for path in (tmp_path / "t").iterdir()}
    assert names == {*record.files, "zeroelastic.json"} and not any(name.startswith("layer_") for name in names)


def save_without_frozen(job: TopologyJob, directory: str) -> str:
    try:
        build(job).save_checkpoint(directory, tag="t", exclude_frozen_parameters=True)
    except UnsupportedError as error:
        return str(error)
    return ""


def test_frozen_experts_are_not_excluded(topology_pool: RankPool, tmp_path: Path) -> None:
    job = TopologyJob("moe", ep=2, stage=1, frozen_experts=True)
    for error in topology_pool.run(save_without_frozen, 2, job, str(tmp_path)):
        assert "exclude_frozen_parameters) does not go with frozen experts" in error
    assert not (tmp_path / "t").exists()
