"""`make man`: a page for the program and for each verb, with all that --help says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from programs import run_command

from zeroelastic.cli.app import VERBS

sys.path.insert(0, str(ROOT / "docs"))
import make_man


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return make_man.pages()


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z0-9]{2,}", text)


def test_there_is_a_page_for_the_program_and_one_for_each_verb(pages: dict[str, str]) -> None:
    assert set(pages) == {"zeroelastic.1", *(f"zeroelastic-{verb}.1" for verb in VERBS)}
    for verb in VERBS:
        assert rf"\fBzeroelastic\-{verb}\fR(1)" in pages["zeroelastic.1"]


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_a_page_has_every_option_and_every_word_of_the_help(pages: dict[str, str], verb: str) -> None:
    name = f"zeroelastic-{verb}.1" if verb else "zeroelastic.1"
    shown = run_command(*filter(None, [verb]), "--help", env={"COLUMNS": "200", "NO_COLOR": "1"}).stdout
    shown = re.sub(r"-\n\s+", "-", shown)  # lines that end within a word
    page = re.sub(r"\\f[BR]", "", pages[name]).replace(r"\-", "-")
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", shown))
    assert "--help" in options
    assert options <= set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page))
    description = shown.partition("Usage")[2].partition("Options")[0] if verb else ""
    assert set(words(description)) - {"Usage", "Arguments", "Examples", "str", "path"} <= set(words(page))


@pytest.mark.parametrize("name", ["zeroelastic.1", *(f"zeroelastic-{verb}.1" for verb in VERBS)])
def test_troff_reads_a_page_without_a_warning(pages: dict[str, str], name: str, tmp_path: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("there is no groff")
    path = tmp_path / name
    path.write_text(pages[name])
    command = ["groff", "-man", "-Tutf8", "-ww", "-rLL=78n", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert not done.stderr
    plain = re.sub(r"\x1b\[[0-9;]*m|.\x08", "", done.stdout)
    assert "NAME" in plain and "OPTIONS" in plain and "--help" in plain
