"""Saving and loading again and again in one process: nothing of an earlier state, save or engine is left behind."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from extended import with_swept
from saved_files import record_of
from training import Job, Outcome, build_engine, look, resume, train_step

import zeroelastic
from zeroelastic.testing import RankPool, compare_states

USING = "Using it"


def root_of(directory: str, tag: str) -> str:
    return record_of(Path(directory) / tag).content_root


def go_back_and_forth(job: Job, directory: str) -> dict[str, Any]:
    """Many saves and loads at one engine; returns the state that each tag holds."""
    engine = build_engine(job)
    states: dict[str, Any] = {}
    losses: dict[int, float] = {}

    def save(tag: str) -> None:
        states[tag] = look(engine)
        engine.save_checkpoint(directory, tag=tag)
        assert look(engine) == states[tag]

    def load(tag: str | None, expected: str) -> None:
        engine.load_checkpoint(directory, tag=tag)
        assert engine.zeroelastic_report.root_matches
        assert look(engine) == states[expected]

    save("0")  # before any step, and before the first forward pass
    load("0", "0")  # right after a save
    for step in range(4):
        losses[step] = train_step(engine, step)
        save(str(step + 1))
        load(None, str(step + 1))
    for tag in ("2", "4", "1", "0", "3", "0"):  # older after newer; from "0" on there is no optimizer state
        load(tag, tag)
        if tag == "0":
            assert not any(key.startswith("state/") for key in states["0"][0])
        for step in range(int(tag), 4):  # trained further, the same way as before
            assert train_step(engine, step) == losses[step]
    load("2", "2")
    save("same")  # right after a load
    assert root_of(directory, "same") == root_of(directory, "2")
    zeroelastic.uninstall()
    train_step(engine, 2)
    zeroelastic.install()
    load("3", "3")
    train_step(engine, 3)
    save("3")  # the same tag with another state
    load("3", "3")
    assert root_of(directory, "3") == root_of(directory, "4")
    return {tag: state for tag, (state, _) in states.items()}


@pytest.mark.core
@pytest.mark.support(USING, "checkpoints from before the first step", "exact")
@pytest.mark.support(USING, "save, load, save, load, ... in one process, older tags after newer ones", "exact")
@pytest.mark.support(USING, "saving over a tag, and loading it again in one process", "exact")
@pytest.mark.parametrize("elastic", with_swept((True, False), {False}), ids=["elastic", "rigid"])
def test_saves_and_loads_in_any_order_at_one_engine(rank_pool: RankPool, tmp_path: Path, elastic: bool) -> None:
    job = Job(elastic=elastic)
    states = rank_pool.run(go_back_and_forth, 2, job, str(tmp_path))[0]
    for tag in ("0", "3"):
        outcome: Outcome = rank_pool.run(resume, 3, job.other(), str(tmp_path), after=0, tag=tag)[0]
        assert compare_states(states[tag], outcome.state) == []


def actor_and_critic(directory: str) -> None:
    jobs = {"actor": Job(), "critic": Job(extra="value", lr=3e-3, sub_group_size=77)}
    engines = {name: build_engine(job) for name, job in jobs.items()}
    states: dict[tuple[str, int], Any] = {}
    for step in range(3):
        for name, engine in engines.items():
            train_step(engine, step)
            states[name, step] = look(engine)[0]
            engine.save_checkpoint(f"{directory}/{name}", tag=str(step))
    for name, step in (("critic", 0), ("actor", 2), ("critic", 1), ("actor", 0), ("critic", 2)):
        engine = engines[name]
        engine.load_checkpoint(f"{directory}/{name}", tag=str(step))
        assert look(engine)[0] == states[name, step]
        assert engine.zeroelastic_report.root_matches and f"/{name}/{step}" in engine.zeroelastic_report.path
    other = look(engines["actor"])[0]
    engines.pop("critic").destroy()
    rebuilt = build_engine(replace(jobs["critic"], perturb=0.5))
    rebuilt.load_checkpoint(f"{directory}/critic", tag="1")
    assert look(rebuilt)[0] == states["critic", 1]
    train_step(rebuilt, 2)
    assert compare_states(states["critic", 2], look(rebuilt)[0]) == []
    assert look(engines["actor"])[0] == other


@pytest.mark.support(USING, "several engines in one process; engines destroyed and built again", "exact")
def test_two_engines_of_one_process_do_not_meet(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(actor_and_critic, 2, str(tmp_path))


def tensor_bytes() -> int:
    """Bytes of the storages of all tensors that are alive."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def save_and_load_for_long(job: Job, directory: str) -> list[int]:
    engine = build_engine(job)
    train_step(engine, 0)
    sizes = []
    for cycle in range(10):
        engine.save_checkpoint(directory, tag=str(cycle % 2))
        engine.load_checkpoint(directory)
        train_step(engine, cycle)
        sizes.append(tensor_bytes())
    return sizes


