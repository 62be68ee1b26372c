"""Before a commit every rank looks at the files of another: it has to see them as the rank that wrote them does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from training import Job, build_engine, train_step

from zeroelastic.deepspeed.save.commit import PendingCommit
from zeroelastic.testing import RankError, RankPool
from zeroelastic.verbs.verify.verify import verify_checkpoint

SAVING = "Checkpoint engines and storage"


def save_seen_otherwise(directory: str, victim: int, change: str) -> None:
    """A save in which the optimizer file of ``victim`` is another one after that rank has read it back."""
    from zeroelastic.deepspeed.save.plain import Directory

    engine = build_engine(Job())
    train_step(engine, 0)
    engine.save_checkpoint(directory, tag="good")
    dist.barrier()
    read_back: Callable[..., Any] = Directory._sync_and_read_back

    def read_back_and_change(self: Directory, save: PendingCommit, *args: Any) -> Any:
        written = read_back(self, save, *args)
        path = self.staging_dir / save.file_names[1]
        if dist.get_rank() == victim and change == "shorter":
            os.truncate(path, path.stat().st_size - 1)
        elif dist.get_rank() == victim:
            path.unlink()
        return written

    with mock.patch.object(Directory, "_sync_and_read_back", read_back_and_change):
        engine.save_checkpoint(directory, tag="bad")


@pytest.mark.support(SAVING, "a directory that is not the same on all nodes", "refused", "every size is compared")
@pytest.mark.parametrize("change", ["shorter", "missing"])
@pytest.mark.parametrize(("world_size", "victim"), [(1, 0), (3, 0), (3, 1), (3, 2)])
def test_a_file_that_another_rank_sees_otherwise_is_not_committed(
    rank_pool: RankPool, tmp_path: Path, world_size: int, victim: int, change: str
) -> None:
    with pytest.raises(RankError) as caught:
        rank_pool.run(save_seen_otherwise, world_size, str(tmp_path), victim, change)
    said = {failure.rank: failure.headline for failure in caught.value.failures}
    assert set(said) == set(range(world_size)) and len(set(said.values())) == 1
    (text,) = set(said.values())
    assert f"{tmp_path}/bad: not committed: " in text and f"does not see what rank {victim} wrote" in text
    assert f"rank_{victim}_" in text and "is unchanged" in text
    assert not (tmp_path / "bad").exists() and (tmp_path / "latest").read_text() == "good"
    assert verify_checkpoint(tmp_path / "good").valid
