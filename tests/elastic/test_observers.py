"""Observers: what rank 0 gets of saves, loads, resumes and stops, and that a failing observer stops no training."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from training import Job, build_engine, train_step

import zeroelastic
from zeroelastic.observers import Loaded, Resumed, Saved, Stopping, publish
from zeroelastic.testing import RankPool

STOPPING = Stopping("SIGTERM", 7)


def test_an_observer_that_fails_is_logged_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[object] = []

    def fail(event: object) -> None:
        raise RuntimeError("the tracker is down")

    unsubscribe = [zeroelastic.subscribe(fail), zeroelastic.subscribe(seen.append)]
    try:
        with caplog.at_level(logging.WARNING):
            publish(STOPPING)
            publish(STOPPING)
    finally:
        for end in 2 * unsubscribe:
            end()
    publish(STOPPING)
    assert seen == [STOPPING] * 2
    (record,) = caplog.records
    assert record.name == "zeroelastic.observers" and "the tracker is down" in caplog.text


def test_jsonl_appends_a_line_for_each_event_also_after_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "Sav')
    append = zeroelastic.jsonl(path)
    append(STOPPING)
    append(Resumed("t", "memory", 7, 2, 0.5))
    torn, *lines = path.read_text().splitlines()
    assert torn == '{"event": "Sav'
    stopping, resumed = map(json.loads, lines)
    assert stopping.pop("time") <= resumed.pop("time")
    assert stopping == {"event": "Stopping", "reason": "SIGTERM", "step": 7}
    assert resumed == {
        "event": "Resumed", "tag": "t", "tier": "memory", "step": 7, "world_size": 2, "seconds": 0.5
    }  # fmt: skip


def train_and_stop(directory: str, options: dict[str, Any]) -> list[Any]:
    """What an observer sees on this rank of a job that resumes, saves, loads, and gets a signal on its last rank."""
    from zeroelastic.elastic import preemption, resume

    seen: list[Any] = []
    unsubscribe = zeroelastic.subscribe(
        lambda event: seen.append((event, threading.current_thread() is threading.main_thread()))
    )
    engine = build_engine(Job(options=options))
    began = time.perf_counter()
    resume(engine, directory)
    seen.append(time.perf_counter() - began)
    with preemption(engine, directory) as stop:
        train_step(engine, 0)
        stop()
        engine.save_checkpoint(directory)
        zeroelastic.wait_for_save(engine)
        engine.load_checkpoint(directory)
        train_step(engine, 1)
        if engine.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert stop()
    unsubscribe()
    return seen if engine.global_rank == 0 else seen[1:]


@pytest.mark.parametrize("background", [False, True])
def test_rank_0_sees_every_event(rank_pool: RankPool, tmp_path: Path, background: bool) -> None:
    first, second = rank_pool.run(train_and_stop, 2, str(tmp_path), {"async_save": background})
    assert second == []
    (resumed, _), clock, (saved, in_main), (loaded, _), (stopping, _), (last, _) = first
    assert (resumed.tag, resumed.tier, resumed.step, resumed.world_size) == (None, None, 0, 2)
    assert 0.8 * clock <= resumed.seconds <= clock
    nbytes = sum(path.stat().st_size for path in (tmp_path / "global_step1").glob("*.pt"))
    assert isinstance(saved, Saved) and in_main is not background
    assert (saved.tag, saved.step, saved.world_size, saved.tier) == ("global_step1", 1, 2, "directory")
    assert saved.path == str(tmp_path / "global_step1") and saved.bytes == nbytes > 10_000
    assert saved.background is background and 0 < saved.stall_seconds <= saved.seconds < 60
    assert (saved.stall_seconds < saved.seconds) is background
    assert isinstance(loaded, Loaded) and loaded.path == saved.path and loaded.root_matches is True
    assert (loaded.format, loaded.step, loaded.saved_world_size, loaded.world_size) == ("elastic", 1, 2, 2)
    assert 0 < loaded.bytes < nbytes and loaded.seconds > 0
    assert stopping == Stopping("SIGUSR1", 2)
    assert isinstance(last, Saved) and last.tag == "global_step2"
