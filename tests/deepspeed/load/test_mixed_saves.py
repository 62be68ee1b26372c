"""Module states of one save beside optimizer files of another, without a commit record: what DeepSpeed, killed while it
overwrites a tag, leaves. And what looks like it in an intact save of DeepSpeed: no load and no verb refuses that.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from saved_files import record_of
from training import Job, build_engine, train_step

import zeroelastic
from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.testing import RankPool

STOCK = Job(elastic=False, installed=False)
SGD = {"optimizer": "plain_sgd"}
MIXES = {
    "stage 3": replace(STOCK, stage=3),
    "stage 2": replace(STOCK, stage=2),
    "stage 1": replace(STOCK, stage=1, precision="fp32"),
    "stage 2, no steps": replace(STOCK, stage=2, **SGD),
    "stage 2, fp16": replace(STOCK, stage=2, precision="fp16"),
}


def save_twice(job: Job, directory: str) -> None:
    """Saves after two steps and after four, and a mix of them: the module states of the first."""
    engine = build_engine(job)
    for step in range(4):
        train_step(engine, step)
        if step % 2:
            engine.save_checkpoint(directory, tag=f"s{step}", client_state={"of": step})
    if dist.get_rank() == 0:
        shutil.copytree(f"{directory}/s3", f"{directory}/mixed")
        for path in Path(directory, "s1").glob("*model_states.pt"):
            shutil.copy(path, f"{directory}/mixed")
    dist.barrier()


def load_each(job: Job, directory: str, tags: list[str], **options: Any) -> list[str]:
    """On a rank: the error that each load ends with; empty where it is none."""
    engine, found = build_engine(replace(job, installed=True)), []
    for tag in tags:
        try:
            engine.load_checkpoint(directory, tag=tag, **options)
            found.append("")
        except zeroelastic.ZeroElasticError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("name", MIXES)
def test_module_states_of_another_save_are_damage(rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    rank_pool.run(save_twice, 2, MIXES[name], str(tmp_path))
    for tag in ("s1", "s3"):
        assert zeroelastic.verify(tmp_path / tag).valid
    report = zeroelastic.verify(tmp_path / "mixed")
    assert not report.valid and "Files of two saves are mixed" in report.problems[0].sentence
    assert len({problem.file for problem in report.problems}) == 1 and "model_states" in report.problems[0].file
    found = rank_pool.run(load_each, 3, MIXES[name], str(tmp_path), ["mixed", "s3"])
    assert len({errors[0] for errors in found}) == 1 and {errors[1] for errors in found} == {""}
    assert found[0][0].startswith("CheckpointError") and "Files of two saves are mixed" in found[0][0]


@pytest.mark.parametrize(
    "stage", [pytest.param(2, marks=pytest.mark.quick), pytest.param(3, marks=pytest.mark.extended)]
)
def test_every_file_of_a_save_of_ours_has_its_id(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    """Without the record, too: neither steps nor learning rates are compared then."""
    job = Job(elastic=False, stage=stage, optimizer="plain_sgd")
    rank_pool.run(save_twice, 2, job, str(tmp_path))
    for path in (tmp_path / "s3").glob("*.pt"):
        assert torch.load(path, weights_only=False)["zeroelastic_save_id"] == record_of(tmp_path / "s3").save_id
    for tag in ("mixed", "s3"):
        (tmp_path / tag / RECORD_NAME).unlink()
    assert zeroelastic.verify(tmp_path / "s3").valid
    report = zeroelastic.verify(tmp_path / "mixed")
    assert not report.valid and "belongs to save" in report.problems[0].sentence
    mixed, whole = rank_pool.run(load_each, 1, job, str(tmp_path), ["mixed", "s3"])[0]
    assert "belongs to save" in mixed and whole == ""


def other_rates(engine: Any) -> None:
    for group in engine.optimizer.optimizer.param_groups:
        group["lr"] *= 3


def without_optimizer(engine: Any) -> None:
    """As after a load without optimizer states: the counters go on, the optimizer begins anew."""
    engine.global_steps += 5
    engine.global_samples += 5 * engine.train_batch_size()


def count_anew(engine: Any) -> None:
    engine.global_steps = 1


def skip(engine: Any) -> None:
    """A step that overflows."""
    engine.optimizer.loss_scaler.cur_scale = 2.0**60
    train_step(engine, 9)
    assert engine.skipped_steps == 1


def mask(engine: Any) -> None:
    for param in engine.module.parameters():
        if param.ndim > 1:
            param.data[::2] = 0


def limit(engine: Any) -> None:
    for param in engine.module.parameters():
        param.data.clamp_(-0.05, 0.05)


def update_an_embedding(engine: Any) -> None:
    engine.module.embedding.weight.data.mul_(0.5)


def evaluate(engine: Any) -> None:
    engine.optimizer.optimizer.eval()


CHANGES: dict[str, tuple[Job, Callable[[Any], None]]] = {
    "learning rates set after the step": (STOCK, other_rates),
    "optimizer begun anew": (STOCK, without_optimizer),
    "counter set by the job": (STOCK, count_anew),
    "a skipped step": (replace(STOCK, precision="fp16"), skip),
    "masks": (STOCK, mask),
    "limits": (STOCK, limit),
    "one weight renewed": (STOCK, update_an_embedding),
    "weights of an optimizer in eval()": (replace(STOCK, optimizer="schedule_free", lr=0.5), evaluate),
}


def save_changed(jobs: dict[str, tuple[Job, Callable[[Any], None]]], directory: str) -> None:
    for name, (job, change) in jobs.items():
        engine = build_engine(job)
        for step in range(3):
            train_step(engine, step)
        change(engine)
        engine.save_checkpoint(directory, tag=name)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_intact_save_that_a_job_has_changed_is_valid_and_loads(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    """That no optimizer and no precision raises an alarm: test_configurations.py."""
    jobs = {name: (replace(job, stage=stage), change) for name, (job, change) in CHANGES.items()}
    rank_pool.run(save_changed, 2, jobs, str(tmp_path), timeout=300)
    assert {name: zeroelastic.verify(tmp_path / name).problems for name in CHANGES} == dict.fromkeys(CHANGES, ())
    names = [name for name in CHANGES if CHANGES[name][0] is STOCK]
    assert rank_pool.run(load_each, 1, replace(STOCK, stage=stage), str(tmp_path), names)[0] == [""] * len(names)
    said = zeroelastic.verify(tmp_path / "optimizer begun anew").unchecked
    assert any("counts 8 steps" in clause and "these files do not say which" in clause for clause in said)


def test_weights_that_the_job_has_replaced_load_with_verify_off(rank_pool: RankPool, tmp_path: Path) -> None:
    job = MIXES["stage 2, no steps"]
    rank_pool.run(save_twice, 2, job, str(tmp_path))
    off = replace(job, options={"verify": False})
    assert rank_pool.run(load_each, 1, off, str(tmp_path), ["mixed"])[0] == [""]


def test_an_elastic_tag_without_its_record_is_not_loaded(rank_pool: RankPool, tmp_path: Path) -> None:
    job = Job()
    rank_pool.run(save_twice, 2, job, str(tmp_path))
    shutil.rmtree(tmp_path / "mixed")
    assert {tag.tag: tag.status for tag in zeroelastic.ls(tmp_path).tags}["s3"] == "committed"
    (tmp_path / "s3" / RECORD_NAME).unlink()
    assert {tag.tag: tag.status for tag in zeroelastic.ls(tmp_path).tags}["s3"] == "incomplete"
    (tmp_path / "latest").write_text("s3")
    for quick in (False, True):
        assert zeroelastic.latest(tmp_path, quick=quick).tag.name == "s1"
    for size in (1, 2):
        for errors in rank_pool.run(load_each, size, job, str(tmp_path), ["s3", "s1"], load_optimizer_states=False):
            assert "zeroelastic.json is missing. An elastic save writes it last" in errors[0] and errors[1] == ""
    for verb in (zeroelastic.plan, zeroelastic.open):
        with pytest.raises(zeroelastic.CheckpointError, match="does not count as complete"):
            verb(tmp_path / "s3", **({"world_size": 3} if verb is zeroelastic.plan else {}))
    for write in (zeroelastic.export, zeroelastic.reshard):
        with pytest.raises(zeroelastic.CheckpointError, match="does not count as complete"):
            write(tmp_path / "s3", tmp_path / "out", **({"world_size": 3} if write is zeroelastic.reshard else {}))
    with pytest.raises(zeroelastic.CheckpointError, match="does not count as complete"):
        zeroelastic.diff(tmp_path / "s1", tmp_path / "s3")
