"""A signal while a checkpoint is being written: all ranks stop at one step, and nothing of any save is damaged."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from saved_files import record_of
from training import Job, Outcome, build_engine, look, resume, train_step

from zeroelastic.elastic import every, preemption
from zeroelastic.elastic import resume as resume_run
from zeroelastic.errors import CheckpointError
from zeroelastic.testing import RankPool, compare_states
from zeroelastic.verbs.verify.verify import verify_checkpoint

JOB = Job(groups=1)
STEPS = 40


def train_until_told(
    job: Job, directory: str, *, background: bool, rank: int, fails: bool = False
) -> tuple[list[str], int, dict[str, Any], int]:
    """Trains with a save every three steps; one rank gets SIGTERM twice before each write of payload and after it.

    With ``fails`` the last rank cannot write in the background. Returns the tags, the last step, the state then, and
    how many signals came.
    """
    from zeroelastic.torch_file import image, save

    engine = build_engine(job)
    write, write_image, reserve, sent = save._write_rows, image.write_past_cache, save.reserve, [0]

    def tell() -> None:
        if dist.get_rank() == rank:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                sent[0] += 1

    def write_and_tell(*args: Any, **kwargs: Any) -> None:
        tell()
        write(*args, **kwargs)
        tell()

    def write_image_and_tell(*args: Any, **kwargs: Any) -> None:
        tell()
        write_image(*args, **kwargs)
        tell()

    begun = threading.Event()

    def full(path: Path) -> None:
        if fails and threading.current_thread() is not threading.main_thread():
            tell()
            begun.set()
            if dist.get_rank() == dist.get_world_size() - 1:
                raise OSError(28, "No space left on device", str(path))
        reserve(path)

    save._write_rows, image.write_past_cache = write_and_tell, write_image_and_tell
    save.reserve = image.reserve = full
    with preemption(engine, directory, saving=every(steps=3, background=background), grace=200) as stop:
        for step in range(STEPS):
            if fails and step == 3:  # with the next save, the failure of this one would be an error
                assert begun.wait(60)
            train_step(engine, step)
            if stop():
                break
    assert stop.stopped
    state, _ = look(engine)
    return stop.saves, int(engine.global_steps), state, sent[0]


class ByRank:
    """Data whose position depends on the rank, in the middle of a tensor whose text is cut short there."""

    at = torch.zeros(2000)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


def save_and_resume(job: Job, directory: str) -> tuple[list[str], str]:
    engine, data = build_engine(job), ByRank()
    data.at[1000] = dist.get_rank()
    logger = logging.getLogger("zeroelastic.elastic.preemption")
    with (
        mock.patch.object(logger, "warning") as warned,
        preemption(engine, directory, data=data, saving=every(steps=1)) as stop,
    ):
        for step in range(2):
            train_step(engine, step)
            stop()
    try:
        resume_run(engine, directory, data=data)
    except CheckpointError as error:
        return [call.args[0] for call in warned.call_args_list], str(error)
    return [call.args[0] for call in warned.call_args_list], ""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_position_that_depends_on_the_rank_is_not_kept_without_a_word(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    """At stage 2 the save warns, because one client state is kept for all ranks; at stage 3 the load refuses."""
    (warned, error), (others, _) = rank_pool.run(save_and_resume, 2, Job(stage=stage), str(tmp_path))
    assert [text[:30] for text in warned] == (["POSITIONS IN THE DATA are not "] if stage == 2 else []) and not others
    assert ("the ranks came to different positions in the data" in error) == (stage == 3)


@pytest.mark.parametrize("background", [False, True], ids=["waited-for", "background"])
def test_a_signal_during_a_save_and_again_stops_all_with_one_more(
    rank_pool: RankPool, tmp_path: Path, background: bool
) -> None:
    turns = rank_pool.run(train_until_told, 3, JOB, str(tmp_path), background=background, rank=1)
    saves, last, state, _ = turns[0]
    assert turns[1][3] >= 8 and turns[0][3] == turns[2][3] == 0  # during both saves, at one rank
    assert 3 < last < STEPS and saves == ["global_step3", f"global_step{last}"]
    assert last == 4 or background
    assert all(turn[:3] == turns[0][:3] for turn in turns), "the ranks stopped at different steps"
    assert (tmp_path / "latest").read_text() == f"global_step{last}"
    for tag in saves:
        assert verify_checkpoint(tmp_path / tag).valid
        assert tag == f"global_step{record_of(tmp_path / tag).global_steps}"
    outcome: Outcome = rank_pool.run(resume, 2, JOB.other(), str(tmp_path), after=0)[0]
    assert compare_states(state, outcome.state) == [] and outcome.report.root_matches


def test_a_signal_while_a_save_in_the_background_fails_saves_again(rank_pool: RankPool, tmp_path: Path) -> None:
    turns = rank_pool.run(train_until_told, 2, JOB, str(tmp_path), background=True, rank=0, fails=True)
    saves, last, state, _ = turns[0]
    assert turns[0][:3] == turns[1][:3] and saves == [f"global_step{last}"] and last > 3
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == saves
    outcome: Outcome = rank_pool.run(resume, 3, JOB.other(), str(tmp_path), after=0)[0]
    assert compare_states(state, outcome.state) == []
