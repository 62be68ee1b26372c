"""Elastic jobs on real DeepSpeed processes: resume at any size with data and generators, fall back, stop together."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from extended import with_swept
from saved_files import flip, logged
from torch.utils.data import DataLoader
from training import Job, build_engine, look, train_step

from zeroelastic.elastic import EXIT_PREEMPTED, ElasticDistributedSampler, every, preemption, resume
from zeroelastic.elastic.position import KEY, pack_position
from zeroelastic.errors import CheckpointError, ConfigError, StrictError, UsageError
from zeroelastic.testing import RankError, RankPool, compare_states

LENGTH, BATCH = 1000, 120
JOB = Job(groups=1)


@dataclass(frozen=True)
class Turn:
    """What one rank saw of a run: the samples of each step, the state at its end, and what the library said."""

    start: Any
    samples: list[list[int]]
    state: dict[str, Any]
    drawn: list[float]
    saves: list[str]
    stopped: bool
    global_steps: int


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


def run(
    job: Job, directory: str, steps: int, *, signal_at: tuple[int, int] | None = None, save_steps: int | None = None,
    save_at_end: bool = True, strict: bool = True,
) -> Turn:  # fmt: skip
    """Resume, train some steps on the samples that the sampler gives, save. ``signal_at``: rank and step."""
    engine = build_engine(job)
    data = ElasticDistributedSampler(range(LENGTH), BATCH, seed=4)
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    start = resume(engine, directory, data=data, strict=strict)
    state, _ = look(engine)
    drawn = draw()
    samples: list[list[int]] = []
    with preemption(engine, directory, data=data, saving=every(steps=save_steps)) as stop:
        for step in range(start.global_steps, start.global_steps + steps):
            number = data.consumed // BATCH
            samples.append(data.batch(number)[dist.get_rank() :: dist.get_world_size()].tolist())
            train_step(engine, step)
            if signal_at == (dist.get_rank(), step):
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
            if stop():
                break
        if save_at_end and not stop.stopped:
            stop.save()
        drawn_again = draw()
    state = state if start.tag is not None else look(engine)[0]
    if start.tag is None:
        drawn = drawn_again
    return Turn(start, samples, state, drawn, stop.saves, stop.stopped, engine.global_steps)


def steps_of(turns: list[Turn]) -> list[list[int]]:
    """The samples of each step over all ranks, in the order of the permutation."""
    return [
        [turns[i % len(turns)].samples[step][i // len(turns)] for i in range(BATCH)]
        for step in range(len(turns[0].samples))
    ]


@pytest.fixture(scope="module")
def begun(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Turn]]:
    """A run of 3 ranks that began in an empty directory and saved at step 3."""
    directory = str(tmp_path_factory.mktemp("begun") / "ckpt")
    return directory, rank_pool.run(run, 3, JOB, directory, 3)


def test_an_empty_directory_is_a_fresh_start(begun: tuple[str, list[Turn]]) -> None:
    _, turns = begun
    for turn in turns:
        assert turn.start.tag is None and turn.start.global_steps == 0 and turn.start.report is None
        assert turn.saves == ["global_step3"] and turn.global_steps == 3


def test_a_run_goes_on_with_the_next_samples_at_any_size(
    begun: tuple[str, list[Turn]], rank_pool: RankPool, tmp_path: Path
) -> None:
    directory, first = begun
    whole = ElasticDistributedSampler(range(LENGTH), BATCH, seed=4, rank=0, world_size=1)
    trained = steps_of(first)
    streams: dict[int, list[list[float]]] = {}
    for world_size in (2, 4, 3):
        turns = rank_pool.run(run, world_size, JOB.other(), directory, 7, save_at_end=False)
        for turn in turns:
            assert (turn.start.tag, turn.start.global_steps) == ("global_step3", 3)
            assert turn.start.report.root_matches and not turn.start.passed_over
            assert compare_states(first[0].state, turn.state) == []
            derived = "random generators were derived anew, from the checkpoint and the rank"
            assert turn.start.notes == (() if world_size == 3 else (derived,))
        streams[world_size] = [turn.drawn for turn in turns]
        seen = trained + steps_of(turns)  # past the end of the first epoch, which has nine global batches
        for step, samples in enumerate(seen):
            whole.load_state_dict({**whole.state_dict(), "epoch": step // 9, "consumed": step % 9 * BATCH})
            assert samples == whole.batch(step % 9).tolist()
    again = rank_pool.run(run, 2, JOB.other(), directory, 0, save_at_end=False)
    assert [turn.drawn for turn in again] == streams[2], "derived generators depend on more than checkpoint and rank"
    every_draw = [value for world_size in (2, 4) for stream in streams[world_size] for value in stream]
    assert len(set(every_draw)) == len(set(map(tuple, streams[4]))) * 3, "two ranks drew the same numbers"


def test_a_url_is_refused_before_training() -> None:
    with pytest.raises(UsageError, match=r's3://bucket/run: is a URL.*"upload"'):
        preemption(SimpleNamespace(global_steps=0), "s3://bucket/run")


@pytest.mark.parametrize("stage", with_swept((1, 2, 3), {1}))
def test_each_rank_gets_its_own_generators_where_the_size_is_the_saved_one(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    """At stages 1 and 2 all ranks read the client state of rank 0."""
    job = replace(JOB, stage=stage, options={"weights_only_load": True})
    first = rank_pool.run(run, 3, job, str(tmp_path / "ckpt"), 1)
    again = rank_pool.run(run, 3, job.other(), str(tmp_path / "ckpt"), 0, save_at_end=False)
    assert [turn.drawn for turn in again] == [turn.drawn for turn in first]
    assert len({tuple(turn.drawn) for turn in first}) == 3
    assert [turn.start.notes for turn in again] == [()] * 3


def without_generators_of_others(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "generators_by_rank"}


def resume_old_entry(job: Job, directory: str) -> tuple[list[float], tuple[str, ...], list[float]]:
    """What ranks draw after a resume from an entry with rank 0's generators alone, and what they drew at its save."""
    engine = build_engine(job)
    train_step(engine, 0)
    torch.manual_seed(40 + dist.get_rank())
    entry = without_generators_of_others(pack_position(None, engine.device, for_all_ranks=True))
    engine.save_checkpoint(directory, client_state={KEY: entry})
    saved = draw()
    start = resume(engine, directory)
    return draw(), start.notes, saved


