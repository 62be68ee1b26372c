"""A worker that is forked from a warm process is, for its launcher and for its script, like one that was started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from places import ROOT

HERE = Path(__file__).parent
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    """A process that plays the launcher."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def start(launcher: subprocess.Popen[bytes], tmp_path: Path) -> Iterator[Start]:
    """Starts a worker; keyword arguments are variables of its environment."""
    started: list[subprocess.Popen[str]] = []

    def run(script: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "warm_run.py"), str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "LAUNCHER": str(launcher.pid), **environment},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def script(tmp_path: Path, text: str, name: str = "train.py") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def output(process: subprocess.Popen[str], given: str = "") -> str:
    out, err = process.communicate(given, timeout=60)
    assert process.returncode == 0, err
    return out


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


ABOUT = """
import json, os, random, signal, sys
print(json.dumps({
    "argv": sys.argv, "rank": os.environ.get("RANK"), "path": sys.path[0], "name": __name__,
    "main": sys.modules["__main__"].__dict__.get("__file__"), "directory": os.getcwd(),
    "input": sys.stdin.read(), "parent": os.getppid(), "umask": os.umask(0), "random": random.random(),
    "processors": sorted(os.sched_getaffinity(0)), "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    "files": sorted(os.listdir("/proc/self/fd")),
}))
print("error", file=sys.stderr)
"""


def test_a_script_sees_what_it_would_see_in_a_process_of_its_own(start: Start, tmp_path: Path) -> None:
    train = script(tmp_path, ABOUT)
    told = [json.loads(output(start(train, "a", "--b", RANK=str(rank)), given=f"in {rank}")) for rank in range(3)]
    own = subprocess.run(
        [sys.executable, str(train), "a", "--b"],
        input="own", capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    alone = json.loads(own.stdout)
    for rank, about in enumerate(told):
        assert about["rank"] == str(rank) and about["input"] == f"in {rank}"
        same = ("argv", "path", "name", "main", "directory", "umask", "processors", "term", "files")
        assert {key: about[key] for key in same} == {key: alone[key] for key in same}
    assert len({about["parent"] for about in told}) == 1, "one warm process"
    assert len({about["random"] for about in told}) == 3


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("raise ValueError('no')", 1),
        ("import os; os._exit(9)", 9),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -6),
        ("import atexit; atexit.register(print, 'at exit')", 0),
    ],
)
def test_a_worker_ends_as_its_script_ends(start: Start, tmp_path: Path, ending: str, code: int) -> None:
    process = start(script(tmp_path, f"print('begun', flush=True)\n{ending}\n"))
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert out == ("begun\nat exit\n" if "atexit" in ending else "begun\n")
    assert ("ValueError: no" in err) == (code == 1)


WAITING = """
import os, signal, sys, time
def stop(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, lambda *_: print("usr1", flush=True))
print(os.getpid(), os.getppid(), flush=True)
while True:
    time.sleep(0.05)
"""


def test_signals_reach_the_script(start: Start, tmp_path: Path) -> None:
    process = start(script(tmp_path, WAITING))
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "usr1\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "got SIGTERM\n"
    assert process.wait(30) == 5


def test_a_worker_dies_with_the_process_that_its_launcher_knows(start: Start, tmp_path: Path) -> None:
    first, second = (start(script(tmp_path, WAITING), RANK=rank) for rank in "01")
    assert first.stdout is not None and second.stdout is not None
    (worker, server), (other, _) = (map(int, process.stdout.readline().split()) for process in (first, second))
    first.kill()
    until(lambda: not psutil.pid_exists(worker), "the worker lives on")
    assert psutil.pid_exists(other) and psutil.pid_exists(server)
    os.kill(server, signal.SIGKILL)
    assert second.wait(30) == 1
    assert "the warm process was killed, and this worker with it" in second.communicate()[1]
    until(lambda: not psutil.pid_exists(other), "the worker lives on")
    third = start(script(tmp_path, ABOUT))
    assert json.loads(output(third))["parent"] != server


