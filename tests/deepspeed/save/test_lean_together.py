"""Two jobs save lean checkpoints into one directory while a third program removes old ones: nothing is missed.

The removal waits for no age, so that only the order of its steps keeps what a save counts on.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from extended import with_swept
from saved_files import record_of
from training import Job, build_engine, train_step

import zeroelastic
from zeroelastic import UsageError
from zeroelastic.checkpoint.shared_files import FROZEN_FOLDER, SharedFile
from zeroelastic.errors import ZeroElasticError
from zeroelastic.runs import run_store
from zeroelastic.testing import RankPool
from zeroelastic.verbs.verify.verify import verify_checkpoint

JOB = Job(options={"verify": True, "lean": True}, frozen_table=60)
SAVES = 12


def save_often(job: Job, directory: str, name: str) -> None:
    """Save again and again. Frozen weights go to and fro, so that files which were left are wanted again."""
    engine = build_engine(job)
    train_step(engine, 0)
    for number in range(SAVES):
        weight = engine.module.frozen_table.weight
        getattr(weight, "ds_tensor", weight).data.add_(1.0 if number % 3 else -2.0)
        engine.save_checkpoint(directory, tag=f"{name}{number}")


def prune_often(directory: Path, stop: threading.Event) -> int:
    removed = 0
    while not stop.is_set():
        with suppress(UsageError, ZeroElasticError):  # there is nothing yet, or it is being saved
            report = zeroelastic.prune(directory, keep=1, min_age=0, dry_run=False)
            removed += len(report.removed)
        time.sleep(0.01)
    return removed


@pytest.mark.extended
@pytest.mark.parametrize("stage", with_swept((3, 2), {2}))
def test_two_jobs_and_a_removal_leave_no_tag_without_its_shared_file(
    tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without an age, what a save is writing looks like what a dead one has left: the temporary file of ``latest``.
    monkeypatch.setattr(run_store, "leftover_names", lambda directory: ())
    jobs = {"a": replace(JOB, stage=stage), "b": replace(JOB, stage=stage)}
    stop = threading.Event()
    with RankPool(2) as one, RankPool(2) as other, ThreadPoolExecutor() as threads:
        pruning = threads.submit(prune_often, tmp_path, stop)
        saving: list[Any] = [
            threads.submit(pool.run, save_often, 2, job, str(tmp_path), name, timeout=280)
            for pool, (name, job) in zip((one, other), jobs.items(), strict=True)
        ]
        try:
            for job in saving:
                job.result()
        finally:
            stop.set()
        assert pruning.result() > 0
    tags = [path.parent for path in tmp_path.glob("*/zeroelastic.json")]
    assert {f"{name}{SAVES - 1}" for name in jobs} <= {tag.name for tag in tags}
    needed: set[str] = set()
    for tag in tags:
        record = record_of(tag)
        shared: tuple[SharedFile, ...] = record.shared
        needed |= {file.name for file in shared}
        assert verify_checkpoint(tag).valid
    zeroelastic.prune(tmp_path, keep=1, min_age=0, dry_run=False)
    assert {path.name for path in (tmp_path / FROZEN_FOLDER).iterdir()} <= needed
