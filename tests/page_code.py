"""The code blocks of the documentation, and a reader who runs them as they stand."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from places import ROOT
from programs import run_command

# What a process says that torch ends when the script is done: a gloo thread that still holds a tensor asks for the
# interpreter when there is none any more. Rare, and the same without zeroelastic; such a command is run once more.
ABORT_AT_EXIT = "terminate called without an active exception"


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def blocks(document: str) -> list[Block]:
    """The fenced blocks of a page; the language of one that names none is empty."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [Block(language, text) for language, text in found]


# Commands that are not run from a page: they install or build what the tests run in, or run the tests.
SET_UP = ("make ", "pip install ")

PROGRAMS = {
    "python": "",
    "torchrun": "-m torch.distributed.run",
    "zeroelastic": "-m zeroelastic",
    "pytest": "-m pytest -p no:cacheprovider",
    "accelerate": "-m accelerate.commands.accelerate_cli",
}
"""The programs that pages start -> what ``python`` runs for them."""

COMMAND = re.compile(rf"^\s*(\$|export |pip |make |deepspeed |{'|'.join(f'{name} ' for name in PROGRAMS)})")
"""How a line begins that is to be run."""

IN_THIS_PROCESS = re.compile(r"zeroelastic [^$|<>;&]*")
"""Commands that need no shell: they run without a second to start Python."""

WIDTH = "120"
"""Of the terminal in which a page shows what ``zeroelastic`` prints."""

# A reader has nodes with 8 GPUs and the name of one; a test has a part of one machine, with ports that others use.
ON_ONE_MACHINE = {
    "--nproc-per-node=8": "--nproc-per-node=2",
    "HOST:29400": "localhost:{port}",
    "accelerate launch": "accelerate launch --main_process_ip 127.0.0.1 --main_process_port {port}",
}


@dataclass
class Reader:
    """Runs the blocks of a page in a directory, in their order, and compares with the page what they print.

    Python blocks that begin with a file name are written there, others are run; bash blocks are run command by command,
    ``zeroelastic`` in this process where that is the same. ``examples/`` is the repository's. ``python`` is the program
    that runs it all.
    """

    directory: Path
    python: str
    environment: dict[str, str] = field(default_factory=dict)
    ran: int = 0
    printed: str = ""
    """What was printed since the page showed the last output."""

    def __post_init__(self) -> None:
        self.directory.mkdir(exist_ok=True)
        programs = self.directory.parent / f"{self.directory.name}-programs"
        programs.mkdir()
        for name, runs in PROGRAMS.items():
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec {self.python} {runs} "$@"\n')
            program.chmod(0o755)
        if not (self.directory / "examples").exists():
            (self.directory / "examples").symlink_to(ROOT / "examples")
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",  # lines in the order in which a terminal shows them
            "PYTHON_EXEC": self.python,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "COLUMNS": WIDTH,
            **self.environment,
        }

    def read(self, block: Block) -> None:
        """Do with a block what its language says."""
        if block.language == "python":
            name = re.match(r"# (\S+\.py)\n", block.text)
            if name:
                (self.directory / name[1]).write_text(block.text)
            else:
                self.run([self.python, "-c", block.text])
        elif block.language == "bash":
            for command in commands(block.text):
                self.run_command(command)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "console":
            missing = missing_lines(block.text, self.printed, self.directory)
            assert not missing, (
                f"the page shows what was not printed:\n{missing}\nPrinted was:\n{self.printed[-12000:]}"
            )
            self.printed = ""

    def run_command(self, command: str) -> None:
        """Run one command line, which has to succeed."""
        if command.startswith(SET_UP):
            return
        if command.startswith("export "):
            self.environment |= dict(word.split("=", 1) for word in shlex.split(command)[1:])
        elif IN_THIS_PROCESS.fullmatch(command):
            done = run_command(*shlex.split(command)[1:], cwd=self.directory, env=self.environment)
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            self.printed += done.stderr + done.stdout
            self.ran += 1
        else:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            for shown, meant in ON_ONE_MACHINE.items():
                command = command.replace(shown, meant.format(port=port))
            settings = {}
            if "--rdzv" in command:
                settings = {"PET_RDZV_CONF": "last_call_timeout=1"}  # no further node comes
            elif command.startswith("torchrun"):
                settings = {"PET_STANDALONE": "1"}  # a free port
            self.run(["bash", "-eu", "-o", "pipefail", "-c", command], **settings)

    def run(self, command: list[str], **environment: str) -> None:
        """Run a program, which has to succeed, and keep what it prints."""
        self.printed += run_as_written(command, self.directory, {**self.environment, **environment})
        self.ran += 1


def run_as_written(command: list[str], directory: Path, environment: Mapping[str, str]) -> str:
    """What a program prints, which has to succeed."""
    for _ in range(2):
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode == 0 or ABORT_AT_EXIT not in done.stdout:
            break
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout[-6000:]}"
    return done.stdout


def commands(text: str) -> list[str]:
    """The commands of a bash block, without comments; a line that ends in a backslash goes on in the next."""
    lines = text.replace("\\\n", " ").splitlines()
    stripped = (re.sub(r"(^|\s+)# .*$", "", line).strip() for line in lines)
    return [line for line in stripped if line]


def missing_lines(shown: str, printed: str, directory: Path) -> list[str]:
    """The lines of a page's output that are not, in this order, lines of a program's. A line ``...`` stands for others.

    A program's line may begin with more than the page shows: a progress bar that was not ended, or the time of a log.
    """
    found = iter([masked(line, directory) for line in printed.splitlines()])
    wanted = [line for line in shown.splitlines() if line.strip() not in ("", "...")]
    return [line for line in wanted if not any(one.endswith(masked(line, directory)) for one in found)]


def masked(line: str, directory: Path) -> str:
    """A line of output without what differs from run to run: directory, sizes, times, versions, hashes, spaces."""
    line = line.replace(str(directory), "/home/you")
    line = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "<time>", line)
    line = re.sub(r"\b[0-9a-f]{8,}\b", "<hex>", line)
    line = re.sub(r"\b\d+(\.\d+)*( ?)(?=(s|ms|B|[KMG]i?B|%)\b)|\b\d+(\.\d+)+\b", r"<number>\2", line)
    return " ".join(line.split())
