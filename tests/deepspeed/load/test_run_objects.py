"""DeepSpeed's data efficiency through a load: the curriculum of its data sampler, and random-LTD."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lifecycle.rank import use_node
from training import Job, build_model, build_optimizer, ds_config, wait_for_every_gather

import zeroelastic
from zeroelastic.elastic import preemption, resume
from zeroelastic.testing import RankPool

CURRICULUM, RANDOM_LTD = "curriculum", "random-LTD"
SAMPLES = 400
JOB = Job(precision="fp32", batch=24)

RANDOM_LTD_CONFIG = {
    "enabled": True, "total_layer_num": 2, "random_ltd_layer_num": 1, "random_ltd_layer_id": [0],
    "random_ltd_schedule": {
        "min_value": 2, "max_value": 5, "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 10, "seq_per_step": 1},
    },
}  # fmt: skip


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Each sample knows its number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 50, (5,), generator=torch.Generator().manual_seed(int(number)))
        return {"tokens": tokens, "number": torch.tensor(number)}


def write_difficulties(directory: str) -> None:
    """The two index files of a metric of 20 values, that of 20 samples each."""
    from deepspeed.runtime.data_pipeline.data_sampling.utils import (
        close_mmap_dataset_builder,
        create_mmap_dataset_builder,
    )

    Path(directory).mkdir(exist_ok=True)
    numbers = np.arange(SAMPLES, dtype=np.int64).reshape(20, 20)
    for name, rows in (("samples", numbers), ("metric", np.arange(1, 21, dtype=np.int64).reshape(20, 1))):
        builder = create_mmap_dataset_builder(f"{directory}/{name}", np.int64)
        for row in rows:
            builder.add_item_numpy(row)
        close_mmap_dataset_builder(builder, f"{directory}/{name}")


def build(job: Job, directory: str, features: tuple[str, ...]) -> Any:
    """An engine with a data loader of its own, and these features of DeepSpeed."""
    import deepspeed

    if job.installed:
        zeroelastic.install()
    wait_for_every_gather()
    metric = {
        "index_to_sample_path": f"{directory}/samples", "index_to_metric_path": f"{directory}/metric",
        "difficulty_type": "value", "clustering_type": "schedule_based", "min_difficulty": 2, "max_difficulty": 20,
        "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 2},
    }  # fmt: skip
    learning = {"enabled": True, "data_cluster_path": f"{directory}/clusters", "curriculum_metrics": {"length": metric}}
    config = ds_config(job)
    config["data_efficiency"] = {"enabled": True, "seed": 3}
    if CURRICULUM in features:
        sampling = {"enabled": True, "num_workers": 0, "num_epochs": 50, "curriculum_learning": learning}
        config["data_efficiency"]["data_sampling"] = sampling
    if RANDOM_LTD in features:
        config["data_efficiency"]["data_routing"] = {"enabled": True, "random_ltd": RANDOM_LTD_CONFIG}
    model = build_model(job)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=build_optimizer(job, model), config=config, training_data=Samples()
    )
    return engine


def train(engine: Any, batches: Iterator[dict[str, torch.Tensor]], steps: int) -> list[list[int]]:
    """The samples of each step, over all ranks."""
    seen: list[list[int]] = []
    for _ in range(steps):
        batch = next(batches)
        engine.backward(engine(batch["tokens"], batch["tokens"].roll(1, 1)))
        engine.step()
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, batch["number"].tolist())
        seen.append(sorted(number for part in parts for number in part))
    return seen


@dataclass(frozen=True)
class Run:
    """The samples of the steps after a save or a load, the state of random-LTD after them, and the report."""

    samples: list[list[int]]
    random_ltd: dict[str, Any] | None = None
    report: str = ""


def save_run(job: Job, directory: str, features: tuple[str, ...], *, rolls_back: bool = False) -> list[Run]:
    """Three steps, a save, five steps; ``rolls_back``: then a load of that into the same engine, and the five again."""
    if dist.get_rank() == 0:
        write_difficulties(directory)
    dist.barrier()
    engine = build(job, directory, features)
    train(engine, iter(engine.training_dataloader), 3)
    engine.save_checkpoint(f"{directory}/run")
    runs = [go_on(engine, features)]
    if rolls_back:
        engine.load_checkpoint(f"{directory}/run")
        runs.append(go_on(engine, features))
    return runs


def load_run(job: Job, directory: str, features: tuple[str, ...]) -> Run:
    engine = build(job, directory, features)
    engine.load_checkpoint(f"{directory}/run")
    return replace(go_on(engine, features), report=engine.zeroelastic_report.text())


def keep_in_memory(job: Job, directory: str, shared: str) -> Run:
    """Three steps, of which the last is kept in memory, and five more."""
    if dist.get_rank() == 0:
        write_difficulties(directory)
    dist.barrier()
    use_node(Path(shared))
    engine = build(job, directory, (CURRICULUM,))
    with preemption(engine, f"{directory}/run") as stop:
        for _ in range(3):
            train(engine, iter(engine.training_dataloader), 1)
            stop()
    return go_on(engine, ())


def resume_from_memory(job: Job, directory: str, shared: str) -> Run:
    use_node(Path(shared))
    engine = build(job, directory, (CURRICULUM,))
    start = resume(engine, f"{directory}/run")
    assert start.tier == "memory" and start.report is not None
    return replace(go_on(engine, ()), report=start.report.text())


def go_on(engine: Any, features: tuple[str, ...]) -> Run:
    samples = train(engine, iter(engine.training_dataloader), 5)
    return Run(samples, dict(engine.random_ltd_scheduler.state_dict()) if RANDOM_LTD in features else None)


@pytest.mark.support(
    "Using it",
    "curriculum learning and random-LTD of `data_efficiency`",
    "exact",
    "also the order of samples, but in clusters that were shuffled again since the save",
)
@pytest.mark.parametrize("stage", [3, 2])
def test_the_curriculum_goes_on_with_the_samples_of_the_uninterrupted_run(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    both = (CURRICULUM, RANDOM_LTD)
    job = replace(JOB, stage=stage)
    (run, again), *_ = rank_pool.run(save_run, 2, job, str(tmp_path / "data"), both, rolls_back=True)
    assert again.samples == run.samples, "into an engine that has trained"
    for resumed in rank_pool.run(load_run, 3, job, str(tmp_path / "data"), both):
        assert resumed.samples == run.samples
        assert resumed.random_ltd == run.random_ltd
        assert "not restored" not in resumed.report


@pytest.mark.parametrize("stage", [3, 2])
def test_the_curriculum_goes_on_from_memory(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    job = replace(JOB, stage=stage, options={"memory": {"every": 3, "copies": 1}})
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        run, *_ = rank_pool.run(keep_in_memory, 2, job, str(tmp_path / "data"), f"{shared}/node")
        for resumed in rank_pool.run(resume_from_memory, 3, job, str(tmp_path / "data"), f"{shared}/node"):
            assert resumed.samples == run.samples and "not restored" not in resumed.report


def test_what_deepspeed_alone_did_not_save_of_the_curriculum_is_named(rank_pool: RankPool, tmp_path: Path) -> None:
    stock = replace(JOB, installed=False, elastic=False)
    rank_pool.run(save_run, 2, stock, str(tmp_path / "data"), (CURRICULUM,))
    for resumed in rank_pool.run(load_run, 3, JOB, str(tmp_path / "data"), (CURRICULUM,)):
        assert "not restored: the order of samples in the curriculum (DeepSpeed alone" in resumed.report


def test_what_only_the_run_or_only_the_checkpoint_has_is_named(rank_pool: RankPool, tmp_path: Path) -> None:
    """DeepSpeed's load ended in the middle where the run has something of which the checkpoint says that it is None."""
    both = (CURRICULUM, RANDOM_LTD)
    for saved, now, why in (
        ((), both, "(the checkpoint has none; it is the run's own)"),
        (both, (), "(this run has none)"),
    ):
        directory = str(tmp_path / why[1:4])
        rank_pool.run(save_run, 2, JOB, directory, saved)
        for resumed in rank_pool.run(load_run, 3, JOB, directory, now):
            for what in ("random-LTD", "the curriculum data sampler"):
                assert f"the state of {what} {why}" in resumed.report
