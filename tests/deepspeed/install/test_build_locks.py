"""Locks of extension builds: one that a killed process left stops nobody, one of a living process is waited for."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import zeroelastic
from zeroelastic.distributed.process_identity import identity
from zeroelastic.testing import RankPool


def messages() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroelastic").addHandler(handler)
    return said


def outlive_a_builder(path: str, killed_after_s: float) -> tuple[bool, float, list[str]]:
    """A process is killed while it builds; another wants to build what it was building."""
    from torch.utils.file_baton import FileBaton

    zeroelastic.install()
    said = messages()
    builder = os.fork()
    if builder == 0:
        FileBaton(path).try_acquire()
        time.sleep(killed_after_s)
        os.kill(os.getpid(), signal.SIGKILL)
    if not killed_after_s:
        os.waitpid(builder, 0)
    while not os.path.exists(path):
        time.sleep(0.01)
    began = time.monotonic()
    baton = FileBaton(path)
    acquired = bool(baton.try_acquire())
    seconds = time.monotonic() - began
    if acquired:
        baton.release()
    return acquired, seconds, said


@pytest.mark.parametrize("killed_after_s", [0.0, 1.5])
def test_the_lock_of_a_killed_builder_is_taken_over_with_a_log_line(
    rank_pool: RankPool, tmp_path: Path, killed_after_s: float
) -> None:
    """Whether it was killed before this process came, or while it waits."""
    lock = tmp_path / "lock"
    ((acquired, seconds, said),) = rank_pool.run(outlive_a_builder, 1, str(lock), killed_after_s)
    assert acquired and seconds < 20 and not lock.exists()
    assert len(said) == 1 and str(lock) in said[0] and "left by a process that has ended" in said[0]


def die_before_a_lock_is_signed(path: str) -> tuple[bool, float]:
    """A process is killed when it would write into a lock that is there already; another wants to build."""
    from torch.utils.file_baton import FileBaton

    zeroelastic.install()
    builder = os.fork()
    if builder == 0:
        with mock.patch.object(Path, "write_text", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)):
            FileBaton(path).try_acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(builder, 0)
    began = time.monotonic()
    return bool(FileBaton(path).try_acquire()), time.monotonic() - began


def test_a_lock_is_signed_from_the_moment_it_is_there(rank_pool: RankPool, tmp_path: Path) -> None:
    ((acquired, seconds),) = rank_pool.run(die_before_a_lock_is_signed, 1, str(tmp_path / "lock"), timeout=30)
    assert acquired and seconds < 10


def lock_where_it_cannot_be_made_at_once(path: str, name: str) -> tuple[bool, str, bool]:
    """Whether a lock is made and signed, on a file system without files that have no name, or without links."""
    from torch.utils.file_baton import FileBaton

    zeroelastic.install()
    original = getattr(os, name)

    def refuse(*args: Any, **more: Any) -> Any:
        if name == "open" and args[1] & os.O_TMPFILE != os.O_TMPFILE:
            return original(*args, **more)
        raise OSError(errno.EOPNOTSUPP, "not on this file system")

    before = len(os.listdir("/proc/self/fd"))
    baton = FileBaton(path)
    with mock.patch.object(os, name, refuse):
        made = bool(baton.try_acquire())
    found = Path(path).read_text() == identity(os.getpid())
    baton.release()
    return made, "signed" if found else "not signed", len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["open", "link"])
def test_a_lock_is_signed_on_every_file_system(rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    assert rank_pool.run(lock_where_it_cannot_be_made_at_once, 1, str(tmp_path / "lock"), name) == [
        (True, "signed", True)
    ]


def build_one_after_the_other(path: str) -> tuple[bool, float]:
    """Rank 0 builds for a while, rank 1 needs the same; then nobody does."""
    from torch.utils.file_baton import FileBaton

    zeroelastic.install()
    baton = FileBaton(path)
    if dist.get_rank() == 0:
        assert baton.try_acquire()
        dist.barrier()
        time.sleep(1.5)
        baton.release()
        return True, 0.0
    dist.barrier()
    began = time.monotonic()
    acquired = bool(baton.try_acquire())
    baton.wait()
    return acquired, time.monotonic() - began


def test_the_lock_of_a_living_builder_is_waited_for(rank_pool: RankPool, tmp_path: Path) -> None:
    _, (acquired, seconds) = rank_pool.run(build_one_after_the_other, 2, str(tmp_path / "lock"))
    assert not acquired and 1.0 < seconds < 20


def wait_beside_an_unsigned_lock(path: str, shared: bool, quiet_s: float) -> list[str]:
    """A lock that a process without zeroelastic made; removed by somebody after five seconds."""
    import threading

    from torch.utils.file_baton import FileBaton

    from zeroelastic.deepspeed.install import build_locks

    zeroelastic.install()
    said = messages()
    build_locks._WARN_S, build_locks._QUIET_S = 1.0, quiet_s
    vars(build_locks)["_is_shared"] = lambda path: shared
    Path(path).touch()
    threading.Timer(5.0, lambda: Path(path).unlink(missing_ok=True)).start()
    assert FileBaton(path).try_acquire()
    return said


@pytest.mark.parametrize(
    ("shared", "quiet_s", "removed"), [(False, 0.0, True), (True, 0.0, False), (False, 60.0, False)]
)
def test_an_unsigned_lock_is_removed_only_where_nobody_can_hold_it(
    rank_pool: RankPool, tmp_path: Path, shared: bool, quiet_s: float, removed: bool
) -> None:
    """On a file system of this machine, where nothing was built for long; otherwise it is named."""
    lock = tmp_path / "lock"
    (said,) = rank_pool.run(wait_beside_an_unsigned_lock, 1, str(lock), shared, quiet_s)
    assert any("left by a process" in line for line in said) == removed, said
    assert any(f"remove it: rm {lock}" in line for line in said) != removed, said


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zeroelastic.run", *arguments],
        env={**os.environ, "ZEROELASTIC_LOG": "info", **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_an_op_is_built_before_a_script_begins_though_a_killed_process_left_its_lock(tmp_path: Path) -> None:
    """An op that is built already: its folder is copied, so that nothing is compiled here."""
    built = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "deepspeed_shm_comm"
    shutil.copytree(built, tmp_path / "ops" / built.name)
    killed = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (tmp_path / "ops" / built.name / "lock").write_text(identity(killed.pid))
    killed.kill()
    killed.wait()
    script = tmp_path / "train.py"
    script.write_text("print('begun')")
    done = run("--build-op", "deepspeed_shm_comm", str(script), TORCH_EXTENSIONS_DIR=str(tmp_path / "ops"))
    assert done.returncode == 0 and done.stdout.endswith("begun\n"), done.stdout + done.stderr
    assert "left by a process that has ended" in done.stderr and "op deepspeed_shm_comm is built" in done.stderr


def test_an_op_that_does_not_exist_is_named_with_those_that_do() -> None:
    done = run("--build-op", "no_such_op")
    assert (
        done.returncode == 2 and "has no op no_such_op here. Choose among " in done.stderr and "cpu_adam" in done.stderr
    )
