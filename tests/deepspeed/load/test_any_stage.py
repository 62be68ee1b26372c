"""A stage 3 run goes on from what DeepSpeed saved at stage 1 or 2, at any number of ranks, bit for bit.

The truth is gathered from the flat buffers of the run that saved (``zeroelastic.testing.group_split``), because
DeepSpeed's own accessors are wrong under ``round_robin_gradients``.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from training import LOSS_RTOL, Job, Outcome, build_engine, resume, train_step

import zeroelastic
from zeroelastic.testing import RankPool, compare_states, fingerprint, gather_state

LIMIT_S = 300


@dataclass(frozen=True)
class Case:
    """A run at stage 1 or 2 on ``saved`` ranks, and ``current`` ranks that go on at stage 3."""

    saved: int
    current: int
    stage: int = 2
    optimizer: str = "adamw"
    precision: str = "bf16"
    zero: tuple[tuple[str, Any], ...] = ()
    grad_accum_dtype: str | None = None

    @property
    def job(self) -> Job:
        config = {"data_types": {"grad_accum_dtype": self.grad_accum_dtype}} if self.grad_accum_dtype else {}
        return Job(
            stage=self.stage,
            installed=False,
            optimizer=self.optimizer,
            precision=self.precision,
            zero=dict(self.zero),
            config=config,
        )

    @property
    def resumed(self) -> Job:
        zero = {key: value for key, value in self.zero if key == "offload_optimizer"}
        return replace(self.job, stage=3, installed=True, config={}, zero=zero).other()


ROUND_ROBIN = ("round_robin_gradients", True)
ALIGNED = ("parameter_alignment", True)
OFFLOAD = ("offload_optimizer", {"device": "cpu"})

CASES = {
    "stage 2, 3 to 2, round robin, aligned": Case(3, 2, zero=(ROUND_ROBIN, ALIGNED)),
    "stage 2, 2 to 3, round robin": Case(2, 3, zero=(ROUND_ROBIN,)),
    "stage 1, 2 to 4": Case(2, 4, stage=1),
    "stage 1, BF16_Optimizer, 2 to 3": Case(2, 3, stage=1, grad_accum_dtype="fp32"),
    "stage 2, 4 to 1, fp32": Case(4, 1, precision="fp32"),
    "stage 2, 2 to 2, fp16": Case(2, 2, precision="fp16"),
    "stage 2, 1 to 3, DeepSpeedCPUAdam": Case(1, 3, optimizer="cpu_adam", zero=(OFFLOAD,)),
    "stage 1, 3 to 2, amsgrad": Case(3, 2, stage=1, optimizer="amsgrad", zero=(ROUND_ROBIN,)),
    "stage 2, 2 to 1, SGD": Case(2, 1, optimizer="sgd"),
}


def train_and_save(job: Job, directory: str) -> Outcome:
    engine = build_engine(job)
    for step in range(3):
        train_step(engine, step)
    state = fingerprint(gather_state(engine))
    engine.save_checkpoint(directory, client_state={"note": "hello"})
    return Outcome(state, {}, [train_step(engine, step) for step in (3, 4)])


@pytest.mark.support(
    "Using it", "stage 1 and 2 checkpoints in a stage 3 run", "exact", "at any size; `round_robin_gradients` included"
)
@pytest.mark.parametrize("name", CASES)
def test_a_stage_3_run_goes_on_from_stages_1_and_2(rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    saved = rank_pool.run(train_and_save, case.saved, case.job, str(tmp_path), timeout=LIMIT_S)[0]
    outcomes = rank_pool.run(resume, case.current, case.resumed, str(tmp_path), timeout=LIMIT_S)
    for rank, outcome in enumerate(outcomes):
        different = compare_states(saved.state, outcome.state)
        if case.grad_accum_dtype:  # BF16_Optimizer has no loss scaler
            different = [line for line in different if not line.startswith("loss_scaler/")]
        assert different == [], f"rank {rank}"
        assert outcome.losses == pytest.approx(saved.losses, rel=LOSS_RTOL[case.precision])
        assert outcome.client_state["note"] == "hello"
        assert outcome.report.saved_world_size == case.saved
        assert outcome.report.bytes_read <= 1.01 * outcome.report.bytes_owned
        assert not any("rank" in line for line in (*outcome.report.rederived, *outcome.report.reset))


@pytest.fixture(scope="module")
def round_robin(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A stage 2 checkpoint of 3 ranks, and the run that saved it."""
    directory = tmp_path_factory.mktemp("round_robin")
    case = Case(3, 2, zero=(ROUND_ROBIN,))
    return directory, rank_pool.run(train_and_save, case.saved, case.job, str(directory), timeout=LIMIT_S)[0]


