"""Runs with experts and tensor parallelism resume at other data, tensor and expert parallel sizes, bit for bit.

The referee is ``topologies.logical_state``, which shares no code with what saves and loads. Every run that resumes
saves again at once, with the content root of the first, and trains on with the losses of the uninterrupted run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import topologies
import torch
from saved_files import flip
from topologies import LOSS_RTOL, TopologyJob, build, differences, logical_hashes, train
from training import raised

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.checkpoint.open import Checkpoint, open_checkpoint
from zeroelastic.errors import DigestMismatchError
from zeroelastic.testing import RankPool
from zeroelastic.verbs.verify.verify import verify

ALONE: dict[str, Any] = {"installed": False, "elastic": False}
"""The run of DeepSpeed alone."""
stock = partial(replace, **ALONE)

SECTION = "Parallelism and communication"


def gather_at_the_start(job: TopologyJob) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[float]]:
    """The weights before DeepSpeed sliced them, the state that is gathered behind it, and losses."""
    engine = build(job)
    state = topologies.logical_state(engine)
    return engine.built.weights, state, train(engine, 0, 3)


GATHERED = [
    (4, TopologyJob("llama", tp=4, stage=3), False),
    (4, TopologyJob("qwen3", tp=2, stage=2, frozen=True), False),
    (2, TopologyJob("neox", tp=2, stage=1), False),
    (2, TopologyJob("mixtral", tp=2, stage=3), True),
    (2, TopologyJob("llama", tp=2, stage=2, adapters=True), False),
    (4, TopologyJob("autoep", ep=2, stage=3), False),
    (4, TopologyJob("autoep", ep=4, stage=2), True),
    (4, TopologyJob("moe", ep=2, stage=2), False),
]
"""Ranks, the job, and whether `make sweep` alone runs it: others have its size and stage."""


@pytest.mark.parametrize(
    ("ranks", "job"),
    [
        pytest.param(ranks, job, marks=[pytest.mark.sweep] * swept, id=f"{job.model}-{job.stage}")
        for ranks, job, swept in GATHERED
    ],
)
def test_the_referee_gathers_the_unsharded_model_at_every_topology(
    topology_pool: RankPool, ranks: int, job: TopologyJob
) -> None:
    """It finds the weights that were there before, and the losses are those of one rank without parallelism."""
    weights, state, losses = topology_pool.run(gather_at_the_start, ranks, job)[0]
    assert {key.removesuffix("/weight") for key in state if key.endswith("/weight")} == {*weights}
    for name, weight in weights.items():
        for key in (f"{name}/weight", f"{name}/fp32"):
            assert key not in state or torch.equal(state[key], weight), key
    alone = TopologyJob(job.model, stage=job.stage, frozen=job.frozen, adapters=job.adapters)
    assert losses == pytest.approx(topology_pool.run(gather_at_the_start, 1, alone)[0][2], rel=1e-5)


class Seen(NamedTuple):
    """A run's logical state, after training or a load; the content root of its save; and the losses that follow."""

    state: dict[str, Any]
    root: str
    losses: list[float]


def save(job: TopologyJob, directory: str) -> Seen:
    engine = build(job)
    train(engine, 0, 3)
    state = logical_hashes(engine)
    engine.save_checkpoint(directory, tag="t", client_state={"note": "hello"})
    assert not differences(state, logical_hashes(engine)), "saving changed the live state"
    return Seen(state, root_of(directory), train(engine, 3, 2))


def resume(job: TopologyJob, directory: str, target: str) -> Seen:
    engine = build(job)
    path, client_state = engine.load_checkpoint(directory, tag="t")
    assert path is not None and client_state["note"] == "hello"
    report = engine.zeroelastic_report
    assert report.root_matches is (None if report.saved_root is None else True)
    state = logical_hashes(engine)
    engine.save_checkpoint(target, tag="t", client_state={"note": "hello"})
    return Seen(state, root_of(target), train(engine, 3, 2))


