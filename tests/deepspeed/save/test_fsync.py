"""What a save flushes to the device: everything, or nothing where the options say so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from training import Job, build_engine, train_step

from zeroelastic.testing import RankPool
from zeroelastic.torch_file import save as torch_file_save
from zeroelastic.verbs.verify.verify import verify_checkpoint


def flushed(directory: str, fsync: bool) -> list[str]:
    """The names of what this rank flushes in two saves of one tag, the second of which replaces the first."""
    engine = build_engine(Job(options={"fsync": fsync}))
    train_step(engine, 0)
    names: list[str] = []
    original, write = os.fsync, torch_file_save.write_segments

    def noting(fd: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        original(fd)

    def noting_write(*args: Any, sync: bool = False, **kwargs: Any) -> Any:
        names.extend(["payload"] if sync else [])
        return write(*args, sync=sync, **kwargs)

    with (
        mock.patch.object(os, "fsync", noting),
        mock.patch.object(torch_file_save, "write_segments", noting_write),
        mock.patch.object(torch_file_save, "_EARLY_BYTES", 0),
    ):
        for _ in range(2):
            engine.save_checkpoint(directory, tag="tag")
            dist.barrier()
    return names


@pytest.mark.parametrize("fsync", [True, False])
def test_everything_is_flushed_or_nothing(rank_pool: RankPool, tmp_path: Path, fsync: bool) -> None:
    first, second = rank_pool.run(flushed, 2, str(tmp_path), fsync)
    if not fsync:
        assert first == second == []
    for rank, names in enumerate((first, second) if fsync else ()):
        assert "payload" in names and any(f"rank_{rank}_" in name and "optim" in name for name in names)
        assert any("model_states" in name for name in names)
    if fsync:
        assert any(name.startswith(".zeroelastic.json") for name in first)
        assert any(name.startswith(".latest") for name in first)
    assert verify_checkpoint(tmp_path / "tag").valid and (tmp_path / "latest").read_text() == "tag"
