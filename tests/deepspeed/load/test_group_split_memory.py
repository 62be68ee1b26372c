"""How much memory a load at ZeRO stage 2 takes beyond what the run holds anyway: ours, and DeepSpeed's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bounded import process_status, reset_peak
from training import initialize

from zeroelastic.testing import RankPool

WIDTH, LAYERS = 2048, 4
STATE_BYTES = 12 * LAYERS * WIDTH * WIDTH
"""Of all ranks: fp32 master weights and two moments, 192 MiB; DeepSpeed unpickles a rank's half of it."""
MOST_BYTES = 64 << 20
"""What a load may add on each rank."""


def build(installed: bool) -> Any:
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return initialize(model, {"stage": 2}, installed=installed, train_batch_size=6, bf16={"enabled": True})


def save(directory: str) -> None:
    engine = build(installed=False)
    engine.backward(engine(torch.ones(6 // dist.get_world_size(), WIDTH, dtype=torch.bfloat16)).float().pow(2).mean())
    engine.step()
    engine.save_checkpoint(directory)


def added_by_a_load(directory: str, installed: bool) -> int:
    """Bytes by which the resident memory of this rank grew at most in a second load; the first one makes the state."""
    engine = build(installed)
    engine.load_checkpoint(directory)
    dist.barrier()
    reset_peak()
    before = process_status("VmRSS")
    path, _ = engine.load_checkpoint(directory)
    assert path is not None and installed == hasattr(engine, "zeroelastic_report")
    return process_status("VmHWM") - before


@pytest.mark.extended
def test_a_load_adds_little_memory_where_deepspeed_holds_a_whole_file(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(save, 2, str(tmp_path))
    for ranks in (2, 3):
        ours = rank_pool.run(added_by_a_load, ranks, str(tmp_path), True)
        assert max(ours) <= MOST_BYTES, (ranks, ours)
    theirs = rank_pool.run(added_by_a_load, 2, str(tmp_path), False)
    assert min(theirs) > 0.9 * STATE_BYTES / 2 > 1.3 * MOST_BYTES, theirs
