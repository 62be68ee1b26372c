"""State and parameters on the CPU, wholly or in part, or moved there for a while: saved and resumed bit for bit."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from saved_files import logged
from saves import Saved, check_resumed
from training import Job, Outcome, attempt, build_engine, look, resume_and_save, train_and_save, train_step

from zeroelastic.testing import RankPool, compare_states


def save(rank_pool: RankPool, job: Job, world_size: int, directory: Path) -> Saved:
    return Saved(str(directory), rank_pool.run(train_and_save, world_size, job, str(directory))[0])


def row(feature: str, verdict: str = "exact", note: str = "") -> pytest.MarkDecorator:
    return pytest.mark.support("Offload", feature, verdict, note)


PARTIAL = Job(optimizer="cpu_adam", lr=1e-3, zero={"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, backup=True)
WHOLE = replace(PARTIAL, zero={"offload_optimizer": {"device": "cpu"}}, backup=False)


def resume_and_look(job: Job, directory: str) -> tuple[Outcome, list[bool], list[tuple[str, str]]]:
    """Resume; which sub-groups the backup optimizer has, and the kind of ``step`` and of nothing left in the other."""
    engine = build_engine(job)
    path, client_state = engine.load_checkpoint(directory)
    assert path is not None
    optimizer = engine.optimizer
    backup = [device != "cpu" for device in optimizer.subgroup_to_device.values()]
    kinds: list[tuple[str, str]] = []
    for flat, is_backup in zip(optimizer.fp32_partitioned_groups_flat, backup, strict=True):
        owner, other = optimizer.optimizer, getattr(optimizer, "backup_optimizer", None)
        if is_backup:
            owner, other = other, owner
        step = owner.state[flat]["step"]
        assert other is None or not other.state.get(flat)
        kinds.append((type(owner).__name__, type(step).__name__))
    state, gathered = look(engine)
    losses = [train_step(engine, step) for step in (3, 4)]
    outcome = Outcome(state, gathered, losses, engine.zeroelastic_report, client_state, ([], 0))
    return outcome, backup, kinds


@row("partial offload (`ratio` < 1)", note="state follows its sub-group to the optimizer that steps it")
def test_partial_offload_resumes_with_the_owner_of_each_sub_group(rank_pool: RankPool, tmp_path: Path) -> None:
    """The run has other sub-groups than the save, so parameters change from one optimizer to the other."""
    checkpoint = save(rank_pool, PARTIAL, 2, tmp_path / "ckpt")
    for run in (PARTIAL.other(lr=PARTIAL.lr), WHOLE.other(lr=PARTIAL.lr)):
        results = rank_pool.run(resume_and_look, 3, run, checkpoint.directory)
        outcomes = [outcome for outcome, _, _ in results]
        for outcome in outcomes:
            assert compare_states(checkpoint.outcome.state, outcome.state) == []
            assert outcome.losses == pytest.approx(checkpoint.outcome.losses, rel=4e-3)
        assert outcomes[0].report.root_matches and outcomes[0].report.loaded_root == checkpoint.root
        _, backup, kinds = results[0]
        want = {("DeepSpeedCPUAdam", "int"), ("AdamW", "Tensor")} if run.backup else {("DeepSpeedCPUAdam", "int")}
        assert set(kinds) == want
        assert any(backup) == run.backup


def test_hyper_parameters_that_partial_offload_keeps_for_itself_are_named(rank_pool: RankPool, tmp_path: Path) -> None:
    """DeepSpeed's backup optimizer has a copy of those of group 0, at the first rate of the schedule."""
    checkpoint = save(rank_pool, PARTIAL, 2, tmp_path / "ckpt")
    for run, rate in ((PARTIAL.other(lr=PARTIAL.lr * 8), PARTIAL.lr), (WHOLE.other(), None)):
        for outcome, _, _ in rank_pool.run(resume_and_look, 3, run, checkpoint.directory):
            text = outcome.report.text()
            assert ("that partial offload leaves on the GPU" in text) == (rate is not None)
            assert rate is None or f"has the run's own lr {rate}: DeepSpeed copies" in text


def test_a_run_with_partial_offload_takes_state_of_one_without(rank_pool: RankPool, tmp_path: Path) -> None:
    checkpoint = save(rank_pool, WHOLE, 2, tmp_path / "ckpt")
    results = rank_pool.run(resume_and_look, 3, PARTIAL.other(lr=PARTIAL.lr), checkpoint.directory)
    for outcome, _, _ in results:
        lines = compare_states(checkpoint.outcome.state, outcome.state)
        # DeepSpeed's backup optimizer shares this group's dict and adds the options of torch's AdamW to it
        assert all(line.startswith("group/1/") and line.endswith("is new") for line in lines)
    roots = rank_pool.run(
        resume_and_save, 3, PARTIAL.other(lr=PARTIAL.lr), checkpoint.directory, str(tmp_path / "again")
    )
    assert set(roots) == {checkpoint.root}


