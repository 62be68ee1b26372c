"""Builds of DeepSpeed's ops: which locks a killed build left, who says so and removes them, and builds ahead."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import Done, launched
from packaging import version

from zeroelastic.deepspeed.install import op_builds
from zeroelastic.deepspeed.install.op_builds import find_locks, remove_left_locks, waits_for_lock_files
from zeroelastic.testing import RankPool


def make_lock(root: Path, *, quiet_s: float = 0.0) -> Path:
    """A lock as torch makes it, in a folder in which nothing was written for a while."""
    lock = root / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - quiet_s,) * 2)
    return lock


@pytest.fixture(autouse=True)
def torch_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch up to 2.13, whichever is installed."""
    monkeypatch.setattr(op_builds, "waits_for_lock_files", lambda: True)


WAITS = waits_for_lock_files()


@pytest.mark.parametrize(("source", "waits"), [("baton = FileBaton(path)", True), ("with FileLock(path):", False)])
def test_a_torch_that_locks_its_files_is_held_up_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, waits: bool
) -> None:
    """torch 2.14.1 leaves the file after every build, and the kernel releases the lock."""
    made = tmp_path / "torch" / "utils" / "cpp_extension.py"
    made.parent.mkdir(parents=True)
    made.write_text(source)
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path / "torch")])
    monkeypatch.setattr(op_builds, "find_spec", lambda name: found)
    monkeypatch.setattr(op_builds, "waits_for_lock_files", waits_for_lock_files)
    lock = make_lock(tmp_path, quiet_s=5000)
    assert [one.path for one in find_locks(tmp_path)] == [str(lock)] * waits


def test_the_installed_torch_is_known() -> None:
    assert WAITS or version.parse(torch.__version__).release >= (2, 14)


def test_a_lock_that_a_process_has_open_is_held(tmp_path: Path) -> None:
    lock = make_lock(tmp_path, quiet_s=5000)
    with open(lock):
        (found,) = find_locks(tmp_path)
        assert (found.path, found.state, found.problem) == (str(lock), "held", "")


def test_a_lock_that_is_released_while_it_is_looked_at_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = make_lock(tmp_path)
    built = lock.with_name("cpu_adam.so")
    built.touch()
    os.utime(built, (time.time() - 5000,) * 2)
    monkeypatch.setattr(op_builds, "_is_shared", lambda path: False)
    monkeypatch.setattr(op_builds, "_is_open", lambda status: lock.unlink() is not None)
    assert [found.state for found in find_locks(tmp_path)] == ["unknown"]


@pytest.mark.parametrize(
    ("shared", "quiet_s", "state"), [(False, 5000, "left"), (True, 5000, "unknown"), (False, 60, "unknown")]
)
def test_a_lock_counts_as_left_only_where_nobody_can_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool, quiet_s: float, state: str
) -> None:
    """On a file system of this machine, where nothing was built for long; otherwise it is named and stays."""
    monkeypatch.setattr(op_builds, "_is_shared", lambda path: shared)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = make_lock(tmp_path, quiet_s=quiet_s)
    (found,) = find_locks()
    assert found.state == state and f"rm {lock}" in found.problem
    assert ("doctor --fix" in found.problem) == (state == "left")
    assert [removed.path for removed in remove_left_locks()] == [str(lock)] * (state == "left")
    assert lock.exists() == (state != "left")


@pytest.fixture
def run(rank_pool: RankPool) -> Callable[..., Done]:
    """``launched``, in the process of a rank: a new interpreter would import torch and DeepSpeed for seconds."""
    return lambda *arguments, **env: rank_pool.run(launched, 1, [*arguments], env)[0]


@pytest.mark.quick
@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_the_first_rank_of_a_node_says_that_a_lock_is_left_before_a_script_begins(
    run: Callable[..., Done], tmp_path: Path, local_rank: str
) -> None:
    lock = make_lock(tmp_path / "ops")
    script = tmp_path / "train.py"
    script.write_text("print('begun')")
    done = run(str(script), TORCH_EXTENSIONS_DIR=str(tmp_path / "ops"), LOCAL_RANK=local_rank)
    assert done.returncode == 0 and done.stdout.endswith("begun\n"), done.stdout + done.stderr
    assert (f"remove it: rm {lock}" in done.stderr) == (local_rank == "0" and WAITS)


@pytest.mark.quick
def test_an_op_is_built_before_a_script_begins(run: Callable[..., Done], tmp_path: Path) -> None:
    """An op that is built already, so that nothing is compiled here."""
    script = tmp_path / "train.py"
    script.write_text("print('begun')")
    done = run("--build-op", "deepspeed_shm_comm", str(script))
    assert done.returncode == 0 and done.stdout.endswith("begun\n"), done.stdout + done.stderr
    assert "op deepspeed_shm_comm is built" in done.stderr


@pytest.mark.quick
def test_an_op_that_does_not_exist_is_named_with_those_that_do(run: Callable[..., Done]) -> None:
    done = run("--build-op", "no_such_op")
    assert (
        done.returncode == 2 and "has no op no_such_op here. Choose among " in done.stderr and "cpu_adam" in done.stderr
    )
