"""The code in the documentation runs, in order, as a reader would run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    "README.md",
    "docs/quickstart.md",
    "docs/format.md",
    "docs/cli.md",
    "docs/elastic.md",
    "docs/huggingface.md",
)

# Commands that are not run from here: they install or build what this test runs in, or run this test.
SET_UP = ("make ", "pip install ")

# What a process says that torch ends when the script is done: a gloo thread that still holds a tensor asks for the
# interpreter when there is none any more. Rare, and the same without zeroelastic; such a command is run once more.
ABORT_AT_EXIT = "terminate called without an active exception"


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def blocks(document: str) -> list[Block]:
    found = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [Block(language, text) for language, text in found]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_code_blocks_run(document: str, tmp_path: Path) -> None:
    """Python blocks that begin with a file name are written there, others are run; bash blocks are run line by line."""
    ran = 0
    for block in blocks(document):
        if block.language == "python":
            name = re.match(r"# (\S+\.py)\n", block.text)
            if name:
                (tmp_path / name[1]).write_text(block.text)
                continue
            run([sys.executable, "-c", block.text], tmp_path)
            ran += 1
        elif block.language == "bash":
            for line in filter(None, block.text.splitlines()):
                if line.startswith(SET_UP):
                    continue
                program, *arguments = line.split()
                if program == "python":
                    run([sys.executable, *arguments], tmp_path)
                    ran += 1
                    continue
                modules = {"torchrun": "torch.distributed.run", "pytest": "pytest", "zeroelastic": "zeroelastic"}
                options = ["--standalone"] if program == "torchrun" else []
                options += ["-p", "no:cacheprovider"] if program == "pytest" else []
                run([sys.executable, "-m", modules[program], *options, *arguments], tmp_path)
                ran += 1
        elif block.language == "json":
            json.loads(block.text)
        else:
            assert block.language == "text", block.language
    assert ran > 0


def run(command: list[str], directory: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        result = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        if result.returncode == 0 or ABORT_AT_EXIT not in result.stderr:
            break
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"


def test_links_in_the_documentation_exist() -> None:
    frameworks = ("docs/accelerate.md", "docs/lightning.md")
    for document in (
        *DOCUMENTS,
        *frameworks,
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs/reliability.md",
        "examples/README.md",
        "benchmarks/README.md",
    ):
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text()):
            assert ((ROOT / document).parent / link).exists(), f"{document}: {link}"


def test_quickstart_names_every_option() -> None:
    from zeroelastic.stage3.options import Options

    text = (ROOT / "docs/quickstart.md").read_text()
    for option in Options.model_fields:
        assert f"| `{option}` |" in text, option
