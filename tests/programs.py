"""Programs as tests run them: the command line in this process, others in processes of their own, and their sources.

That a command also works as a program of its own is what tests/cli/test_cli.py shows, once for each verb.
"""

from __future__ import annotations

import atexit
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from documents import check
from places import ROOT
from typer.testing import CliRunner

from zeroelastic.cli.app import VERBS, app


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


ARGUMENTS = {
    "inspect": (),
    "verify": (),
    "plan": ("--world-size", "3"),
    "reshard": ("{dst}", "--world-size", "3"),
    "diff": ("{good}",),
    "export": ("{dst}",),
    "convert": ("{dst}", "--to", "fsdp2"),
    "latest": (),
    "prune": ("--keep", "1", "--dry-run"),
}
"""What each verb that reads a checkpoint needs beside it: ``dst`` is to be made, ``good`` another checkpoint."""


_WIDE = {"COLUMNS": str(1 << 20)}


@dataclass(frozen=True)
class Done:
    """The part of subprocess.CompletedProcess that tests look at."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run_command(*arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Done:
    """``zeroelastic`` with these arguments, in the directory ``cwd``, with these changes of the environment.

    Lines are as long as they are where there is no terminal, unless ``env`` has COLUMNS: a test depends neither on the
    terminal nor on the environment variables of the shell. A document of ``--json`` is held to its schema.
    """
    before = Path.cwd()
    os.chdir(cwd or before)
    try:
        result = CliRunner().invoke(app, [*map(str, arguments)], env={**_WIDE, **(env or {})}, prog_name="zeroelastic")
    finally:
        os.chdir(before)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if "--json" in arguments and result.stdout:
        found = check(str(next(word for word in arguments if word in VERBS)), result.stdout)
        assert found.ok == (result.exit_code == 0)
    return Done(result.exit_code, result.stdout, result.stderr)


def launched(arguments: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> Done:
    """``python -m zeroelastic.run`` with these arguments, in this process, which is to be one of a rank."""
    from zeroelastic.run import main

    os.environ.update(env)
    logging.getLogger("zeroelastic").setLevel(logging.DEBUG)
    os.chdir(cwd or Path.cwd())
    status, shown, said = 0, io.StringIO(), io.StringIO()
    with redirect_stdout(shown), redirect_stderr(said):
        try:
            main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
    return Done(status, shown.getvalue(), said.getvalue())


def no_result(stdout: str) -> bool:
    """Whether a verb has printed nothing, or under ``--json`` the document of a failure."""
    return not stdout or set(json.loads(stdout)) == {"schema_version", "ok", "error"}


def peak_memory(*arguments: object) -> int:
    """The most memory in bytes that ``zeroelastic`` with these arguments has in a process of its own, by the kernel."""
    script = (
        "import resource, sys; from zeroelastic.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as e: assert e.code == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    # A shell between: the peak of a process that was forked from this one begins with this one's.
    command = ["/bin/sh", "-c", '"$@"', "sh", sys.executable, "-c", script, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    return int(done.stdout.split()[-1]) * 1024


def documented_keys(verb: str) -> set[str]:
    """The keys whose meaning stands in the schema of the document that a verb prints with --json."""
    meanings: dict[str, dict[str, str]] = json.loads((ROOT / "docs/tools/keys.json").read_text())
    assert all(meanings[verb].values())
    return set(meanings[verb])
