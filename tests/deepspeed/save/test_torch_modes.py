"""Saves and loads within what changes how torch makes tensors, and beside forked processes: the same as without."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lifecycle.rank import use_node
from programs import end_interpreter
from saved_files import record_of
from training import Job, build_engine, look, train_step

import zeroelastic
from zeroelastic.deepspeed.save.background import saving_in_background
from zeroelastic.testing import RankPool

JOB = Job(options={"verify": True, "memory": {"every": 1}})


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def forked_child() -> Iterator[None]:
    """A process that was forked before, and ends after, with what its copy of this one does at its end."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        end_interpreter()
        os._exit(0)
    os.close(read_end)
    try:
        yield
    finally:
        os.close(write_end)
        assert os.waitpid(child, 0)[1] == 0


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "float16": partial(default_dtype, torch.float16),
    "bfloat16": partial(default_dtype, torch.bfloat16),
    "float64": partial(default_dtype, torch.float64),
    "meta": partial(default_device, "meta"),
    "cpu": partial(default_device, "cpu"),
    "fork": forked_child,
}


STAGES = {
    stage: [name for number, name in enumerate(MODES) if name == "none" or number % 3 + 1 == stage]
    for stage in (1, 2, 3)
}
"""Each mode at one stage; `make sweep` has all at each."""


def save_in_each_mode(job: Job, names: list[str], directory: str, shared: str) -> dict[str, Any]:
    """By mode, what each kind of save has written, and by mode and kind, the state and the loss after its load."""
    from zeroelastic.elastic.memory.checkpoints import MemoryCheckpoints

    use_node(Path(shared) / "node")
    engine = build_engine(job)
    engine.save_checkpoint(directory, tag="0")  # of an optimizer without state
    train_step(engine, 0)
    engine.save_checkpoint(directory, tag="1")
    engine.load_checkpoint(directory, tag="1")  # what a load sets is pickled a little longer than what was there
    found: dict[str, Any] = {}
    memory = MemoryCheckpoints(engine, Path(directory))
    for name in names:
        mode = MODES[name]
        with mode():
            engine.save_checkpoint(directory, tag=name)
        with mode(), saving_in_background(engine, True):
            engine.save_checkpoint(directory, tag=f"{name} behind")
        with mode():
            memory.capture({})
        memory.wait()
        assert memory.error is None
        zeroelastic.wait_for_save(engine)
        (kept,) = memory._run.complete.iterdir()
        for kind, tag in {"save": name, "background": f"{name} behind", "memory": str(kept)}.items():
            record = record_of(Path(directory) / tag)
            found[f"{name}, {kind}"] = record.content_root, dict(record.files)
        engine.load_checkpoint(directory, tag="0")
        with mode():
            engine.load_checkpoint(str(kept.parent), tag=kept.name)
        found[f"{name}, resumed from memory"] = look(engine), train_step(engine, 1)
        engine.load_checkpoint(directory, tag=name)
    memory.close()
    engine.destroy()
    return found


def load_in_each_mode(job: Job, names: list[str], directory: str) -> dict[str, Any]:
    """By mode, the state and the loss after a load; the optimizer has no state before."""
    engine = build_engine(job.other())
    found: dict[str, Any] = {}
    for name in names:
        mode = MODES[name]
        engine.load_checkpoint(directory, tag="0")
        with mode():
            engine.load_checkpoint(directory, tag=name)
        found[f"{name}, resumed"] = look(engine), train_step(engine, 1)
    engine.destroy()
    return found


def differing(found: dict[str, Any]) -> list[str]:
    """The names of what differs from the same without a mode."""
    return [name for name, value in found.items() if value != found["none, " + name.partition(", ")[2]]]


@pytest.mark.support(
    "Using it",
    "in `torch.inference_mode`, under another default dtype or device, beside forked processes",
    "exact",
    "saves, also in the background and in memory, and loads",
)
@pytest.mark.parametrize(
    ("stage", "names"),
    [
        *(pytest.param(stage, names, id=f"stage {stage}") for stage, names in STAGES.items()),
        *(pytest.param(stage, [*MODES], marks=pytest.mark.sweep, id=f"stage {stage}, all") for stage in STAGES),
    ],
)
def test_saves_and_loads_are_the_same_in_every_mode_of_torch(
    rank_pool: RankPool, tmp_path: Path, stage: int, names: list[str]
) -> None:
    job, directory = replace(JOB, stage=stage), str(tmp_path / "run")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="zeroelastic-test-") as shared:
        for found in rank_pool.run(save_in_each_mode, 2, job, names, directory, shared, timeout=240):
            assert differing(found) == []
    for found in rank_pool.run(load_in_each_mode, 3, job, names, directory, timeout=240):
        assert differing(found) == []
