"""Checkpoints of ZeRO resharded to stage 0: plain data parallel in stock DeepSpeed goes on with the whole state.

The truth of the run that saved is gathered from its flat buffers, that of the run that goes on is read off its own
optimizer (tests/stage_0.py), whose class is one of three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from saves import Saved, Saver, save_once
from stage_0 import gathered_at_stage_0, scale_losses, state_at_stage_0
from stock_programs import resume_on_stock
from training import LOSS_RTOL, Job, Outcome, build_engine, train_step

import zeroelastic
from zeroelastic.testing import RankPool, compare_states, fingerprint

LIMIT_S = 300
STOCK: dict[str, Any] = {"installed": False, "elastic": False}


@dataclass(frozen=True)
class Case:
    """A run of ``job`` on ``saved`` ranks, and DeepSpeed's class around its optimizer at stage 0."""

    job: Job
    saved: int
    wrapper: str


CASES = {
    "3 elastic, bf16": Case(Job(), 4, "FP16_UnfusedOptimizer"),
    "3 rigid, fp32": Case(Job(precision="fp32", **STOCK), 2, "AdamW"),
    "2 round robin, fp16": Case(
        Job(stage=2, precision="fp16", zero={"round_robin_gradients": True}, **STOCK), 3, "FP16_UnfusedOptimizer"
    ),
    "1 BF16_Optimizer": Case(
        Job(stage=1, config={"data_types": {"grad_accum_dtype": "fp32"}}, **STOCK), 2, "FP16_UnfusedOptimizer"
    ),
    "3 elastic, fp16, FusedAdam": Case(Job(optimizer="fused_adam", precision="fp16"), 3, "FP16_Optimizer"),
}

MORE = {
    "2, fp32, no optimizer state": Case(Job(stage=2, precision="fp32", optimizer="plain_sgd", **STOCK), 2, "SGD"),
    "1, fp32, amsgrad": Case(Job(stage=1, precision="fp32", optimizer="amsgrad", **STOCK), 2, "AdamW"),
    "3, fp32, Adagrad": Case(Job(precision="fp32", optimizer="adagrad", groups=1, **STOCK), 2, "Adagrad"),
    "3, bf16, FusedAdam": Case(Job(optimizer="fused_adam", **STOCK), 2, "FP16_Optimizer"),
    "3, bf16, a group of frozen parameters": Case(Job(groups=3, **STOCK), 2, "FP16_UnfusedOptimizer"),
    "3, DeepSpeedCPUAdam": Case(
        Job(optimizer="cpu_adam", zero={"offload_optimizer": {"device": "cpu"}}, **STOCK), 2, "FP16_UnfusedOptimizer"
    ),
    "2, aligned, one group, nothing frozen": Case(
        Job(stage=2, groups=1, frozen=False, zero={"parameter_alignment": True}, **STOCK), 3, "FP16_UnfusedOptimizer"
    ),
    "1, fp16, static loss scale": Case(
        Job(stage=1, precision="fp16", config={"fp16": {"loss_scale": 128}}, **STOCK), 2, "FP16_UnfusedOptimizer"
    ),
    "3, fp16, after an overflow": Case(
        Job(precision="fp16", config={"fp16": {"initial_scale_power": 20, "hysteresis": 1}}, **STOCK),
        2,
        "FP16_UnfusedOptimizer",
    ),
}
"""Further optimizers, options and numbers of the loss scaler."""


