"""The event log as a job writes it: what resume, preemption and the steps leave there, and the status line."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from training import Job, build_engine, train_step

from zeroelastic.elastic import (
    ElasticDistributedSampler,
    events,
    every,
    preemption,
    resume,
    set_collective_timeout,
)
from zeroelastic.elastic.events import Status, StatusLine
from zeroelastic.errors import ConfigError
from zeroelastic.job_log.event_log import EndEvent, ResumeEvent, SaveEvent, StartEvent, StepEvent, read_events
from zeroelastic.job_log.timeline import make_timeline
from zeroelastic.monitoring import ResumeReport, subscribe
from zeroelastic.testing import RankError, RankPool
from zeroelastic.testing.supervisor import GRACE_VARIABLE

JOB = Job(groups=1)


def run(directory: str, to: int, *, fail_on: int | None = None, steps: int = 1) -> None:
    """Train to a step, saving every second; the rank ``fail_on`` fails there."""
    os.environ["LOCAL_RANK"] = "0"  # every rank is the first of its node
    engine = build_engine(JOB)
    data = ElasticDistributedSampler(range(1000), 120)
    with events(engine, f"{directory}/events.jsonl", steps=steps) as log:
        resume(engine, f"{directory}/ckpt", data=data, log=log)
        with preemption(engine, f"{directory}/ckpt", data=data, saving=every(steps=2), log=log) as stop:
            while engine.global_steps < to:
                train_step(engine, engine.global_steps)
                log.step(torch.tensor(float(engine.global_steps)))
                stop()
            if fail_on is not None:
                dist.barrier()
                if dist.get_rank() == fail_on:
                    raise RuntimeError("this rank\nis gone")


@pytest.fixture(scope="module")
def job(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 ranks to step 5, where rank 1 fails; then 2 ranks to step 7, logging every fourth step."""
    directory = tmp_path_factory.mktemp("job")
    with pytest.raises(Exception, match="this rank"):
        rank_pool.run(run, 3, str(directory), 5, fail_on=1)
    rank_pool.run(run, 2, str(directory), 7, steps=4)
    return directory / "events.jsonl"


def test_a_job_logs_what_happens_to_it_once(job: Path) -> None:
    log = read_events([job])
    first = [event for event in log.events if event.run == log.events[0].run]
    start, resumed = first[:2]
    assert isinstance(start, StartEvent) and isinstance(resumed, ResumeEvent) and log.num_torn == 0
    assert (start.world_size, start.job, start.restart) == (3, None, None)
    assert (resumed.tag, resumed.step, resumed.lost_steps) == (None, 0, None)
    steps = [event for event in first if isinstance(event, StepEvent)]
    assert [(event.step, event.loss) for event in steps] == [(n, float(n)) for n in range(1, 6)]
    saves = [event for event in first if isinstance(event, SaveEvent)]
    assert [(event.step, event.tag) for event in saves] == [(2, "global_step2"), (4, "global_step4")]
    assert all(event.seconds > 0 for event in saves)
    sizes = [sum(path.stat().st_size for path in (job.parent / "ckpt" / event.tag).glob("*.pt")) for event in saves]
    assert [event.bytes for event in saves] == sizes and all(0 < event.stalled <= event.seconds for event in saves)
    ends = [event for event in first if isinstance(event, EndEvent)]
    assert ("error", 1, 5, "RuntimeError: this rank") in [(e.reason, e.rank, e.step, e.error) for e in ends]


def test_a_restart_knows_the_steps_that_were_lost(job: Path) -> None:
    timeline = make_timeline(read_events([job]))
    first, second = timeline.incarnations
    assert second.resume is not None
    assert (second.resume.tag, second.resume.step, second.resume.lost_steps) == ("global_step4", 4, 1)
    assert (second.resume.saved_world_size, second.resume.proved, second.lost_steps) == (3, True, 1)
    assert second.resume.load_seconds is not None and 0 < second.resume.load_seconds <= second.resume.seconds
    assert [event.step for event in second.steps] == [5], "every fourth step and the first"
    assert second.end == "done" and first.end is not None
    restart = second.restart
    assert restart is not None and restart.load == second.resume.seconds
    assert second.start.process_seconds > 0 and restart.total > restart.load


def resume_slowly(directory: str) -> float:
    """The seconds of a clock around a ``resume`` that is slow at its beginning, and in its load."""
    from zeroelastic.distributed import partners

    def check_slowly() -> None:
        time.sleep(0.5)

    engine = build_engine(JOB)
    stop = subscribe(lambda report, engine: time.sleep(0.5 * isinstance(report, ResumeReport)))
    with (
        events(engine, f"{directory}/slow.jsonl") as log,
        mock.patch.object(partners, "require_partners", check_slowly),
    ):
        began = time.perf_counter()
        resume(engine, f"{directory}/ckpt", data=ElasticDistributedSampler(range(1000), 120), log=log)
        clock = time.perf_counter() - began
    stop()
    return clock


def test_the_seconds_of_a_resume_are_those_of_the_call(rank_pool: RankPool, job: Path) -> None:
    clock, _ = rank_pool.run(resume_slowly, 2, str(job.parent))
    (resumed,) = (event for event in read_events([job.parent / "slow.jsonl"]).events if isinstance(event, ResumeEvent))
    assert clock > 1 and 0.95 * clock <= resumed.seconds <= clock
    assert resumed.load_seconds is not None and 0.5 < resumed.load_seconds < resumed.seconds - 0.5


