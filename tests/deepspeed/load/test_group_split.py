"""Runs at ZeRO stages 1 and 2: what they save, and what they load of every stage, at any number of ranks, bit for bit.

The truth is gathered from the flat buffers of the run that saved (``zeroelastic.testing.state``). DeepSpeed's own
accessors are wrong under ``round_robin_gradients``, until a load of ours has put its table right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from saved_files import logged
from training import (
    LOSS_RTOL,
    Job,
    Outcome,
    build_engine,
    flat_buffers,
    gathered_by_deepspeed,
    of_all,
    raised,
    train_step,
)

import zeroelastic
from zeroelastic.testing import RankPool, compare_states, fingerprint, gather_state

LIMIT_S = 300

DEALT = {"round_robin_gradients": True}
ALIGNED = {"parameter_alignment": True}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


@dataclass(frozen=True)
class Run:
    """A run: its stage and ranks, and what of the configuration matters to where its state lies."""

    stage: int
    ranks: int
    zero: Mapping[str, Any] = field(default_factory=dict)
    installed: bool = True
    accumulate: str | None = None
    """The dtype that gradients are summed in; "fp32" at stage 1 in bf16 makes a ``BF16_Optimizer``."""

    def job(self, like: Job) -> Job:
        config = dict(like.config)
        if self.accumulate:
            config["data_types"] = {"grad_accum_dtype": self.accumulate}
        return replace(like, stage=self.stage, zero=dict(self.zero), installed=self.installed, config=config)

    @property
    def scales_no_loss(self) -> bool:
        return self.accumulate is not None


FP32_SUMS = partial(Run, 1, accumulate="fp32")
"""Runs with a ``BF16_Optimizer``."""

CASES = {
    "2 on 3, dealt and aligned, to 2 on 2, dealt": (Run(2, 3, DEALT | ALIGNED), Run(2, 2, DEALT), Job()),
    "2 on 3 of DeepSpeed alone, dealt and aligned, to 3 on 2": (
        Run(2, 3, DEALT | ALIGNED, installed=False),
        Run(3, 2),
        Job(elastic=False),
    ),
    "BF16_Optimizer on 2 of DeepSpeed alone to 3 on 3": (
        FP32_SUMS(2, installed=False),
        Run(3, 3),
        Job(elastic=False),
    ),
    "2 on 1 of DeepSpeed alone, CPU, to 3 on 3": (
        Run(2, 1, OFFLOADED, installed=False),
        Run(3, 3, OFFLOADED),
        Job(elastic=False, optimizer="cpu_adam"),
    ),
    "1 on 2 to 2 on 1": (Run(1, 2), Run(2, 1), Job(precision="fp16")),
    "3 on 1 to 2 on 3, CPU, dealt": (Run(3, 1, OFFLOADED), Run(2, 3, OFFLOADED | DEALT), Job(optimizer="cpu_adam")),
    "2 on 3, dealt, to BF16_Optimizer on 2": (Run(2, 3, DEALT), FP32_SUMS(2), Job(optimizer="amsgrad")),
    "BF16_Optimizer on 2 to 2 on 3, dealt": (FP32_SUMS(2), Run(2, 3, DEALT), Job(options={"async_save": True})),
    "3 on 2 to BF16_Optimizer on 4": (Run(3, 2), FP32_SUMS(4), Job(groups=1, frozen=False)),
}
"""Each arrangement of a save with one of a load; tests/oracle has those of a load without options from all of them."""


INTO_STAGE_3 = pytest.mark.support(
    "Using it", "stage 1 and 2 checkpoints in a stage 3 run", "exact", "at any size; `round_robin_gradients` included"
)


def train_and_save(job: Job, directory: str) -> Outcome:
    engine = build_engine(job)
    for step in range(3):
        train_step(engine, step)
    state = fingerprint(gather_state(engine))
    engine.save_checkpoint(directory, client_state={"note": "hello"})
    assert compare_states(state, fingerprint(gather_state(engine))) == [], "saving changed the live state"
    losses = [train_step(engine, step) for step in (3, 4)]
    if job.installed:
        zeroelastic.wait_for_save(engine)
    return Outcome(state, {}, losses)


def resume(job: Job, directory: str) -> Outcome:
    engine = build_engine(job)
    path, client_state = engine.load_checkpoint(directory)
    assert path is not None
    truth = gather_state(engine)
    for name, value in fragments(engine).items():
        assert torch.equal(value, truth[name]), name
    losses = [train_step(engine, step) for step in (3, 4)]
    for name, value in fragments(engine).items():
        assert torch.equal(value, gather_state(engine)[name]), name
    return Outcome(fingerprint(truth), {}, losses, engine.zeroelastic_report, client_state)


def fragments(engine: Any) -> dict[str, torch.Tensor]:
    """What DeepSpeed's accessors gather of each trained parameter, under the keys of ``gather_state``."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for key in gathered_by_deepspeed(engine):
        name, _, what = key.rpartition("/")
        param = dict(engine.module.named_parameters())[name]
        if what == "fp32":
            found[f"master/{name}"] = safe_get_full_fp32_param(param).cpu()
        else:
            found[f"state/{name}/{what}"] = safe_get_full_optimizer_state(param, what).cpu()
    return found


