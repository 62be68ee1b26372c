"""Saving in the background: what is written is the moment of the save, whatever training does meanwhile."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoint_writers import LateEngine, held_writers, writer_job
from programs import end_interpreter
from saved_files import committed, file_bytes, latest, logged
from training import Job, Outcome, build_engine, look, raised, resume, train_step

import zeroelastic
from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.testing import RankPool, compare_states

JOB = Job(options={"async_save": True})


def without_order(files: dict[str, bytes]) -> dict[str, object]:
    """The same files, the record without its place in the order of commits and the checksum that covers it."""
    name = f"tag/{RECORD_NAME}"
    record = json.loads(files[name])
    for key in ("committed_at", "checksum"):
        record.pop(key, None)
    return {**files, name: record}


def save_twice(job: Job, directory: str) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """The same moment saved and waited for, then saved in the background while training goes on.

    Returns the state at that moment, the names of files that differ, and the state that was live when they were
    written. Both saves have the same id, so that nothing in their files is allowed to differ but the order of commits.
    """
    from zeroelastic.deepspeed.save import save_checkpoint
    from zeroelastic.deepspeed.save.background import saving_in_background

    engine = build_engine(job)
    for step in range(3):
        train_step(engine, step)
    save_checkpoint.new_save_id = lambda: "0123456789abcdef" * 2
    state, _ = look(engine)
    mine = {"note": ["as it was"], "rank": dist.get_rank()}
    with saving_in_background(engine, False):
        engine.save_checkpoint(f"{directory}/waited", tag="tag", client_state=mine)
    assert committed(f"{directory}/waited", "tag")
    with held_writers() as gate:
        engine.save_checkpoint(f"{directory}/behind", tag="tag", client_state=mine)
        mine["note"].append("later")
        for step in range(3, 6):
            train_step(engine, step)
        later, _ = look(engine)
        dist.barrier()
        assert not (Path(directory) / "behind" / "tag").exists() and latest(f"{directory}/behind") is None
        gate.set()
        zeroelastic.wait_for_save(engine)
    assert look(engine)[0] == later, "writing changed the live state"
    dist.barrier()
    waited, behind = (without_order(file_bytes(Path(directory) / name)) for name in ("waited", "behind"))
    differing = [name for name in waited.keys() | behind.keys() if waited.get(name) != behind.get(name)]
    dist.barrier()
    return state, differing, later


CASES = {
    "bf16, elastic": JOB,
    "fp32, rigid": replace(JOB, precision="fp32", elastic=False, groups=3),
    "fp16, CPU offload": replace(
        JOB,
        precision="fp16",
        optimizer="cpu_adam",
        zero={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    ),
}


@pytest.mark.support("Using it", '`"async_save"`', "exact", "file for file what a save that is waited for writes")
@pytest.mark.parametrize("case", CASES)
def test_the_files_are_those_of_a_save_that_was_waited_for(rank_pool: RankPool, tmp_path: Path, case: str) -> None:
    """Byte for byte, the record and ``latest`` included; and they resume at another size as what was saved."""
    job = CASES[case]
    for state, differing, later in rank_pool.run(save_twice, 2, job, str(tmp_path)):
        assert differing == []
        assert compare_states(state, later) != []
    outcome: Outcome = rank_pool.run(resume, 3, job.other(), f"{tmp_path}/behind", after=0)[0]
    assert compare_states(state, outcome.state) == []
    assert outcome.report.root_matches and outcome.client_state["note"] == ["as it was"]


def save_again_and_again(job: Job, directory: str) -> tuple[list[Any], list[str]]:
    """Saves that each of the occasions has to wait for; what was committed before it and after."""
    engine = build_engine(job)
    train_step(engine, 0)
    said = logged("deepspeed.save.background")
    seen: list[Any] = []
    threads: list[int] = []
    with held_writers() as gate:

        def save(tag: str) -> None:
            gate.clear()
            threading.Timer(0.3, gate.set).start()
            engine.save_checkpoint(directory, tag=tag)
            threads.append(sum(thread.name == "zeroelastic-save" for thread in threading.enumerate()))

        def then(name: str, action: Callable[[], Any]) -> None:
            dist.barrier()
            before = latest(directory)
            dist.barrier()
            action()
            dist.barrier()
            seen.append((name, before, latest(directory)))
            dist.barrier()

        save("a")
        then("a step", lambda: train_step(engine, 1))
        then("a save", lambda: save("b"))
        then("a load", lambda: engine.load_checkpoint(directory, tag="a"))
        save("c")
        then("the model", lambda: engine.save_16bit_model(f"{directory}/weights"))
        save("d")
        then("uninstall", zeroelastic.uninstall)
        zeroelastic.install()
        save("e")
        then("destroy", engine.destroy)
    assert threads == [1] * 5, "more than one save was in flight"
    assert committed(directory, "e") and not list(Path(directory).glob(".*"))
    return seen, said


def test_at_most_one_is_in_flight_and_what_comes_next_waits_for_it(rank_pool: RankPool, tmp_path: Path) -> None:
    results = rank_pool.run(save_again_and_again, 2, JOB, str(tmp_path))
    seen, said = results[0]
    assert seen == [
        ("a step", None, None),
        ("a save", None, "a"),
        ("a load", "a", "b"),
        ("the model", "b", "c"),
        ("uninstall", "c", "d"),
        ("destroy", "d", "e"),
    ]
    waited = [line.split(" s for ")[0].rsplit(" ", 1) for line in said if " waited " in line]
    assert [what for what, _ in waited] == [
        "the save of b waited", "load_checkpoint() waited", "save_16bit_model() waited", "destroy() waited",
    ]  # fmt: skip
    assert all(0.01 < float(seconds) < 30 for _, seconds in waited)
    assert results[1][1] == []  # rank 0 speaks


def save_onto_a_disk_that_fills(job: Job, directory: str) -> tuple[list[tuple[str, str]], list[Any]]:
    """Saves that fail on rank 1, each found out by another of the next calls, between saves that work."""
    from zeroelastic.torch_file import image

    engine = build_engine(job)
    train_step(engine, 0)
    reserve = image.reserve

    def full(path: Path) -> None:
        if dist.get_rank() == 1 and threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device", str(path))
        reserve(path)

    engine.save_checkpoint(directory, tag="good")
    zeroelastic.wait_for_save(engine)
    good = file_bytes(Path(directory) / "good")
    errors: list[tuple[str, str]] = []
    calls: tuple[Callable[[], Any], ...] = (
        lambda: engine.save_checkpoint(directory, tag="not begun"),
        lambda: engine.load_checkpoint(directory, tag="good"),
        lambda: zeroelastic.wait_for_save(engine),
    )
    for tag, call in zip(("bad", "good", "worse"), calls, strict=True):
        image.reserve = full
        engine.save_checkpoint(directory, tag=tag)
        train_step(engine, 1)  # goes on
        errors.append(raised(call))
        image.reserve = reserve
    seen = [
        latest(directory),
        sorted(p.name for p in Path(directory).iterdir() if p.suffix != ".py"),
        file_bytes(Path(directory) / "good") == good,
    ]
    dist.barrier()
    engine.save_checkpoint(directory, tag="again")
    engine.destroy()
    dist.barrier()
    return errors, [*seen, latest(directory)]


def test_what_went_wrong_on_one_rank_is_raised_on_all_by_the_next_call(rank_pool: RankPool, tmp_path: Path) -> None:
    """Also under the name of a tag that is there already, which stays what it was."""
    results = rank_pool.run(save_onto_a_disk_that_fills, 2, JOB, str(tmp_path), timeout=60)
    assert results[0] == results[1]
    errors, seen = results[0]
    for (kind, text), tag in zip(errors, ("bad", "good", "worse"), strict=True):
        assert kind == "SaveError"
        assert f"{tag}" in text and "No space left on device" in text and "zero_pp_rank_1" in text, text
    assert seen == ["good", ["good", "latest"], True, "again"]


def leave_without_a_word(job: Job, directory: str, decorated: bool) -> tuple[Any, list[str]]:
    """One rank's engine is collected, the others live on, and every rank's program ends while a save is written."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    engine = build_engine(job)
    train_step(engine, 0)
    destroy = DeepSpeedEngine.destroy
    if decorated:
        DeepSpeedEngine.destroy = lambda self: destroy(self)
    said = logged("deepspeed.save.background")
    with held_writers() as gate:
        engine.save_checkpoint(directory, tag="left")
        if dist.get_rank() == 0:
            engine.__del__()
        dist.barrier()
        before = latest(directory)
        threading.Timer(0.3, gate.set).start()
        end_interpreter()
    return (before, latest(directory), committed(directory, "left")), said


