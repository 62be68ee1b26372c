"""Resharded checkpoints of stages 1 and 2 in stock DeepSpeed: the whole state is the saved one, and training goes on.

The truth is gathered from the flat buffers of both runs, by the memory of the weights (``zeroelastic.testing`` and
tests/training.py), because DeepSpeed's own accessors are wrong under ``round_robin_gradients``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stock_programs import merged_by_zero_to_fp32, resume_on_stock
from training import LOSS_RTOL, Job, Outcome, resume, train_and_save

import zeroelastic
from zeroelastic.testing import RankPool, compare_states

LIMIT_S = 300

ROUND_ROBIN = ("round_robin_gradients", True)
ALIGNED = ("parameter_alignment", True)
OFFLOAD = ("offload_optimizer", {"device": "cpu"})


@dataclass(frozen=True)
class Case:
    """A run of ``stage`` on ``saved`` ranks, and stock DeepSpeed at stage ``to`` on ``current`` ranks that goes on."""

    stage: int
    saved: int
    to: int
    current: int
    zero: tuple[tuple[str, Any], ...] = ()
    optimizer: str = "adamw"
    precision: str = "bf16"
    elastic: bool = False
    frozen: bool = True
    groups: int = 2
    grad_accum_dtype: str | None = None
    given: tuple[tuple[str, bool], ...] = ()
    """Options of the run that goes on, where it does not have those of the run that saved."""

    @property
    def job(self) -> Job:
        config = {"data_types": {"grad_accum_dtype": self.grad_accum_dtype}} if self.grad_accum_dtype else {}
        return Job(
            stage=self.stage,
            installed=self.elastic,
            elastic=self.elastic,
            optimizer=self.optimizer,
            precision=self.precision,
            frozen=self.frozen,
            groups=self.groups,
            zero=dict(self.zero),
            config=config,
        )

    @property
    def resumed(self) -> Job:
        """The same model in stock DeepSpeed, with everything else different, to be overwritten by the load."""
        zero = {**self.job.zero, **dict(self.given)}
        return replace(self.job.other(), stage=self.to, zero=zero, installed=False, elastic=False)


CASES = {
    "3 rigid to 2, 4 to 3": Case(3, 4, 2, 3),
    "3 elastic to 1, 3 to 2, round robin": Case(3, 3, 1, 2, zero=(ROUND_ROBIN,), elastic=True),
    "3 to 2, 2 to 3, round robin, aligned": Case(3, 2, 2, 3, zero=(ROUND_ROBIN, ALIGNED)),
    "2 to 2, 3 to 2, round robin, aligned": Case(2, 3, 2, 2, zero=(ROUND_ROBIN, ALIGNED)),
    "2 to 2, 2 to 4, round robin": Case(2, 2, 2, 4, zero=(ROUND_ROBIN,)),
    "1 to 1, 2 to 4": Case(1, 2, 1, 4),
    "1 to 2, 3 to 3, aligned, amsgrad": Case(1, 3, 2, 3, zero=(ALIGNED,), optimizer="amsgrad"),
    "3 to 2, 3 to 2, fp16": Case(3, 3, 2, 2, precision="fp16"),
    "2 to 1, 2 to 3, fp16": Case(2, 2, 1, 3, precision="fp16"),
    "2 to 1, 4 to 1, fp32": Case(2, 4, 1, 1, precision="fp32"),
    "3 to 1, 1 to 4, fp32, SGD": Case(3, 1, 1, 4, precision="fp32", optimizer="sgd"),
    "3 to 2, 1 to 3, DeepSpeedCPUAdam": Case(3, 1, 2, 3, zero=(OFFLOAD,), optimizer="cpu_adam"),
    "3 to 1, 2 to 3, one group, nothing frozen": Case(3, 2, 1, 3, zero=(ROUND_ROBIN,), frozen=False, groups=1),
    "1 BF16_Optimizer to 2, 2 to 3": Case(1, 2, 2, 3, grad_accum_dtype="fp32"),
    "1 BF16_Optimizer to 1, 3 to 2": Case(1, 3, 1, 2, grad_accum_dtype="fp32", zero=(ROUND_ROBIN, ALIGNED)),
    "2 to 1 BF16_Optimizer, 2 to 3": Case(2, 2, 1, 3, zero=(ROUND_ROBIN,), grad_accum_dtype="fp32", groups=1),
    "3 to 2, 2 to 3, round robin given": Case(3, 2, 2, 3, given=(ROUND_ROBIN,)),
    "2 to 2, 3 to 2, round robin taken away, aligned": Case(
        2, 3, 2, 2, zero=(ROUND_ROBIN,), given=(("round_robin_gradients", False), ALIGNED)
    ),
    "1 to 2, 3 to 4, aligned no more, round robin": Case(
        1, 3, 2, 4, zero=(ALIGNED,), given=(("parameter_alignment", False), ROUND_ROBIN)
    ),
}


@pytest.mark.support(
    "Using it",
    "`zeroelastic reshard --stage 1`, `2`, then stock DeepSpeed",
    "exact",
    "from stages 1, 2 and 3; `round_robin_gradients` and `parameter_alignment` included",
)
@pytest.mark.parametrize("name", CASES)
def test_stock_deepspeed_goes_on_at_stages_1_and_2(rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    saved = rank_pool.run(train_and_save, case.saved, case.job, str(tmp_path / "a"), timeout=LIMIT_S)[0]
    report = zeroelastic.reshard(
        tmp_path / "a", tmp_path / "b", world_size=case.current, stage=case.to, verify=True, **dict(case.given)
    )
    assert report.content_root == zeroelastic.verify(tmp_path / "a").content_root
    for outcome in rank_pool.run(resume, case.current, case.resumed, str(tmp_path / "b"), timeout=LIMIT_S):
        different = compare_states(saved.state, outcome.state)
        if case.grad_accum_dtype:  # BF16_Optimizer has no loss scaler
            different = [line for line in different if not line.startswith("loss_scaler/")]
        assert different == []
        assert outcome.gathered == saved.gathered
        assert outcome.report is None, "this was not stock DeepSpeed"
        assert outcome.client_state["note"] == "hello"
        assert outcome.losses == pytest.approx(saved.losses, rel=LOSS_RTOL[case.precision])


@pytest.fixture(scope="module")
def round_robin(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A stage 3 checkpoint of 4 ranks, of a run whose configuration says round_robin_gradients."""
    directory = tmp_path_factory.mktemp("round_robin")
    job = Case(3, 4, 2, 3, zero=(ROUND_ROBIN,)).job
    return directory, rank_pool.run(train_and_save, 4, job, str(directory), timeout=LIMIT_S)[0]


