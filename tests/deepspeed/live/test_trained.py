"""What changes between ``deepspeed.initialize`` and a save, and what a load makes of it.

A parameter is trained if the optimizer has it, whatever its ``requires_grad`` says when it is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from changed_runs import (
    add_a_group,
    freeze,
    freeze_a_weight,
    register_a_buffer,
    register_a_parameter,
    rename,
    replace_a_module,
    thaw,
    thaw_and_freeze,
)
from extended import with_swept
from saved_files import contents, logged, record_of
from training import Job, build_engine, train_step

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.errors import UnsupportedError
from zeroelastic.testing import RankPool, compare_states, fingerprint, gather_state
from zeroelastic.verbs.verify.verify import verify_checkpoint

Change = Callable[[Any], None]


CHANGES = (freeze, thaw_and_freeze)
STRUCTURAL = (rename, register_a_buffer)
"""A run that loads what was saved after one of these has to have made it, too."""


def save_after(job: Job, directory: str, changes: tuple[Change, ...]) -> list[dict[str, Any]]:
    """The state that each save held, made by an engine that was changed and then trained."""
    states = []
    for change in changes:
        engine = build_engine(job)
        train_step(engine, 0)
        change(engine.module)
        train_step(engine, 1)
        states.append(fingerprint(gather_state(engine)))
        engine.save_checkpoint(f"{directory}/{change.__name__}", tag="tag")
    return states


def load_each(
    job: Job, directory: str, changes: tuple[Change, ...], *, again: bool, **load: Any
) -> list[tuple[dict[str, Any], str]]:
    """What each load restored, and what its report says changed; ``again`` makes the change before the load."""
    found = []
    for change in changes:
        engine = build_engine(job)
        if again:
            change(engine.module)
        engine.load_checkpoint(f"{directory}/{change.__name__}", tag="tag", **load)
        report = getattr(engine, "zeroelastic_report", None)
        found.append((fingerprint(gather_state(engine)), "" if report is None else " ".join(report.changed)))
        train_step(engine, 2)
    return found


def check(states: list[dict[str, Any]], loaded: list[tuple[dict[str, Any], str]], changes: tuple[Change, ...]) -> None:
    for change, state, (restored, changed) in zip(changes, states[: len(changes)], loaded, strict=True):
        assert compare_states(state, restored) == [], change.__name__
        assert not changed, change.__name__


@pytest.mark.support(
    "Parameters", "`requires_grad` changed after `deepspeed.initialize`", "exact", "the optimizer decides"
)
@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "rigid"])
def test_what_the_optimizer_has_is_trained_whatever_requires_a_gradient(
    rank_pool: RankPool, tmp_path: Path, elastic: bool
) -> None:
    """Saved on two ranks; loaded on two and three, by engines with and without the change, and by DeepSpeed alone."""
    job, directory = Job(elastic=elastic), str(tmp_path)
    every = (*CHANGES, *STRUCTURAL)
    states = rank_pool.run(save_after, 2, job, directory, every)[0]
    for change in every:
        assert verify_checkpoint(tmp_path / change.__name__ / "tag").problems == (), change.__name__
        record = record_of(tmp_path / change.__name__ / "tag")
        assert record.checkpoint_format == ("elastic" if elastic else "rigid")
        names = {content.param.name for content in record.contents()}
        assert names - record.params.trained == {"adapter.weight", "adapter.bias"}
    check(states, rank_pool.run(load_each, 3, job.other(), directory, every, again=True)[0], every)
    check(states, rank_pool.run(load_each, 2, job.other(), directory, CHANGES, again=False)[0], CHANGES)
    stock = replace(job.other(installed=False, elastic=False), sub_group_size=job.sub_group_size)
    check(states, rank_pool.run(load_each, 2, stock, directory, CHANGES, again=False)[0], CHANGES)


def test_what_deepspeed_alone_saved_of_a_frozen_layer_loads_at_any_size(rank_pool: RankPool, tmp_path: Path) -> None:
    """Its files list what does not require a gradient as frozen, and as trained what its optimizer has."""
    changes = (freeze, freeze_a_weight, rename)
    stock = Job(elastic=False, installed=False)
    states = rank_pool.run(save_after, 2, stock, str(tmp_path), changes)[0]
    for world_size, job in ((2, Job(elastic=False)), (3, Job().other())):
        check(states, rank_pool.run(load_each, world_size, job, str(tmp_path), changes, again=True)[0], changes)
    assert verify_checkpoint(tmp_path / "freeze" / "tag").problems == ()


@pytest.mark.parametrize("elastic", with_swept((True, False), {False}), ids=["elastic", "rigid"])
def test_excluded_are_the_parameters_that_the_optimizer_does_not_have(
    rank_pool: RankPool, tmp_path: Path, elastic: bool
) -> None:
    entries = rank_pool.run(save_without_frozen, 2, Job(elastic=elastic), str(tmp_path))[0]
    assert {name for name in entries if name.startswith(("up", "adapter"))} == {"up.weight", "up.bias"}
    assert rank_pool.run(load_the_trained, 3, Job().other(), str(tmp_path))[0] == []


def save_without_frozen(job: Job, directory: str) -> list[str]:
    engine = build_engine(job)
    train_step(engine, 0)
    thaw(engine.module)
    freeze(engine.module)
    engine.save_checkpoint(directory, tag="tag", exclude_frozen_parameters=True)
    if dist.get_rank() == 0:
        torch.save(fingerprint(gather_state(engine)), f"{directory}/state")
    else:
        gather_state(engine)
    model = torch.load(f"{directory}/tag/zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    return list(model["module"])


def load_the_trained(job: Job, directory: str) -> list[str]:
    """Where the state differs, in what was not excluded."""
    engine = build_engine(job)
    engine.load_checkpoint(directory, tag="tag", load_module_strict=False)
    state, saved = fingerprint(gather_state(engine)), torch.load(f"{directory}/state", weights_only=False)
    return [name for name in saved if saved[name] != state[name] and "adapter" not in name]


def refuse_after_each(job: Job, directory: str, changes: list[Change]) -> list[tuple[str, str, list[str]]]:
    return [refuse_after(job, f"{directory}/{number}", change) for number, change in enumerate(changes)]


def refuse_after(job: Job, directory: str, change: Change) -> tuple[str, str, list[str]]:
    """The error of a save over a good one, that the directory is what it was, and the log."""
    engine = build_engine(job)
    train_step(engine, 0)
    engine.save_checkpoint(directory, tag="tag")
    before = contents(Path(directory))
    change(engine)
    said = logged("")
    try:
        engine.save_checkpoint(directory, tag="tag")
    except Exception as error:
        dist.barrier()
        assert contents(Path(directory)) == before
        return type(error).__name__, str(error), said
    return "", "", said


@pytest.mark.support(
    "Parameters", "groups, parameters and modules added after `initialize`", "refused", "at the save, by name"
)
def test_what_cannot_be_restored_is_refused_at_the_save(rank_pool: RankPool, tmp_path: Path) -> None:
    said = {
        add_a_group: "optimizer group 2 was added after deepspeed.initialize",
        register_a_parameter: "parameter late is not managed by ZeRO-3",
        replace_a_module: "parameter down.weight is not managed by ZeRO-3",
    }
    for outcomes in rank_pool.run(refuse_after_each, 2, Job(), str(tmp_path), list(said)):
        for (kind, text, _), words in zip(outcomes, said.values(), strict=True):
            assert kind == "UnsupportedError" and words in text


def test_groups_that_deepspeed_drops_are_named(rank_pool: RankPool) -> None:
    """DeepSpeed 0.19.8 makes torch's Adagrad anew without them (``initialize_optimizer_states``), and cannot step."""
    said = rank_pool.run(refused_at_the_start, 2, Job(optimizer="adagrad", groups=2))
    assert said == ["DeepSpeed made the optimizer anew with 1 of its 2 groups"] * 2


def refused_at_the_start(job: Job) -> str:
    with pytest.raises(UnsupportedError) as caught:
        build_engine(job)
    return str(caught.value).split(",")[0]


def test_a_rigid_save_without_a_record_does_not_keep_the_record_of_the_one_before(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """DeepSpeed saves it, and one line says why there is no record."""
    outcomes = rank_pool.run(refuse_after, 2, Job(elastic=False), str(tmp_path), add_a_group)
    assert [kind for kind, _, _ in outcomes] == ["", ""]
    assert any("no commit record is written: optimizer group 2 was added" in text for text in outcomes[0][2])
    assert (tmp_path / "tag").is_dir() and read_record(tmp_path / "tag") is None
