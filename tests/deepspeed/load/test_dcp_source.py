"""``"source": "dcp"``: a ZeRO run goes on from a checkpoint of FSDP2, read by range, at any stage and size."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dcp_writers import grid, job_state, write_dcp
from fsdp_job import fsdp_train_and_save
from saved_files import flip
from topologies import TopologyJob, differences, load_and_gather, save_trained
from training import LOSS_RTOL, Job, Outcome, attempt_each, build_engine, raised, resume, train_and_save, train_step

import zeroelastic
from zeroelastic.dcp.saved import open_dcp
from zeroelastic.testing import RankPool

SECTION, FEATURE = "Using it", 'From FSDP2 in training (`"source": "dcp"`)'
NOTE = "state to the bit, losses of the uninterrupted run, bytes read / owned 1.000"

SOURCE = {"verify": "full", "source": "dcp"}


def from_dcp(job: Job, **changes: Any) -> Job:
    options = {**SOURCE, **changes.pop("options", {})}
    return replace(job.other(**changes), options=options)


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str], list[float]]:
    """A job of FSDP2 on 2 ranks, saved by torch's DCP, its state, and the losses that follow."""
    place = tmp_path_factory.mktemp("saved") / "fsdp"
    return place, *rank_pool.run(fsdp_train_and_save, 2, Job(), str(place))[0]


def check(outcome: Outcome, state: dict[str, str], losses: list[float], ranks: int) -> None:
    assert outcome.gathered == state
    assert set(outcome.steps[0]) == {3.0}
    torch.testing.assert_close(outcome.losses, losses, rtol=LOSS_RTOL["bf16"], atol=0)
    report = outcome.report
    assert (report.format, report.saved_world_size, report.world_size) == ("dcp", 2, ranks)
    assert report.bytes_read == report.bytes_owned and report.bytes_sent == 0
    assert any("of FSDP2" in note or "inferred" in note or "taken as" in note for note in report.notes)
    assert f"global_samples (360: 3 steps of this run's batch of {Job().batch})" in report.rederived


@pytest.mark.support(SECTION, FEATURE, "exact", NOTE)
@pytest.mark.parametrize(
    ("stage", "ranks", "options"), [(3, 3, {}), (2, 2, {"fallback": True}), (1, 1, {"verify": "read"})]
)
def test_a_job_of_fsdp2_goes_on_without_a_conversion(
    rank_pool: RankPool, saved: Any, stage: int, ranks: int, options: dict[str, Any]
) -> None:
    place, state, losses = saved
    outcome = rank_pool.run(resume, ranks, from_dcp(Job(), stage=stage, options=options), str(place))[0]
    check(outcome, state, losses, ranks)
    assert not any("loss scale" in note for note in outcome.report.notes)


@pytest.mark.parametrize("stage", [3, 2])
def test_all_of_the_state_is_that_of_a_conversion(rank_pool: RankPool, saved: Any, tmp_path: Path, stage: int) -> None:
    """Frozen parameters, buffers, hyper-parameters, counters and the scheduler, too."""
    notes = zeroelastic.convert(saved[0], tmp_path / "native", from_="fsdp2", world_size=3).notes
    assert "re-derived: global_samples (0: the configuration has no global batch)" in notes
    job = from_dcp(Job(), stage=stage)
    found = rank_pool.run(resume, 3, job, str(saved[0]))
    expected = rank_pool.run(resume, 3, job, str(tmp_path / "native"))
    for one, other in zip(found, expected, strict=True):
        samples = one.state.pop("engine/global_samples"), other.state.pop("engine/global_samples")
        assert samples == (3 * job.batch, 0)  # the conversion was not given a batch
        assert (one.state, one.gathered, one.losses) == (other.state, other.gathered, other.losses)


def save_and_go_on(job: Job, source: str, target: str) -> tuple[str, list[float], str]:
    """A run that begins with a checkpoint of FSDP2, saves, and is started again with the same configuration."""
    engine = build_engine(job)
    engine.load_checkpoint(source)
    losses = [train_step(engine, 3)]
    engine.save_checkpoint(target)
    losses.append(train_step(engine, 4))
    again = build_engine(job)
    path, _ = again.load_checkpoint(target)
    assert train_step(again, 4) == losses[1]
    return again.zeroelastic_report.format, losses, str(path)


