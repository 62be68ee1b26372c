"""The code in the documentation runs, in order, as a reader would run it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from commands import run_command
from documentation import blocks, run
from places import ROOT

DOCUMENTS = (
    "README.md",
    "docs/quickstart.md",
    "docs/format.md",
    "docs/cli.md",
    "docs/elastic.md",
    "docs/huggingface.md",
    "docs/zero2.md",
)

# Commands that are not run from here: they install or build what this test runs in, or run this test.
SET_UP = ("make ", "pip install ")


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(document, marks=() if document == "docs/quickstart.md" else pytest.mark.extended)
        for document in DOCUMENTS
    ],
)
def test_code_blocks_run(document: str, tmp_path: Path) -> None:
    """Python blocks that begin with a file name are written there, others are run; bash blocks are run line by line,
    ``zeroelastic`` in this process."""
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
                if program == "zeroelastic":
                    done = run_command(*arguments, cwd=tmp_path)
                    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
                    ran += 1
                    continue
                modules = {"torchrun": "torch.distributed.run", "pytest": "pytest"}
                options = ["--standalone"] if program == "torchrun" else []
                options += ["-p", "no:cacheprovider"] if program == "pytest" else []
                run([sys.executable, "-m", modules[program], *options, *arguments], tmp_path)
                ran += 1
        elif block.language == "json":
            json.loads(block.text)
        else:
            assert block.language == "text", block.language
    assert ran > 0


def test_links_in_the_documentation_exist() -> None:
    frameworks = ("docs/accelerate.md", "docs/lightning.md", "docs/library.md")
    for document in (
        *DOCUMENTS,
        *frameworks,
        "docs/architecture.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs/reliability.md",
        "examples/README.md",
        "benchmarks/README.md",
    ):
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text()):
            assert ((ROOT / document).parent / link).exists(), f"{document}: {link}"


def test_the_table_of_options_in_the_quickstart_is_the_generated_one() -> None:
    """After a change: put the output of ``options_table()`` into docs/quickstart.md."""
    from zeroelastic.deepspeed.options import options_table

    assert options_table() in (ROOT / "docs/quickstart.md").read_text()