def test_an_entry_with_the_generators_of_one_rank_is_read_too(rank_pool: RankPool, tmp_path: Path) -> None:
    turns = rank_pool.run(resume_old_entry, 2, replace(JOB, stage=2), str(tmp_path / "ckpt"))
    assert [drawn == saved for drawn, _, saved in turns] == [True, False]
    assert all(len(notes) == 1 and "on all ranks but the one" in notes[0] for _, notes, _ in turns)


@pytest.fixture
def three_tags(rank_pool: RankPool, tmp_path: Path) -> Path:
    directory = tmp_path / "ckpt"
    turns = rank_pool.run(run, 2, JOB, str(directory), 3, save_steps=1, save_at_end=False)
    assert turns[0].saves == ["global_step1", "global_step2", "global_step3"]
    return directory


def damage(tag: Path) -> None:
    """Turn a bit of the payload of rank 0's optimizer file: its size and header stay."""
    path = next(tag.glob("*zero_pp_rank_0_*optim_states.pt"))
    flip(path)


def test_damaged_tags_are_passed_over_and_named(three_tags: Path, rank_pool: RankPool) -> None:
    damage(three_tags / "global_step3")
    next((three_tags / "global_step2").glob("*zero_pp_rank_1_*optim_states.pt")).unlink()
    turns = rank_pool.run(run, 3, JOB.other(), str(three_tags), 1, save_at_end=False)
    for turn in turns:
        assert (turn.start.tag, turn.global_steps) == ("global_step1", 2)
        newest, middle = turn.start.passed_over
        assert newest.startswith("global_step3: ") and "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt" in newest
        assert middle.startswith("global_step2: ") and "zero_pp_rank_1_mp_rank_00_optim_states.pt" in middle
        assert turn.start.report.root_matches
    damage(three_tags / "global_step1")
    with pytest.raises(Exception, match="none of the checkpoints can be loaded") as failed:
        rank_pool.run(run, 3, JOB.other(), str(three_tags), 1)
    assert CheckpointError.__name__ in str(failed.value) and str(failed.value).count("global_step1") >= 1


def without_position(job: Job, directory: str, strict: bool) -> tuple[int, tuple[str, ...]]:
    engine = build_engine(job)
    train_step(engine, 0)
    engine.save_checkpoint(directory)
    data = ElasticDistributedSampler(range(LENGTH), BATCH)
    data.advance(2)
    notes = resume(build_engine(job), directory, data=data, strict=strict).notes
    return data.consumed, notes


