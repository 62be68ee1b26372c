"""elastic.memory.place, reaper: real launchers that restart, end and are killed, and what they leave."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from programs import wait_for

from zeroelastic.distributed.process_identity import machine, start_of
from zeroelastic.elastic.memory.place import MEMORY_DIR, JobPlace, RunPlace, launcher
from zeroelastic.elastic.memory.reaper import LOCK_NAME, start_reaper
from zeroelastic.errors import CheckpointError, SaveError

LIMIT_S = 60.0

WORKER = """
import json, os, sys, time, types
from pathlib import Path
import zeroelastic
package = types.ModuleType("zeroelastic.elastic")  # without its imports, of which torch takes each worker a second
package.__path__ = [str(Path(zeroelastic.__file__).parent / "elastic")]
sys.modules[package.__name__] = package
from zeroelastic.elastic.memory.place import JobPlace, RunPlace
from zeroelastic.elastic.memory.reaper import start_reaper
out, wait = Path(sys.argv[1]), sys.argv[2]
place = JobPlace.of_this_job()
place.create()
start_reaper(*place.launcher, str(place.path))
restart, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
(place.path / f"kept-{restart}-{rank}").write_text("x" * 100)
time.sleep(0.3)
seen = sorted(os.listdir(place.path))
(out / f"part-{restart}-{rank}").write_text(json.dumps([str(place.path), place.node, os.getpid(), os.getppid(), seen]))
(out / f"part-{restart}-{rank}").rename(out / f"{restart}-{rank}")
while not ((out / f"{restart}-0").exists() and (out / f"{restart}-1").exists()):
    time.sleep(0.05)
if restart == "0":
    sys.exit(3)
if wait == "wait":
    time.sleep(60)
"""


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], Path]]]:
    """Starts a job of two workers that fails once and is restarted; returns torchrun and where the workers report."""
    jobs: list[subprocess.Popen[str]] = []
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "wrapper.sh").write_text(f'#!/bin/sh\n{sys.executable} "$@"\nexit $?\n')
    (tmp_path / "wrapper.sh").chmod(0o755)

    def start(*arguments: str, wrapped: bool = False) -> tuple[subprocess.Popen[str], Path]:
        out = tmp_path / "job"
        out.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        command += ["--max-restarts", "1", "--monitor-interval", "0.1"]
        command += ["--no-python", str(tmp_path / "wrapper.sh")] if wrapped else []
        job = subprocess.Popen(
            [*command, str(tmp_path / "worker.py"), str(out), *arguments],
            env={**os.environ, MEMORY_DIR: str(tmp_path / "memory")},
            text=True,
        )
        jobs.append(job)
        return job, out

    (tmp_path / "memory").mkdir()
    yield start
    for job in jobs:
        job.kill()
        job.wait(LIMIT_S)


def report(out: Path, restart: int, rank: int) -> list[Any]:
    wait_for((out / f"{restart}-{rank}").exists, f"worker {rank} of start {restart}")
    found: list[Any] = json.loads((out / f"{restart}-{rank}").read_text())
    return found


@pytest.mark.parametrize("how", ["done", pytest.param("SIGKILL", marks=pytest.mark.extended)])
def test_what_a_job_keeps_outlives_its_workers_and_goes_with_it(torchrun: Any, how: str) -> None:
    job, out = torchrun("wait" if how == "SIGKILL" else "0")
    (first, *_), (second, node, worker, _, seen) = report(out, 0, 0), report(out, 1, 1)
    other = report(out, 1, 0)
    assert first == second == other[0] and node == other[1]
    assert {"kept-0-0", "kept-0-1", "reaper.lock"} <= set(seen), "the files of the start before"
    if how == "SIGKILL":
        assert Path(first).is_dir()
        job.kill()
    job.wait(LIMIT_S)
    wait_for(lambda: not Path(first).exists(), "the reaper removes the directory")
    if how == "SIGKILL":  # the workers are left behind
        for pid in (worker, other[2]):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.extended
def test_a_wrapper_around_each_worker_makes_no_other_node(torchrun: Any) -> None:
    job, out = torchrun("0", wrapped=True)
    (path, node, _, parent, _), other = report(out, 0, 0), report(out, 0, 1)
    assert [path, node] == other[:2] and job.pid != parent != other[3]
    assert str(job.pid) in node
    job.wait(LIMIT_S)


def test_a_process_that_nobody_launched_is_its_own_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert launcher() == os.getpid()
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert launcher() == os.getppid()


@pytest.fixture
def place(tmp_path: Path) -> JobPlace:
    return JobPlace.of_this_job({MEMORY_DIR: str(tmp_path)})


def test_the_directory_is_for_this_user_alone(place: JobPlace) -> None:
    place.create()
    place.create()
    assert place.path.stat().st_mode & 0o777 == place.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_link_or_an_open_directory_is_refused(place: JobPlace, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.path.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SaveError, match="this user alone"):
        place.create()
    place.path.parent.unlink()
    place.path.parent.mkdir()
    place.path.parent.chmod(0o755)
    with pytest.raises(SaveError, match=MEMORY_DIR):
        place.create()


def test_what_a_launcher_that_ended_has_left_is_removed(place: JobPlace) -> None:
    """By its process id: of a process that has ended, be it before its start was asked for; of another one that has the
    same id; not of other namespaces."""
    place.create()
    namespace, _, _ = place.path.name.partition("-")
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait(LIMIT_S)
    dead, again = f"{namespace}-{ended.pid}-12345", f"{namespace}-{os.getpid()}-1"
    names = [dead, again, f"1{namespace}-{ended.pid}-12345", f"{namespace}-{ended.pid}-"]
    for name in names:
        (place.path.parent / name).mkdir()
    place.create()
    assert sorted(os.listdir(place.path.parent)) == sorted([place.path.name, names[2]])


IN_A_CONTAINER = """
import os, sys, time
from zeroelastic.elastic.memory.place import JobPlace
from zeroelastic.elastic.memory.reaper import start_reaper
place = JobPlace.of_this_job({"ZEROELASTIC_MEMORY_DIR": sys.argv[1]})
place.create()
start_reaper(*place.launcher, str(place.path))
(place.path / "kept").write_text("x")
print(place.path, flush=True)
time.sleep(60)
"""


def test_what_a_container_that_was_killed_has_left_is_removed(place: JobPlace, tmp_path: Path) -> None:
    """Not before: its processes cannot be seen from here, and the lock of its reaper can."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.getuid() != 0 or subprocess.run([*unshare, "true"], check=False).returncode != 0:
        pytest.skip("needs the right to make PID namespaces")
    command = [*unshare, sys.executable, "-c", IN_A_CONTAINER, str(tmp_path)]
    container = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert container.stdout is not None
        left = Path(container.stdout.readline().strip())
        assert left.parent == place.path.parent
        wait_for(lambda: (left / LOCK_NAME).read_text(), "its reaper")
        place.create()
        assert (left / "kept").exists()
    finally:
        container.kill()
        container.communicate()
    time.sleep(2.5)  # its reaper would have removed it
    assert (left / "kept").exists()
    place.create()
    assert os.listdir(place.path.parent) == [place.path.name]


