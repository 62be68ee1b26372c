"""Programs of their own, as tests run them: how one ended and what it printed; and the sources to build one."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from places import ROOT


def run_program(
    *command: object, cwd: Path | None = None, timeout: float = 300, **env: str
) -> subprocess.CompletedProcess[str]:
    """A program and its arguments, with these changes of the environment."""
    return subprocess.run(
        [*map(str, command)],
        env={**os.environ, **env},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_python(
    *arguments: object, path: Sequence[Path] = (ROOT,), cwd: Path | None = None, timeout: float = 300, **env: str
) -> subprocess.CompletedProcess[str]:
    """This Python, with ``path`` as its module path."""
    env = {"PYTHONPATH": os.pathsep.join(map(str, path)), **env}
    return run_program(sys.executable, *arguments, cwd=cwd, timeout=timeout, **env)


def is_running(pid: int | str) -> bool:
    """Whether there is a process, and not only one that waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], Any], otherwise: str = "it did not come to that", limit_s: float = 60) -> Any:
    """What the condition gives once that is true."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)
    return found


def end_interpreter() -> None:
    """Call what the interpreter calls at its end, in its order; a rank of these tests ends without."""
    for call in reversed(threading._threading_atexits):  # type: ignore[attr-defined]
        call()
    atexit._run_exitfuncs()


def copy_sources(target: Path) -> Path:
    """All that a build of the package needs, without what was built."""
    ignore = shutil.ignore_patterns("build", "_*.so", "_*.log", "__pycache__")
    for name in ("zeroelastic", "csrc"):
        shutil.copytree(ROOT / name, target / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    return target


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
