"""Resharded checkpoints in stock DeepSpeed: the whole state is the saved one, and training goes on as it would have.

Some loads run in processes in which zeroelastic cannot be imported at all (tests/stock_programs.py); others, faster, in
a pool of ranks in which it is not installed. The truth is gathered from the flat buffers of both runs
(``zeroelastic.testing`` and tests/training.py), because DeepSpeed's own accessors are wrong under
``round_robin_gradients``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from saves import Saver, save_once
from stock_programs import merged_by_zero_to_fp32, resume_on_stock
from training import LOSS_RTOL, Job, resume

import zeroelastic
from zeroelastic.testing import RankPool, compare_states

LIMIT_S = 300
STOCK: dict[str, Any] = {"installed": False, "elastic": False}
ROUND_ROBIN = {"round_robin_gradients": True}
ALIGNED = {"parameter_alignment": True}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}


@dataclass(frozen=True)
class Case:
    """A run of ``job`` on ``saved`` ranks, and stock DeepSpeed at stage ``to`` on ``current`` ranks that goes on.

    ``options`` are those of the reshard; of ``zero_optimization`` the run that goes on has them, too.
    """

    saved: int
    to: int
    current: int
    job: Job
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def resumed(self) -> Job:
        """The same model in stock DeepSpeed, with everything else different, to be overwritten by the load."""
        if self.to == 3:
            whole = {} if self.job.stage == 3 else {"stage": 3, "sub_group_size": 10**9}
            return replace(self.job, perturb=0.5, lr=self.job.lr * 7, **whole, **STOCK)
        zero = {**self.job.zero, **self.options} if self.to else {}
        config = self.job.config if self.to else {key: v for key, v in self.job.config.items() if key == "fp16"}
        return replace(self.job.other(), stage=self.to, zero=zero, config=config, **STOCK)


def case(stage: int, saved: int, to: int, current: int, given: dict[str, Any] | None = None, **job: Any) -> Case:
    return Case(saved, to, current, Job(stage=stage, **{**STOCK, **job}), given or {})


ELASTIC = {"installed": True, "elastic": True}
CASES = {
    "3 rigid to 3 elastic, 4 to 3": case(3, 4, 3, 3),
    "3 rigid to rigid, 1 to 4": case(3, 1, 3, 4, {"format": "rigid"}),
    "3 elastic to rigid, 6 to 4": case(3, 6, 3, 4, {"format": "rigid"}, **ELASTIC),
    "3 to 3, 4 to 6, 3 groups, many sub-groups": case(3, 4, 3, 6, groups=3, sub_group_size=90, **ELASTIC),
    "3 to 3, 2 to 3, amsgrad": case(3, 2, 3, 3, {"format": "rigid"}, precision="fp32", optimizer="amsgrad"),
    "3 to 3, 2 to 3, SGD": case(3, 2, 3, 3, precision="fp32", optimizer="sgd", **ELASTIC),
    "3 to 3, 3 to 2, no optimizer state": case(3, 3, 3, 2, {"format": "rigid"}, optimizer="plain_sgd"),
    "3 to 3, 2 to 3, DeepSpeedCPUAdam": case(3, 2, 3, 3, optimizer="cpu_adam", zero=OFFLOAD),
    "2 to 3 rigid, 3 to 2, round robin, aligned": case(
        2, 3, 3, 2, {"format": "rigid"}, zero={**ROUND_ROBIN, **ALIGNED}
    ),
    "3 rigid to 2, 4 to 3": case(3, 4, 2, 3),
    "3 elastic to 1, 3 to 2, round robin": case(3, 3, 1, 2, zero=ROUND_ROBIN, **ELASTIC),
    "2 to 2, 3 to 2, round robin, aligned": case(2, 3, 2, 2, zero={**ROUND_ROBIN, **ALIGNED}),
    "1 to 1, 2 to 4": case(1, 2, 1, 4),
    "1 to 2, 3 to 3, aligned, amsgrad": case(1, 3, 2, 3, zero=ALIGNED, optimizer="amsgrad"),
    "3 to 2, 3 to 2, fp16": case(3, 3, 2, 2, precision="fp16"),
    "3 to 1, 1 to 4, fp32, SGD": case(3, 1, 1, 4, precision="fp32", optimizer="sgd"),
    "3 to 1, 2 to 3, one group, nothing frozen": case(3, 2, 1, 3, zero=ROUND_ROBIN, frozen=False, groups=1),
    "1 BF16_Optimizer to 1, 3 to 2": case(1, 3, 1, 2, config=BF16_OPTIMIZER, zero={**ROUND_ROBIN, **ALIGNED}),
    "2 to 1 BF16_Optimizer, 2 to 3": case(2, 2, 1, 3, zero=ROUND_ROBIN, config=BF16_OPTIMIZER, groups=1),
    "3 to 2, 2 to 3, round robin given": case(3, 2, 2, 3, ROUND_ROBIN),
    "2 to 2, 3 to 2, round robin taken away, aligned": case(
        2, 3, 2, 2, {"round_robin_gradients": False, **ALIGNED}, zero=ROUND_ROBIN
    ),
    "1 to 2, 3 to 4, aligned no more, round robin": case(
        1, 3, 2, 4, {"parameter_alignment": False, **ROUND_ROBIN}, zero=ALIGNED
    ),
}


@pytest.fixture(scope="module")
def save(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saver:
    return save_once(rank_pool, tmp_path_factory)


def reshard(source: str | Path, target: Path, of: Case) -> None:
    report = zeroelastic.reshard(source, target, world_size=of.current, stage=of.to, verify=True, **of.options)
    assert report.content_root == zeroelastic.verify(source).content_root


TO_STAGE_3 = pytest.mark.support(
    "Using it", "`zeroelastic reshard`, then stock DeepSpeed", "exact", "to elastic or rigid files for any world size"
)
TO_STAGES_1_AND_2 = pytest.mark.support(
    "Using it",
    "`zeroelastic reshard --stage 1`, `2`, then stock DeepSpeed",
    "exact",
    "from stages 1, 2 and 3; `round_robin_gradients` and `parameter_alignment` included",
)
CORE = next(iter(CASES))
"""This case also runs with older versions of DeepSpeed."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[TO_STAGE_3 if of.to == 3 else TO_STAGES_1_AND_2] + [pytest.mark.core] * (name == CORE)
        )
        for name, of in CASES.items()
    ],
)
def test_stock_deepspeed_goes_on(rank_pool: RankPool, save: Saver, tmp_path: Path, name: str) -> None:
    of = CASES[name]
    saved = save(of.job, of.saved)
    reshard(saved.directory, tmp_path / "b", of)
    for outcome in rank_pool.run(resume, of.current, of.resumed, str(tmp_path / "b"), timeout=LIMIT_S):
        different = compare_states(saved.outcome.state, outcome.state)
        if of.job.config:  # BF16_Optimizer has no loss scaler
            different = [line for line in different if not line.startswith("loss_scaler/")]
        assert different == []
        assert outcome.gathered == saved.outcome.gathered
        assert outcome.report is None, "this was not stock DeepSpeed"
        assert outcome.client_state["note"] == "hello"
        steps, distinct = outcome.steps
        assert distinct in (0, sum(step is not None for step in steps))
        for got, want in zip(outcome.losses, saved.outcome.losses, strict=True):
            assert got == pytest.approx(want, rel=LOSS_RTOL[of.job.precision])