def test_a_warm_process_ends_after_its_launcher_and_its_workers(
    start: Start, launcher: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    process = start(script(tmp_path, WAITING))
    assert process.stdout is not None
    worker, server = map(int, process.stdout.readline().split())
    launcher.kill()
    launcher.wait()
    time.sleep(2.5)
    assert psutil.pid_exists(worker) and psutil.pid_exists(server)
    process.terminate()
    assert process.wait(30) == 5
    until(lambda: not psutil.pid_exists(server), "the warm process lives on")


IMPORTING = """
import os, sys
import {module}
print(os.getppid(), {module}.__dict__.get("VALUE"), {module}.__dict__.get("PROCESS") == os.getpid())
"""


def imported_ahead(start: Start, train: Path, module: str) -> bool:
    """Whether the module has been imported by the warm process some time after the first start."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if output(start(train)).split()[2] == "False":
            return True
        time.sleep(0.1)
    return False


def test_what_the_script_imports_is_imported_ahead_until_it_changes(start: Start, tmp_path: Path) -> None:
    module = script(tmp_path, "import os\nPROCESS = os.getpid()\nVALUE = 1\n", "mine.py")
    train = script(tmp_path, IMPORTING.format(module="mine"))
    first = output(start(train)).split()
    assert first[1:] == ["1", "True"]
    assert imported_ahead(start, train, "mine")
    module.write_text("import os\nPROCESS = os.getpid()\nVALUE = 23\n")
    changed = output(start(train)).split()
    assert changed[1] == "23" and changed[0] != first[0], "another warm process"


@pytest.mark.parametrize(
    "harm",
    [
        "import os\nVALUE = int(os.environ.get('RANK', '0'))",
        "import os\nVALUE = int(os.getenv('LOCAL_RANK', '0'))",
        "import os\nVALUE = int(os.environ['RANK']) if 'RANK' in os.environ else 0",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nVALUE = 3",
        "import os\nassert 'RANK' in os.environ\nVALUE = 3",
        "import os\nos.environ.get('RANK') or os._exit(1)\nVALUE = 3",
    ],
)
def test_what_would_be_wrong_after_a_fork_is_not_imported_ahead(start: Start, tmp_path: Path, harm: str) -> None:
    script(tmp_path, f"import os\nPROCESS = os.getpid()\n{harm}\n", "mine.py")
    script(tmp_path, "import os\nPROCESS = os.getpid()\n", "harmless.py")
    train = script(tmp_path, IMPORTING.format(module="mine") + "import harmless\n")
    last = script(tmp_path, IMPORTING.format(module="harmless"), "last.py")
    server, *_ = output(start(train, RANK="3", LOCAL_RANK="3")).split()
    assert imported_ahead(start, last, "harmless"), "what comes later is"
    assert output(start(train, RANK="3", LOCAL_RANK="3")).split() == [server, "3", "True"]


def test_another_environment_or_directory_takes_another_warm_process(start: Start, tmp_path: Path) -> None:
    train = script(tmp_path, ABOUT)

    def server(path: Path, **environment: str) -> int:
        found = json.loads(output(start(path, **environment)))["parent"]
        assert isinstance(found, int)
        return found

    first = server(train, MASTER_PORT="1", TORCHELASTIC_RESTART_COUNT="0")
    assert server(train, MASTER_PORT="2", TORCHELASTIC_RESTART_COUNT="1", WORLD_SIZE="7") == first
    second = server(train, OMP_NUM_THREADS="2")
    assert second != first
    (tmp_path / "other").mkdir()
    assert server(script(tmp_path / "other", ABOUT), OMP_NUM_THREADS="2") not in (first, second)


def test_without_a_warm_process_a_worker_starts_all_the_same(start: Start, tmp_path: Path) -> None:
    """A directory of sockets that others may enter is not used."""
    (tmp_path / f"zeroelastic-warm-{os.getuid()}").mkdir(mode=0o755)
    out = output(start(script(tmp_path, "print('ran')"), TMPDIR=str(tmp_path)))
    assert out.splitlines()[0].startswith("cold: is not a directory that this user alone may enter")
    assert out.splitlines()[1] == "ran"


def test_many_workers_at_once_have_one_warm_process(start: Start, tmp_path: Path) -> None:
    train = script(tmp_path, ABOUT)
    workers = [start(train, RANK=str(rank)) for rank in range(12)]
    told = [json.loads(output(worker)) for worker in workers]
    assert {about["rank"] for about in told} == {str(rank) for rank in range(12)}
    assert len({about["parent"] for about in told}) == 1