@pytest.fixture(scope="module")
def save(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saver:
    return save_once(rank_pool, tmp_path_factory)


def at_stage_0(job: Job) -> Job:
    """The same model in stock DeepSpeed at stage 0, with everything else different, to be overwritten by the load."""
    config = {key: value for key, value in job.config.items() if key == "fp16"}
    return replace(job.other(), stage=0, zero={}, config=config, **STOCK)


def resume_at_stage_0(job: Job, directory: str) -> tuple[str, Outcome]:
    """The class of the optimizer, and what a rank sees after the load and in two more steps."""
    engine = build_engine(job)
    scale_losses(engine)
    path, client_state = engine.load_checkpoint(directory)
    assert path is not None
    state, seen = fingerprint(state_at_stage_0(engine)), gathered_at_stage_0(engine)
    losses = [train_step(engine, step) for step in (3, 4)]
    report = getattr(engine, "zeroelastic_report", None)
    return type(engine.optimizer).__name__, Outcome(state, seen, losses, report, client_state)


def without_scaler(state: dict[str, Any]) -> dict[str, Any]:
    """Stage 0 has fewer numbers of the loss scaler than ZeRO, and those in fp16 alone."""
    return {key: value for key, value in state.items() if not key.startswith("loss_scaler/")}


def check_resumed(saved: Saved, outcome: Outcome, precision: str) -> None:
    assert compare_states(without_scaler(saved.outcome.state), without_scaler(outcome.state)) == []
    if precision == "fp16":
        scale = {key: value for key, value in outcome.state.items() if key.startswith("loss_scaler/")}
        assert scale["loss_scaler/cur_iter"] == 3  # a static scaler of ZeRO does not count
        assert scale == {key: saved.outcome.state.get(key, 3) for key in scale} and len(scale) in (2, 5)
    assert outcome.gathered == saved.outcome.gathered
    assert outcome.client_state["note"] == "hello" and outcome.report is None
    assert outcome.losses == pytest.approx(saved.outcome.losses, rel=LOSS_RTOL[precision])


@pytest.mark.support(
    "Using it",
    "`zeroelastic reshard --stage 0`, then stock DeepSpeed without ZeRO",
    "exact",
    "from stages 1, 2 and 3; fp32, bf16, fp16; `FusedAdam` included",
)
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        pytest.param("3 elastic, bf16", 2, marks=pytest.mark.core),
        *(
            (name, world_size)
            for name in CASES
            for world_size in (1, 2)
            if (name, world_size) != ("3 elastic, bf16", 2)
        ),
        *(pytest.param(name, 1, marks=pytest.mark.extended) for name in MORE),
    ],
)
def test_stock_deepspeed_goes_on_at_stage_0(
    rank_pool: RankPool, save: Saver, tmp_path: Path, name: str, world_size: int
) -> None:
    case = {**CASES, **MORE}[name]
    saved = save(case.job, case.saved)
    report = zeroelastic.reshard(saved.directory, tmp_path / "b", world_size=world_size, stage=0, verify=True)
    assert report.content_root == zeroelastic.verify(saved.directory).content_root
    found = rank_pool.run(resume_at_stage_0, world_size, at_stage_0(case.job), str(tmp_path / "b"), timeout=LIMIT_S)
    for wrapper, outcome in found:
        assert wrapper == case.wrapper
        check_resumed(saved, outcome, case.job.precision)
        assert (outcome.state["engine/skipped_steps"] > 0) == ("overflow" in name)


@pytest.mark.starts_processes
def test_also_where_zeroelastic_cannot_be_imported(save: Saver, tmp_path: Path) -> None:
    before = save(CASES["3 elastic, bf16"].job, 4)
    zeroelastic.reshard(before.directory, tmp_path / "to", world_size=2, stage=0)
    changes = {"elastic": False, "perturb": 0.5, "lr": 0.07, "stage": 0}
    seen = resume_on_stock(tmp_path / "to", tmp_path, 2, changes)
    assert seen["gathered"] == before.outcome.gathered
    assert [group["weight_decay"] for group in seen["groups"]] == [0.1, 0.0]
    assert set(seen["steps"]) == {3.0} and seen["distinct_steps"] == 9
    assert seen["global_steps"] == 3 and seen["scheduler"] == 3 and seen["note"] == "hello"
    assert seen["losses"] == pytest.approx(before.outcome.losses, rel=LOSS_RTOL["bf16"])
