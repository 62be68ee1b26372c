"""Faults of the machine: full disks, failing and interrupted system calls, read-only directories, clocks."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from places import TESTS
from programs import run_command, run_python
from sample import write_sample
from saved_files import record_of
from training import Job, build_engine, train_step

from zeroelastic.executors.build_info import describe_build
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.verdicts import check_quickly, find_newest
from zeroelastic.testing import RankPool
from zeroelastic.verbs.verify.verify import verify_checkpoint

ENGINES = "Checkpoint engines and storage"


@pytest.fixture(scope="module")
def faulty_io(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    built = tmp_path_factory.mktemp("faults") / "faulty_io.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(TESTS / "faults" / "faulty_io.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return built


EXECUTORS = ["numpy", *["native"] * describe_build("native").usable]


def run_faulty(faulty_io: Path, directory: Path, mode: str, code: int = 0) -> list[dict[str, Any]]:
    """What came of it with each executor."""
    (directory / "expected").mkdir()
    faults = {
        "LD_PRELOAD": str(faulty_io),
        "FAULTY_PATH": f"{directory}/" + "marked" * (mode != "w"),
        "FAULTY_MODE": mode,
    }
    faults |= {"FAULTY_AT": "1", "FAULTY_ERRNO": str(code)}
    done = run_python(TESTS / "faults" / "io_job.py", directory, *EXECUTORS, **faults)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(EXECUTORS)
    return found


def test_interrupted_and_short_calls_change_nothing(tmp_path: Path, faulty_io: Path) -> None:
    for found in run_faulty(faulty_io, tmp_path, "is"):
        assert found.pop("digest") is not None
        assert found == {"same": True, "keys": ["b", "w"], "json": 5000}


@pytest.mark.parametrize(
    ("mode", "code"),
    [
        pytest.param("r", errno.EIO, id="a read that fails"),
        pytest.param("f", errno.EIO, id="an fsync that fails", marks=pytest.mark.extended),
        pytest.param("w", errno.EDQUOT, id="writes beyond a quota", marks=pytest.mark.extended),
    ],
)
def test_a_call_that_fails_is_an_error_that_names_the_file(
    tmp_path: Path, faulty_io: Path, mode: str, code: int
) -> None:
    for found in run_faulty(faulty_io, tmp_path, mode, code=code):
        assert found["error"] == "OSError" and os.strerror(code) in found["text"] and "marked.pt" in found["text"]


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[None]:
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=60)


def save_on_a_bad_disk(directory: str) -> list[tuple[str, str]]:
    """A save that fits, one for which the disk is full, one on a disk that is read-only, and one when it is not."""
    engine = build_engine(Job())
    told: list[tuple[str, str]] = []
    root = Path(directory)

    def save(tag: str) -> None:
        try:
            engine.save_checkpoint(directory, tag=tag)
            told.append(("", ""))
        except OSError as error:
            told.append((type(error).__name__, str(error)))
        dist.barrier()

    def first(*command: str) -> None:
        if dist.get_rank() == 0 and command:
            subprocess.run(command, check=True)
        dist.barrier()

    train_step(engine, 0)
    save("good")
    train_step(engine, 1)
    if dist.get_rank() == 0:
        free = os.statvfs(directory)
        (root / "ballast").write_bytes(b"x" * max(0, free.f_bavail * free.f_frsize - (24 << 10)))
    dist.barrier()
    save("full")
    save("good")
    if dist.get_rank() == 0:
        (root / "ballast").unlink()
    first("mount", "-o", "remount,ro", directory)
    save("readonly")
    save("good")
    first("mount", "-o", "remount,rw", directory)
    save("better")
    return told


@pytest.mark.parametrize(
    "options",
    [
        ["reshard", "-n", "2"],
        ["export"],
        ["convert", "--to", "fsdp2"],
    ],
    ids=" ".join,
)
def test_a_verb_on_a_full_disk_is_one_error_line(tmp_path: Path, options: list[str]) -> None:
    write_sample(tmp_path / "ckpt", steps=[4])
    with small_disk(tmp_path / "disk", "64k"):
        done = run_command(options[0], tmp_path / "ckpt", tmp_path / "disk/out", *options[1:], "--quiet")
        assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert "No space left on device" in done.stderr or "bytes are needed" in done.stderr
        assert os.listdir(tmp_path / "disk") == []


@pytest.mark.support(
    ENGINES, "a disk that is full or read-only", "refused", "`SaveError` on every rank; older tags stay"
)
def test_a_full_disk_and_a_read_only_one(rank_pool: RankPool, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "3m"):
        results = rank_pool.run(save_on_a_bad_disk, 2, str(disk))
        assert results[0] == results[1]
        kinds, texts = zip(*results[0], strict=True)
        assert kinds == ("", "SaveError", "SaveError", "SaveError", "SaveError", "")
        assert all("No space left on device" in text for text in texts[1:3]), texts
        assert all("Read-only file system" in text for text in texts[3:5]), texts
        assert sorted(name for name in os.listdir(disk) if not name.endswith(".py")) == ["better", "good", "latest"]
        assert (disk / "latest").read_text() == "better"
        for tag, step in (("good", 1), ("better", 2)):
            assert record_of(disk / tag).global_steps == step and verify_checkpoint(disk / tag).valid


def save_with_wrong_clocks(directory: str) -> None:
    """Each save seems to be an hour older than the one before it, and the ranks' clocks are days apart."""
    engine = build_engine(Job())
    for step in range(3):
        train_step(engine, step)
        engine.save_checkpoint(directory, tag=("c", "b", "a")[step])
        if dist.get_rank() == 0:
            for path in (Path(directory) / ("c", "b", "a")[step]).iterdir():
                ahead = 86400 * (1 + ("rank_1" in path.name))
                os.utime(path, (time.time() + ahead - 3600 * step,) * 2)
        dist.barrier()


def test_clocks_decide_nothing(rank_pool: RankPool, tmp_path: Path) -> None:
    """The newest checkpoint is that of the last step, whatever the times of its files and its name say."""
    rank_pool.run(save_with_wrong_clocks, 2, str(tmp_path))
    tags = RunStore(tmp_path).tags()
    assert [(tag.name, tag.step) for tag in tags] == [("a", 3), ("b", 2), ("c", 1)]
    newest, passed = find_newest(tags, check_quickly)
    assert newest is not None and newest.name == "a" and passed == ()
