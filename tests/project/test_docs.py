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
from warm_python import executable

DOCUMENTS = (
    "README.md",
    "docs/quickstart.md",
    "docs/format.md",
    "docs/cli.md",
    "docs/elastic.md",
    "docs/huggingface.md",
    "docs/zero2.md",
)

# Of the others, processes are forked from one that has imported torch and deepspeed, and these.
RUN_BY_PYTHON_ITSELF = "docs/quickstart.md"
PRELOADED = {"docs/huggingface.md": ("transformers.trainer", "transformers.models.llama.modeling_llama")}

# Commands that are not run from here: they install or build what this test runs in, or run this test.
SET_UP = ("make ", "pip install ")


@pytest.mark.parametrize(
    "document",
    [pytest.param(document, marks=() if document == "README.md" else pytest.mark.extended) for document in DOCUMENTS],
)
def test_code_blocks_run(document: str, tmp_path: Path) -> None:
    """Python blocks that begin with a file name are written there, others are run; bash blocks are run line by line,
    ``zeroelastic`` in this process."""
    python = sys.executable if document == RUN_BY_PYTHON_ITSELF else executable(*PRELOADED.get(document, ()))
    ran = 0
    for block in blocks(document):
        if block.language == "python":
            name = re.match(r"# (\S+\.py)\n", block.text)
            if name:
                (tmp_path / name[1]).write_text(block.text)
                continue
            run(["-c", block.text], tmp_path, python=python)
            ran += 1
        elif block.language == "bash":
            for line in filter(None, block.text.splitlines()):
                if line.startswith(SET_UP):
                    continue
                program, *arguments = line.split()
                if program == "python":
                    run(arguments, tmp_path, python=python)
                    ran += 1
                    continue
                if program == "zeroelastic":
                    done = run_command(*arguments, cwd=tmp_path, env={"PYTHON_EXEC": python})
                    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
                    ran += 1
                    continue
                modules = {"torchrun": "torch.distributed.run", "pytest": "pytest"}
                options = ["--standalone"] if program == "torchrun" else []
                options += ["-p", "no:cacheprovider"] if program == "pytest" else []
                run(["-m", modules[program], *options, *arguments], tmp_path, python=python)
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
