"""zeroelastic.deepspeed.client_state: client state that has keys of DeepSpeed's own, saved and loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from changed_runs import COUNTERS, FREE, REFUSED
from extended import with_swept
from saved_files import contents, logged, record_of
from training import Job, build_engine, train_and_save, train_step

import zeroelastic
from zeroelastic.checkpoint.commit_record import RECORD_NAME, record_text
from zeroelastic.testing import RankPool, compare_states, fingerprint, gather_state
from zeroelastic.verbs.verify.verify import verify_checkpoint


def save_each_refused(job: Job, directory: str) -> list[tuple[str, str]]:
    engine = build_engine(job)
    train_step(engine, 0)
    engine.save_checkpoint(directory, tag="tag")
    before, errors = contents(Path(directory)), []
    for key, value in REFUSED.items():
        try:
            # On one rank alone: the others raise the same.
            engine.save_checkpoint(directory, tag="tag", client_state={key: value} if dist.get_rank() else {})
        except Exception as error:
            errors.append((type(error).__name__, str(error)))
    dist.barrier()
    assert contents(Path(directory)) == before
    return errors


@pytest.mark.support(
    "Using it", "client state with keys of DeepSpeed's own (`module`, `param_shapes`, ...)", "refused", "at the save"
)
@pytest.mark.parametrize("stage", [3, 2])
def test_a_key_that_a_load_relies_on_is_refused_by_name_before_anything_is_written(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    first, second = rank_pool.run(save_each_refused, 2, Job(stage=stage), str(tmp_path))
    assert first == second and len(first) == len(REFUSED)
    for key, (kind, text) in zip(REFUSED, first, strict=True):
        assert kind == "UnsupportedError" and f"client_state['{key}'] is " in text and "Rename the key" in text


def save_overriding(job: Job, directory: str) -> list[dict[str, Any]]:
    """Counters and keys that nobody relies on; and what a load returned, passed on, keys of DeepSpeed's included."""
    engine = build_engine(job)
    train_step(engine, 0)
    states = []
    for name, client_state in (("counters", COUNTERS), ("free", FREE)):
        engine.save_checkpoint(directory, tag=name, client_state=client_state)
        states.append(fingerprint(gather_state(engine)))
    _, returned = engine.load_checkpoint(directory, tag="free")
    assert "param_shapes" in returned and returned["frozen_param_fragments"] is None
    engine.save_checkpoint(directory, tag="passed-on", client_state=returned)
    zeroelastic.wait_for_save(engine)
    return [*states, states[1]]


