"""``"keep"``: which older tags go after a commit, which never do, and that a removal that fails fails no save."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from places import GOLDEN
from saved_files import logged, record_of
from saves import Nodes, on_nodes
from training import Job, build_engine, train_step

import zeroelastic
from zeroelastic.checkpoint.commit_record import RECORD_NAME, params_digest, record_text
from zeroelastic.deepspeed.live.kinds import trained_params
from zeroelastic.deepspeed.save import after_commit
from zeroelastic.testing import RankPool

JOB = Job(options={"keep": 2})


def save_often(
    job: Job, directory: str, steps: int, *, latest_at: int | None = None, fails: bool = False
) -> tuple[list[Any], list[str]]:
    """Save after every step; the tags that were committed and the lines of the log on this rank.

    Before the save at step ``latest_at``, ``latest`` is pointed at the first tag, and stays there.
    """
    committed: list[Any] = []
    said = logged("")
    unsubscribe = zeroelastic.subscribe(lambda event: committed.append(event.tag))  # type: ignore[union-attr]
    after_commit._warned.clear()
    if fails:
        after_commit.remove_tag = refuse  # type: ignore[assignment]
    engine = build_engine(job)
    for step in range(steps):
        train_step(engine, step)
        if step + 1 == latest_at and dist.get_rank() == 0:
            Path(directory, "latest").write_text("global_step1")
        engine.save_checkpoint(directory, save_latest=latest_at is None or step + 1 < latest_at)
    zeroelastic.wait_for_save(engine)
    unsubscribe()
    return committed, said


def removed(said: list[str]) -> list[str]:
    return [line.rpartition("; removed ")[2] for line in said if "; removed " in line]


def refuse(plan: object, decision: object) -> str | None:
    raise PermissionError(13, "Permission denied", "/ckpt/global_step1")


def tags(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


def test_the_newest_stay_and_the_log_names_the_others(rank_pool: RankPool, tmp_path: Path) -> None:
    (committed, said), (others, _) = rank_pool.run(save_often, 2, JOB, str(tmp_path), 4)
    assert tags(tmp_path) == ["global_step3", "global_step4"]
    assert (tmp_path / "latest").read_text() == "global_step4"
    assert committed == [f"global_step{step}" for step in (1, 2, 3, 4)] and others == []
    assert removed(said) == ["global_step1", "global_step2"] and not [line for line in said if "keep" in line]
    assert not list(tmp_path.glob(".zeroelastic*"))
    assert zeroelastic.verify(tmp_path).valid


def trained(job: Job) -> str:
    return params_digest(trained_params(build_engine(job)) or ())


def own_params(rank_pool: RankPool) -> str:
    """The digest of the parameters that JOB trains."""
    return str(rank_pool.run(trained, 1, JOB)[0])


def test_what_prune_would_not_remove_and_what_is_not_ours_stays(rank_pool: RankPool, tmp_path: Path) -> None:
    golden = GOLDEN / "elastic2" / "global_step2"
    record = record_of(golden)
    undated = record_text(record.model_copy(update={"trained_params": own_params(rank_pool), "committed_at": None}))
    for name in ("linked", "damaged", "old", "stock", "unfinished"):
        shutil.copytree(golden, tmp_path / name)
        (tmp_path / name / RECORD_NAME).write_bytes(undated)
        for path in (tmp_path / name, *(tmp_path / name).iterdir()):
            os.utime(path, (1e9, 1e9))
    (tmp_path / "link").symlink_to("linked")
    next((tmp_path / "damaged").glob("*rank_1_*optim_states.pt")).write_bytes(b"")
    (tmp_path / "stock" / "zeroelastic.json").unlink()  # as DeepSpeed alone saves it: it neither counts nor goes
    next((tmp_path / "unfinished").glob("*rank_0_*optim_states.pt")).unlink()
    (tmp_path / "notes").mkdir()
    rank_pool.run(save_often, 2, JOB, str(tmp_path), 3)
    kept = {"damaged", "link", "linked", "notes", "stock", "unfinished"}
    assert set(tags(tmp_path)) == kept | {"global_step2", "global_step3"}


def test_every_so_many_steps_one_stays(rank_pool: RankPool, tmp_path: Path) -> None:
    job = replace(JOB, options={"keep": 1, "keep_every": 2}, stage=2, elastic=False)
    rank_pool.run(save_often, 2, job, str(tmp_path), 5)
    assert tags(tmp_path) == ["global_step2", "global_step4", "global_step5"]


def test_the_tag_that_latest_names_stays(rank_pool: RankPool, tmp_path: Path) -> None:
    """``latest`` was set back to step 1, and saves do not move it."""
    rank_pool.run(save_often, 2, JOB, str(tmp_path), 5, latest_at=2)
    assert "global_step1" in tags(tmp_path) and "global_step5" in tags(tmp_path)


def test_a_removal_that_fails_warns_and_the_save_is_committed(rank_pool: RankPool, tmp_path: Path) -> None:
    (committed, said), _ = rank_pool.run(save_often, 2, JOB, str(tmp_path), 3, fails=True)
    assert len(committed) == 3 and not removed(said)
    (line,) = [line for line in said if "keep" in line]
    assert "/ckpt/global_step1: Permission denied" in line and "zeroelastic prune" in line
    assert zeroelastic.verify(tmp_path).valid and len(tags(tmp_path)) == 3


def test_folders_of_a_framework_are_left_to_it(rank_pool: RankPool, tmp_path: Path) -> None:
    job = replace(JOB, options={"keep": 1})
    folder = tmp_path / "checkpoint-5"
    ((_, said),) = rank_pool.run(save_often, 1, job, str(folder), 2)
    (line,) = [line for line in said if '"keep"' in line]
    assert "save_total_limit" in line and not removed(said) and len(tags(folder)) == 2


@pytest.mark.parametrize(
    ("folder", "tag", "setting"),
    [
        ("state", "pytorch_model", "total_limit"),
        ("last.ckpt", "checkpoint", "save_top_k"),
        ("checkpoint_3", "global_step3", "save_total_limit"),
        ("run", "global_step3", None),
    ],
)
def test_the_setting_of_each_framework_is_named(tmp_path: Path, folder: str, tag: str, setting: str | None) -> None:
    found = after_commit._limit_of_framework(tmp_path / folder, tag)
    assert found is None if setting is None else setting in str(found)


@pytest.mark.usefixtures("mounts")
def test_every_node_removes_its_own(rank_pool: RankPool, tmp_path: Path) -> None:
    job = replace(JOB, config={"checkpoint": {"use_node_local_storage": True}})
    nodes = Nodes(tmp_path)
    placed = (0, 0, 1)
    found = rank_pool.run(on_nodes, 3, nodes, placed, save_often, job, nodes.path, 4, timeout=120)
    for node in (0, 1):
        assert tags(nodes.disk(node)) == ["global_step3", "global_step4"]
    assert removed(found[0][1])[-1] == "global_step2"