@pytest.mark.parametrize("decorated", [False, True])
def test_a_program_that_ends_lets_its_save_come_to_its_end(
    rank_pool: RankPool, tmp_path: Path, decorated: bool
) -> None:
    """The collected engine waits for nobody, also where another library has decorated ``destroy``."""
    for seen, said in rank_pool.run(leave_without_a_word, 2, JOB, str(tmp_path), decorated, timeout=60):
        assert seen == (None, "left", True)
        assert sum("the process waits for this save before it exits" in line for line in said) == 1


def fork_while_saving(job: Job, directory: str) -> tuple[str, list[str]]:
    """A forked child ends, with the engine that it has a copy of, while a save of its parent is written."""
    engine = build_engine(job)
    train_step(engine, 0)
    said = logged("deepspeed.save.background")
    with held_writers() as gate:
        engine.save_checkpoint(directory, tag="saved")
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            engine.destroy()
            end_interpreter()
            os.write(write_end, "; ".join(said).encode())
            os._exit(0)
        os.close(write_end)
        os.waitpid(child, 0)
        child_said = os.read(read_end, 4096).decode()
        gate.set()
        zeroelastic.wait_for_save(engine)
    return child_said, said


def test_a_forked_child_says_nothing_of_its_parents_save(rank_pool: RankPool, tmp_path: Path) -> None:
    ((child_said, said),) = rank_pool.run(fork_while_saving, 1, JOB, str(tmp_path), timeout=60)
    assert child_said == "" and latest(tmp_path) == "saved"
    assert [line for line in said if "saved in the background" in line]