def kinds_of_difference(saved: Outcome, outcome: Outcome) -> set[str]:
    return {line.partition("/")[0] for line in compare_states(saved.state, outcome.state)}


@pytest.mark.parametrize(
    ("options", "flags", "different"),
    [
        ({"weights_only_load": True}, {}, set()),
        ({"verify": "off"}, {}, set()),
        ({}, {"load_lr_scheduler_states": False}, {"scheduler"}),
        ({}, {"load_optimizer_states": False}, {"state", "scalar", "group"}),
        ({}, {"load_module_only": True}, {"state", "scalar", "group", "scheduler", "engine"}),
    ],
    ids=["weights_only_load", "verify off", "no scheduler", "no optimizer states", "module only"],
)
def test_flags_of_a_load_leave_out_what_they_say(
    rank_pool: RankPool,
    round_robin: tuple[Path, Outcome],
    options: dict[str, Any],
    flags: dict[str, Any],
    different: set[str],
) -> None:
    directory, saved = round_robin
    job = replace(Case(3, 2).resumed, options=options)
    for outcome in rank_pool.run(resume, 2, job, str(directory), timeout=LIMIT_S, **flags):
        assert kinds_of_difference(saved, outcome) == different


def load_error(job: Job, directory: str) -> str:
    with pytest.raises(zeroelastic.ZeroElasticError) as raised:
        build_engine(job).load_checkpoint(directory)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_missing_file_and_another_model_are_refused_on_every_rank(
    rank_pool: RankPool, round_robin: tuple[Path, Outcome], tmp_path: Path
) -> None:
    directory = shutil.copytree(round_robin[0], tmp_path / "copy")
    resumed = Case(3, 2).resumed
    other = rank_pool.run(load_error, 2, replace(resumed, extra="more"), str(directory), timeout=LIMIT_S)
    assert other[0] == other[1] and "more.weight [16, 16] of the model is not in the checkpoint" in other[0]
    (directory / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    missing = rank_pool.run(load_error, 2, resumed, str(directory), timeout=LIMIT_S)
    assert missing[0] == missing[1] and missing[0].startswith("MissingFileError") and "zero_pp_rank_1" in missing[0]


@pytest.mark.support("Using it", "stage 1 and 2 checkpoints: reshard to stage 3", "exact", "the same content root")
@pytest.mark.parametrize("name", ["stage 2, 3 to 2, round robin, aligned", "stage 1, 2 to 4"])
def test_stock_deepspeed_loads_what_reshard_made_of_stages_1_and_2(
    rank_pool: RankPool, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    saved = rank_pool.run(train_and_save, case.saved, case.job, str(tmp_path / "saved"), timeout=LIMIT_S)[0]
    zeroelastic.reshard(tmp_path / "saved", tmp_path / "made", world_size=case.current, stage=3)
    stock = Job(installed=False, elastic=False, sub_group_size=10**9).other(sub_group_size=10**9)
    for outcome in rank_pool.run(resume, case.current, stock, str(tmp_path / "made"), timeout=LIMIT_S):
        assert compare_states(saved.state, outcome.state) == []
        assert outcome.losses == pytest.approx(saved.losses, rel=LOSS_RTOL[case.precision])


@pytest.mark.parametrize("optimizer", ["adamw", "cpu_adam"])
def test_hyper_parameters_that_deepspeed_did_not_save_are_named(
    rank_pool: RankPool, tmp_path: Path, optimizer: str
) -> None:
    offload = (OFFLOAD,) if optimizer == "cpu_adam" else ()
    case = Case(2, 3, optimizer=optimizer, zero=(("elastic_checkpoint", True), *offload))
    saved = rank_pool.run(train_and_save, case.saved, case.job, str(tmp_path), timeout=LIMIT_S)[0]
    outcome = rank_pool.run(resume, case.current, case.resumed, str(tmp_path), timeout=LIMIT_S)[0]
    different = compare_states(saved.state, outcome.state)
    assert different and all(line.startswith("group/") and "lr: is" in line for line in different), different
    assert any("HYPER-PARAMETERS NOT SAVED" in note for note in outcome.report.notes)
    assert any(line.startswith("hyper-parameters of 2 groups") for line in outcome.report.reset)
