"""Lean saves where no directory is shared by all ranks: in object stores, and on the disks of nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training import (
    Job,
    Outcome,
    build_model,
    build_optimizer,
    ds_config,
    look,
    train_step,
)

support = pytest.mark.support
SECTION = "Checkpoint engines and storage"

# --- functions that run on ranks --------------------------------------------------------------------------------------


def build_with_codes(job: Job) -> Any:
    """An engine whose model has a large buffer that training does not change."""
    import deepspeed

    import zeroelastic

    zeroelastic.install()
    model = build_model(job)
    codes = torch.arange(40_000, dtype=torch.int32) + int(job.perturb * 10)
    model.register_buffer("codes", codes.reshape(200, 200))
    optimizer = build_optimizer(job, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(job), lr_scheduler=schedule)
    return engine


def save_codes(job: Job, directory: str) -> Outcome:
    engine = build_with_codes(job)
    for step in range(3):
        train_step(engine, step)
    state, seen = look(engine)
    engine.save_checkpoint(directory)
    engine.save_checkpoint(directory, tag="again")
    return Outcome(state, seen, [train_step(engine, step) for step in range(3, 5)])


def load_codes(job: Job, directory: str, *, save: bool = False) -> Outcome:
    engine = build_with_codes(job)
    path, _ = engine.load_checkpoint(directory, tag="global_step3")
    assert path is not None
    state, seen = look(engine)
    if save:
        engine.save_checkpoint(directory)
    losses = [train_step(engine, step) for step in range(3, 5)]
    return Outcome(state, seen, losses, engine.zeroelastic_report)
