"""The command line, run in this process: what a command prints and how it ends, without a second to start Python.

That a command also works as a program of its own is what tests/cli/test_cli.py shows, once for each verb.
"""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from places import ROOT
from typer.testing import CliRunner

from zeroelastic.cli.app import VERBS, app
from zeroelastic.cli.documents import check

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