def what_outlives_an_engine(job: Job, directory: str) -> dict[str, bool]:
    engine = build_engine(job)
    train_step(engine, 0)
    engine.save_checkpoint(directory)
    engine.load_checkpoint(directory)
    things = {
        "engine": engine,
        "optimizer": engine.optimizer,
        "weights": engine.optimizer.fp32_partitioned_groups_flat[0],
    }
    references = {name: weakref.ref(thing) for name, thing in things.items()}
    things.clear()
    engine.destroy()
    del engine
    gc.collect()
    return {name: reference() is not None for name, reference in references.items()}


@pytest.mark.extended
def test_memory_does_not_grow_from_cycle_to_cycle(rank_pool: RankPool, tmp_path: Path) -> None:
    for elastic in (True, False):
        sizes = rank_pool.run(save_and_load_for_long, 2, Job(elastic=elastic), str(tmp_path / f"{elastic}"))[0]
        assert min(sizes[6:]) <= min(sizes[2:6]), sizes  # the least: a transient of a few bytes is no growth


def test_nothing_of_ours_keeps_a_destroyed_engine(rank_pool: RankPool, tmp_path: Path) -> None:
    """What is still alive is what DeepSpeed alone keeps too."""
    alone = rank_pool.run(what_outlives_an_engine, 1, Job(elastic=False, installed=False), str(tmp_path / "alone"))[0]
    ours = rank_pool.run(what_outlives_an_engine, 1, Job(), str(tmp_path / "ours"))[0]
    assert ours == alone


def save_and_load_at_odd_times(job: Job, directory: str) -> None:
    engine = build_engine(job)
    with torch.no_grad():
        engine.save_checkpoint(directory, tag="first")  # before the first forward pass
        state = look(engine)[0]
        engine.load_checkpoint(directory, tag="first")
    assert look(engine)[0] == state
    train_step(engine, 0)
    state = look(engine)[0]
    engine.eval()
    engine.save_checkpoint(directory, tag="second")
    assert engine.save_16bit_model(directory, "weights.bin")
    dist.barrier()
    weights = torch.load(Path(directory) / "weights.bin")
    assert weights["up.weight"].shape == (33, 16) and weights["up.weight"].dtype == torch.bfloat16
    engine.train()
    loss = train_step(engine, 1)
    engine.eval()
    engine.load_checkpoint(directory, tag="second")
    assert not engine.module.training
    assert look(engine)[0] == state
    with torch.no_grad():
        again = engine.save_checkpoint(directory, tag="third")
    assert again
    engine.train()
    assert train_step(engine, 1) == loss
    other = build_engine(replace(job, perturb=0.5))
    other.eval()
    other.load_checkpoint(directory, tag="third")  # before its first forward pass
    assert look(other)[0] == state
    other.train()
    assert train_step(other, 1) == loss


@pytest.mark.support(USING, "`save_16bit_model`, `torch.no_grad`, `engine.eval()`, before the first forward", "exact")
def test_saves_and_loads_at_odd_times(rank_pool: RankPool, tmp_path: Path) -> None:
    job = Job(zero={"stage3_gather_16bit_weights_on_model_save": True})
    rank_pool.run(save_and_load_at_odd_times, 2, job, str(tmp_path))
