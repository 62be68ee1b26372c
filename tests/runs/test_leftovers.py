"""What saves that died have left goes with the next save into the directory; what may be a running save's stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from places import ROOT
from training import Job, build_engine

from zeroelastic.distributed.process_identity import identity
from zeroelastic.runs.run_store import RunStore, leftover_names, why_kept
from zeroelastic.runs.tag_directory import (
    is_note,
    is_unfinished,
    life_of_owner,
    make_staging_dir,
    note_owner,
    staging_dir_of,
)
from zeroelastic.testing import RankPool

OLD, NEW = "0" * 32, "1" * 32
DAY = 24 * 3600.0
JOB = Job(groups=1, frozen=False)

Start = Callable[[Path, str], "subprocess.Popen[str]"]


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    for found in (path, *(path.rglob("*") if path.is_dir() else ())):
        os.utime(found, (then, then))


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that have begun to save a tag, and goes no further."""
    program = (
        "import sys; from pathlib import Path; from zeroelastic.runs.tag_directory import make_staging_dir\n"
        "make_staging_dir(Path(sys.argv[1]), sys.argv[2]); print('begun', flush=True); sys.stdin.read()"
    )
    started: list[subprocess.Popen[str]] = []

    def run(tag_dir: Path, save_id: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tag_dir), save_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def die_in_a_save(directory: str) -> None:
    from zeroelastic.deepspeed.save.shard_writer import ShardWriter

    engine = build_engine(JOB)
    ShardWriter.save = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    engine.save_checkpoint(directory, tag="epoch1/first")


def save(directory: str) -> None:
    build_engine(JOB).save_checkpoint(directory, tag="epoch1/second")


def test_a_save_removes_what_one_of_another_tag_left_and_nothing_of_one_that_runs(
    rank_pool: RankPool, tmp_path: Path, start: Start
) -> None:
    with pytest.raises(Exception, match=r"SIGKILL|-9|killed"):
        rank_pool.run(die_in_a_save, 1, str(tmp_path), timeout=60)
    assert [is_unfinished(name) for name in os.listdir(tmp_path / "epoch1")] == [True]
    start(tmp_path / "running", OLD)
    age(staging_dir_of(tmp_path / "running", OLD), 10 * DAY)
    for name, days in ((".latest.123.tmp", 2), (".latest.123.0badcafe.tmp", 2), (".latest.124.tmp", 0)):
        (tmp_path / name).touch()
        age(tmp_path / name, days * DAY)
    (tmp_path / ".mine.123.tmp").touch()
    age(tmp_path / ".mine.123.tmp", 2 * DAY)
    rank_pool.run(save, 1, str(tmp_path))
    assert os.listdir(tmp_path / "epoch1") == ["second"]
    hidden = {name for name in os.listdir(tmp_path) if name.startswith(".")}
    assert hidden == {staging_dir_of(tmp_path / "running", OLD).name, ".latest.124.tmp", ".mine.123.tmp"}
    assert not any(map(is_note, os.listdir(tmp_path / "epoch1" / "second")))


def test_the_note_of_an_owner_is_an_empty_file(tmp_path: Path) -> None:
    """So that its removal waits for no disk."""
    note_owner(tmp_path)
    (note,) = tmp_path.iterdir()
    assert is_note(note.name) and note.is_file() and note.stat().st_size == 0
    assert life_of_owner(tmp_path) == "lives"


def test_a_second_job_that_saves_the_same_tag_leaves_the_first_alone(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path / "tag", OLD)
    staging_dir = make_staging_dir(tmp_path / "tag", NEW)
    assert staging_dir.is_dir() and staging_dir_of(tmp_path / "tag", OLD).is_dir()
    process.kill()
    process.wait()
    third = make_staging_dir(tmp_path / "tag", "2" * 32)
    assert set(leftover_names(tmp_path)) == {staging_dir.name, third.name}, "that of this process may be on its way"


def test_where_its_process_cannot_be_asked_for_a_save_is_dead_after_a_day(tmp_path: Path) -> None:
    boot, _, process = identity(os.getpid()).partition("/")
    for owner in (f"another-boot/{process}", "", "damaged", None):
        staging_dir = make_staging_dir(tmp_path / "tag", NEW)
        (note,) = staging_dir.iterdir()
        note.unlink()
        if owner is not None:
            (staging_dir / (note.name[: note.name.index(quote(boot))] + quote(owner, safe=""))).touch()
        age(staging_dir, 0.9 * DAY)
        assert why_kept(staging_dir) is not None
        (staging_dir / "written now").touch()
        age(staging_dir, 1.1 * DAY)
        (staging_dir / "written now").touch()
        assert why_kept(staging_dir) is not None
        age(staging_dir, 1.1 * DAY)
        RunStore(tmp_path).sweep()
        assert os.listdir(tmp_path) == [], owner


def test_what_is_all_there_is_of_a_tag_stays(tmp_path: Path) -> None:
    aside = staging_dir_of(tmp_path / "tag", OLD).with_suffix(".old")
    aside.mkdir()
    age(aside, 10 * DAY)
    RunStore(tmp_path).sweep()
    assert aside.is_dir()
