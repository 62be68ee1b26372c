"""Observers of saves, loads and starts: what they get from real ranks, and that a failing one stops no training."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from saved_files import logged
from training import Job, build_engine, train_step

import zeroelastic
from zeroelastic.monitoring import ResizeReport, ResumeReport, SaveReport, StartReport, metrics_of, subscribe
from zeroelastic.monitoring.observers import publish
from zeroelastic.testing import RankPool

SAVED = SaveReport("/run/t", "t", 7, 4, False, 0.5, 2.0, bytes=100)


def test_an_observer_that_fails_is_logged_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[object] = []

    def fail(report: object, engine: object) -> None:
        raise RuntimeError("the tracker is down")

    stops = [subscribe(fail), subscribe(lambda report, engine: seen.append((report, engine)))]
    try:
        with caplog.at_level(logging.WARNING):
            publish(SAVED, "an engine")
            publish(SAVED, "an engine")
    finally:
        for stop in stops:
            stop()
    assert seen == [(SAVED, "an engine")] * 2
    (record,) = caplog.records
    assert record.name == "zeroelastic.monitoring.observers" and "the tracker is down" in caplog.text
    publish(SAVED, None)
    assert len(seen) == 2


def test_the_metrics_of_a_report_leave_out_what_is_not_known() -> None:
    failed = metrics_of(SaveReport("/run/t", "t", 7, 4, False, 0.5, 2.0, error="the disk is full"))
    assert failed == {"zeroelastic/save/stall_s": 0.5, "zeroelastic/save/failed": 1.0}
    assert metrics_of(SAVED)["zeroelastic/save/bytes_per_s"] == 50
    resized = ResizeReport(7, 4, 3, "f00d", 700, 300, teardown_seconds=0.25, engine_seconds=0.5, move_seconds=0.25)
    assert metrics_of(resized) == {
        "zeroelastic/resize/seconds": 1.0, "zeroelastic/resize/bytes_moved": 300.0,
        "zeroelastic/resize/from_ranks": 4.0, "zeroelastic/resize/to_ranks": 3.0,
    }  # fmt: skip
    assert "zeroelastic/job/lost_steps" not in metrics_of(StartReport(None, 0, 2, 0.1, None, None))


def save_and_load(directory: str, options: dict[str, Any]) -> list[Any]:
    """What an observer on this rank sees of two saves, one of which fails, and a load."""
    seen: list[Any] = []
    engine = build_engine(Job(options=options))
    other = object()

    def watch(report: Any, of: Any) -> None:
        seen.append((report, of is engine and of is not other, threading.current_thread() is threading.main_thread()))

    stop = subscribe(watch)
    train_step(engine, 0)
    engine.save_checkpoint(directory)
    zeroelastic.wait_for_save(engine)
    blocked = Path(directory) / "blocked"
    if dist.get_rank() == 0:
        blocked.touch()
    dist.barrier()
    with pytest.raises(zeroelastic.ZeroElasticError):
        engine.save_checkpoint(str(blocked))
        zeroelastic.wait_for_save(engine)
    engine.load_checkpoint(directory)
    stop()
    sizes = {path.name: path.stat().st_size for path in Path(directory, "global_step1").iterdir()}
    del sizes["zeroelastic.json"]
    return [*seen, sum(size for name, size in sizes.items() if name.endswith(".pt"))]


@pytest.mark.parametrize("background", [False, True])
def test_rank_0_sees_every_save_and_load(rank_pool: RankPool, tmp_path: Path, background: bool) -> None:
    first, second = rank_pool.run(save_and_load, 2, str(tmp_path), {"async_save": background})
    (saved, of_engine, in_main), (failed, *_), (loaded, *_), nbytes = first
    assert second == [nbytes]  # only rank 0 makes reports
    assert isinstance(saved, SaveReport) and of_engine and in_main is not background
    assert (saved.tag, saved.step, saved.world_size, saved.error) == ("global_step1", 1, 2, None)
    assert saved.path == str(tmp_path / "global_step1") and saved.bytes == nbytes > 10_000
    assert saved.background is background and 0 < saved.stall_seconds <= saved.seconds < 60
    assert (saved.stall_seconds < saved.seconds) is background
    assert isinstance(failed, SaveReport) and "blocked" in str(failed.error) and failed.bytes == 0
    assert isinstance(loaded, ResumeReport) and loaded.saved_world_size == 2


def monitored(directory: str, options: dict[str, Any]) -> None:
    """A run whose DeepSpeed configuration has a CSV monitor, beside an engine of another run, which has none."""
    csv = {"csv_monitor": {"enabled": True, "output_path": directory, "job_name": "csv"}}
    engine = build_engine(Job(options=options, config=csv))
    train_step(engine, 0)
    engine.save_checkpoint(f"{directory}/ckpt")
    zeroelastic.wait_for_save(engine)
    engine.load_checkpoint(f"{directory}/ckpt")


def test_deepspeeds_own_monitor_gets_the_metrics(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(monitored, 2, str(tmp_path), {"metrics_file": str(tmp_path / "run.prom")})
    files = {path.stem: path.read_text().split() for path in (tmp_path / "csv").glob("zeroelastic_*.csv")}
    assert float(files["zeroelastic_save_stall_s"][-1].split(",")[1]) > 0
    assert files["zeroelastic_load_from_ranks"][-1] == "120,2.0"  # at the sample count of DeepSpeed's own metrics
    assert 'zeroelastic_saves_total{run="run"} 1\n' in (tmp_path / "run.prom").read_text()


def test_metrics_false_keeps_them_out_of_the_monitor(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(monitored, 2, str(tmp_path), {"metrics": False})
    assert not list((tmp_path / "csv").glob("zeroelastic_*"))


def unwritable(directory: str) -> list[str]:
    said = logged("")
    engine = build_engine(Job(options={"metrics_file": os.path.join(directory, "missing", "run.prom")}))
    engine.save_checkpoint(directory)
    return [line for line in said if line.startswith('"metrics_file"')]


def test_a_metrics_file_that_cannot_be_written_stops_no_training(rank_pool: RankPool, tmp_path: Path) -> None:
    (said,) = rank_pool.run(unwritable, 1, str(tmp_path))
    assert len(said) == 1 and "missing/run.prom cannot be written: No such file" in said[0]
    assert (tmp_path / "latest").exists()
