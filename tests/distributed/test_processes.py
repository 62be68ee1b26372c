"""The processes of a command: found in what a launcher sets, and sharing the work of the verbs that several can do."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from places import ROOT
from saved_files import flip
from torch.distributed import TCPStore
from warm_python import executable

from zeroelastic.distributed.processes import FIND_SECONDS, Processes, _find, _find_seconds, first_host
from zeroelastic.errors import UsageError
from zeroelastic.testing.sample import write_sample

WRITERS = [("reshard", "a", "b", "-n", "3"), ("export", "a", "b")]


def environment(**more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC"))}
    return {**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200", **more}


def cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zeroelastic", *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)


def torchrun(*arguments: object, count: int = 2) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count), "-m", "zeroelastic"]
    python = executable()
    command = [python, *launcher, *map(str, arguments), "--distributed"]
    env = environment(PYTHON_EXEC=python)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture
def job() -> Iterator[dict[str, str]]:
    """What a script of a torchrun job of two ranks finds in its environment; the job's store answers."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    yield {"RANK": "0", "WORLD_SIZE": "2", **address}
    del store


def test_one_process_needs_neither_launcher_nor_torch() -> None:
    alone = Processes()
    assert alone.all_gather("x") == ["x"] and alone.all_or_raise(lambda: 3) == 3 and alone.run_on_rank0(lambda: 4) == 4
    assert list(alone.mine(3)) == [0, 1, 2]
    code = (
        "import sys, zeroelastic.distributed.processes as p\n"
        "with p.launched_processes(distributed=False) as x: print(x.size, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "1 False\n"


def test_shares_cover_everything_once() -> None:
    for size in range(1, 7):
        shares = [n for rank in range(size) for n in Processes(rank, size).mine(10)]
        assert sorted(shares) == list(range(10))


def test_launchers_are_known_by_what_they_set() -> None:
    def find(**env: str) -> Processes:
        return _find(env)  # type: ignore[arg-type]

    with pytest.raises(UsageError, match="neither torchrun nor srun"):
        find()
    assert find(WORLD_SIZE="1", RANK="0") == Processes()
    assert find(WORLD_SIZE="4", RANK="2", MASTER_ADDR="a", MASTER_PORT="1") == Processes(2, 4)
    with pytest.raises(UsageError, match="RANK, MASTER_ADDR, MASTER_PORT is not"):
        find(WORLD_SIZE="4")
    # Inside a batch script there are SLURM_NTASKS and SLURM_PROCID although nobody else was started.
    with pytest.raises(UsageError, match="neither torchrun nor srun"):
        find(SLURM_NTASKS="4", SLURM_PROCID="0")
    env = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_STEP_NODELIST": "gpu[07-09]", "SLURM_JOB_ID": "7"}
    assert _find(env) == Processes(3, 4)  # type: ignore[arg-type]
    assert env["MASTER_ADDR"] == "gpu07" and 20000 <= int(env["MASTER_PORT"]) < 40000
    with pytest.raises(UsageError, match="SLURM_PROCID is not"):
        find(SLURM_STEP_NUM_TASKS="2")


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("gpu[003-007,9]", "gpu003"),
        ("gpu[3,5]", "gpu3"),
        ("r[1-2]n,x", "r1n"),
        ("n-1.x.org", "n-1.x.org"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.extended
def test_processes_of_srun_find_each_other(tmp_path: Path) -> None:
    write_sample(tmp_path / "a", world_size=3)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "zeroelastic", "reshard", "a", "b", "-n", "5", "--json", "--distributed"],
            cwd=tmp_path,
            env=environment(
                SLURM_STEP_NUM_TASKS="2",
                SLURM_PROCID=str(rank),
                SLURM_STEP_NODELIST="localhost",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert json.loads(said[0][0])["target_world_size"] == 5 and said[1][0] == ""


@pytest.mark.parametrize("verb", [("verify", "a"), *WRITERS], ids=" ".join)
def test_a_verb_that_a_script_of_a_job_starts_does_not_join_the_job(tmp_path: Path, job: dict[str, str], verb) -> None:
    write_sample(tmp_path / "a", world_size=2, steps=[2])
    command = [sys.executable, "-m", "zeroelastic", *verb]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(**job), capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "note: this process works alone; --distributed shares the work among 2 processes\n"


@pytest.mark.extended
def test_processes_that_do_not_find_each_other_say_who_is_missing(tmp_path, job, monkeypatch) -> None:
    write_sample(tmp_path / "a", world_size=1, steps=[2])
    command = [sys.executable, "-m", "zeroelastic", "verify", "a", "--distributed"]
    away = {**job, "MASTER_PORT": "9"}
    monkeypatch.setenv(FIND_SECONDS, "soon")
    with pytest.raises(UsageError, match="'soon', not a positive number of seconds"):
        _find_seconds()
    for env, said in (
        (environment(**job, ZEROELASTIC_FIND_SECONDS="1"), "did not find each other in 1 s: rank 1 is not here"),
        (environment(**away, ZEROELASTIC_FIND_SECONDS="1"), "they cannot meet at 127.0.0.1:9"),
    ):
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2 and said in done.stderr and done.stdout == "", done.stderr


@pytest.mark.extended
def test_a_process_that_waits_for_others_ends_by_sigterm(tmp_path: Path, job: dict[str, str]) -> None:
    write_sample(tmp_path / "a", world_size=1, steps=[2])
    command = [sys.executable, "-m", "zeroelastic", "verify", "a", "--distributed"]
    waiting = subprocess.Popen(command, cwd=tmp_path, env=environment(**job, ZEROELASTIC_FIND_SECONDS="600"))
    try:
        store = TCPStore(job["MASTER_ADDR"], int(job["MASTER_PORT"]), is_master=False)
        store.wait(["zeroelastic/1/here/0"], timedelta(seconds=60))
        time.sleep(0.5)
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait(timeout=20) == 128 + signal.SIGTERM
    finally:
        waiting.kill()
        waiting.wait()


@pytest.mark.parametrize("verb", WRITERS, ids=" ".join)
def test_a_second_process_that_writes_the_same_target_is_refused(tmp_path: Path, job: dict[str, str], verb) -> None:
    write_sample(tmp_path / "a", world_size=1, steps=[2])
    (tmp_path / ".b.zeroelastic-partial").mkdir()
    with open(tmp_path / ".b.zeroelastic-partial/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "zeroelastic", *verb]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(**job), capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 2 and "another process is writing this target" in done.stderr
    assert "--distributed" in done.stderr and not (tmp_path / "b").exists()


@pytest.mark.extended
def test_verify_shares_the_reading_and_finds_the_same(tmp_path: Path) -> None:
    write_sample(tmp_path / "a", world_size=3)
    alone, shared = (json.loads(run("verify", tmp_path / "a", "--json").stdout) for run in (cli, torchrun))
    for document in (alone, shared):
        assert document.pop("seconds") > 0 and document.pop("read_seconds") > 0
    assert alone == shared and alone["ok"]
    damaged = tmp_path / "a" / "global_step4" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    flip(damaged)
    done = cli("verify", tmp_path / "a", "--json")
    shared = torchrun("verify", tmp_path / "a", "--json")
    assert done.returncode == 3 and shared.returncode != 0
    assert json.loads(shared.stdout)["problems"] == json.loads(done.stdout)["problems"] != []


@pytest.mark.extended
def test_export_shares_the_tensors_and_writes_the_same_bytes(tmp_path: Path) -> None:
    write_sample(tmp_path / "a", world_size=3)
    options = ("--max-shard-size", "30KB", "--optimizer", "--json")
    alone = json.loads(cli("export", tmp_path / "a", tmp_path / "b", *options).stdout)
    done = torchrun("export", tmp_path / "a", tmp_path / "c", *options, count=3)
    assert done.returncode == 0, done.stderr
    shared = json.loads(done.stdout)
    assert shared["digests_compared"] == alone["digests_compared"] > 0
    names = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "c").iterdir()) and len(names) > 5
    assert all((tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes() for name in names)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


def test_damage_that_one_process_finds_ends_all_and_leaves_nothing(tmp_path: Path) -> None:
    write_sample(tmp_path / "a", world_size=2)
    path = tmp_path / "a" / "global_step4" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    flip(path, 20_000)
    for verb, more in (("reshard", ("-n", 3)), ("export", ("--optimizer",))):
        done = torchrun(verb, tmp_path / "a", tmp_path / "b", *more)
        assert done.returncode != 0 and "commit record" in done.stderr, done.stderr
        assert os.listdir(tmp_path) == ["a"]
