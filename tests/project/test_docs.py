"""The code in the documentation runs, in order, as a reader would run it."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from page_code import COMMAND, Reader, blocks, missing_lines
from places import ROOT
from stores import serve_s3
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

# ZEROELASTIC=1 is read when Python starts. For the other pages, processes are forked from one that has imported torch,
# deepspeed, and these.
RUN_BY_PYTHON_ITSELF = "docs/guides/front-ends.md"
LLAMA = ("transformers.trainer", "transformers.models.llama.modeling_llama")
PRELOADED = {
    "docs/guides/huggingface.md": LLAMA,
    "docs/guides/experts-and-tensor-parallelism.md": LLAMA,
    "docs/guides/storage.md": ("s3fs",),
}
NEEDS_A_STORE = "docs/guides/storage.md"

LANGUAGES = {"bash", "python", "json", "console", "diff", "text"}


@pytest.mark.extended
@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(document: str, tmp_path: Path) -> None:
    python = sys.executable if document == RUN_BY_PYTHON_ITSELF else executable(*PRELOADED.get(document, ()))
    with serve_s3() if document == NEEDS_A_STORE else nullcontext():
        reader = Reader(tmp_path / "page", python)
        for block in blocks(document):
            reader.read(block)
    assert reader.ran > 0


@pytest.mark.parametrize("document", ("README.md", *pages()))
def test_a_block_says_what_it_is(document: str) -> None:
    """What is neither run nor compared is ``text``, which is no command."""
    for block in blocks(document):
        assert block.language in LANGUAGES, f"a block of {block.language or 'no language'}:\n{block.text}"
        if block.language == "text":
            assert not [line for line in block.text.splitlines() if COMMAND.match(line)], block.text


def test_what_was_not_printed_is_missing_from_a_page(tmp_path: Path) -> None:
    printed = f" 50%|##  resumed {tmp_path}/ckpt/global_step3: 4 -> 3 ranks in 0.12 s; root 0a9a3ccf239a\nValid.\n"
    shown = "resumed /home/you/ckpt/global_step3: 4 -> 3 ranks in 1.5 s; root 38ed995d3763\n...\nValid.\n"
    assert missing_lines(shown, printed, tmp_path) == []
    assert missing_lines(shown.replace("4 -> 3", "4 -> 2"), printed, tmp_path) != []
    assert missing_lines("Valid.\n" + shown, printed, tmp_path) != []
    assert missing_lines("Invalid.\n", printed, tmp_path) == ["Invalid."]


def test_the_added_lines_of_the_readme_are_those_of_the_script_that_it_runs() -> None:
    (change,) = [block.text for block in blocks("README.md") if block.language == "diff"]
    (script,) = {word for block in blocks("README.md") for word in block.text.split() if word.startswith("examples/")}
    lines = {line.partition("  #")[0].strip() for line in (ROOT / script).read_text().splitlines()}
    added = [line[1:].partition("  #")[0].strip() for line in change.splitlines() if line.startswith("+")]
    assert len(added) >= 3
    assert not set(added) - lines


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
