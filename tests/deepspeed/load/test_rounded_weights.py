"""The 16-bit weights, which a load at stage 3 makes in the pass that reads the master weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from training import Job, build_engine, train_and_save, train_step

from zeroelastic.testing import RankPool

NAME = "_reassign_or_swap_out_partitioned_parameters"


def resume(directory: str, job: Job, tensors: str = "state") -> tuple[int, int, list[str]]:
    """How many sub-groups there are and how many DeepSpeed rounded, and what of the 16-bit weights is wrong.

    Every 16-bit weight, padding included, is another one before the load.
    """
    engine = build_engine(job.other())
    optimizer: Any = engine.optimizer
    for low in optimizer.fp16_partitioned_groups_flat:
        low.fill_(7.0)
    rounded_by_deepspeed: list[int] = []
    original = getattr(DeepSpeedZeroOptimizer_Stage3, NAME)

    def noting(self: Any, number: int) -> None:
        rounded_by_deepspeed.append(number)
        original(self, number)

    with mock.patch.object(DeepSpeedZeroOptimizer_Stage3, NAME, noting):
        engine.load_checkpoint(directory, tag="tag", load_optimizer_states=tensors == "state")
    wrong = []
    pairs = list(zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True))
    for number, (low, master) in enumerate(pairs):
        if not torch.equal(low, master.to(low.dtype)):
            wrong.append(f"sub-group {number}")
        pieces = optimizer.fp16_partitioned_groups[number]
        if not torch.equal(torch.cat([piece.view(-1) for piece in pieces]), low[: sum(p.numel() for p in pieces)]):
            wrong.append(f"parameters of sub-group {number}")
    dist.barrier()
    train_step(engine, 2)
    return len(pairs), len(rounded_by_deepspeed), wrong


@pytest.mark.parametrize(
    ("world_size", "precision", "io_engine"), [(1, "bf16", "native"), (3, "fp16", "native"), (3, "bf16", "numpy")]
)
def test_16_bit_weights_are_made_in_the_pass_that_reads(
    rank_pool: RankPool, tmp_path: Path, world_size: int, precision: str, io_engine: str
) -> None:
    job = Job(precision=precision, options={"verify": "read", "io_engine": io_engine})
    rank_pool.run(train_and_save, 2, job, str(tmp_path), before=2, after=0, tag="tag")
    for sub_groups, by_deepspeed, wrong in rank_pool.run(resume, world_size, str(tmp_path), job):
        assert wrong == []
        assert sub_groups > 1 and by_deepspeed == 0


@pytest.mark.parametrize("tensors", ["state", "weights"])
def test_parameters_that_only_the_run_has_keep_their_16_bit_weights(
    rank_pool: RankPool, tmp_path: Path, tensors: str
) -> None:
    """Their sub-groups are not read whole, so DeepSpeed rounds these."""
    rank_pool.run(train_and_save, 2, Job(), str(tmp_path), before=2, after=0, tag="tag")
    options = {"verify": "full", "on_mismatch": "initialize"}
    found = rank_pool.run(resume, 3, str(tmp_path), Job(extra="added", options=options), tensors)
    assert [wrong for _, _, wrong in found] == [[], [], []]
    assert all(0 < by_deepspeed < sub_groups for sub_groups, by_deepspeed, _ in found)
