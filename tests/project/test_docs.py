"""The code in the documentation runs, in order, as a reader would run it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from places import ROOT
from programs import blocks, run_as_written, run_command
from warm_python import executable


def pages() -> list[str]:
    """Every page below docs, by its path from the root of the repository."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))


def links(document: str) -> list[str]:
    """The targets of the links and pictures of a page within the repository, as they are written."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\((?!\w+:)([^)\s]+)\)", text)


def anchors(path: Path) -> set[str]:
    """What a link may have behind its #: the headings of a page as code hosts and the site number them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+?)\s*$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


RUN_BY_OTHER_TESTS = {
    "docs/guides/accelerate.md": "integrations/test_frameworks.py",
    "docs/guides/lightning.md": "integrations/test_frameworks.py",
    "docs/reference/library.md": "verbs/test_examples.py",
}
"""Pages whose code needs more than this test gives it -> the test that runs it."""

DOCUMENTS = [
    document
    for document in ("README.md", *pages())
    if document not in RUN_BY_OTHER_TESTS and any(block.language in ("bash", "python") for block in blocks(document))
]

# A page that saves and loads; jobs that change size are started by the real python, too, in tests/elastic. Of the
# others, processes are forked from one that has imported torch and deepspeed, and these.
RUN_BY_PYTHON_ITSELF = "docs/guides/keeping.md"
PRELOADED = {"docs/guides/huggingface.md": ("transformers.trainer", "transformers.models.llama.modeling_llama")}

# Commands that are not run from here: they install or build what this test runs in, or run this test.
SET_UP = ("make ", "pip install ")


@pytest.mark.extended
@pytest.mark.parametrize("document", DOCUMENTS)
def test_code_blocks_run(document: str, tmp_path: Path) -> None:
    """Python blocks that begin with a file name are written there, others are run; bash blocks are run line by line,
    ``zeroelastic`` in this process."""
    assert run_blocks(document, tmp_path) > 0


def run_blocks(document: str, directory: Path) -> int:
    """Run the code of a page in a directory; returns the number of programs that ran."""
    python = sys.executable if document == RUN_BY_PYTHON_ITSELF else executable(*PRELOADED.get(document, ()))
    ran = 0
    for block in blocks(document):
        if block.language == "python":
            name = re.match(r"# (\S+\.py)\n", block.text)
            if name:
                (directory / name[1]).write_text(block.text)
                continue
            run_as_written(["-c", block.text], directory, python=python)
            ran += 1
        elif block.language == "bash":
            for line in filter(None, block.text.splitlines()):
                if not line.startswith(SET_UP):
                    run_line(line, directory, python)
                    ran += 1
        elif block.language == "json":
            json.loads(block.text)
        else:
            assert block.language == "text", block.language
    return ran


def run_line(line: str, directory: Path, python: str) -> None:
    """Run one command, which has to succeed."""
    program, *arguments = [str(ROOT / word) if word.startswith("examples/") else word for word in line.split()]
    if program == "python":
        run_as_written(arguments, directory, python=python)
    elif program == "zeroelastic":
        done = run_command(*arguments, cwd=directory, env={"PYTHON_EXEC": python})
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    else:
        modules = {"torchrun": "torch.distributed.run", "pytest": "pytest"}
        options = ["--standalone"] if program == "torchrun" else []
        options += ["-p", "no:cacheprovider"] if program == "pytest" else []
        run_as_written(["-m", modules[program], *options, *arguments], directory, python=python)


def test_pages_that_other_tests_run_are_named_there() -> None:
    for document, test in RUN_BY_OTHER_TESTS.items():
        assert document in (ROOT / "tests" / test).read_text()


ALL = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md", "benchmarks/README.md"),
    *pages(),
)


@pytest.mark.parametrize("document", ALL)
def test_links_lead_to_files_and_headings_that_exist(document: str) -> None:
    for link in links(document):
        path, _, anchor = link.partition("#")
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), f"{document}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{document}: {link} is none of {sorted(anchors(target))}"


GROWS_WITH_THE_TESTS = "docs/support.md"


@pytest.mark.parametrize("document", [page for page in pages() if page != GROWS_WITH_THE_TESTS])
def test_a_page_is_of_a_length_that_is_read(document: str) -> None:
    assert len((ROOT / document).read_text().splitlines()) <= 300
