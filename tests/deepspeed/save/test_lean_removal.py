"""Shared files of lean saves go with the last tag that refers to them, by ``"keep"`` and ``prune`` beside a job."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lean_runs import FIRST, SECOND, lean_tag, shared_path, write_shared
from saved_files import record_of
from training import Job, build_engine, train_step

import zeroelastic
from zeroelastic.checkpoint.shared_files import FROZEN_FOLDER, SharedFile
from zeroelastic.deepspeed.options import Options
from zeroelastic.deepspeed.save.after_save import remove_old_tags
from zeroelastic.errors import UsageError
from zeroelastic.testing import RankPool

JOB = Job(stage=2, options={"lean": True, "keep": 2}, frozen_table=60)
LONG_AGO = 1e9


def shared_files(run: Path) -> set[str]:
    return set(os.listdir(run / FROZEN_FOLDER))


def refers_to(tag_dir: Path) -> tuple[SharedFile, ...]:
    return record_of(tag_dir).shared


def make_old(run: Path) -> None:
    """Let all shared files look as if nothing had touched them for years."""
    for path in (run / FROZEN_FOLDER).glob("frozen-*"):
        with suppress(FileNotFoundError):
            os.utime(path, (LONG_AGO, LONG_AGO))


def save_changing(job: Job, directory: str, saves: int) -> list[set[str]]:
    """Save with frozen weights that change every second time; the shared files after each save.

    Before each save all shared files look old.
    """
    engine, folder = build_engine(job), Path(directory, FROZEN_FOLDER)
    found: list[set[str]] = []
    for step in range(saves):
        train_step(engine, step)
        with torch.no_grad():
            for param in engine.module.parameters():
                if not param.requires_grad:
                    param.fill_(0.5 + step // 2)
        dist.barrier()
        if dist.get_rank() == 0:
            make_old(Path(directory))
        dist.barrier()
        engine.save_checkpoint(directory)
        found.append({*os.listdir(folder)})
    return found


def test_keep_removes_the_files_to_which_no_tag_refers_any_more(rank_pool: RankPool, tmp_path: Path) -> None:
    write_shared(tmp_path, FIRST)
    left, _ = rank_pool.run(save_changing, 2, JOB, str(tmp_path), 6)
    assert [len(names) for names in left] == [1, 1, 2, 1, 2, 1]
    assert shared_path(tmp_path, FIRST).name not in left[0], "to which none has ever referred"
    assert sorted(path.name for path in tmp_path.glob("global_step*")) == ["global_step5", "global_step6"]
    assert {file.name for tag in (5, 6) for file in refers_to(tmp_path / f"global_step{tag}")} == left[-1]
    assert zeroelastic.verify(tmp_path).valid


def test_prune_beside_a_saving_job_leaves_every_tag_its_file(rank_pool: RankPool, tmp_path: Path) -> None:
    """Files look old to it all the time, so that only tags and saves on their way keep them."""
    stop, pruned = threading.Event(), 0

    def prune_often() -> None:
        nonlocal pruned
        while not stop.wait(0.02):
            with suppress(UsageError):  # there is no checkpoint yet
                pruned += len(zeroelastic.prune(tmp_path, keep=1, min_age=60, dry_run=False).removed)

    thread = threading.Thread(target=prune_often)
    thread.start()
    try:
        rank_pool.run(save_changing, 2, replace(JOB, options={"lean": True}), str(tmp_path), 10)
    finally:
        stop.set()
        thread.join()
    tags = [*tmp_path.glob("global_step*")]
    assert pruned > 5 and tmp_path / "global_step10" in tags
    assert shared_files(tmp_path) >= {file.name for tag in tags for file in refers_to(tag)}
    assert zeroelastic.verify(tmp_path).valid
    make_old(tmp_path)
    zeroelastic.prune(tmp_path, keep=1, min_age=60, dry_run=False)
    assert shared_files(tmp_path) == {file.name for file in refers_to(tmp_path / "global_step10")}


def test_a_shared_file_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step, digest in ((1, FIRST), (2, SECOND)):
        lean_tag(tmp_path / f"s{step}", step, digest)
        write_shared(tmp_path, digest)
    rename = os.rename

    def refuse(src: Path, dst: Path) -> None:
        if Path(src).suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(src))
        rename(src, dst)

    monkeypatch.setattr(os, "rename", refuse)
    caplog.set_level("INFO", logger="zeroelastic")
    assert remove_old_tags(tmp_path, "s2", Options(keep=1), over_nodes=False) == ("s1",)
    path = shared_path(tmp_path, FIRST)
    assert f'{path}: "keep": no tag refers to it, and it was not removed: Permission denied' in caplog.text
    monkeypatch.setattr(os, "rename", rename)
    assert remove_old_tags(tmp_path, "s2", Options(keep=1), over_nodes=False) == ()
    assert f'{path}: "keep": removed, no tag refers to it' in caplog.text
    assert shared_files(tmp_path) == {shared_path(tmp_path, SECOND).name}


def test_the_file_of_a_tag_that_keep_every_keeps_stays(tmp_path: Path) -> None:
    for step, digest in ((1, FIRST), (2, SECOND)):
        lean_tag(tmp_path / f"s{step}", step, digest)
        write_shared(tmp_path, digest)
    assert remove_old_tags(tmp_path, "s2", Options(keep=1, keep_every=1), over_nodes=False) == ()
    assert len(shared_files(tmp_path)) == 2