@pytest.mark.support(
    "Using it", "training at ZeRO stages 1 and 2", "exact", "saved, verified and resumed at any size, and at any stage"
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[INTO_STAGE_3] * (not before.installed and after.stage == 3),
        )
        for name, (before, after, _) in CASES.items()
    ],
)
def test_a_run_goes_on_at_another_stage_and_size(rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    before, after, like = CASES[name]
    saved = rank_pool.run(train_and_save, before.ranks, before.job(like), str(tmp_path), timeout=LIMIT_S)[0]
    root = None
    if before.installed:
        verified = zeroelastic.verify(tmp_path)
        assert verified.valid
        root = verified.content_root
    job = after.job(like).other()
    for rank, outcome in enumerate(rank_pool.run(resume, after.ranks, job, str(tmp_path), timeout=LIMIT_S)):
        different = compare_states(saved.state, outcome.state)
        if before.scales_no_loss or after.scales_no_loss:
            different = [line for line in different if not line.startswith("loss_scaler/")]
        assert different == [], f"rank {rank}"
        assert outcome.losses == pytest.approx(saved.losses, rel=LOSS_RTOL[like.precision])
        assert outcome.client_state["note"] == "hello"
        assert outcome.report.bytes_read <= 1.01 * outcome.report.bytes_owned
        if before.stage < 3:  # rank 0 saves client state and buffers for all ranks
            assert not any("rank" in line for line in (*outcome.report.rederived, *outcome.report.reset))
        assert root is None or outcome.report.loaded_root == root


def fill_and_save(job: Job, directory: str) -> dict[str, Any]:
    """Save made-up moments of a run that took no step; returns the fingerprints of its state."""
    engine = build_engine(job)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    optimizer = engine.optimizer
    for flat in flat_buffers(optimizer):
        state = optimizer.optimizer.state.setdefault(flat, {})
        state.setdefault("step", torch.tensor(7.0))
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.rand(flat.shape, generator=generator)
    truth = trained_state(engine)
    engine.save_checkpoint(directory)
    return truth


def trained_state(engine: Any) -> dict[str, Any]:
    return fingerprint({k: v for k, v in gather_state(engine).items() if k.startswith(("master/", "state/"))})


def load_and_look(job: Job, directory: str) -> dict[str, Any]:
    engine = build_engine(job)
    engine.load_checkpoint(directory)
    return trained_state(engine)


@pytest.mark.core
@pytest.mark.parametrize("stage", [2, 3])
def test_what_took_no_step_is_saved_and_loaded(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    """By every DeepSpeed version: 0.18.9 cannot train stages 1 and 2 on gloo, but it can save and load them."""
    truth = rank_pool.run(fill_and_save, 2, Run(2, 2).job(Job()), str(tmp_path), timeout=LIMIT_S)[0]
    assert len(truth) == 3 * sum(key.startswith("master/") for key in truth) > 0
    resumed = Run(stage, 3).job(Job()).other()
    for state in rank_pool.run(load_and_look, 3, resumed, str(tmp_path), timeout=LIMIT_S):
        assert compare_states(truth, state) == []


def stock_resume(job: Job, directory: str) -> Outcome:
    engine = build_engine(job)
    path, _ = engine.load_checkpoint(directory)
    assert path is not None
    return Outcome(fingerprint(gather_state(engine)), {}, [train_step(engine, step) for step in (3, 4)])


@pytest.mark.parametrize(
    ("run", "flag"), [(Run(2, 3, DEALT), True), (FP32_SUMS(3), False)], ids=["stage 2", "BF16_Optimizer"]
)
def test_deepspeed_alone_loads_what_was_saved(rank_pool: RankPool, tmp_path: Path, run: Run, flag: bool) -> None:
    """At the same size; with ``elastic_checkpoint`` too, under which stage 2 cannot load what it saves itself."""
    saved = rank_pool.run(train_and_save, 3, run.job(Job(elastic=flag)), str(tmp_path), timeout=LIMIT_S)[0]
    stock = replace(run.job(Job()), installed=False, zero={**run.zero, "elastic_checkpoint": flag}).other()
    for outcome in rank_pool.run(stock_resume, 3, stock, str(tmp_path), timeout=LIMIT_S):
        assert compare_states(saved.state, outcome.state) == []
        assert outcome.losses == pytest.approx(saved.losses, rel=LOSS_RTOL["bf16"])


def clipping_after_loads(job: Job, directory: str) -> tuple[list[float], list[str]]:
    """The norm to which gradients are clipped after DeepSpeed's own load and ours, and what our report says of it."""
    engine = build_engine(replace(job, config={**job.config, "gradient_clipping": 0.25}))
    engine.save_checkpoint(directory)
    found = []
    for installed in (False, True):
        engine = build_engine(replace(job, installed=installed))
        engine.load_checkpoint(directory)
        assert hasattr(engine, "zeroelastic_report") == installed
        found.append(engine.optimizer.clip_grad)
    return found, [note for note in engine.zeroelastic_report.notes if "gradient_clipping" in note]


@pytest.mark.parametrize(
    "run", [Run(2, 2, installed=False), FP32_SUMS(2, installed=False)], ids=["stage 2", "BF16_Optimizer"]
)
@pytest.mark.quick
def test_gradients_are_clipped_as_in_the_save_as_after_a_load_of_deepspeed(
    rank_pool: RankPool, tmp_path: Path, run: Run
) -> None:
    found = rank_pool.run(clipping_after_loads, 2, run.job(Job(elastic=False)), str(tmp_path), timeout=LIMIT_S)
    note = "gradient_clipping is 0.25, as in the checkpoint; this run's configuration says 1"
    assert found == [([0.25, 0.25], [note])] * 2


def load_error(job: Job, directory: str) -> tuple[str, str]:
    return raised(partial(build_engine(job).load_checkpoint, directory))


@pytest.mark.parametrize(
    ("like", "zero"),
    [
        pytest.param(Job(), {}, marks=pytest.mark.extended),
        (Job(optimizer="cpu_adam"), OFFLOADED),  # whose files have the step among the hyper-parameters
    ],
)
def test_what_deepspeed_saves_with_the_flag_it_cannot_load_and_we_can(
    rank_pool: RankPool, tmp_path: Path, like: Job, zero: dict[str, Any]
) -> None:
    """Hyper-parameters are not in the files, which the report says."""
    job = Run(2, 2, zero | {"elastic_checkpoint": True}, installed=False).job(like)
    saved = rank_pool.run(train_and_save, 2, job, str(tmp_path), timeout=LIMIT_S)[0]
    if not zero:
        assert rank_pool.run(load_error, 2, job, str(tmp_path), timeout=LIMIT_S) == [("AssertionError", "")] * 2
    outcome = rank_pool.run(resume, 3, Run(3, 3, zero).job(like).other(), str(tmp_path), timeout=LIMIT_S)[0]
    different = compare_states(saved.state, outcome.state)
    assert different and all(line.startswith("group/") for line in different), different
    assert any("lr: is" in line for line in different)
    assert any("HYPER-PARAMETERS NOT SAVED" in note for note in outcome.report.notes)
    assert any(line.startswith("hyper-parameters of 2 groups") for line in outcome.report.reset)


# What is rare: odd parameters, flags of a load, changed models, damaged tags.


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
        other = of_all(rank_pool.run(load_error, 2, replace(run, extra="more"), str(directory), timeout=LIMIT_S))
        assert "more.weight [16, 16] of the model is not in the checkpoint" in other[1]
        (directory / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        kind, text = of_all(rank_pool.run(load_error, 2, run, str(directory), timeout=LIMIT_S))
        assert kind == "MissingFileError" and "zero_pp_rank_1" in text


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
    assert ('saves are rigid in spite of "format": "elastic"' in first[0]) == elastic