def root_of(directory: str) -> str:
    """The content root that a save has recorded; that of DeepSpeed alone has none."""
    record = read_record(Path(directory) / "t")
    return record.content_root if record is not None else ""


class Run(NamedTuple):
    """A job on a number of ranks."""

    ranks: int
    job: TopologyJob


LLAMA, QWEN, NEOX, MIXTRAL = (TopologyJob(model) for model in topologies.MODELS)
AUTOEP, MOE = TopologyJob("autoep"), TopologyJob("moe", stage=2)


def change(job: TopologyJob, ranks: int, saved: dict[str, Any], *resumed: tuple[int, dict[str, Any]]) -> Any:
    """A run with what is saved, and runs that resume from it: ranks, and what the job has in another way."""
    return Run(ranks, replace(job, **saved)), [Run(number, replace(job, **changes)) for number, changes in resumed]


CHANGES: dict[str, tuple[Run, list[Run]]] = {
    "llama, stage 3, tp 2 of 4": change(
        replace(LLAMA, precision="bf16"),
        *(4, {"tp": 2}),
        *((3, {}), (4, {"tp": 4, "elastic": False}), (2, {"tp": 2, "stage": 2})),
    ),
    "llama of DeepSpeed alone, stage 3, tp 2": change(
        replace(LLAMA, precision="bf16"), 4, {**ALONE, "tp": 2}, (2, {}), (4, {"tp": 4, "stage": 1})
    ),
    "qwen3 of DeepSpeed alone, stage 2, tp 4, offload": change(
        replace(QWEN, frozen=True),
        *(4, {**ALONE, "tp": 4, "stage": 2, "offload": True}),
        *((4, {"tp": 2, "stage": 2}), (2, {"offload": True})),
    ),
    "neox, stage 1, tp 1": change(NEOX, 3, {"stage": 1}, (4, {"tp": 4, "stage": 1}), (4, {"tp": 2})),
    "mixtral, stage 2, tp 2": change(
        replace(MIXTRAL, precision="bf16"), 4, {"tp": 2, "stage": 2}, (4, {"tp": 4}), (1, {"stage": 2})
    ),
    "adapters, stage 3, tp 2": change(replace(LLAMA, adapters=True), 2, {"tp": 2}, (2, {}), (4, {"tp": 2, "stage": 2})),
    "AutoEP, stage 3, ep 2 of 4": change(
        replace(AUTOEP, precision="bf16"),
        *(4, {"ep": 2}),
        *((4, {"ep": 4, "elastic": False}), (3, {}), (2, {"ep": 2, "stage": 2})),
    ),
    "AutoEP, stage 2, ep 4, offload, experts frozen": change(
        replace(AUTOEP, frozen_experts=True),
        *(4, {"ep": 4, "stage": 2, "offload": True}),
        *((2, {"stage": 2}), (4, {"ep": 2, "stage": 1})),
    ),
    "AutoEP of DeepSpeed alone, stage 3, ep 2": change(AUTOEP, 4, {**ALONE, "ep": 2}, (1, {}), (4, {"ep": 4})),
    "AutoEP of DeepSpeed alone, stage 1, ep 4": change(
        replace(AUTOEP, stage=1, precision="bf16"), 4, {**ALONE, "ep": 4}, (2, {}), (4, {"ep": 2})
    ),
    "MoE, stage 2, ep 2 of 4": change(
        replace(MOE, precision="bf16"),
        *(4, {"ep": 2}),
        *((4, {"ep": 4}), (3, {}), (2, {"ep": 2, "stage": 1, "offload": True})),
    ),
    "MoE, stage 1, ep 2, all kinds frozen": change(
        replace(MOE, frozen=True, frozen_experts=True, precision="bf16"),
        4,
        {"ep": 2, "stage": 1},
        (4, {"ep": 4}),
        (3, {}),
    ),
    "MoE of DeepSpeed alone, stage 2, ep 2": change(MOE, 4, {**ALONE, "ep": 2}, (2, {"ep": 2}), (4, {"ep": 4})),
}
"""By what is saved: the runs that resume from it, each of which changes more than one thing."""