def test_a_run_that_began_with_one_goes_on_from_its_own_saves(rank_pool: RankPool, saved: Any, tmp_path: Path) -> None:
    place, _, losses = saved
    formats, found, path = rank_pool.run(save_and_go_on, 2, from_dcp(Job()), str(place), str(tmp_path / "run"))[0]
    assert formats == "elastic" and Path(path).parent.name == "global_step4"
    torch.testing.assert_close(found, losses, rtol=LOSS_RTOL["bf16"], atol=0)
    assert zeroelastic.verify(tmp_path / "run").ok


@pytest.fixture(scope="module")
def places(saved: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories that a load is pointed at, each with something else in it."""
    root, whole = tmp_path_factory.mktemp("places"), saved[0]
    found = {name: root / name for name in ("several", "cut", "renamed")}
    shutil.copytree(whole, found["several"] / "step-1")
    shutil.copytree(whole, found["cut"])
    payload = found["cut"] / "__1_0.distcp"
    payload.write_bytes(payload.read_bytes()[:-3000])
    shutil.copytree(whole, found["renamed"])
    table = found["renamed"] / ".metadata"
    table.write_bytes(table.read_bytes().replace(b"exp_avg_sq", b"exp_avg_s_"))
    return {name: str(path) for name, path in {**found, "whole": whole, "above": whole.parent}.items()}


def refused(job: Job, directories: list[str], tag: str | None = None) -> list[tuple[str, str]]:
    return attempt_each(job, directories, tag=tag)


def test_what_cannot_be_loaded_is_said_and_changes_nothing(rank_pool: RankPool, places: dict[str, str]) -> None:
    names = ["several", "cut", "renamed"]
    outcomes = rank_pool.run(refused, 2, from_dcp(Job()), [places[name] for name in names])
    expected = [
        ("MissingFileError", "is no checkpoint of FSDP2, but has some: step-1. Nothing was loaded."),
        ("CheckpointError", "__1_0.distcp: has "),
        ("LayoutMismatchError", "has the state of another optimizer (exp_avg, exp_avg_s_, step)"),
    ]
    for errors in outcomes:
        assert [kind for kind, _ in errors] == [kind for kind, _ in expected]
        assert all(words in text for (_, text), (_, words) in zip(errors, expected, strict=True)), errors


def test_a_flipped_bit_in_a_chunk_is_found(rank_pool: RankPool, saved: Any, tmp_path: Path) -> None:
    """Chunks have no digest: the CRC-32 of each is compared, of which every rank reads a part."""
    root, state, losses = saved
    for outcome in rank_pool.run(resume, 3, from_dcp(Job()), str(root)):
        check(outcome, state, losses, 3)
        assert any("what was read has the CRC-32 that its files state (" in note for note in outcome.report.notes)
    found = open_dcp(root)
    parts = (found.trained,) if found.frozen is None else (found.trained, found.frozen)
    for number, (extents, key) in enumerate((part.extents[1], key) for part in parts for key in part.extents[1]):
        at = int(np.flatnonzero(extents[key].offset >= 0)[-1])  # others are compared with further names of theirs
        assert extents[key].param_paths is not None
        shutil.copytree(root, damaged := tmp_path / str(number))
        path = damaged / extents[key].param_paths[at].name
        flip(path, int(extents[key].offset[at]) + 2)
        (kind, text), *others = rank_pool.run(attempt_damaged, 3, from_dcp(Job()), str(damaged))
        assert others == [(kind, text)] * 2 and kind == "DigestMismatchError"
        assert text.startswith(f"{path}: record data/0, bytes ") and text.count(" has CRC-32 ") == 1


def attempt_damaged(job: Job, directory: str) -> tuple[str, str]:
    engine = build_engine(job)
    return raised(lambda: engine.load_checkpoint(directory))


def test_a_load_that_does_not_ask_for_it_says_what_is_there(rank_pool: RankPool, places: dict[str, str]) -> None:
    required = replace(Job(), options={"required": True})
    for directory, tag in ((places["whole"], None), (places["above"], "fsdp")):
        for errors in rank_pool.run(refused, 2, required, [directory], tag):
            assert "checkpoint of FSDP2" in errors[0][1] and '"source": "dcp"' in errors[0][1], errors


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (from_dcp(Job(), precision="fp16"), "a run in fp16 has a loss scale"),
        (from_dcp(Job(), config={"checkpoint": {"load_universal": True}}), '"load_universal": true'),
    ],
)
def test_runs_that_cannot_take_one_are_refused_by_name(
    rank_pool: RankPool, places: dict[str, str], job: Job, why: str
) -> None:
    for errors in rank_pool.run(refused, 2, job, [places["whole"]]):
        assert errors[0][0] == "UnsupportedError" and why in errors[0][1], errors


def refused_at_stage_0(directory: str) -> tuple[str, str]:
    return raised(partial(build_engine(from_dcp(Job(), stage=0)).load_checkpoint, directory))


def test_a_run_that_deepspeed_alone_loads_is_refused_by_name(rank_pool: RankPool, places: dict[str, str]) -> None:
    for kind, text in rank_pool.run(refused_at_stage_0, 2, places["whole"]):
        assert kind == "UnsupportedError" and "DeepSpeed alone loads this run" in text


@pytest.mark.extended
def test_one_of_accelerate_with_unchanged_frozen_parameters_loads_from_a_store(
    rank_pool: RankPool, calm: Any, tmp_path: Path
) -> None:
    job = Job(stage=2)
    state = rank_pool.run(train_and_save, 3, job, str(tmp_path / "native"))[0]
    zeroelastic.convert(tmp_path / "native", tmp_path / "fsdp", to="fsdp2", layout="accelerate")
    for place in (str(tmp_path / "fsdp"), calm.upload(tmp_path / "fsdp", "fsdp")):
        outcome = rank_pool.run(resume, 2, from_dcp(Job()), place)[0]
        assert outcome.state == state.state
        torch.testing.assert_close(outcome.losses, state.losses, rtol=LOSS_RTOL["bf16"], atol=0)
        assert outcome.report.format == "dcp"


@pytest.mark.parametrize("options", [{"load_optimizer_states": False}, {"load_module_only": True}])
def test_weights_alone(rank_pool: RankPool, saved: Any, options: dict[str, bool]) -> None:
    place, state, _ = saved
    outcome = rank_pool.run(resume, 3, from_dcp(Job()), str(place), **options)[0]
    of_weights = {key: value for key, value in outcome.gathered.items() if key.endswith("/fp32")}
    assert of_weights == {key: value for key, value in state.items() if key.endswith("/fp32")}
    counts = not options.get("load_module_only", False)
    assert any("global_samples" in text for text in outcome.report.rederived) == counts


def other_mesh(root: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of a model with two matrices that a mesh of two dimensions cut; the weights."""
    tensors, objects = job_state({"0.weight": (9, 6), "1.weight": (4, 9)}, lambda shape: grid(shape, (2, 2)))
    write_dcp(root, tensors, objects)
    return {key.removeprefix("model."): value for key, (value, _) in tensors.items() if key.startswith("model.")}


def load_plain_model(root: str) -> dict[str, torch.Tensor]:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    zeroelastic.install()
    model = torch.nn.Sequential(torch.nn.Linear(6, 9, bias=False), torch.nn.Linear(9, 4, bias=False))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "zeroelastic": {"source": "dcp"},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.load_checkpoint(root)
    assert [group["lr"] for group in engine.optimizer.optimizer.param_groups] == [0.25]
    return {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}


def test_boxes_of_a_mesh_of_two_dimensions(rank_pool: RankPool, tmp_path: Path) -> None:
    weights = other_mesh(tmp_path / "boxes")
    found = rank_pool.run(load_plain_model, 3, str(tmp_path / "boxes"))[0]
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_of_autotp_takes_its_slices(topology_pool: RankPool, tmp_path: Path, stage: int) -> None:
    state = topology_pool.run(save_trained, 2, TopologyJob("llama", stage=stage), str(tmp_path / "native"))[0]
    zeroelastic.convert(tmp_path / "native", tmp_path / "fsdp", to="fsdp2")
    job = TopologyJob("llama", stage=stage, tp=2, config={"zeroelastic": {"source": "dcp"}}).other()
    assert not differences(state, topology_pool.run(load_and_gather, 4, job, str(tmp_path / "fsdp"))[0])
