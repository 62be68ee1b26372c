"""The first load of a process: every element of its new memory is written once, and the report counts all seconds.

``"verify": "read"`` shows the whole live state, wherever it lies, without a second pass over any of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from saves import Saved, check_resumed, save_each
from training import Job, Outcome, build_engine, resume, train_and_save, train_step

from zeroelastic.deepspeed.engine_state import state_of
from zeroelastic.deepspeed.live import digests, live_optimizer
from zeroelastic.deepspeed.live.digests import digest_pieces
from zeroelastic.errors import CheckpointError
from zeroelastic.observers import subscribe
from zeroelastic.testing import RankPool

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
READ = {"verify": "read"}
JOBS = {
    "stage 3, full": Job(),
    "stage 3, fp32": Job(precision="fp32", options=READ),
    "stage 3, offloaded": Job(optimizer="cpu_adam", zero=OFFLOAD, options=READ),
    "stage 2": Job(stage=2, options=READ),
    "stage 2, offloaded": Job(stage=2, zero=OFFLOAD, options=READ),
}


@contextmanager
def dirty_memory() -> Iterator[list[int]]:
    """While it lasts, new memory for optimizer state holds NaN; the list gets the elements of each new tensor."""
    made: list[int] = []

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = torch.full(*args, torch.nan, **kwargs)
        made.append(tensor.numel())
        return tensor

    with mock.patch.object(live_optimizer, "torch", SimpleNamespace(**(vars(torch) | {"empty": empty}))):
        yield made


def states(engine: Any) -> list[dict[str, Any]]:
    return [state for state in engine.optimizer.optimizer.state.values() if state]


def resume_in_dirty_memory(job: Job, directory: str) -> tuple[Outcome, int, int]:
    """The outcome of a resume, how many tensors of state were made for it, and how many with elements were digested."""
    looked = []

    def wrapped(load: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
        with dirty_memory() as made, mock.patch.object(digests, "digest_pieces", wraps=digest_pieces) as digested:
            result = load(engine, *args, **kwargs)
        pieces = [piece for call in digested.call_args_list for piece in call.args[0]]
        looked.append(sum(piece.tensor.numel() > 0 for piece in pieces))
        flats = [value for state in states(engine) for value in state.values() if isinstance(value, torch.Tensor)]
        assert flats and not any(flat.isnan().any() for flat in flats), "memory that nothing was written to"
        looked.append(len(made))
        return result

    from deepspeed import DeepSpeedEngine

    import zeroelastic

    zeroelastic.install()
    load = DeepSpeedEngine.load_checkpoint
    with mock.patch.object(
        DeepSpeedEngine, "load_checkpoint", lambda engine, *args, **kwargs: wrapped(load, engine, *args, **kwargs)
    ):
        outcome = resume(job, directory)
    num_digested, num_made = looked
    return outcome, num_made, num_digested


def resume_each_in_dirty_memory(jobs: list[Job], directory: str) -> list[tuple[Outcome, int, int]]:
    return [resume_in_dirty_memory(job, f"{directory}/{number}") for number, job in enumerate(jobs)]


def test_every_element_of_new_memory_is_written(rank_pool: RankPool, tmp_path: Path) -> None:
    jobs = list(JOBS.values())
    saves = rank_pool.run(save_each, 4, jobs, str(tmp_path), timeout=300)[0]
    found = rank_pool.run(resume_each_in_dirty_memory, 3, [job.other() for job in jobs], str(tmp_path), timeout=300)
    for number, (name, job) in enumerate(JOBS.items()):
        results = [of_rank[number] for of_rank in found]
        assert all(made >= 2 and (digested > 5) == ("full" in name) for _, made, digested in results), name
        assert all(digested == 0 for *_, digested in results) == (job.options == READ), name
        saved = Saved(f"{tmp_path}/{number}", saves[number])
        check_resumed(saved, [outcome for outcome, *_ in results], job, what=name)


def test_so_is_the_state_of_parameters_that_are_newly_trained(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(train_and_save, 2, Job(), str(tmp_path))
    job = Job(frozen=False, options={"verify": True, "on_mismatch": "initialize"}, sub_group_size=10**6)
    for outcome, made, _ in rank_pool.run(resume_in_dirty_memory, 3, job, str(tmp_path)):
        assert made >= 2 and any("as before a first step" in line for line in outcome.report.changed)


def fail_half_way(job: Job, directory: str) -> tuple[str, int, bool | None]:
    """The error, how many sub-groups have optimizer state after it, and whether the next load is right."""
    from zeroelastic.deepspeed import fill

    engine = build_engine(job)
    read = fill.read_segments

    def read_and_fail(*args: Any, **kwargs: Any) -> Any:
        read(*args, **kwargs)
        raise CheckpointError("the disk is gone")

    with (
        dirty_memory() as made,
        mock.patch.object(fill, "read_segments", read_and_fail),
        pytest.raises(CheckpointError) as caught,
    ):
        engine.load_checkpoint(directory)
    left = len(states(engine))
    assert made
    engine.load_checkpoint(directory)
    train_step(engine, 2)
    return str(caught.value), left, engine.zeroelastic_report.root_matches


@pytest.mark.parametrize("stage", [2, 3])
def test_a_load_that_fails_takes_away_the_state_that_it_began(stage: int, rank_pool: RankPool, tmp_path: Path) -> None:
    job = Job(stage=stage)
    rank_pool.run(train_and_save, 4, job, str(tmp_path), after=0)
    for text, left, matches in rank_pool.run(fail_half_way, 3, job, str(tmp_path)):
        assert "the disk is gone" in text and left == 0 and matches


PAUSE_S = 0.3


def seconds_of_a_slow_load(job: Job, directory: str) -> tuple[float, float]:
    """Of the report, and of a clock around the call, which is slow at its beginning, within, and at its end.

    Rank 1 is late before its first collective, between two of them and after the last one. What a load frees is slow,
    and so is a callback, on every rank; observers and the log are on rank 0.
    """
    from zeroelastic.deepspeed import wrappers
    from zeroelastic.deepspeed.load import load, report, restore

    def pause(*args: Any) -> None:
        time.sleep(PAUSE_S)

    def late(function: Any, *, after: bool = False) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            if dist.get_rank() == 1 and not after:
                pause()
            result = function(*args, **kwargs)
            if dist.get_rank() == 1 and after:
                pause()
            return result

        return called

    class Freed(dict[str, int]):
        __del__ = pause

    def costs(*args: Any) -> tuple[bool, dict[str, int]]:
        failed, found = gather(*args)
        return failed, Freed(found)

    engine = build_engine(job)
    gather, handler = load.gather_costs, logging.Handler()
    state_of(engine).on_load.append(pause)
    subscribe(pause)
    with (
        mock.patch.object(handler, "emit", pause),
        mock.patch.object(wrappers, "finish_pending", late(wrappers.finish_pending)),
        mock.patch.object(restore, "note_module_files", late(restore.note_module_files)),
        mock.patch.object(load, "gather_costs", costs),
        mock.patch.object(report, "maximum_and_total", late(report.maximum_and_total, after=True)),
    ):
        logging.getLogger("zeroelastic").addHandler(handler)
        dist.barrier()
        began = time.perf_counter()
        engine.load_checkpoint(directory)
        clock = time.perf_counter() - began
    return engine.zeroelastic_report.seconds, clock


def test_the_seconds_of_the_report_are_those_of_the_call(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(train_and_save, 2, Job(), str(tmp_path), after=0)
    pauses = (7, 5, 4)  # two lines are logged
    for (reported, clock), number in zip(
        rank_pool.run(seconds_of_a_slow_load, 3, Job(), str(tmp_path)), pauses, strict=True
    ):
        assert clock > number * PAUSE_S and 0.95 * clock <= reported <= clock
