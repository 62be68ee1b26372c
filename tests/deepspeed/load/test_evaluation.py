"""Engines without an optimizer, which evaluate: weights, buffers and frozen parameters load at any size.

Saves of them are refused by name.

DeepSpeed makes them at ZeRO stage 3 and loads nothing into them: at the size that saved it fails, at another one some
ranks do and the others wait.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from training import Job, of_all, raised

from zeroelastic.elastic import resume
from zeroelastic.testing import RankPool


def weights(engine: Any) -> dict[str, str]:
    """A hash of every parameter and buffer, whole, in the dtype in which the engine computes with it."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([p for p in engine.module.parameters() if hasattr(p, "ds_id")]):
        tensors = [*engine.module.named_parameters(), *engine.module.named_buffers()]
        return {name: hashlib.sha256(t.detach().float().numpy().tobytes()).hexdigest() for name, t in tensors}


def train_and_save(job: Job, directory: str) -> tuple[dict[str, str], float]:
    engine = training.build_engine(job)
    for step in range(3):
        training.train_step(engine, step)
    engine.save_checkpoint(directory, client_state={"note": "hello"})
    return weights(engine), loss(engine)


def loss(engine: Any) -> float:
    engine.eval()
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        tokens, targets = torch.randint(0, training.VOCABULARY, (2, 4, 5), generator=generator)
        return float(engine(tokens, targets))


def evaluate(job: Job, directory: str, extra: str = "", **load: Any) -> Any:
    import deepspeed

    import zeroelastic

    zeroelastic.install()
    config = training.ds_config(replace(job, stage=3))
    engine = deepspeed.initialize(model=training.build_model(replace(job, extra=extra)), config=config)[0]
    before = weights(engine)
    assert raised(lambda: engine.save_checkpoint(directory))[0] == "UnsupportedError"
    try:
        path, client_state = engine.load_checkpoint(directory, **load)
    except Exception as error:
        assert weights(engine) == before
        return type(error).__name__, str(error)
    assert path is not None and client_state["note"] == "hello"
    return weights(engine), loss(engine), engine.global_steps, engine.zeroelastic_report.root_matches


@pytest.mark.support(
    "Using it",
    "engines without an optimizer (evaluation, `trainer.test`)",
    "exact",
    "ZeRO-3: weights, buffers and frozen parameters, from checkpoints of stages 1 to 3",
)
@pytest.mark.parametrize(
    "job",
    [
        Job(zero={"stage3_param_persistence_threshold": 40}),
        Job(stage=2),
        Job(elastic=False, zero={"offload_param": {"device": "cpu"}}),
    ],
    ids=["stage 3", "stage 2", "offload"],
)
def test_weights_load_at_any_size(rank_pool: RankPool, tmp_path: Path, job: Job) -> None:
    saved = rank_pool.run(train_and_save, 2, job, str(tmp_path))[0]
    other = job.other(zero=job.zero if job.stage == 3 else {})
    other_flags: Any = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
    for world_size, flags in ((2, {}), (3, other_flags)):
        for found in rank_pool.run(evaluate, world_size, other, str(tmp_path), **flags):
            assert found[0] == saved[0] and found[1] == pytest.approx(saved[1], rel=training.LOSS_RTOL["bf16"])
            assert found[2] == 3


def evaluate_one_of_two(job: Job, directory: str) -> list[tuple[str | None, bool]]:
    """Two engines train and save in turn; without ``latest``, engines without an optimizer resume.

    The tag of each, and if it has it.
    """
    import deepspeed

    jobs = {"G": job, "D": replace(job, extra="late")}
    saved: dict[str, dict[str, str]] = {}
    engines = {name: training.build_engine(one) for name, one in jobs.items()}
    for step in range(2):
        for name, engine in engines.items():
            training.train_step(engine, step)
            engine.save_checkpoint(directory, tag=f"{name}_{step}")
            saved[name] = weights(engine)
    if dist.get_rank() == 0:
        (Path(directory) / "latest").unlink()
    dist.barrier()
    found: list[tuple[str | None, bool]] = []
    for name, one in jobs.items():
        model = training.build_model(one.other())
        engine = deepspeed.initialize(model=model, config=training.ds_config(one))[0]
        start = resume(engine, directory, strict=False)
        found.append((start.tag, weights(engine) == saved[name]))
    return found


def test_it_resumes_from_the_tags_of_its_own_model(rank_pool: RankPool, tmp_path: Path) -> None:
    found, _ = rank_pool.run(evaluate_one_of_two, 2, Job(), str(tmp_path))
    assert found == [("G_1", True), ("D_1", True)]


def test_another_model_is_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(train_and_save, 2, Job(), str(tmp_path))
    kind, text = of_all(rank_pool.run(evaluate, 3, Job().other(), str(tmp_path), extra="late"))
    assert kind == "LayoutMismatchError" and "late.weight [16, 16] of the model is not in the checkpoint" in text
