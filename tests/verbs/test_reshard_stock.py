"""Resharded checkpoints in stock DeepSpeed: the whole state is the saved one, and training goes on as it would have.

Some loads run in processes in which zeroelastic cannot be imported at all (tests/stock_resume.py); others, faster, in
a pool of ranks in which it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stock_programs import merged_by_zero_to_fp32, resume_on_stock
from training import LOSS_RTOL, Job, Outcome, resume, train_and_save

from zeroelastic.runs.locate import find_source
from zeroelastic.testing import RankPool, compare_states
from zeroelastic.verbs.reshard.report import ReshardReport
from zeroelastic.verbs.reshard.reshard import ReshardOptions, plan_reshard, run_reshard

Saver = Callable[[Job, int], tuple[Path, Outcome]]


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saver:
    made: dict[str, tuple[Path, Outcome]] = {}

    def save(job: Job, world_size: int) -> tuple[Path, Outcome]:
        key = f"{job}@{world_size}"
        if key not in made:
            directory = tmp_path_factory.mktemp("save")
            made[key] = directory, rank_pool.run(train_and_save, world_size, job, str(directory))[0]
        return made[key]

    return save


def run(src: Path, dst: Path, world_size: int, **options: Any) -> ReshardReport:
    return run_reshard(
        plan_reshard(find_source(src), ReshardOptions(world_size=world_size, verify=True, **options)), dst
    )


STOCK = Job(elastic=False, installed=False)


@pytest.mark.starts_processes
@pytest.mark.support(
    "Using it", "`zeroelastic reshard`, then stock DeepSpeed", "exact", "to elastic or rigid files for any world size"
)
@pytest.mark.parametrize(
    ("job", "world_size", "to_world_size", "format"),
    [
        pytest.param(STOCK, 4, 3, "elastic", marks=pytest.mark.core),
        (STOCK, 1, 4, "rigid"),
        (STOCK, 8, 1, "elastic"),
        (STOCK, 2, 5, "elastic"),
        (STOCK, 5, 2, "rigid"),
        (Job(), 3, 8, "elastic"),
        (Job(), 6, 4, "rigid"),
        (Job(groups=3, sub_group_size=90), 4, 6, "elastic"),
        (replace(STOCK, precision="fp16"), 3, 2, "elastic"),
        (replace(STOCK, precision="fp32", optimizer="amsgrad"), 2, 3, "rigid"),
        (Job(precision="fp32", optimizer="sgd"), 2, 3, "elastic"),
        (replace(STOCK, optimizer="plain_sgd"), 3, 2, "rigid"),
        (Job(optimizer="rmsprop", groups=1), 3, 4, "elastic"),
        (replace(STOCK, optimizer="cpu_adam", zero={"offload_optimizer": {"device": "cpu"}}), 2, 3, "elastic"),
        (replace(STOCK, frozen=False), 4, 3, "elastic"),
    ],
    ids=str,
)
def test_stock_deepspeed_resumes_it(
    rank_pool: RankPool, saved: Saver, tmp_path: Path, job: Job, world_size: int, to_world_size: int, format: str
) -> None:
    source, before = saved(job, world_size)
    report = run(source, tmp_path / "to", to_world_size, format=format)
    assert report.recorded_root in (None, report.content_root)
    other = replace(job, installed=False, elastic=False, perturb=0.5, lr=job.lr * 7)
    for outcome in rank_pool.run(resume, to_world_size, other, str(tmp_path / "to")):
        assert compare_states(before.state, outcome.state) == []
        assert outcome.gathered == before.gathered
        assert outcome.report is None, "this was not stock DeepSpeed"
        steps, distinct = outcome.steps
        assert distinct in (0, len(steps))
        for got, want in zip(outcome.losses, before.losses, strict=True):
            assert got == pytest.approx(want, rel=LOSS_RTOL[job.precision])


@pytest.mark.support(
    "Using it", "`zeroelastic reshard`, then stock DeepSpeed", "exact", "to elastic or rigid files for any world size"
)
@pytest.mark.parametrize(
    ("elastic", "world_size", "to_world_size", "format"),
    [(False, 4, 3, "elastic"), (True, 3, 4, "rigid"), (False, 2, 1, "rigid")],
)
def test_also_where_zeroelastic_cannot_be_imported(
    saved: Saver, tmp_path: Path, elastic: bool, world_size: int, to_world_size: int, format: str
) -> None:
    job = Job(elastic=elastic, installed=elastic)
    source, before = saved(job, world_size)
    run(source, tmp_path / "to", to_world_size, format=format)
    changes = {"elastic": False, "perturb": 0.5, "lr": 0.07}
    seen = resume_on_stock(tmp_path / "to", tmp_path, to_world_size, changes)
    assert seen["gathered"] == before.gathered
    assert [group["weight_decay"] for group in seen["groups"]] == [0.1, 0.0]
    assert seen["steps"] == [3.0] * len(seen["steps"]) and seen["distinct_steps"] == len(seen["steps"]) > 1
    assert seen["global_steps"] == 3 and seen["note"] == "hello"
    assert seen["losses"] == pytest.approx(before.losses, rel=LOSS_RTOL["bf16"])


def test_zeroelastic_itself_resumes_it_with_the_same_root(rank_pool: RankPool, saved: Saver, tmp_path: Path) -> None:
    source, before = saved(STOCK, 4)
    report = run(source, tmp_path / "to", 3)
    outcome = rank_pool.run(resume, 5, Job().other(), str(tmp_path / "to"))[0]
    assert compare_states(before.state, outcome.state) == []
    assert outcome.report.root_matches and outcome.report.saved_root == report.content_root


def test_weights_that_zero_to_fp32_merges_are_the_same(saved: Saver, tmp_path: Path) -> None:
    source, _ = saved(STOCK, 4)
    run(source, tmp_path / "to", 3, format="rigid")
    run(source, tmp_path / "too", 7, format="elastic")
    weights = merged_by_zero_to_fp32([source, tmp_path / "to", tmp_path / "too"], tmp_path)
    for other in weights[1:]:
        assert other.keys() == weights[0].keys()
        assert all(torch.equal(other[key], value) for key, value in weights[0].items())
