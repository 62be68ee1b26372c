"""Engines with other parameters in one directory, as in a GAN: neither's tags are removed or taken in silence."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from saved_files import logged
from training import Job, build_engine, look, train_step

import zeroelastic
from zeroelastic.elastic import resume
from zeroelastic.errors import LayoutMismatchError
from zeroelastic.testing import RankPool

G = Job(options={"keep": 1})
D = replace(G, extra="more")


def listed(directory: str) -> list[str]:
    dist.barrier()
    found = sorted(path.name for path in Path(directory).iterdir() if path.is_dir())
    dist.barrier()
    return found


def save_both(directory: str, jobs: dict[str, Job]) -> dict[str, Any]:
    """Train and save two engines, three times; engines that are built anew then resume, with and without ``latest``."""
    engines = {name: build_engine(job) for name, job in jobs.items()}
    for epoch in range(3):
        for name, engine in engines.items():
            train_step(engine, epoch)
            engine.save_checkpoint(directory, tag=f"{name}_{epoch}")
    kept = listed(directory)
    saved = {name: look(engine)[0] for name, engine in engines.items()}
    engine, refused = build_engine(replace(jobs["G"], perturb=0.5)), ""
    before = look(engine)[0]
    try:
        resume(engine, directory, strict=False)
    except LayoutMismatchError as error:
        refused = str(error)
    unchanged = look(engine)[0] == before
    dist.barrier()
    if dist.get_rank() == 0:
        (Path(directory) / "latest").unlink()
    dist.barrier()
    resumed: dict[str, Any] = {}
    for name, job in jobs.items():
        engine = build_engine(replace(job, perturb=0.5))
        start = resume(engine, directory, strict=False)
        resumed[name] = start.tag, start.passed_over, start.notes[0], look(engine)[0] == saved[name]
    return {"kept": kept, "refused": refused, "unchanged": unchanged, "resumed": resumed}


@pytest.mark.parametrize("stage", [2, 3])
def test_keep_leaves_the_other_engine_s_tags_and_no_engine_takes_them(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    jobs = {name: replace(job, stage=stage, elastic=stage == 3) for name, job in (("G", G), ("D", D))}
    for found in rank_pool.run(save_both, 2, str(tmp_path), jobs):
        assert found["kept"] == ["D_2", "G_2"]
        assert "D_2" in found["refused"] and "more" in found["refused"] and found["unchanged"]
        for name in "GD":
            tag, passed, note, same = found["resumed"][name]
            assert (tag, passed, same) == (f"{name}_2", (), True) and note.startswith("NOT WHAT LATEST NAMES: ")
    assert zeroelastic.prune(tmp_path, keep=1).plan.removals == ()


def save_under_one_tag(directory: str) -> list[str]:
    said = logged("deepspeed.save.checks", logging.WARNING)
    for job in (G, G, D):
        build_engine(job).save_checkpoint(directory, tag="epoch")
    return said


def test_a_save_that_replaces_other_parameters_says_so(rank_pool: RankPool, tmp_path: Path) -> None:
    (line,), others = rank_pool.run(save_under_one_tag, 2, str(tmp_path))
    assert "replaces a checkpoint whose trained parameters are not those of the engine" in line and others == []
    assert zeroelastic.verify(tmp_path / "epoch").valid


def change_params(directory: str) -> tuple[list[str], list[str]]:
    """Save, and go on with a further parameter: the directory after each save."""
    found: list[list[str]] = []
    for job in (G, replace(D, options={"keep": 1, "on_mismatch": "initialize"})):
        engine = build_engine(job)
        if found:
            engine.load_checkpoint(directory)
        for step in range(2):
            train_step(engine, step)
            engine.save_checkpoint(directory)
        found.append(listed(directory))
    return found[0], found[1]


def test_where_parameters_change_the_tags_of_before_stay(rank_pool: RankPool, tmp_path: Path) -> None:
    before, after = rank_pool.run(change_params, 2, str(tmp_path))[0]
    assert before == ["global_step2"] and after == ["global_step2", "global_step4"]
