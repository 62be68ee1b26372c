"""A torchrun job whose workers start warm: killed and started again, it trains as one whose workers start cold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

TRAIN = """
import json, os, sys
import torch, deepspeed
import zeroelastic

before = set(sys.modules)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
config = {
    "train_batch_size": 12, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 3, "elastic_checkpoint": True},
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
imported = len(set(sys.modules) - before)
data = torch.randn(120, 16, generator=torch.Generator().manual_seed(1)).view(10, world_size, -1, 16)
start = zeroelastic.resume(engine, sys.argv[1])
out = open(f"{sys.argv[2]}.{rank}", "a")
exact = start.report.root_matches if start.report else None
print(json.dumps({"imported": imported, "parent": os.getppid(), "exact": exact}), file=out, flush=True)
while engine.global_steps < 6:
    loss = engine(data[engine.global_steps, rank]).pow(2).mean()
    engine.backward(loss)
    engine.step()
    print(json.dumps({"step": engine.global_steps, "loss": loss.item()}), file=out, flush=True)
    if engine.global_steps == 3:
        engine.save_checkpoint(sys.argv[1])
    if engine.global_steps == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), 9) if rank == 1 else torch.distributed.barrier()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def run(tmp_path: Path, name: str, *options: str) -> list[list[dict[str, Any]]]:
    """What each of two ranks told, in a job that loses one and is started again."""
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*command, "-m", "zeroelastic.run", *options, "train.py", f"{name}-ckpt", name],
        cwd=tmp_path, capture_output=True, text=True, timeout=400,
        # Without this torch 2.13 keeps its store from one start to the next, with the addresses of the last one.
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [(tmp_path / f"{name}.{rank}").read_text().splitlines() for rank in range(2)]
    return [[json.loads(line) for line in lines] for lines in told]


@pytest.mark.timeout(900)
def test_a_job_that_starts_warm_trains_as_one_that_starts_cold(tmp_path: Path) -> None:
    warm, cold = run(tmp_path, "warm", "--warm"), run(tmp_path, "cold")
    for ours, theirs in zip(warm, cold, strict=True):
        assert [one for one in ours if "loss" in one] == [one for one in theirs if "loss" in one]
        starts = [one for one in ours if "imported" in one]
        assert [one["exact"] for one in starts] == [None, True]
        assert max(one["imported"] for one in starts) < 60, "deepspeed.initialize finds nearly all imported"
        assert min(one["imported"] for one in theirs if "imported" in one) > 300, "which is where the time goes"
    assert len({one["parent"] for told in warm for one in told if "parent" in one}) == 1, "one warm process"