def at_another_batch(job: Job, directory: str, batch: int, strict: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    data = ElasticDistributedSampler(range(LENGTH), batch, seed=4)
    notes = resume(build_engine(job), directory, data=data, strict=strict).notes
    return data.state_dict(), notes


def test_the_position_goes_on_with_another_global_batch_where_that_is_allowed(
    three_tags: Path, rank_pool: RankPool
) -> None:
    job = JOB.other(batch=60)
    with pytest.raises(Exception, match="GLOBAL BATCH CHANGED from 120 to 60"):
        rank_pool.run(at_another_batch, 2, job, str(three_tags), 60, True)
    position, notes = rank_pool.run(at_another_batch, 2, job, str(three_tags), BATCH // 2 * 5, False)[0]
    assert (position["epoch"], position["consumed"]) == (0, BATCH // 2 * 5)
    (note,) = [note for note in notes if "global batch" in note]
    assert note.endswith(
        f"epoch 0, {3 * BATCH} samples -> epoch 0, {BATCH // 2 * 5} samples; {BATCH // 2} samples come again"
    )


def test_a_checkpoint_without_a_position_is_refused_unless_told(rank_pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=f"{StrictError.__name__}.*no position in the data"):
        rank_pool.run(without_position, 2, JOB, str(tmp_path / "a"), True)
    consumed, notes = rank_pool.run(without_position, 2, JOB, str(tmp_path / "b"), False)[0]
    assert consumed == 2 * BATCH and any("data stays where it was" in note for note in notes)


def train_with_workers(job: Job, directory: str, method: str) -> tuple[list[str], int, list[int], list[int]]:
    """A loop with a DataLoader, whose process group gets SIGTERM and SIGUSR1 at step 3: as from torchrun, a shell or a
    batch system. The tags, the steps, the places in the data, and the workers that are left after the loop."""
    assert os.getpgrp() == os.getpid(), "the signals would go to others"
    engine = build_engine(job)
    data = ElasticDistributedSampler(range(LENGTH), BATCH, seed=4)
    begun = data.consumed
    micro = engine.train_micro_batch_size_per_gpu()
    loader = DataLoader(range(LENGTH), batch_size=micro, sampler=data, num_workers=2, multiprocessing_context=method)
    with preemption(engine, directory, data=data, grace=200) as stop:
        for step, _ in enumerate(loader):
            train_step(engine, step)
            if step == 3 and dist.get_rank() == 0:
                kill = f"kill -TERM -{os.getpid()}; kill -USR1 -{os.getpid()}"  # a worker obeys its parent's SIGTERM
                subprocess.run(["sh", "-c", kill], start_new_session=True, check=True)
                time.sleep(1.0)  # torch looks at its workers when one has ended
            if stop():
                break
    workers = multiprocessing.active_children()
    return stop.saves, engine.global_steps, [begun, data.consumed], [worker.pid for worker in workers if worker.pid]


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.extended)])
def test_a_signal_to_the_process_group_leaves_the_workers_of_a_loader_at_work(
    rank_pool: RankPool, tmp_path: Path, method: str
) -> None:
    turns = rank_pool.run(train_with_workers, 2, JOB, str(tmp_path / "ckpt"), method)
    assert turns == [(["global_step4"], 4, [0, 4 * BATCH], [])] * 2
    again = rank_pool.run(run, 2, JOB.other(), str(tmp_path / "ckpt"), 0, save_at_end=False)
    assert again[0].start.tag == "global_step4"


def end_a_worker(method: str) -> int | None:
    """The exit code of a worker that does not end by itself, when its DataLoader ends it."""
    with preemption(_Clocked(0.0), "unused"):
        iterator = iter(DataLoader(range(8), num_workers=1, multiprocessing_context=method))
        next(iterator)
        (worker,) = iterator._workers
        os.kill(worker.pid, signal.SIGTERM)
        time.sleep(0.5)
        assert worker.is_alive()
        worker.terminate()
        with suppress(RuntimeError):  # of torch, whose handler finds the worker gone
            worker.join(30)
        worker.join(30)
    return worker.exitcode


def test_a_dataloader_can_end_a_worker_that_hangs(rank_pool: RankPool) -> None:
    assert rank_pool.run(end_a_worker, 1, "fork") == [-signal.SIGKILL]