def test_a_log_that_cannot_be_written_does_not_stop_the_job(
    rank_pool: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "events.jsonl").mkdir()
    rank_pool.run(run, 1, str(tmp_path), 1)
    assert (tmp_path / "events.jsonl").is_dir()


def timeouts(seconds: float) -> list[float]:
    """Before and after, of every group; a rank that stays silent is given up on."""
    with pytest.raises(ConfigError):
        set_collective_timeout(0)
    engine = build_engine(JOB)
    set_collective_timeout(seconds)
    began = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.all_reduce(torch.ones(1), group=engine.optimizer.dp_process_group)
    else:
        time.sleep(seconds + 2)
    return [time.monotonic() - began]


def test_a_silent_rank_is_given_up_on_in_the_group_that_zero_works_in(rank_pool: RankPool) -> None:
    waited = rank_pool.run(timeouts, 2, 2.0)[0][0]
    assert 1.5 < waited < 60


def limits_of_groups(seconds: float, in_place: bool) -> set[float]:
    """The timeouts of all process groups, made by DeepSpeed alone or over a store, after one was set before."""
    from zeroelastic.deepspeed.process_world import begin_world

    dist.destroy_process_group()
    set_collective_timeout(seconds)
    if in_place:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        begin_world(dist.PrefixStore("a world", store), rank=0, world_size=1)
    else:
        with socket.socket() as port:
            port.bind(("127.0.0.1", 0))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port.getsockname()[1]))
    build_engine(JOB)
    groups = list(dist.distributed_c10d._world.pg_map)
    assert len(groups) > 1
    return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


@pytest.mark.extended
@pytest.mark.parametrize("in_place", [False, True])
def test_the_timeout_reaches_every_group_also_the_default_one(rank_pool: RankPool, in_place: bool) -> None:
    assert rank_pool.run(limits_of_groups, 1, 77.0, in_place) == [{77.0}]


def lose_a_rank_in_initialize(seconds: float, moment: str) -> tuple[str, float]:
    """Rank 1 dies after the rendezvous; the error of the other, and how long it took."""
    import deepspeed

    set_collective_timeout(seconds)
    owner, name = {
        "before its groups are made": (deepspeed.DeepSpeedEngine, "__init__"),
        "while the optimizer is made": (deepspeed.DeepSpeedEngine, "_configure_zero_optimizer"),
    }[moment]
    if dist.get_rank() == 1:
        setattr(owner, name, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
    build_engine(JOB)
    raise AssertionError("nobody is lost")


@pytest.mark.parametrize("moment", ["before its groups are made", "while the optimizer is made"])
def test_a_rank_lost_while_the_engine_is_built_is_given_up_on(rank_pool: RankPool, moment: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        rank_pool.run(lose_a_rank_in_initialize, 2, 8.0, moment, timeout=90, env={GRACE_VARIABLE: "80"})
    assert time.monotonic() - began < 80
    said = {failure.rank: failure.headline for failure in caught.value.failures}
    assert "SIGKILL" in said[1] and "nobody is lost" not in said[0] and "Error" in said[0], said


MEET = """
import datetime, sys, torch
from zeroelastic.elastic import set_collective_timeout
set_collective_timeout(3)
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=2)
"""


@pytest.mark.extended
def test_a_rank_that_never_comes_to_the_rendezvous_is_given_up_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEET, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.strip().endswith(("timeout", "timed out")), done.stderr


STATUS = Status(world_size=3, restart=2, step=41, loss=1.23456, saved_at=100.0, save_seconds=0.5, lost_steps=4)


def test_the_status_says_all_of_it() -> None:
    assert STATUS.text(112.0) == (
        "step 41 | loss 1.235 | 3 ranks | saved 12 s ago in 0.5 s | 4 steps lost at the last restart | restart 2"
    )
    assert Status(world_size=1).text(0.0) == "step 0 | 1 rank | not saved yet"


def test_where_output_is_no_terminal_a_plain_line_comes_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    line = StatusLine()
    for _ in range(61):
        line.show(STATUS)
        now += 1.0
    line.close()
    said = capsys.readouterr().err
    assert said.count("\n") == 3 and said.count("step 41") == 3 and "\x1b" not in said


def test_on_a_terminal_one_line_is_drawn_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal of its own: the lines of a print in between stay, and the status is drawn again below them."""
    code = (
        "import dataclasses, time\nfrom zeroelastic.elastic.events import Status, StatusLine\n"
        "line = StatusLine(); status = Status(world_size=2)\n"
        "for n in range(1, 4): line.show(dataclasses.replace(status, step=n)); print('printed', n); time.sleep(0.3)\n"
        "line.close()"
    )
    read: list[bytes] = []

    def keep(descriptor: int) -> bytes:
        data = os.read(descriptor, 4096)
        read.append(data)
        return data

    monkeypatch.setenv("TERM", "xterm")
    assert pty.spawn([sys.executable, "-c", code], keep) == 0
    text = b"".join(read).decode()
    assert text.count("\x1b[2K") >= 2 and all(f"step {n}" in text and f"printed {n}" in text for n in (1, 2, 3))
    assert "step 3" in text.split("printed 3")[-1], "the status is not drawn again below what was printed"
