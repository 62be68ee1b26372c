"""Elastic jobs on real DeepSpeed processes: resume at any size with data and generators, fall back, stop together."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from training import Job, build_engine, look, train_step

from zeroelastic.elastic import EXIT_PREEMPTED, ElasticDistributedSampler, every, preemption, resume
from zeroelastic.elastic.resume import ATTEMPTS_NAME
from zeroelastic.errors import CheckpointError, ConfigError, LayoutMismatchError, StrictError
from zeroelastic.testing import RankPool, compare_states

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
    assert not (Path(directory) / ATTEMPTS_NAME).exists()
    again = rank_pool.run(run, 2, JOB.other(), directory, 0, save_at_end=False)
    assert [turn.drawn for turn in again] == streams[2], "derived generators depend on more than checkpoint and rank"
    every_draw = [value for world_size in (2, 4) for stream in streams[world_size] for value in stream]
    assert len(set(every_draw)) == len(set(map(tuple, streams[4]))) * 3, "two ranks drew the same numbers"


def test_generators_are_restored_exactly_where_rank_and_size_are_the_saved_ones(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    first = rank_pool.run(run, 2, JOB, str(tmp_path / "ckpt"), 1)
    again = rank_pool.run(run, 2, JOB.other(), str(tmp_path / "ckpt"), 0, save_at_end=False)
    assert [turn.drawn for turn in again] == [turn.drawn for turn in first]
    assert first[0].drawn != first[1].drawn


def roll_back(job: Job, directory: str) -> dict[str, list[Any]]:
    """Save steps 1 to 3, go back to step 1, and commit another step 2 by a clock that is an hour slow. What resumes
    take then, after ``latest`` was damaged, and after it was pointed at another tag; with the order of the tags."""
    from zeroelastic.latest import find_latest, fix_latest, set_latest
    from zeroelastic.tags import check_quickly

    root, engine = Path(directory), build_engine(job)
    for step in range(3):
        train_step(engine, step)
        engine.save_checkpoint(directory)
    engine.load_checkpoint(directory, tag="global_step1")
    train_step(engine, 9)
    clock = time.time
    time.time = lambda: clock() - 3600  # type: ignore[assignment]
    engine.save_checkpoint(directory, tag="again2")
    time.time = clock
    starts = [resume(build_engine(job), directory)]
    tags = [tag.name for tag in find_latest(root, check_quickly).run.tags]
    if dist.get_rank() == 0:
        (root / "latest").unlink()
        fix_latest(root, check_quickly)
        set_latest(root, "global_step3")
    dist.barrier()
    starts.append(resume(build_engine(job), directory))
    found = [(start.tag, start.global_steps) for start in starts]
    return {"tags": tags, "starts": found, "notes": [start.notes for start in starts],
            "reported": [start.report.notes for start in starts]}  # fmt: skip


def test_after_a_rollback_the_last_commit_counts_and_latest_rolls_back(rank_pool: RankPool, tmp_path: Path) -> None:
    for found in rank_pool.run(roll_back, 2, JOB, str(tmp_path / "ckpt")):
        assert found["tags"] == ["again2", "global_step3", "global_step2", "global_step1"]
        assert found["starts"] == [("again2", 2), ("global_step3", 3)]
        (left, *_), (pointed, *_) = found["notes"]
        assert left == "LEFT: global_step3, global_step2 are of a branch that was rolled back"
        assert pointed.startswith("NOT THE NEWEST: latest was pointed at global_step3 after the last commit. Newer, ")
        assert left in found["reported"][0] and pointed in found["reported"][1]


@pytest.fixture
def three_tags(rank_pool: RankPool, tmp_path: Path) -> Path:
    directory = tmp_path / "ckpt"
    turns = rank_pool.run(run, 2, JOB, str(directory), 3, save_steps=1, save_at_end=False)
    assert turns[0].saves == ["global_step1", "global_step2", "global_step3"]
    return directory


def damage(tag: Path) -> None:
    """Turn a bit of the payload of rank 0's optimizer file: its size and header stay."""
    path = next(tag.glob("*zero_pp_rank_0_*optim_states.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damaged_tags_are_passed_over_and_named(three_tags: Path, rank_pool: RankPool) -> None:
    damage(three_tags / "global_step3")
    (three_tags / "global_step2" / "zeroelastic.json").write_text("{")
    turns = rank_pool.run(run, 3, JOB.other(), str(three_tags), 1, save_at_end=False)
    for turn in turns:
        assert (turn.start.tag, turn.global_steps) == ("global_step1", 2)
        newest, middle = turn.start.passed_over
        assert newest.startswith("global_step3: ") and "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt" in newest
        assert middle.startswith("global_step2: ") and "zeroelastic.json" in middle
        assert turn.start.report.root_matches
    assert not (three_tags / ATTEMPTS_NAME).exists()
    damage(three_tags / "global_step1")
    with pytest.raises(Exception, match="none of the checkpoints can be loaded") as failed:
        rank_pool.run(run, 3, JOB.other(), str(three_tags), 1)
    assert CheckpointError.__name__ in str(failed.value) and str(failed.value).count("global_step1") >= 1


def test_a_tag_that_ended_the_job_twice_is_passed_over(three_tags: Path, rank_pool: RankPool) -> None:
    attempts = three_tags / ATTEMPTS_NAME
    attempts.write_text(json.dumps({"global_step3": 1}))
    turns = rank_pool.run(run, 2, JOB.other(), str(three_tags), 0, save_at_end=False)
    assert turns[0].start.tag == "global_step3" and not attempts.exists()  # once is no pattern, and it loaded now
    attempts.write_text(json.dumps({"global_step3": 2}))
    turns = rank_pool.run(run, 2, JOB.other(), str(three_tags), 0, save_at_end=False)
    assert turns[1].start.tag == "global_step2"
    assert turns[1].start.passed_over == ("global_step3: the job ended 2 times while it was being loaded",)


def dying(job: Job, directory: str) -> None:
    """Ends the process in the middle of a load, as a kill does."""
    import zeroelastic.stage3.wrappers as wrappers

    engine = build_engine(job)
    wrappers.survey = lambda *args, **kwargs: os._exit(9)  # type: ignore[assignment]
    resume(engine, directory)


def test_a_death_while_loading_is_counted_and_an_error_of_the_run_is_not(three_tags: Path) -> None:
    from zeroelastic.testing import run_ranks

    attempts = three_tags / ATTEMPTS_NAME
    for count in (1, 2):
        with pytest.raises(Exception, match="9"):
            run_ranks(dying, 1, JOB.other(), str(three_tags), timeout=120)
        assert json.loads(attempts.read_text()) == {"global_step3": count}
    attempts.unlink()


def test_what_is_wrong_with_the_run_is_raised_and_no_older_tag_taken(three_tags: Path, rank_pool: RankPool) -> None:
    with pytest.raises(Exception, match=LayoutMismatchError.__name__):
        rank_pool.run(run, 2, JOB.other(extra="more"), str(three_tags), 1)
    with pytest.raises(Exception, match="GLOBAL BATCH CHANGED from 120 to 60"):
        rank_pool.run(run, 2, JOB.other(batch=60), str(three_tags), 1)
    assert not (three_tags / ATTEMPTS_NAME).exists()
    turns = rank_pool.run(run, 2, JOB.other(batch=60), str(three_tags), 0, strict=False, save_at_end=False)
    assert any("GLOBAL BATCH CHANGED" in note for note in turns[0].start.report.notes)


def without_position(job: Job, directory: str, strict: bool) -> tuple[int, tuple[str, ...]]:
    engine = build_engine(job)
    train_step(engine, 0)
    engine.save_checkpoint(directory)
    data = ElasticDistributedSampler(range(LENGTH), BATCH)
    data.advance(2)
    return data.consumed, resume(build_engine(job), directory, data=data, strict=strict).notes


def test_a_checkpoint_without_a_position_is_refused_unless_told(rank_pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=f"{StrictError.__name__}.*no position in the data"):
        rank_pool.run(without_position, 2, JOB, str(tmp_path / "a"), True)
    _, notes = rank_pool.run(without_position, 2, JOB, str(tmp_path / "b"), False)[0]
    assert any("begins at the first sample" in note for note in notes)


def test_a_signal_to_one_rank_stops_all_at_one_step_with_one_save(rank_pool: RankPool, tmp_path: Path) -> None:
    directory = str(tmp_path / "ckpt")
    turns = rank_pool.run(run, 3, JOB, directory, 9, signal_at=(2, 4), save_steps=3)
    for turn in turns:
        assert turn.stopped and turn.global_steps == 5 and len(turn.samples) == 5
        assert turn.saves == ["global_step3", "global_step5"]
    assert (Path(directory) / "latest").read_text() == "global_step5"
    again = rank_pool.run(run, 2, JOB.other(), directory, 1, save_at_end=False)
    assert again[0].start.tag == "global_step5" and again[0].global_steps == 6


class _Clocked:
    """An engine whose saves take as long as a test says, and no training."""

    def __init__(self, seconds: float) -> None:
        self.global_steps, self.device, self.seconds = 0, torch.device("cpu"), seconds
        self.tags: list[str] = []

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
        assert signal.getsignal(signal.SIGUSR1) is not None and engine.tags == stop.saves
        os.kill(os.getpid(), signal.SIGUSR1)  # the old handler is back
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


def test_the_deadline_ends_the_process_with_an_exit_code_of_its_own() -> None:
    from zeroelastic.testing import run_ranks

    began = time.monotonic()
    with pytest.raises(Exception, match="75"):
        run_ranks(overdue, 1, timeout=50)
    assert time.monotonic() - began < 50


def test_every_is_by_steps_or_seconds_whichever_comes_first() -> None:
    assert not every().due(seconds=1e9, steps=10**9)
    assert every(steps=3).due(seconds=0, steps=3) and not every(steps=3).due(seconds=1e9, steps=2)
    both = every(seconds=10, steps=3)
    assert both.due(seconds=10, steps=0) and both.due(seconds=0, steps=3) and not both.due(seconds=9, steps=2)
    with pytest.raises(ConfigError, match="steps is 0"):
        every(steps=0)


def test_exit_is_by_a_code_of_its_own() -> None:
    with pytest.raises(SystemExit) as ended:
        preemption(_Clocked(0.0), "unused").exit()
    assert ended.value.code == EXIT_PREEMPTED == 75
