"""Lean saves: what a tag holds, what it refers to, and resumes from it at other sizes and stages.

The state after each load is compared with what DeepSpeed gathered when it was saved, and the content root with that of
a full save of the same state.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from training import LOSS_RTOL, Job, Outcome, build_engine, look, resume, train_step

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.checkpoint.shared_files import FROZEN_FOLDER
from zeroelastic.testing import RankPool

LEAN = {"verify": True, "lean": True}
JOB = Job(options=LEAN, frozen_table=60)
STAGES = {3: {}, 2: {"stage": 2}, 1: {"stage": 1}}


def shared_files(run: Path) -> list[Path]:
    return sorted((run / FROZEN_FOLDER).iterdir())


def save_both(job: Job, lean: str, full: str) -> Outcome:
    """Train, save lean and in full, and train on."""
    engine = build_engine(job)
    for step in range(3):
        train_step(engine, step)
    state, seen = look(engine)
    engine.save_checkpoint(lean)
    engine._config._param_dict["zeroelastic"] = {"verify": True}
    engine.save_checkpoint(full)
    return Outcome(state, seen, [train_step(engine, step) for step in range(3, 5)])


@pytest.mark.parametrize(
    ("stage", "ranks", "other_stage", "other_ranks", "elastic"),
    [(3, 3, 3, 2, True), (3, 3, 2, 2, False), (2, 3, 3, 4, True), (2, 2, 2, 3, True), (1, 3, 1, 2, True)],
)
def test_a_lean_save_resumes_at_another_size_and_stage(
    rank_pool: RankPool, tmp_path: Path, stage: int, ranks: int, other_stage: int, other_ranks: int, elastic: bool
) -> None:
    job = replace(JOB, elastic=elastic, **STAGES[stage])
    lean, full = tmp_path / "lean", tmp_path / "full"
    saved = rank_pool.run(save_both, ranks, job, str(lean), str(full))[0]
    roots = [read_record(run / "global_step3").content_root for run in (lean, full)]  # type: ignore[union-attr]
    assert roots[0] == roots[1]
    other = replace(JOB, elastic=elastic, **STAGES[other_stage]).other()
    found = rank_pool.run(resume, other_ranks, other, str(lean))
    for outcome in found:
        assert outcome.state == saved.state
        assert outcome.gathered == saved.gathered
        assert outcome.report.root_matches
        assert outcome.losses == pytest.approx(saved.losses, rel=LOSS_RTOL["bf16"])


@pytest.mark.parametrize("stage", [3, 2])
def test_a_tag_holds_trained_state_alone(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    job = replace(JOB, **STAGES[stage])
    rank_pool.run(save_both, 2, job, str(tmp_path / "lean"), str(tmp_path / "full"))
    (shared,) = shared_files(tmp_path / "lean")
    with safe_open(shared, framework="pt") as file:
        frozen = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    assert {*frozen} == {"adapter.weight", "adapter.bias", "frozen_table.weight"}
    for path in (tmp_path / "lean/global_step3").glob("*model_states.pt"):
        module: dict[str, Any] = torch.load(path, weights_only=False)["module"]
        assert [name for name, tensor in module.items() if tensor.numel()] == ["batches_seen"]
    record = read_record(tmp_path / "lean/global_step3")
    assert record is not None
    assert [file.name for file in record.shared] == [shared.name]