@pytest.mark.parametrize("held", [LOCK_NAME, "none", "another boot", "no reaper"])
def test_what_is_in_another_pid_namespace_stays_unless_its_lock_is_free(place: JobPlace, held: str) -> None:
    place.create()
    namespace, _, _ = place.path.name.partition("-")
    other = place.path.parent / f"1{namespace}-7-12345"
    other.mkdir(0o700)
    boot = "0000" if held == "another boot" else machine().partition("/")[0]
    (other / LOCK_NAME).write_text("" if held == "no reaper" else f"{boot}/pid:[1{namespace}]")
    with open(other / LOCK_NAME) as lock:
        if held == LOCK_NAME:
            fcntl.flock(lock, fcntl.LOCK_SH)
        place.create()
    assert other.exists() == (held != "none")


def test_a_reaper_holds_no_connection_of_the_worker(tmp_path: Path) -> None:
    """Sockets that pass through exec, such as gloo's: else peers of a killed worker wait for it for ever."""
    (tmp_path / "job").mkdir()
    ours, theirs = socket.socketpair()
    os.set_inheritable(ours.fileno(), True)
    start_reaper(os.getpid(), start_of(os.getpid()), str(tmp_path / "job"))
    wait_for((tmp_path / "job" / "reaper.lock").exists, "a reaper")
    ours.close()
    theirs.settimeout(LIMIT_S)
    assert theirs.recv(1) == b"", "the other end is still open somewhere"
    theirs.close()
    (reaper,) = [
        int(name)
        for name in os.listdir("/proc")
        if name.isdecimal() and str(tmp_path / "job").encode() in _command(int(name))
    ]
    os.kill(reaper, signal.SIGKILL)


ALONE = """
import os, sys, time
from zeroelastic.distributed.process_identity import start_of
from zeroelastic.elastic.memory.reaper import start_reaper
start_reaper(os.getpid(), start_of(os.getpid()), sys.argv[1])
print(os.path.exists(f"{sys.argv[1]}/reaper.lock"), flush=True)
time.sleep(60)
"""


