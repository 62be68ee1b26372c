"""Weights of the model that are not the master weights, cast: a schedule-free optimizer in ``eval()`` leaves such."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_files import record_of
from training import LOSS_RTOL, Job, attempt, build_engine, look, train_step

import zeroelastic
from zeroelastic.deepspeed.live.own_weights import same_values
from zeroelastic.errors import UnsupportedError
from zeroelastic.testing import RankPool, compare_states

SAID = "the weights of the model, which differ from the cast master weights"
LR = 0.5  # so that the weights in the two modes differ in bf16
JOB = Job(optimizer="schedule_free", lr=LR, sub_group_size=10**6)
JOBS = {
    "bf16, stage 1": replace(JOB, stage=1),
    "bf16, stage 2": replace(JOB, stage=2),
    "fp32, stage 2": replace(JOB, stage=2, precision="fp32"),
    "fp16, stage 2": replace(JOB, stage=2, precision="fp16"),
    "saved by DeepSpeed alone": replace(JOB, stage=2, installed=False),
}


@dataclass(frozen=True)
class Seen:
    """The weights of the model, the gathered state, and the losses of the next steps."""

    weights: dict[str, torch.Tensor]
    state: dict[str, Any]
    losses: list[float]


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def go_on(engine: Any) -> Seen:
    weights, state = weights_of(engine), look(engine)[0]
    engine.optimizer.optimizer.train()
    return Seen(weights, state, [train_step(engine, step) for step in (3, 4)])


def save_each(jobs: dict[str, Job], directory: str) -> dict[str, Seen]:
    """Saves in train() and in eval(); what the run was in eval(), and how it goes on."""
    seen: dict[str, Seen] = {}
    for name, job in jobs.items():
        engine = build_engine(job)
        for step in range(3):
            train_step(engine, step)
        engine.save_checkpoint(f"{directory}/{name}", tag="train")
        engine.optimizer.optimizer.eval()
        engine.save_checkpoint(f"{directory}/{name}", tag="eval")
        seen[name] = go_on(engine)
    return seen


def resume_each(jobs: dict[str, Job], directory: str, tags: Sequence[str] = ("train", "eval")) -> dict[str, Seen]:
    """What each run is after a load of the last tag; the report says so of that in eval() alone."""
    seen: dict[str, Seen] = {}
    for name, job in jobs.items():
        engine = build_engine(job.other(installed=True))
        for tag in tags:
            engine.load_checkpoint(f"{directory}/{name}", tag=tag)
            assert any(SAID in line for line in engine.zeroelastic_report.exact) == (tag == "eval"), (name, tag)
        seen[name] = go_on(engine)
    return seen


@pytest.mark.support(
    "Optimizers", "schedule-free ones saved in `eval()`", "exact", "stages 1 and 2: the weights of the model too"
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_of_the_model_that_are_not_the_master_weights_are_those_that_were_saved(
    rank_pool: RankPool, saved: tuple[str, dict[str, Seen]], world_size: int
) -> None:
    directory, before = saved
    for seen in rank_pool.run(resume_each, world_size, JOBS, directory, timeout=240):
        for name, job in JOBS.items():
            assert compare_states(before[name].state, seen[name].state) == [], name
            for param, weight in before[name].weights.items():
                assert torch.equal(seen[name].weights[param], weight), (name, param)
            assert seen[name].losses == pytest.approx(before[name].losses, rel=LOSS_RTOL[job.precision]), name


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Seen]]:
    directory = str(tmp_path_factory.mktemp("saved"))
    stock = {name: job for name, job in JOBS.items() if not job.installed}
    ours = {name: job for name, job in JOBS.items() if job.installed}
    seen = rank_pool.run(save_each, 2, stock, directory)[0]
    return directory, {**rank_pool.run(save_each, 2, ours, directory, timeout=240)[0], **seen}


def test_the_record_says_so_and_stage_3_has_no_place_for_them(
    rank_pool: RankPool, saved: tuple[str, dict[str, Seen]]
) -> None:
    directory = Path(saved[0]) / "bf16, stage 2"
    assert record_of(directory / "eval").own_weights and not record_of(directory / "train").own_weights
    kind, said = rank_pool.run(attempt, 2, replace(JOB, stage=3), str(directory), tag="eval")[0]
    assert kind == "UnsupportedError" and "schedule-free optimizer in eval()" in said


@pytest.mark.parametrize("name", ["bf16, stage 2", "saved by DeepSpeed alone"])
def test_a_resharded_save_has_them_too(
    rank_pool: RankPool, saved: tuple[str, dict[str, Seen]], tmp_path: Path, name: str
) -> None:
    directory, before = saved
    zeroelastic.reshard(f"{directory}/{name}/eval", tmp_path / name, world_size=3)
    seen = rank_pool.run(resume_each, 3, {name: JOBS[name]}, str(tmp_path), ["eval"])[0][name]
    assert all(torch.equal(weight, before[name].weights[param]) for param, weight in seen.weights.items())


def test_no_reshard_makes_other_weights_of_them(saved: tuple[str, dict[str, Seen]], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"schedule-free optimizer in eval\(\)"):
        zeroelastic.reshard(f"{saved[0]}/bf16, stage 2/eval", tmp_path / "3", world_size=3, stage=3)


def test_weights_that_are_not_numbers_are_those_of_master_weights_that_are_not() -> None:
    """The bits of NaN depend on how it was rounded; a run that has diverged is not taken for one of other weights."""
    bits = torch.tensor([0x3F80, 0x7FC0, 0x7FFF, 0xFFFF - 2**16], dtype=torch.int16)
    weights, others = bits.view(torch.bfloat16), bits[[0, 3, 1, 2]].view(torch.bfloat16)
    assert same_values(weights, others) and not same_values(weights, weights.nan_to_num(nan=1.0))
