"""Before a commit every rank looks at the files of another: it has to see them as the rank that wrote them does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from saves import Nodes, on_nodes
from training import Job, build_engine, raised, train_step

from zeroelastic.deepspeed.save.commit import PendingCommit
from zeroelastic.testing import RankPool
from zeroelastic.verbs.verify.verify import verify_checkpoint

SAVING = "Checkpoint engines and storage"


def save_seen_otherwise(directory: str) -> list[tuple[int, str, str, str]]:
    """Saves in which the optimizer file of one rank is another one after that rank has read it back."""
    from zeroelastic.deepspeed.save.directory import SaveDirectory

    engine = build_engine(Job())
    train_step(engine, 0)
    engine.save_checkpoint(directory, tag="good")
    dist.barrier()
    read_back: Callable[..., Any] = SaveDirectory._read_back
    found = []
    for victim in range(dist.get_world_size()):
        for change in ("shorter", "missing"):

            def read_back_and_change(
                self: SaveDirectory, save: PendingCommit, *args: Any, victim: int = victim, change: str = change
            ) -> Any:
                written = read_back(self, save, *args)
                path = self.staging_dir / save.file_names[1]
                if dist.get_rank() == victim and change == "shorter":
                    os.truncate(path, path.stat().st_size - 1)
                elif dist.get_rank() == victim:
                    path.unlink()
                return written

            with mock.patch.object(SaveDirectory, "_read_back", read_back_and_change):
                found.append((victim, change, *raised(lambda: engine.save_checkpoint(directory, tag="bad"))))
    return found


@pytest.mark.support(SAVING, "a directory that is not the same on all nodes", "refused", "every size is compared")
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_file_that_another_rank_sees_otherwise_is_not_committed(
    rank_pool: RankPool, tmp_path: Path, world_size: int
) -> None:
    results = rank_pool.run(save_seen_otherwise, world_size, str(tmp_path))
    assert all(result == results[0] for result in results) and len(results[0]) == 2 * world_size
    for victim, change, kind, text in results[0]:
        assert kind == "SaveError" and f"{tmp_path}/bad: not committed: " in text, (change, text)
        assert f"does not see what rank {victim} wrote" in text and f"rank_{victim}_" in text and "is unchanged" in text
    assert not (tmp_path / "bad").exists() and (tmp_path / "latest").read_text() == "good"
    assert verify_checkpoint(tmp_path / "good").valid


def save_once(job: Job, directory: str) -> tuple[str, str]:
    engine = build_engine(job)
    train_step(engine, 0)
    return raised(lambda: engine.save_checkpoint(directory, tag="tag"))


@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize(("stage", "placed"), [(2, (0, 1, 0, 1)), (3, (0, 0, 0, 1)), (1, (0, 0, 1))])
def test_nodes_with_disks_of_their_own_commit_nothing_unless_they_are_said_to(
    rank_pool: RankPool, tmp_path: Path, stage: int, placed: tuple[int, ...]
) -> None:
    nodes, job = Nodes(tmp_path), Job(stage=stage)
    found = rank_pool.run(on_nodes, len(placed), nodes, placed, save_once, job, nodes.path, timeout=120)
    assert all(kind == "SaveError" and "not the same on all nodes" in text for kind, text in found), found
    assert not [path for node in (0, 1) for path in nodes.disk(node).iterdir() if path.is_dir()]
