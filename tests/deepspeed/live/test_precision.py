"""A run in another precision than the saved one goes on, with what changes named; GradScalers and loss scales."""

from __future__ import annotations

from typing import Any

import pytest
from exact_jobs import CPU, PRECISIONS
from saves import Saver, save_once
from training import Job, build_engine, look, resume, train_step

from zeroelastic.testing import RankPool, compare_states

STEPS = {"before": 2, "after": 1}


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saver:
    return save_once(rank_pool, tmp_path_factory, **STEPS)


def test_grad_scaler_of_fp16_autocast_goes_on(rank_pool: RankPool, tmp_path: Any) -> None:
    """A scale that is none of those that a new one begins with, and how long it has been good."""
    job = PRECISIONS["fp16_autocast"][0]
    state = rank_pool.run(save_with_scale, 3, job, str(tmp_path))[0]
    assert state["grad_scaler/scale"] == 96.0 and state["grad_scaler/_growth_tracker"] > 1
    outcome = rank_pool.run(resume, 2, job.other(), str(tmp_path), **STEPS)[0]
    assert compare_states(state, outcome.state) == []
    assert not any("GradScaler" in line for line in outcome.report.reset)


def save_with_scale(job: Job, directory: str) -> Any:
    engine = build_engine(job)
    engine.optimizer.torch_autocast_gradscaler._init_scale = 96.0
    for step in range(2):
        train_step(engine, step)
    engine.save_checkpoint(directory, client_state={"note": "hello"})
    return look(engine)[0]


def test_grad_scaler_that_was_not_saved_is_said_to_begin_anew(rank_pool: RankPool, saved: Saver) -> None:
    checkpoint = saved(Job(precision="fp32"), 3)
    outcome = rank_pool.run(resume, 2, PRECISIONS["fp16_autocast"][0].other(), checkpoint.directory, **STEPS)[0]
    assert "the GradScaler of fp16 autocast (the checkpoint has none; it begins anew)" in outcome.report.reset
    assert (
        "saved with fp32, running with fp32 with fp16 autocast: the loss scale is the run's own" in outcome.report.notes
    )
    exact = ("master/", "state/", "scalar/", "weight/", "group/")
    assert pick(outcome.state, *exact) == pick(checkpoint.outcome.state, *exact)


def pick(state: dict[str, Any], *prefixes: str) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key.startswith(prefixes)}


BF16_TO_FP32 = pytest.mark.support(
    "Precision",
    "`bf16` checkpoint in an fp32 run",
    "exact",
    "master weights and optimizer state; frozen weights are cast",
)
CHANGES = [
    ("bf16", "fp16_dynamic"),
    ("fp16_dynamic", "bf16"),
    ("fp16_dynamic", "fp32"),
    ("fp32", "fp16_static"),
    pytest.param("bf16", "fp32", marks=BF16_TO_FP32),
]


@pytest.mark.support(
    "Precision", "changing between bf16, fp16 and fp32", "exact", "fp32 state; frozen weights and buffers are cast"
)
@pytest.mark.parametrize(("one", "other"), CHANGES)
def test_precision_changes_with_master_weights_and_state_exact(
    rank_pool: RankPool, saved: Saver, one: str, other: str
) -> None:
    checkpoint = saved(PRECISIONS[one][0], 3)
    job = PRECISIONS[other][0].other()
    outcomes = rank_pool.run(resume, 2, job, checkpoint.directory, **STEPS)
    exact = ("master/", "state/", "scalar/", "group/")
    for outcome in outcomes:
        assert pick(outcome.state, *exact) == pick(checkpoint.outcome.state, *exact)
        kinds = PRECISIONS[one][0].precision, PRECISIONS[other][0].precision
        assert (
            f"saved with {kinds[0]}, running with {kinds[1]}: the loss scale is the run's own" in outcome.report.notes
        )
        dtypes = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        frozen = f"frozen parameters: cast from {dtypes[kinds[0]]} to {dtypes[kinds[1]]}"
        assert frozen in outcome.report.notes
        scale = {"bf16": 1.0, "fp16_dynamic": 2.0**8, "fp32": 1.0, "fp16_static": 128.0}[other]
        assert outcome.state["loss_scaler/cur_scale"] == scale
        assert all(loss == loss for loss in outcome.losses)


def test_master_weights_in_16_bits_go_to_a_run_with_fp32_ones_and_back(rank_pool: RankPool, saved: Saver) -> None:
    """Upwards nothing is lost, downwards every value is rounded; both are said, and the optimizer steps on."""
    narrow, wide = PRECISIONS["bf16_states"][0], Job(optimizer="cpu_adam", zero=CPU)
    cast = ("exp_avg", "exp_avg_sq", "master weights")
    up = rank_pool.run(resume, 2, wide.other(), saved(narrow, 3).directory, **STEPS)[0]
    for what in cast:
        assert f"{what}: cast from bfloat16 to float32" in up.report.notes
    assert {entry.split()[0] for entry in pick(up.state, "state/", "master/").values()} == {"torch.float32"}
    weights = pick(saved(narrow, 3).outcome.state, "weight/")
    assert pick(up.state, "weight/") == weights
    down = rank_pool.run(resume, 2, narrow.other(), saved(wide, 3).directory, **STEPS)[0]
    for what in cast:
        assert f"{what}: cast from float32 to bfloat16" in down.report.notes
    assert {entry.split()[0] for entry in pick(down.state, "state/", "master/").values()} == {"torch.bfloat16"}
    assert pick(down.state, "weight/") == pick(saved(wide, 3).outcome.state, "weight/")


def test_loss_scale_of_another_kind_is_the_saved_one_and_said(rank_pool: RankPool, saved: Saver) -> None:
    checkpoint = saved(PRECISIONS["fp16_dynamic"][0], 3)
    outcome = rank_pool.run(resume, 2, PRECISIONS["fp16_static"][0].other(), checkpoint.directory, **STEPS)[0]
    assert pick(outcome.state, "loss_scaler/") == pick(checkpoint.outcome.state, "loss_scaler/")
    assert any("the loss scale is dynamic, as in the checkpoint" in note for note in outcome.report.notes)