@pytest.mark.starts_processes
@pytest.mark.parametrize(("stage", "world_size"), [(2, 3), (1, 2)])
def test_also_where_zeroelastic_cannot_be_imported(
    round_robin: tuple[Path, Outcome], tmp_path: Path, stage: int, world_size: int
) -> None:
    source, before = round_robin
    zeroelastic.reshard(source, tmp_path / "to", world_size=world_size, stage=stage)
    changes = {"elastic": False, "perturb": 0.5, "lr": 0.07, "stage": stage, "zero": dict([ROUND_ROBIN])}
    seen = resume_on_stock(tmp_path / "to", tmp_path, world_size, changes)
    assert seen["gathered"] == before.gathered
    assert [group["weight_decay"] for group in seen["groups"]] == [0.1, 0.0]
    assert seen["steps"] == [3.0, 3.0] and seen["distinct_steps"] == 2
    assert seen["global_steps"] == 3 and seen["scheduler"] == 3 and seen["note"] == "hello"
    assert seen["losses"] == pytest.approx(before.losses, rel=LOSS_RTOL["bf16"])


def test_zero_to_fp32_merges_the_same_weights_at_every_stage(round_robin: tuple[Path, Outcome], tmp_path: Path) -> None:
    made = [tmp_path / "2", tmp_path / "1", tmp_path / "3"]
    for directory in made:
        zeroelastic.reshard(round_robin[0], directory, world_size=3, stage=int(directory.name))
    first, second, one, three = merged_by_zero_to_fp32([round_robin[0], *made], tmp_path)
    for other in (second, three):
        assert other.keys() == first.keys()
        assert all(torch.equal(other[key], value) for key, value in first.items())
    # At stage 1 DeepSpeed lists no frozen parameters, and its script leaves them out.
    assert first.keys() - one.keys() == {"adapter.weight", "adapter.bias"}
    assert all(torch.equal(first[key], value) for key, value in one.items())


def test_a_stage_3_run_of_zeroelastic_goes_on_from_it(
    rank_pool: RankPool, round_robin: tuple[Path, Outcome], tmp_path: Path
) -> None:
    source, before = round_robin
    report = zeroelastic.reshard(source, tmp_path / "to", world_size=3, stage=2)
    outcome = rank_pool.run(resume, 2, Job().other(), str(tmp_path / "to"), timeout=LIMIT_S)[0]
    assert compare_states(before.state, outcome.state) == []
    assert outcome.report.root_matches and outcome.report.saved_root == report.content_root