ROWS = {
    "llama, stage 3, tp 2 of 4": ("tensor parallelism (AutoTP)", "stages 1, 2 and 3"),
    "AutoEP, stage 3, ep 2 of 4": ("mixture-of-experts layers (AutoEP)", "stages 1, 2 and 3"),
    "MoE, stage 2, ep 2 of 4": ("DeepSpeed's own mixture-of-experts layer", "stages 1 and 2, as DeepSpeed has it"),
}
"""Of docs/support.md."""


def marked(name: str) -> Any:
    if name not in ROWS:
        return name
    feature, note = ROWS[name]
    mark = pytest.mark.support(SECTION, f"{feature}, at any size", "exact", note)
    return pytest.param(name, marks=mark)


@pytest.mark.parametrize("name", [marked(name) for name in CHANGES])
def test_a_run_resumes_at_another_topology(topology_pool: RankPool, tmp_path: Path, name: str) -> None:
    saved_run, resumed_runs = CHANGES[name]
    saved = topology_pool.run(save, saved_run.ranks, saved_run.job, str(tmp_path / "run"))
    assert len({str(seen) for seen in saved}) == 1
    report = verify(tmp_path / "run")
    root = report.content_root
    assert report.valid and saved[0].root == (root if saved_run.job.installed else ""), report.problems
    same = Run(saved_run.ranks, replace(saved_run.job, installed=True, elastic=not saved_run.job.elastic))
    for number, (ranks, job) in enumerate([same, *resumed_runs]):
        target = tmp_path / str(number)
        found = topology_pool.run(resume, ranks, job.other(), str(tmp_path / "run"), str(target))
        assert len({str(seen) for seen in found}) == 1
        assert not differences(saved[0].state, found[0].state), (ranks, job)
        assert found[0].root == root, (ranks, job)
        assert found[0].losses == pytest.approx(saved[0].losses, rel=LOSS_RTOL[job.precision]), (ranks, job)
        assert verify(target).valid


def load_frozen_experts(job: TopologyJob, directory: str) -> tuple[dict[str, Any], Any]:
    """The state after a load, and what of the content was verified; or no state, and the error of the load."""
    engine = build(job)
    try:
        engine.load_checkpoint(directory, tag="t")
    except DigestMismatchError as error:
        return {}, str(error)
    return logical_hashes(engine), engine.zeroelastic_report.root_matches


FROZEN_EXPERTS = {
    "AutoEP at stage 3": (replace(AUTOEP, ep=2, stage=2, frozen_experts=True), replace(AUTOEP, ep=4)),
    "AutoEP": (replace(AUTOEP, ep=2, stage=1, frozen_experts=True), replace(AUTOEP, ep=1, stage=2)),
    "MoE": (replace(MOE, ep=2, frozen_experts=True), replace(MOE, ep=4, stage=1)),
}
"""Runs that save, in which nothing but experts is frozen, and runs that load."""


@pytest.mark.parametrize("name", FROZEN_EXPERTS)
def test_experts_alone_are_frozen_and_a_bit_of_one_is_flipped(
    topology_pool: RankPool, tmp_path: Path, name: str
) -> None:
    job, other = FROZEN_EXPERTS[name]
    run = replace(other, frozen_experts=True).other()
    saved = topology_pool.run(save, 2, job, str(tmp_path))
    for state, matches in topology_pool.run(load_frozen_experts, 4, run, str(tmp_path)):
        assert not differences(saved[0].state, state) and matches is True
    frozen = open_checkpoint(tmp_path / "t").frozen_extents(3)
    assert frozen.param_paths is not None
    at = int(np.argmax(frozen.offset))
    path = Path(frozen.param_paths[at])
    flip(path, int(frozen.offset[at]) + 1)
    for _, error in topology_pool.run(load_frozen_experts, 4, run, str(tmp_path)):
        assert "1 tensor differs" in error and ": frozen." in error and f"Damaged: {path.name}." in error, error
    assert {problem.file for problem in verify(tmp_path).problems} == {path.name}