def load_with_warnings(job: Job, directory: str) -> tuple[bool, list[str]]:
    """Whether the load found something, and what was logged of it as a warning."""
    engine = build_engine(job)
    said = logged("", logging.WARNING)
    return engine.load_checkpoint(directory)[0] is not None, said


@row(
    "partial offload, saved by DeepSpeed alone",
    "refused",
    "the GPU's part of the state is not in its files; at the size that saved, DeepSpeed loads the rest, with a warning",
)
def test_what_stock_deepspeed_saved_under_partial_offload_is_refused_by_name(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    stock = replace(PARTIAL, elastic=False, installed=False)
    rank_pool.run(train_and_save, 2, stock, str(tmp_path))
    for name, message in rank_pool.run(attempt, 3, PARTIAL, str(tmp_path)):
        assert name == "UnsupportedError"
        assert "partial optimizer offload (ratio 0.5)" in message and '"format": "elastic"' in message
    (loaded, warnings), (_, others) = rank_pool.run(load_with_warnings, 2, replace(WHOLE, elastic=False), str(tmp_path))
    assert loaded and len(warnings) == 1 and others == []
    assert "loading through DeepSpeed alone: " in warnings[0] and "lacks the optimizer state of the" in warnings[0]
    weights = rank_pool.run(resume_weights, 3, PARTIAL, str(tmp_path))
    assert set(weights) == {True}


def resume_weights(job: Job, directory: str) -> bool:
    engine = build_engine(job)
    engine.load_checkpoint(directory, load_optimizer_states=False)
    return bool(engine.zeroelastic_report.reset)


FUSED = Job(optimizer="fused_adam", frozen=False)


def save_while_offloaded(job: Job, directory: str) -> tuple[Outcome, list[str]]:
    """Save with everything moved away, twice in a row; the keys of optimizer state that lie in memory then."""
    engine = build_engine(job)
    for step in range(3):
        train_step(engine, step)
    state, gathered = look(engine)
    engine.offload_states()
    keys = sorted({key for entry in engine.optimizer.optimizer.state.values() for key in entry})
    engine.save_checkpoint(directory, client_state={"note": "hello"})
    engine.reload_states()
    again, _ = look(engine)
    assert compare_states(state, again) == [], "saving changed the live state"
    return Outcome(state, gathered, [train_step(engine, step) for step in (3, 4)]), keys


def load_while_offloaded(job: Job, directory: str) -> Outcome:
    engine = build_engine(job)
    train_step(engine, 0)
    engine.offload_states()
    assert engine.optimizer.offloaded_states
    _, client_state = engine.load_checkpoint(directory)
    assert not engine.optimizer.offloaded_states
    state, gathered = look(engine)
    return Outcome(
        state,
        gathered,
        [train_step(engine, step) for step in (3, 4)],
        engine.zeroelastic_report,
        client_state,
        ([], 0),
    )


@row("`offload_states()` and `reload_states()`", note="saved while away; a load calls `reload_states()`")
@pytest.mark.parametrize(("save_world_size", "world_size", "elastic"), [(2, 3, True), (3, 2, False)])
def test_states_that_are_offloaded_for_a_while(
    rank_pool: RankPool, tmp_path: Path, save_world_size: int, world_size: int, elastic: bool
) -> None:
    job = replace(FUSED, elastic=elastic)
    results = rank_pool.run(save_while_offloaded, save_world_size, job, str(tmp_path))
    assert "exp_avg_offload_buffer" in results[0][1]
    checkpoint = Saved(str(tmp_path), results[0][0])
    outcomes = rank_pool.run(load_while_offloaded, world_size, job.other(), checkpoint.directory)
    check_resumed(checkpoint, outcomes, job)
    assert outcomes[0].report.root_matches
    if elastic:
        path = next(checkpoint.tag_dir.glob("*optim_states.pt"))
        saved = torch.load(path, weights_only=False)["optimizer_state_dict"]
        nested = saved["optimizer_state_dict"]["state"].values()
        assert {key for entry in (*saved["base_optimizer_state"], *nested) for key in entry} == {
            "exp_avg",
            "exp_avg_sq",
            "step",
        }