def test_a_signal_while_a_stopped_process_ends_leaves_its_exit_code(tmp_path: Path) -> None:
    script = f"""
import os, signal
from types import SimpleNamespace
import torch, torch.distributed as dist
from zeroelastic.elastic import preemption

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)  # the interpreter has taken Python's handlers away by now

late = Late()
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
save = lambda directory, tag, client_state: None
engine = SimpleNamespace(global_steps=0, device=torch.device("cpu"), save_checkpoint=save)
engine.zero_optimization_stage = lambda: 2
with preemption(engine, "unused") as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    engine.global_steps += 1
    assert stop()
os.kill(os.getpid(), signal.SIGTERM)
stop.exit()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == EXIT_PREEMPTED == 75, done.stderr


class _Clocked:
    """An engine whose saves take as long as a test says, and no training."""

    def __init__(self, seconds: float) -> None:
        self.global_steps, self.device, self.seconds = 0, torch.device("cpu"), seconds
        self.tags: list[str] = []

    def zero_optimization_stage(self) -> int:
        return 3

    def save_checkpoint(self, directory: str, tag: str, client_state: dict[str, Any]) -> None:
        time.sleep(self.seconds)
        self.tags.append(tag)


def stops(save_seconds: float, grace: float) -> tuple[list[str], bool, bool]:
    """Two steps, the second after a signal; what was saved, whether it stopped, whether the old handler was called."""
    called: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    engine = _Clocked(save_seconds)
    try:
        with preemption(engine, "unused", saving=every(steps=1), grace=grace) as stop:
            assert not stop(), "nothing was trained yet"
            engine.global_steps += 1
            assert not stop()
            os.kill(os.getpid(), signal.SIGUSR1)
            engine.global_steps += 1
            stopped = stop()
            assert stop() == stopped
        assert engine.tags == stop.saves
        os.kill(os.getpid(), signal.SIGUSR1)  # ignored, since this process is to end
        signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
        with preemption(engine, "unused"):
            pass
        os.kill(os.getpid(), signal.SIGUSR1)  # nothing stopped it: the old handler is back
    finally:
        signal.signal(signal.SIGUSR1, before)
    return engine.tags, stopped, len(called) == 2


def test_a_save_that_would_not_be_done_in_time_is_not_begun(rank_pool: RankPool) -> None:
    assert rank_pool.run(stops, 2, 0.3, 60.0) == [(["global_step1", "global_step2"], True, True)] * 2
    assert rank_pool.run(stops, 2, 1.2, 1.3) == [(["global_step1"], True, True)] * 2


def overdue() -> None:
    with preemption(_Clocked(0.0), "unused", grace=0.2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


@pytest.mark.quick
def test_the_deadline_ends_the_process_with_an_exit_code_of_its_own(rank_pool: RankPool) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match="75"):
        rank_pool.run(overdue, 1, timeout=50)
    assert time.monotonic() - began < 50


def test_every_is_by_steps_or_seconds_whichever_comes_first() -> None:
    assert not every().due(seconds=1e9, steps=10**9)
    assert every(steps=3).due(seconds=0, steps=3) and not every(steps=3).due(seconds=1e9, steps=2)
    both = every(seconds=10, steps=3)
    assert both.due(seconds=10, steps=0) and both.due(seconds=0, steps=3) and not both.due(seconds=9, steps=2)
    with pytest.raises(ConfigError, match="steps is 0"):
        every(steps=0)


BEGINS = {
    "load": ({}, "", "{parent}/ckpd: no such directory. In {parent} there are: ckpt. The run begins from scratch; "),
    "required load": ({"required": True}, "MissingFileError", "{parent}/ckpd: no such directory. In {parent} there"),
    "resume": ({}, "", "{parent}/ckpd: no such directory. In {parent} there are: ckpt. The run begins"),
    "required by the options": (
        {"required": True},
        "MissingFileError",
        "A checkpoint is required here, so the run does not begin",
    ),
    "required resume": ({}, "MissingFileError", "{parent}/ckpd: no such directory. In {parent} there are: ckpt."),
    "tag": ({}, "MissingFileError", "{parent}/ckpt: has no tag nope. There are, newest first: global_step3."),
}
"""Options, an error, and what it says, or what rank 0 logs."""


def begin(job: Job, directory: Path) -> dict[str, tuple[str, str]]:
    """What starts without a checkpoint come to: an error, or what rank 0 logged."""
    found, said = dict[str, tuple[str, str]](), logged("")
    nowhere = str(directory.with_name("ckpd"))
    for how, (options, _, _) in BEGINS.items():
        engine = build_engine(job.other(options=options))
        said.clear()
        try:
            if how == "tag":
                engine.load_checkpoint(str(directory), tag="nope")
            elif "load" in how:
                assert engine.load_checkpoint(nowhere)[0] is None
            else:
                assert resume(engine, nowhere, required=how == "required resume").tag is None
            found[how] = "", " ".join(said)
        except FileNotFoundError as error:
            found[how] = type(error).__name__, str(error)
    return found


def test_a_mistyped_path_is_named_with_what_is_there(begun: tuple[str, list[Turn]], rank_pool: RankPool) -> None:
    directory = Path(begun[0])
    first, second = rank_pool.run(begin, 2, JOB, directory)
    for how, (_, error, message) in BEGINS.items():
        assert first[how][0] == second[how][0] == error, how
        assert message.format(parent=directory.parent) in first[how][1], how
