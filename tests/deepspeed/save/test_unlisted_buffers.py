"""What DeepSpeed lists neither as a parameter nor as a buffer, in the file of the whole module of stages 1 and 2."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from safetensors.torch import load_file
from training import Job, TinyModel, build_engine, train_step

from zeroelastic import export
from zeroelastic.testing import RankPool

JOB = Job(precision="fp32", stage=2, options={})
"""Of the default options: what is read back of a save is its headers."""


class Unlisted(TinyModel):
    """A buffer whose first name is not persistent, and an entry that a layer adds, as those of bitsandbytes do."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        table = torch.arange(5.0)
        self.register_buffer("first", table, persistent=False)
        self.register_buffer("second", table)
        self.absmax = torch.arange(7.0)
        self.register_state_dict_post_hook(add_absmax)
        self.register_load_state_dict_pre_hook(take_absmax)


def add_absmax(module: Any, state: dict[str, Any], *rest: object) -> None:
    state["up.weight.absmax"] = module.absmax


def take_absmax(module: Any, state: dict[str, Any], *rest: object) -> None:
    module.absmax = state.pop("up.weight.absmax").clone()


def values(engine: Any) -> list[list[float]]:
    return [tensor.tolist() for tensor in (engine.module.second, engine.module.absmax)]


def save(job: Job, directory: str, exclude: bool) -> list[list[float]]:
    training.TinyModel = Unlisted
    engine = build_engine(job)
    train_step(engine, 0)
    for tensor in (engine.module.second, engine.module.absmax):
        tensor.mul_(3)
    engine.save_checkpoint(directory, tag="first", exclude_frozen_parameters=exclude)
    return values(engine)


def load_and_save(job: Job, directory: str, exclude: bool) -> list[list[float]]:
    training.TinyModel = Unlisted
    engine = build_engine(job)
    _, client_state = engine.load_checkpoint(directory, tag="first", load_module_strict=not exclude)
    engine.save_checkpoint(directory, tag="second", client_state=client_state)
    return values(engine)


@pytest.mark.parametrize(
    ("stage", "installed", "exclude"), [(1, True, False), (2, True, True), (1, False, False), (2, False, False)]
)
def test_tensors_that_are_in_no_list_of_deepspeeds_are_buffers(
    rank_pool: RankPool, tmp_path: Path, stage: int, installed: bool, exclude: bool
) -> None:
    job = replace(JOB, stage=stage)
    saved = rank_pool.run(save, 2, replace(job, installed=installed), str(tmp_path), exclude)
    assert saved == [[[0, 3, 6, 9, 12], [0, 3, 6, 9, 12, 15, 18]]] * 2
    assert rank_pool.run(load_and_save, 3, job, str(tmp_path), exclude) == saved[:1] * 3
    export(tmp_path / "second", tmp_path / "exported")
    exported = load_file(tmp_path / "exported/model.safetensors")
    assert [exported[name].tolist() for name in ("second", "up.weight.absmax")] == saved[0]
