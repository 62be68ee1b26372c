"""Between runs with ZeRO and without: what DeepSpeed loads is left to it, and what it cannot is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training import Job, build_engine, gathered, of_all, raised, train_step

from zeroelastic.testing import RankPool

FLAGS: tuple[dict[str, Any], ...] = ({"load_optimizer_states": False}, {"load_module_only": True})


def job_of(stage: int, *, installed: bool = True) -> Job:
    return Job(stage=stage, frozen=False, groups=1, installed=installed)


def save(stage: int, directory: str) -> None:
    engine = build_engine(job_of(stage))
    train_step(engine, 0)
    engine.save_checkpoint(directory)


def weights_taken(stage: int, directory: str, installed: bool) -> list[tuple[dict[str, str], int, list[float]]]:
    """For each flag the master weights after the load, the step, and the losses that follow."""
    found = []
    for flags in FLAGS:
        engine = build_engine(job_of(stage, installed=installed).other())
        path, _ = engine.load_checkpoint(directory, **flags)
        assert path is not None
        state, step = gathered(engine), engine.global_steps
        found.append((state, step, [train_step(engine, step) for step in (1, 2)]))
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_the_weights_alone_of_a_checkpoint_of_stage_0_are_taken_as_by_deepspeed(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    rank_pool.run(save, 2, 0, str(tmp_path))
    ours, stock = (rank_pool.run(weights_taken, 3, stage, str(tmp_path), installed) for installed in (True, False))
    assert ours == stock


def errors_of(stage: int, directory: str) -> list[tuple[str, str]]:
    errors = []
    for flags in ({}, *FLAGS):
        engine = build_engine(job_of(stage))
        errors.append(raised(lambda engine=engine, flags=flags: engine.load_checkpoint(directory, **flags)))
    return errors


@pytest.mark.parametrize(("saved", "run"), [(0, 2), (0, 3), (1, 0), (2, 0), (3, 0)])
def test_what_only_fails_in_deepspeed_is_refused_with_a_way_out(
    rank_pool: RankPool, tmp_path: Path, saved: int, run: int
) -> None:
    rank_pool.run(save, 2, saved, str(tmp_path))
    said = of_all(rank_pool.run(errors_of, 2, run, str(tmp_path)))
    refused = {(0, 2): 1, (0, 3): 3, (3, 0): 3}.get((saved, run), 1)
    assert [kind for kind, _ in said[:refused]] == ["UnsupportedError"] * refused
    assert [kind for kind, _ in said[refused:]] == [""] * (3 - refused)
    for _, text in said[:refused]:
        if run:
            assert "A run at stage 1 or 2 loads the weights alone with load_optimizer_states=False." in text
        else:
            assert f"{tmp_path / 'global_step1'}: has the files of a run with ZeRO" in text and "Set stage 1" in text
            assert ("take the weights alone" in text) is (saved != 3)