def load_by_training(job: TopologyJob, directory: str) -> dict[str, Any]:
    """What of the state is in the weights, after a load into a run that trains the experts that were frozen."""
    engine = build(job)
    engine.load_checkpoint(directory, tag="t")
    state = logical_hashes(engine)
    masters = {key.removesuffix("fp32") + "weight": value for key, value in state.items() if key.endswith("/fp32")}
    assert not differences(masters, {key: state[key] for key in masters})
    return {key: value for key, value in state.items() if key.endswith("/weight")}


@pytest.mark.parametrize("model", ["autoep", "moe"])
def test_experts_that_were_frozen_are_trained(topology_pool: RankPool, tmp_path: Path, model: str) -> None:
    job = TopologyJob(model, ep=2, stage=2, frozen_experts=True)
    saved = topology_pool.run(save, 4, job, str(tmp_path))[0].state
    options = {"zeroelastic": {"on_mismatch": "initialize"}}
    for ranks, other in ((4, replace(job, ep=4)), (3, replace(job, ep=1, stage=1))):
        run = replace(other, frozen_experts=False, config=options).other()
        for state in topology_pool.run(load_by_training, ranks, run, str(tmp_path)):
            assert not differences({key: value for key, value in saved.items() if key.endswith("/weight")}, state)


def save_without_frozen(job: TopologyJob, directory: str) -> None:
    build(job).save_checkpoint(directory, tag="t", exclude_frozen_parameters=True)


def refused(job: TopologyJob, directory: str) -> str:
    return raised(partial(build(job).load_checkpoint, directory, tag="t"))[1]


def test_frozen_experts_that_a_save_lacks_are_named(topology_pool: RankPool, tmp_path: Path) -> None:
    job = replace(MOE, ep=2, frozen_experts=True)
    topology_pool.run(save_without_frozen, 2, stock(job), str(tmp_path))
    for error in topology_pool.run(refused, 4, replace(job, ep=4).other(), str(tmp_path)):
        assert "deepspeed_experts.3.up.weight [25, 16] is not in the checkpoint" in error


def alter_a_copy(tag: Path) -> None:
    """One byte of what the second tensor parallel rank has of a norm, which both ranks are to have alike."""
    checkpoint = open_checkpoint(tag)
    rank = next(rank for rank in (1, 3) if checkpoint.shard(rank).layout.owned(rank)[1][norm_of(checkpoint, rank)])
    shard, norm = checkpoint.shard(rank), norm_of(checkpoint, rank)
    in_buffer = int(shard.layout.buffer_offset(rank)[norm] - shard.layout.offset[norm])
    offset = int(shard.extents["exp_avg"].offset[norm]) + 4 * in_buffer
    path = tag / shard.path.name
    flip(path, offset + 1)
    torch.save(torch.load(path, weights_only=False), path)  # as a rank that had it so would have saved it


def norm_of(checkpoint: Checkpoint, rank: int) -> int:
    return checkpoint.shard(rank).layout.index()["model.norm.weight"]


def test_copies_that_differ_are_not_taken_silently(topology_pool: RankPool, tmp_path: Path) -> None:
    job = TopologyJob("llama", tp=2, stage=2)
    topology_pool.run(save, 4, stock(job), str(tmp_path))
    assert topology_pool.run(refused, 2, job.other(tp=1), str(tmp_path)) == ["", ""]
    alter_a_copy(tmp_path / "t")
    for said in topology_pool.run(refused, 2, job.other(tp=1), str(tmp_path)):
        assert "different copies of the same values: model.norm.weight: exp_avg" in said
    assert topology_pool.run(refused, 4, job.other(), str(tmp_path)) == [""] * 4, "each rank takes its own"