def load_overridden(job: Job, directory: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    found = []
    for name in ("counters", "free", "passed-on"):
        engine = build_engine(job)
        _, client_state = engine.load_checkpoint(directory, tag=name)
        found.append((fingerprint(gather_state(engine)), {key: client_state.get(key) for key in (*COUNTERS, *FREE)}))
        train_step(engine, 1)
    return found


@pytest.mark.parametrize("elastic", with_swept((True, False), {False}), ids=["elastic", "rigid"])
def test_counters_of_client_state_are_what_a_load_resumes_at(
    rank_pool: RankPool, tmp_path: Path, elastic: bool
) -> None:
    job = Job(elastic=elastic)
    states = rank_pool.run(save_overriding, 2, job, str(tmp_path))[0]
    states[0] |= {f"engine/{name}": COUNTERS[name] for name in ("global_steps", "global_samples", "skipped_steps")}
    assert record_of(tmp_path / "counters").global_steps == 77
    for name in ("counters", "passed-on"):
        assert verify_checkpoint(tmp_path / name).problems == ()
    for world_size in (2, 3):
        loaded = rank_pool.run(load_overridden, world_size, job.other(), str(tmp_path))[0]
        for state, (restored, _) in zip(states, loaded, strict=True):
            assert compare_states(state, restored) == []
        assert loaded[0][1]["micro_steps"] == 3
        assert loaded[1][1]["epoch"] == 1 == loaded[2][1]["epoch"] and loaded[1][1]["ds_version"] == "mine"


def go_on_and_pass_on(job: Job, directory: str, **flags: bool) -> dict[str, Any]:
    """As DeepSpeed's tutorial does: the client state of the load, with a value of the caller's, is the next save's."""
    engine = build_engine(job)
    _, client_state = engine.load_checkpoint(directory, tag="one", **flags)
    train_step(engine, 7)
    client_state["epoch"] = 1
    engine.save_checkpoint(directory, tag="two", client_state=client_state)
    return fingerprint(gather_state(engine))


def load_passed_on(job: Job, directory: str) -> tuple[dict[str, Any], dict[str, Any]]:
    engine = build_engine(job)
    _, client_state = engine.load_checkpoint(directory, tag="two")
    return fingerprint(gather_state(engine)), client_state


@pytest.mark.parametrize("stage", [3, 2])
@pytest.mark.parametrize(
    "flags",
    [pytest.param({}, marks=pytest.mark.quick), {"load_module_only": True}, {"load_lr_scheduler_states": False}],
    ids=lambda flags: next(iter(flags), "all"),
)
def test_what_is_passed_on_from_a_load_does_not_replace_what_training_has_changed(
    rank_pool: RankPool, tmp_path: Path, stage: int, flags: dict[str, bool]
) -> None:
    job = Job(stage=stage)
    rank_pool.run(train_and_save, 2, job, str(tmp_path), tag="one")
    saved = rank_pool.run(go_on_and_pass_on, 2, replace(job, micro=20, lr=3e-3), str(tmp_path), **flags)[0]
    loaded, client_state = rank_pool.run(load_passed_on, 3, job.other(), str(tmp_path))[0]
    assert compare_states(saved, loaded) == []
    assert client_state["epoch"] == 1 and client_state["note"] == "hello"
    assert client_state["ds_config"]["train_micro_batch_size_per_gpu"] == 20


def pass_on(job: Job, directory: str, source: str, target: str) -> None:
    engine = build_engine(job)
    _, client_state = engine.load_checkpoint(directory, tag=source) if source else (None, {})
    engine.save_checkpoint(directory, tag=target, client_state=client_state)


@pytest.mark.parametrize("stage", [3, 2])
def test_what_a_load_returned_is_saved_by_ranks_that_list_no_tied_parameters(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    """DeepSpeed lists them on rank 0 alone, and every rank may read its file."""
    job = Job(stage=stage)
    for ranks, source, target in ((1, "", "a"), (2, "a", "b"), (3, "b", "c")):
        rank_pool.run(pass_on, ranks, job, str(tmp_path), source, target)
    assert verify_checkpoint(tmp_path / "c").problems == ()


def test_a_record_of_another_step_is_believed_where_it_proves_the_files_to_be_its_own(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """As saves wrote it that stated the engine's step beside a file of the caller's."""
    rank_pool.run(save_overriding, 2, Job(), str(tmp_path))
    record = record_of(tmp_path / "counters")
    (tmp_path / "counters" / RECORD_NAME).write_bytes(record_text(record.model_copy(update={"global_steps": 1})))
    assert verify_checkpoint(tmp_path / "counters").problems == ()
    state, _ = rank_pool.run(load_overridden, 3, Job().other(), str(tmp_path))[0][0]
    assert state["engine/global_steps"] == 77


OVERRIDING = {"param_shapes": "square", "frozen_param_shapes": "round", "buffer_names": []}


def save_rigid(job: Job, directory: str) -> tuple[dict[str, Any], list[str]]:
    said = logged("")
    engine = build_engine(job)
    train_step(engine, 0)
    for key, value in OVERRIDING.items():
        engine.save_checkpoint(directory, tag=key, client_state={key: value})
    return fingerprint(gather_state(engine)), said


def load_rigid(job: Job, directory: str) -> list[tuple[dict[str, Any], list[str]]]:
    found = []
    for key in OVERRIDING:
        said = logged("")
        engine = build_engine(job)
        engine.load_checkpoint(directory, tag=key)
        found.append((fingerprint(gather_state(engine)), said))
    return found


@pytest.mark.parametrize("installed", [True, False], ids=["with install()", "without"])
def test_a_rigid_save_that_stock_loads_is_left_to_stock(rank_pool: RankPool, tmp_path: Path, installed: bool) -> None:
    state, log = rank_pool.run(save_rigid, 2, Job(elastic=False, installed=installed), str(tmp_path))[0]
    assert len([text for text in log if "no commit record is written: client_state" in text]) == 3 * installed
    other = Job(elastic=False).other(sub_group_size=200)
    for (restored, texts), key in zip(rank_pool.run(load_rigid, 2, other, str(tmp_path))[0], OVERRIDING, strict=True):
        assert compare_states(state, restored) == [], key
        assert key == "buffer_names" or any("loading through DeepSpeed alone: " in text for text in texts), key
