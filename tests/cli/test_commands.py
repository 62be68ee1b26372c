"""Each verb of the command line works as a program of its own; other tests run the verbs in their own process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_command
from places import GOLDEN, ROOT

from zeroelastic.cli.app import VERBS

RUNS = {
    "inspect": ["ckpt"],
    "show": ["ckpt", "*"],
    "verify": ["ckpt"],
    "plan": ["ckpt", "--world-size", "3", "--bandwidth", "1GiB/s"],
    "reshard": ["ckpt", "out", "-n", "3"],
    "diff": ["ckpt", "ckpt"],
    "export": ["ckpt", "out"],
    "convert": ["ckpt", "out", "--to", "universal"],
    "ls": ["ckpt"],
    "latest": ["ckpt"],
    "prune": ["ckpt", "--keep", "1"],
    "prove": ["--help"],
    "timeline": ["--help"],
    "doctor": ["--help"],
}
"""A run of each verb; those that need more than a checkpoint show their help."""


def test_every_verb_is_run() -> None:
    assert set(VERBS) == set(RUNS)


@pytest.mark.parametrize(
    "verb", [verb if verb == "inspect" else pytest.param(verb, marks=pytest.mark.extended) for verb in RUNS]
)
def test_a_verb_is_a_program(tmp_path: Path, verb: str) -> None:
    shutil.copytree(GOLDEN / "elastic2", tmp_path / "ckpt")
    command = [sys.executable, "-m", "zeroelastic", verb, *RUNS[verb]]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout, done.stderr
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    within = run_command(verb, *RUNS[verb], cwd=tmp_path)
    assert within.returncode == 0
    if "--help" in RUNS[verb]:  # click's runner for tests wraps at another width
        assert within.stdout.split() == done.stdout.split()
    else:
        assert len(within.stdout.splitlines()) == len(done.stdout.splitlines())


def test_a_misspelt_verb_is_misuse(tmp_path: Path) -> None:
    assert run_command("verfiy", cwd=tmp_path).returncode == 2
