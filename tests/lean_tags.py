"""Lean tags for tests that train nothing: made once, copied for each test, damaged there."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training import Job, TinyModel, build_engine, train_step

from zeroelastic.checkpoint.shared_files import FROZEN_FOLDER
from zeroelastic.testing import RankPool

LEAN = {"verify": True, "lean": True}
JOB = Job(options=LEAN, frozen_table=60)
RANKS = 2
TAGS = ("global_step2", "global_step3")
BUFFER = "rotary"
"""A buffer that is large enough to be shared."""


def build_lean_engine(job: Job) -> Any:
    """The engine of a job whose model has a large buffer too."""
    init: Any = TinyModel.__init__

    def with_buffer(self: TinyModel, *args: Any) -> None:
        init(self, *args)
        self.register_buffer(BUFFER, torch.arange(1 << 15, dtype=torch.float32))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TinyModel, "__init__", with_buffer)
        return build_engine(job)


def save_lean(job: Job, directory: str, full: str) -> None:
    """Save lean at steps 2 and 3, and in full at step 3 too."""
    engine = build_lean_engine(job)
    for step in range(3):
        train_step(engine, step)
        if step:
            engine.save_checkpoint(directory)
    engine._config._param_dict["zeroelastic"] = {"verify": True}
    engine.save_checkpoint(full)


def make_lean(rank_pool: RankPool, root: Path, stage: int = 3) -> Path:
    """A run of two lean tags, ``root / "lean"``, and the full tag of the later step in ``root / "full"``."""
    rank_pool.run(save_lean, RANKS, replace(JOB, stage=stage), str(root / "lean"), str(root / "full"))
    return root / "lean"


def copied(run: Path, to: Path) -> Path:
    """A copy of a run."""
    shutil.copytree(run, to)
    return to


def shared_file(run: Path) -> Path:
    """The only shared file of a run."""
    (path,) = (run / FROZEN_FOLDER).iterdir()
    return path