@pytest.mark.extended
def test_a_reaper_outlives_a_kill_of_all_processes_that_descend_from_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    job = subprocess.Popen([sys.executable, "-c", ALONE, str(tmp_path / "job")], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    try:
        assert job.stdout.readline() == "True\n", "the reaper waits"
        assert psutil.Process(job.pid).children(recursive=True) == []
    finally:
        job.kill()
        job.communicate()
    wait_for(lambda: not (tmp_path / "job").exists(), "the reaper removes the directory")


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_the_reaper_of_a_launcher_that_had_ended_removes_the_directory_at_once(tmp_path: Path) -> None:
    """A worker that is still starting when its launcher is killed finds no start of it."""
    (tmp_path / "job").mkdir()
    ended = subprocess.Popen(["true"])
    ended.wait(LIMIT_S)
    start_reaper(ended.pid, start_of(ended.pid), str(tmp_path / "job"))
    wait_for(lambda: not (tmp_path / "job").exists(), "the reaper removes the directory")
    command = str(tmp_path / "job").encode()
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    wait_for(lambda: not any(command in _command(pid) for pid in pids), "the reaper ends")


def test_one_reaper_waits_and_one_that_comes_late_finds_nothing_to_do(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    waited = subprocess.Popen(["sleep", "60"])
    try:
        started = start_of(waited.pid)
        for _ in range(3):
            start_reaper(waited.pid, started, str(tmp_path / "job"))
        wait_for((tmp_path / "job" / "reaper.lock").exists, "a reaper")
        time.sleep(0.3)
        assert (tmp_path / "job").is_dir()
    finally:
        waited.kill()
    wait_for(lambda: not (tmp_path / "job").exists(), "the reaper removes the directory")
    waited.wait(LIMIT_S)
    start_reaper(waited.pid, started, str(tmp_path / "job"))  # ends: the directory has gone


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[RunPlace]:
    """A run with one complete tag, in a job's directory."""
    place = JobPlace(tmp_path / "memory" / "user" / "job", "node")
    place.path.parents[1].mkdir()
    place.create()
    run = RunPlace.of(place.path, tmp_path / "ckpt", "params")
    run.create()
    (run.complete / TAG).mkdir(0o700)
    file = run.complete / TAG / "zeroelastic.json"
    file.touch(0o600)
    yield run
    for path in [run.path, *run.path.parents[:2]]:
        path.chmod(0o700)


TAG = "step3-" + "0" * 32


LEVELS = "user", "job", "run", "complete", "tag", "file"


def at_level(kept: RunPlace, level: str) -> Path:
    """A directory or the file on the way to a checkpoint in memory."""
    tag = kept.complete / TAG
    places = (kept.path.parents[1], kept.path.parent, kept.path, kept.complete, tag, tag / "zeroelastic.json")
    return dict(zip(LEVELS, places, strict=True))[level]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707])
def test_what_others_may_enter_or_write_is_not_read(kept: RunPlace, level: str, mode: int, caplog: Any) -> None:
    assert kept.tags() == [TAG]
    at_level(kept, level).chmod(mode)
    assert kept.tags() == [] and "this user alone may read and write" in caplog.text
    with pytest.raises(CheckpointError, match="so that it is not read"):
        kept.require_own(TAG)


def test_what_belongs_to_another_user_is_not_read(kept: RunPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    assert kept.tags() == []
    with pytest.raises(CheckpointError, match="this user alone"):
        kept.require_own(TAG)


@pytest.mark.parametrize("level", LEVELS)
def test_no_link_is_followed(kept: RunPlace, tmp_path: Path, level: str) -> None:
    place = at_level(kept, level)
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    assert kept.tags() == []
    with pytest.raises(CheckpointError, match="so that it is not read"):
        kept.require_own(TAG)
    place.unlink()
    (tmp_path / "elsewhere").rename(place)
    assert kept.tags() == [TAG]


def test_the_directory_may_be_reached_by_a_link_and_what_is_absent_is_no_error(tmp_path: Path, kept: RunPlace) -> None:
    (tmp_path / "shm").symlink_to(tmp_path / "memory")
    linked = RunPlace(tmp_path / "shm" / kept.path.relative_to(tmp_path / "memory"))
    assert linked.tags() == [TAG]
    kept.require_own("step4-" + "0" * 32)
    kept.remove_tags()
    assert kept.tags() == [] == linked.tags()