@pytest.mark.starts_processes
@pytest.mark.parametrize("name", [CORE, "3 elastic to 1, 3 to 2, round robin"])
def test_also_where_zeroelastic_cannot_be_imported(save: Saver, tmp_path: Path, name: str) -> None:
    of = CASES[name]
    saved = save(of.job, of.saved)
    reshard(saved.directory, tmp_path / "to", of)
    changes = {"elastic": False, "perturb": 0.5, "lr": 0.07, "stage": of.to, "zero": of.resumed.zero}
    seen = resume_on_stock(tmp_path / "to", tmp_path, of.current, changes)
    assert seen["gathered"] == saved.outcome.gathered
    assert [group["weight_decay"] for group in seen["groups"]] == [0.1, 0.0]
    assert set(seen["steps"]) == {3.0} and seen["distinct_steps"] >= 2
    assert seen["distinct_steps"] == len(seen["steps"])
    assert seen["global_steps"] == 3 and seen["scheduler"] == 3 and seen["note"] == "hello"
    assert seen["losses"] == pytest.approx(saved.outcome.losses, rel=LOSS_RTOL["bf16"])


@pytest.mark.parametrize("stage", [2, 3])
def test_zeroelastic_itself_resumes_it_with_the_same_root(
    rank_pool: RankPool, save: Saver, tmp_path: Path, stage: int
) -> None:
    saved = save(Job(**STOCK), 4)
    report = zeroelastic.reshard(saved.directory, tmp_path / "to", world_size=3, stage=stage)
    outcome = rank_pool.run(resume, 5, Job().other(), str(tmp_path / "to"), timeout=LIMIT_S)[0]
    assert compare_states(saved.outcome.state, outcome.state) == []
    assert outcome.report.root_matches and outcome.report.saved_root == report.content_root


def test_zero_to_fp32_merges_the_same_weights_at_every_stage(save: Saver, tmp_path: Path) -> None:
    saved = save(Job(**STOCK), 4)
    targets: dict[str, dict[str, Any]] = {
        "rigid": {"format": "rigid"},
        "elastic": {},
        "two": {"stage": 2},
        "one": {"stage": 1},
    }
    for name, options in targets.items():
        zeroelastic.reshard(saved.directory, tmp_path / name, world_size=3, **options)
    first, *others = merged_by_zero_to_fp32([Path(saved.directory), *(tmp_path / name for name in targets)], tmp_path)
    one = others.pop()
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[key], value) for key, value in first.items())
    # At stage 1 DeepSpeed lists no frozen parameters, and its script leaves them out.
    assert first.keys() - one.keys() == {"adapter.weight", "adapter.bias"}
    assert all(torch.equal(first[key], value) for key, value in one.items())