def destroy_the_groups_first(job: Job, directory: str) -> tuple[list[str], list[str]]:
    engine = build_engine(job)
    train_step(engine, 0)
    said = logged("deepspeed.save.background")
    with held_writers() as gate:
        engine.save_checkpoint(directory, tag="lost")
        dist.destroy_process_group()
        gate.set()
        for thread in threading.enumerate():
            if thread.name == "zeroelastic-save":
                thread.join(30)
    return said, sorted(path.name for path in Path(directory).glob("*lost*"))


def test_a_save_that_loses_its_process_group_is_named_and_not_committed(rank_pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("older")
    results = rank_pool.run(destroy_the_groups_first, 2, JOB, str(tmp_path), timeout=60)
    assert any("the process groups were destroyed" in line and "engine.destroy()" in line for line in results[0][0])
    assert (tmp_path / "latest").read_text() == "older" and results[0][1] == [] and not (tmp_path / "lost").exists()


def use_one_engine(job: Job, directory: str) -> tuple[bool, tuple[int, int], list[str], list[str]]:
    """Memory over three snapshots; then files that torch has to write itself, as its layout is not known."""
    from zeroelastic.deepspeed.engine_state import state_of
    from zeroelastic.deepspeed.save.background import background_of, saving_in_background
    from zeroelastic.errors import UnsupportedError
    from zeroelastic.torch_file import save as skeleton

    engine = build_engine(job)
    train_step(engine, 0)  # from here on there are moments
    addresses = []
    for _ in range(3):
        engine.save_checkpoint(directory, tag="known")
        memory = background_of(engine).memory
        addresses.append(sorted(used.data_ptr() for used, _ in memory._used))
        assert memory._spare == []
    zeroelastic.wait_for_save(engine)
    copied = sum(used.numel() for used, _ in memory._used)
    payload = sum(path.stat().st_size for path in Path(directory, "known").glob(f"*_rank_{dist.get_rank()}_*.pt"))
    said = logged("deepspeed.save.shard_writer")
    lay_out = skeleton._lay_out

    def refuse(obj: object, path: Path) -> Any:
        raise UnsupportedError(f"{path}: this torch is from the future")

    skeleton._lay_out = refuse
    engine.save_checkpoint(directory, tag="unknown")
    skeleton._lay_out = lay_out
    train_step(engine, 1)
    zeroelastic.wait_for_save(engine)
    records = [read_record(Path(directory) / tag) for tag in ("known", "unknown")]
    engine.load_checkpoint(directory, tag="unknown")
    assert engine.zeroelastic_report.root_matches
    with saving_in_background(engine, None):
        engine.destroy()
    assert state_of(engine).background is None
    roots = [record.content_root for record in records if record is not None]
    return addresses[0] == addresses[1] == addresses[2], (copied, payload), said, roots


def test_the_memory_is_that_of_the_files_and_used_again(rank_pool: RankPool, tmp_path: Path) -> None:
    """And files whose layout is not known are written by torch at once, with the same record."""
    for same, (copied, payload), said, roots in rank_pool.run(use_one_engine, 2, JOB, str(tmp_path)):
        assert same and payload <= copied <= payload + payload // 64 + 2 * (64 << 10)
        assert len(said) == 2 and all("from the future" in line for line in said)
        assert len(roots) == 2 and roots[0] == roots[1]


def refuse_at_the_start_and_later(job: Job, directory: str) -> list[tuple[str, str]]:
    errors = [raised(lambda: build_engine(job))]
    engine = build_engine(replace(job, config={}))
    engine.checkpoint_engine = LateEngine()
    return [*errors, raised(lambda: engine.save_checkpoint(directory, tag="tag"))]


@pytest.mark.support("Using it", '`"async_save"` with a decoupled or third-party checkpoint engine', "refused")
def test_an_engine_with_a_background_of_its_own_is_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    job = writer_job("python", decoupled=True, options=JOB.options)
    for errors in rank_pool.run(refuse_at_the_start_and_later, 2, job, str(tmp_path)):
        assert [kind for kind, _ in errors] == ["UnsupportedError"] * 2
        assert '"async_save"' in errors[0][1] and "the writer that its configuration names" in errors[0][1]
        assert "LateEngine" in errors[1][1]
    assert list(tmp_path.iterdir()) == []
