"""The same state saved lean and in full, by a job whose model has every kind of tensor that a lean tag leaves out."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import training
from training import Job, build_engine, build_model, look, train_step

JOB = Job(options={"verify": True, "lean": True}, frozen_table=60)


def kinds_model(job: Job) -> training.TinyModel:
    """``TinyModel`` with frozen parameters that are tied and without elements, and large buffers, one in larger memory.

    DeepSpeed's forward pass of stage 3 takes no parameter without elements.
    """
    model = build_model(job)
    model.tied_table = torch.nn.Embedding(60, 16)
    model.tied_table.weight = model.frozen_table.weight
    model.slanted = torch.nn.Parameter(torch.randn(4, 6), requires_grad=False)
    if job.stage != 3:
        model.nothing = torch.nn.Parameter(torch.empty(0, 5), requires_grad=False)
    model.register_buffer("mask", torch.arange(40_000, dtype=torch.int32))
    model.register_buffer("flags", torch.arange(70_000) % 3 == 0)
    model.register_buffer("part", torch.arange(60_000.0)[:30_000])
    return model


def save_lean_and_full(job: Job, directory: str) -> None:
    """Train, and save to the folders ``lean`` and ``full``; one frozen parameter is not contiguous, where it may be."""
    with mock.patch.object(training, "build_model", kinds_model):
        engine = build_engine(job)
    if job.stage != 3:
        slanted = engine.module.slanted
        slanted.data = slanted.data.t().contiguous().t()
    save_both(engine, train_step, directory)


def save_both(engine: Any, step: Any, directory: str) -> None:
    for number in range(2):
        step(engine, number)
    engine.save_checkpoint(f"{directory}/lean")
    engine._config._param_dict["zeroelastic"] = {"verify": True}
    engine.save_checkpoint(f"{directory}/full")


def load_and_look(job: Job, directory: str) -> tuple[object, object]:
    """What a run of the same model, with other weights before, has after it loads: its state, and its losses."""
    with mock.patch.object(training, "build_model", kinds_model):
        engine = build_engine(job)
    engine.load_checkpoint(directory)
    return look(engine)[0], [train_step(engine, step) for step in range(2)]
