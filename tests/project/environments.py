"""What tests of the project run in: virtual environments, and directories that are made once for all workers."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from places import ROOT
from programs import run_program


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The directory of this name, which the first worker that asks for it fills by ``make``; the others wait."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    directory, done = shared / f"once-{name}", shared / f"once-{name}.done"
    with open(shared / f"once-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(directory, ignore_errors=True)  # of a worker that failed
            directory.mkdir()
            make(directory)
            done.touch()
    return directory


def run_benchmark(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script of benchmarks/ with these arguments."""
    path = os.pathsep.join([os.fspath(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return run_program(sys.executable, f"benchmarks/{script}", *arguments, cwd=ROOT, timeout=400, PYTHONPATH=path)


class Environment:
    """A virtual environment, used from a directory outside of the repository, without settings of Python's or ours."""

    def __init__(self, folder: Path, *options: str, **env: str) -> None:
        self.folder, self.work = folder / "venv", folder / "work"
        self.work.mkdir()
        left_out = ("PYTHON", "COVERAGE", "ZEROELASTIC")
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(left_out)} | env
        self.env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
        subprocess.run([sys.executable, "-m", "venv", *options, self.folder], env=self.env, timeout=120, check=True)
        (self.site,) = self.folder.glob("lib/python*/site-packages")

    def run(self, program: str, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.folder / "bin" / program), *map(str, arguments)]
        env = {**self.env, **env}
        return subprocess.run(command, cwd=self.work, env=env, capture_output=True, text=True, timeout=300, check=False)

    def output(self, program: str, *arguments: object, **env: str) -> str:
        done = self.run(program, *arguments, **env)
        assert done.returncode == 0, f"{program} {arguments}\n{done.stdout}{done.stderr}"
        return done.stdout
