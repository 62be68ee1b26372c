"""docs/support.md says what the tests show: no more, no less, and in CI none of them may stay away."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support_table import (
    COLLECTED,
    PAGE,
    ROOT,
    Shown,
    make_rows,
    read_marks,
    render,
)

pytest_plugins = ["pytester"]

TESTS = ROOT / "tests"
MARK = Shown("Precision", "`bf16`", "exact", "", "tests/test_a.py", "test_one", "", gpu=False)


def test_the_page_is_what_the_tests_generate(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Of the tests of this very run where it collected all of them, or of a run that only collects."""
    items = request.config.stash[COLLECTED]
    whole = {item.path.name for item in items} >= {path.name for path in TESTS.rglob("test_*.py")}
    if whole and not any("::" in argument for argument in request.config.args):
        from support_table import read_versions

        made = render(make_rows(read_marks(items)), read_versions())
    else:
        target = tmp_path / "support.md"
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "--support-table", str(target), str(TESTS)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        made = target.read_text()
    assert PAGE.read_text() == made, "docs/support.md is not what the tests say: run `make support`"


def test_a_row_has_the_notes_of_all_tests_that_carry_it() -> None:
    marks = [
        replace(MARK, function="test_two", case="3-4", note="up"),
        replace(MARK, function="test_two", case="4-3", note="up"),
        MARK,
        replace(MARK, path="tests/test_b.py", function="test_many", case="y", note="loss scale"),
        replace(MARK, feature="fp8", verdict="refused"),
        replace(MARK, feature="fp16", path="tests/test_c.py", gpu=True),
        replace(MARK, feature="fp16"),
    ]
    first, second, third = make_rows(reversed(marks))
    assert (first.feature, first.verdict, first.notes) == ("`bf16`", "exact", ("up", "loss scale"))
    assert [(row.feature, row.verdict) for row in (second, third)] == [("fp16", "exact"), ("fp8", "refused")]
    assert make_rows(marks) == make_rows(reversed(marks)), "the page depends on the order of the tests"


SKIPPED = """
import pytest

@pytest.fixture
def absent(): pytest.skip("not installed")

def body(): pytest.skip("nothing here")

def excused(): pytest.xfail("known")

SHOWN = pytest.mark.support("Precision", "bf16", "exact")

@SHOWN
def test_in_its_body(): body()

@SHOWN
def test_in_a_fixture(absent): ...

@SHOWN
def test_excused(): excused()

@pytest.mark.core
def test_core(): body()

@SHOWN
def test_passes(): ...

@SHOWN
@pytest.mark.gpu(99)
def test_on_gpus(): body()

def test_unmarked(): body()
"""


@pytest.mark.parametrize("ci", [True, False])
def test_a_marked_test_that_is_skipped_has_failed_in_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: bool
) -> None:
    monkeypatch.delenv("CI", raising=False)
    if ci:
        monkeypatch.setenv("CI", "1")
    pytester.makepyfile(SKIPPED)
    result = pytester.runpytest_inprocess("-p", "support_table")
    if ci:
        result.assert_outcomes(passed=1, failed=3, errors=1, skipped=2)
        result.stdout.fnmatch_lines(["*test_in_a_fixture is marked support and did not run*: Skipped: not installed"])
        result.stdout.fnmatch_lines(["*test_core is marked core and did not run*: Skipped: nothing here"])
        assert result.ret == pytest.ExitCode.TESTS_FAILED
    else:
        result.assert_outcomes(passed=1, skipped=5, xfailed=1)
        assert result.ret == 0


def test_the_ci_run_says_that_it_is_one() -> None:
    """Without the variable, a test that is skipped would be none that failed."""
    text = (ROOT / ".ci" / "run").read_text()
    assert "export CI=1" in text and text.index("export CI=1") < text.index("\nmake ")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
