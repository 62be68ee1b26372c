"""Runs at ZeRO stages 1 and 2 with what is rare: odd parameters, flags of a load, changed models, damaged tags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from saved_files import logged
from test_group_split import DEALT, FP32_SUMS, LIMIT_S, Run, train_and_save
from training import LOSS_RTOL, Job, Outcome, build_engine, train_step

import zeroelastic
from zeroelastic.testing import RankPool, compare_states, fingerprint, gather_state


class OddModel(training.TinyModel):
    """With a parameter without elements, and a frozen one whose elements lie in another order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.never_used = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(0, 4))])
        self.slanted = torch.nn.Parameter(torch.arange(12.0).reshape(4, 3), requires_grad=False)


def odd_engine(job: Job, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(training, "TinyModel", OddModel)
    engine = build_engine(job)
    if job.stage != 3:
        slanted = engine.module.slanted
        slanted.data = slanted.data.t().contiguous().t()
        assert not slanted.is_contiguous()
    return engine


def save_odd(job: Job, directory: str, freeze: bool, **save: Any) -> Outcome:
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine = odd_engine(job, monkeypatch)
    train_step(engine, 0)
    engine.module.scale.requires_grad_(not freeze)
    state = fingerprint(gather_state(engine))
    engine.save_checkpoint(directory, **save)
    return Outcome(state, {}, [train_step(engine, 1)])


def load_odd(job: Job, directory: str, **flags: Any) -> Outcome:
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine = odd_engine(job, monkeypatch)
    engine.load_checkpoint(directory, **flags)
    return Outcome(fingerprint(gather_state(engine)), {}, [train_step(engine, 1)], engine.zeroelastic_report)


PAIRS = {
    "2 to 2": (Run(2, 3, DEALT), Run(2, 2)),
    "2 to 3": (Run(2, 2), Run(3, 3)),
    "3 to 1": (Run(3, 2), Run(1, 3)),
    "BF16_Optimizer": (FP32_SUMS(2), FP32_SUMS(3)),
}


@pytest.mark.parametrize(
    ("name", "freeze"), [("2 to 2", False), ("2 to 3", True), ("3 to 1", False), ("BF16_Optimizer", True)]
)
def test_odd_parameters(rank_pool: RankPool, tmp_path: Path, name: str, freeze: bool) -> None:
    before, after = PAIRS[name]
    like = Job(groups=1)
    saved = rank_pool.run(save_odd, before.ranks, before.job(like), str(tmp_path), freeze, timeout=LIMIT_S)[0]
    assert zeroelastic.verify(tmp_path).valid
    for outcome in rank_pool.run(load_odd, after.ranks, after.job(like).other(), str(tmp_path), timeout=LIMIT_S):
        assert compare_states(saved.state, outcome.state) == []
        assert freeze or outcome.losses == pytest.approx(saved.losses, rel=LOSS_RTOL["bf16"])


def load_flags(job: Job, directory: str, **flags: Any) -> Outcome:
    engine = build_engine(job)
    engine.load_checkpoint(directory, **flags)
    return Outcome(fingerprint(gather_state(engine)), {}, [train_step(engine, 1)], engine.zeroelastic_report)


FLAGS: tuple[tuple[dict[str, Any], dict[str, bool], set[str]], ...] = (
    ({"weights_only_load": True}, {}, set()),
    ({"verify": "off"}, {}, set()),
    ({}, {"load_module_only": True}, {"scalar", "group", "scheduler", "state", "engine"}),
    ({}, {"load_optimizer_states": False}, {"group", "state", "scalar"}),
    ({}, {"load_lr_scheduler_states": False}, {"scheduler"}),
)
"""Options and flags of a load, and the kinds of state that it leaves as the run has them."""


def load_with_each(job: Job, directory: str) -> list[Outcome]:
    return [load_flags(replace(job, options=options), directory, **flags) for options, flags, _ in FLAGS]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Run(2, 2, DEALT), Run(2, 3, DEALT)),
        (FP32_SUMS(2), FP32_SUMS(3)),
        (Run(2, 3, DEALT, installed=False), Run(3, 2)),
    ],
    ids=["stage 2", "BF16_Optimizer", "stage 3 from DeepSpeed's stage 2"],
)
def test_flags_of_a_load_leave_out_what_they_say(rank_pool: RankPool, tmp_path: Path, before: Run, after: Run) -> None:
    job, directory = before.job(Job(elastic=before.installed)), tmp_path / "saved"
    saved = rank_pool.run(train_and_save, before.ranks, job, str(directory), timeout=LIMIT_S)[0]
    run = after.job(Job()).other()
    for outcomes in rank_pool.run(load_with_each, after.ranks, run, str(directory), timeout=LIMIT_S):
        for (options, flags, kinds), outcome in zip(FLAGS, outcomes, strict=True):
            lines = compare_states(saved.state, outcome.state)
            assert {line.partition("/")[0] for line in lines} == kinds, (options, flags)
    if not before.installed:
        other = rank_pool.run(load_error, 2, replace(run, extra="more"), str(directory), timeout=LIMIT_S)
        assert other[0] == other[1] and "more.weight [16, 16] of the model is not in the checkpoint" in other[0]
        (directory / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        missing = rank_pool.run(load_error, 2, run, str(directory), timeout=LIMIT_S)
        assert missing[0] == missing[1] and missing[0].startswith("MissingFileError") and "zero_pp_rank_1" in missing[0]


@pytest.mark.parametrize(
    ("name", "frozen"), [("2 to 2", True), ("2 to 3", False), ("3 to 1", True), ("BF16_Optimizer", False)]
)
def test_parameters_that_were_frozen_or_are_now(rank_pool: RankPool, tmp_path: Path, name: str, frozen: bool) -> None:
    before, after = PAIRS[name]
    job = before.job(Job(groups=1, frozen=frozen))
    saved = rank_pool.run(train_and_save, before.ranks, job, str(tmp_path), timeout=LIMIT_S)[0]
    now = replace(after.job(Job(groups=1, frozen=not frozen)).other(), options={"on_mismatch": "initialize"})
    for outcome in rank_pool.run(load_flags, after.ranks, now, str(tmp_path), timeout=LIMIT_S):
        lines = compare_states(saved.state, outcome.state)
        assert all("adapter" in line for line in lines) and not any(line.startswith("weight/") for line in lines)
        assert any("adapter.weight, adapter.bias" in line for line in outcome.report.changed)


def load_error(job: Job, directory: str) -> str:
    with pytest.raises(zeroelastic.ZeroElasticError) as raised:
        build_engine(job).load_checkpoint(directory)
    return f"{type(raised.value).__name__}: {raised.value}"


def log_of_building_with_muon(job: Job) -> list[str]:
    make = training.build_optimizer

    def with_muon(*args: Any) -> torch.optim.Optimizer:
        optimizer = make(*args)
        optimizer.param_groups[0]["use_muon"] = True
        return optimizer

    training.build_optimizer = with_muon  # type: ignore[assignment]
    said = logged("")
    build_engine(job)
    return said


@pytest.mark.parametrize("elastic", [False, True])
def test_a_run_that_is_left_to_deepspeed_is_named_once(rank_pool: RankPool, elastic: bool) -> None:
    """Also that its saves are rigid, where the configuration asks for elastic ones."""
    first, second = rank_pool.run(log_of_building_with_muon, 2, Run(2, 2).job(Job(elastic=elastic)), timeout=LIMIT_S)
    assert [line for line in first if "left to DeepSpeed" in line and "Muon" in line] == first
    assert len(first) == 1 and second == []
    assert ('saves are rigid in spite of "elastic_checkpoint"' in first[0]) == elastic
