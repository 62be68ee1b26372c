"""What `make test` leaves out, and that CI runs the rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from extended import is_extended, repeated_cases, rows_of, touched_by
from places import OLDER_DEEPSPEEDS, ROOT
from support_table import COLLECTED

pytest_plugins = ["pytester"]

TESTS_OF_RANKS = """\
import pytest

def row(name):
    return pytest.mark.support("Using it", name, "exact")

@pytest.fixture
def rank_pool(): ...

@pytest.mark.parametrize("n", [1, 2, pytest.param(3, marks=row("three")), pytest.param(4, marks=row("three"))])
def test_ranks(rank_pool, n): ...

@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.extended), pytest.param(2, marks=row("two"))])
def test_chosen_by_hand(rank_pool, n): ...

@row("pure")
@pytest.mark.starts_processes
def test_commands(): ...

@row("three")
def test_shown_before(rank_pool): ...

@pytest.mark.quick
def test_of_one_rank(rank_pool): ...

@row("pure")
@pytest.mark.parametrize("n", [1, 2])
def test_pure(n): ...

@pytest.mark.extended
def test_long(): ...
"""
TESTS_WITHOUT_ROWS = """\
import pytest

@pytest.fixture
def pool(): ...

@pytest.mark.extended
def test_long(pool): ...

@pytest.mark.parametrize("n", [1, 2])
def test_ranks(pool, n): ...
"""
ROWS_OF_TEST_ALL = {
    *(f"DeepSpeed {version}" for version in OLDER_DEEPSPEEDS),
    "`accelerate launch -m zeroelastic.run train.py`, `torchrun ... -m zeroelastic.run`",
    "torchrun job of a fixed size",
    "Fabric `fabric.save`, `fabric.load`",
    "TRL, unchanged, by `ZEROELASTIC=1`",
}
"""What `make test` leaves out of docs/support.md: jobs of several programs, packages of others, other DeepSpeeds."""

QUICK = {
    "test_ranks[3]",
    "test_chosen_by_hand[2]",
    "test_of_one_rank",
    "test_pure[1]",
    "test_pure[2]",
    "without_rows.py::test_ranks[1]",
    "test_docs.py::test_of_pages",
}


def test_make_test_runs_every_row_and_test_all_the_rest(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_rows=TESTS_OF_RANKS, test_without_rows=TESTS_WITHOUT_ROWS)
    project = pytester.mkdir("project")
    for name in ("docs", "wheel"):
        (project / f"test_{name}.py").write_text("def test_of_pages(): ...\n")
    pytester.makeini("[pytest]\nmarkers = support: a row")
    names = {}
    for chosen in ("not extended", "extended", ""):
        result = pytester.runpytest_inprocess(
            "-q", "--collect-only", "--import-mode=importlib", "-p", "extended", "-m", chosen
        )
        names[chosen] = {line for line in result.outlines if "::" in line}
    assert {next(name for name in QUICK if line.endswith(name)) for line in names["not extended"]} == QUICK
    assert len(names["not extended"]) == len(QUICK)
    assert names["not extended"] | names["extended"] == names[""] and not names["not extended"] & names["extended"]


def test_every_row_of_the_support_table_is_shown_by_make_test(request: pytest.FixtureRequest) -> None:
    """Except for rows that take minutes. Judged where all tests were collected."""
    items = request.config.stash[COLLECTED]
    if len({item.path.name for item in items}) < 100:
        pytest.skip("only some of the test files were collected")
    left_out = {id(item) for item in repeated_cases(items)}
    quick = [item for item in items if not is_extended(item) and id(item) not in left_out]
    shown = {row for item in quick for row in rows_of(item)}
    missing = {row for item in items for row in rows_of(item)} - shown
    assert missing == ROWS_OF_TEST_ALL


def test_ci_runs_what_a_change_needs_once() -> None:
    text = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^make .*\btest\b.*SINCE=\S+", text, flags=re.MULTILINE) == ['make test SINCE="$since"']
    assert "test_versions.py" in text and "csrc" in text and " lint " in text


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ("tests/core/test_plan.py", {"core/test_plan.py"}),
        ("tests/stores.py", {"io/test_s3.py"}),
        ("zeroelastic/core/plan.py", {"core/test_plan.py", "verbs/test_plan_verb.py"}),
        ("zeroelastic/io/deep/retries.py", {"io/test_s3.py"}),
        ("zeroelastic/byte_sizes.py", set()),
        ("docs/guides/lora.md", {"project/test_docs.py"}),
        ("csrc/tests/main.cpp", {"executors/test_native.py"}),
        ("LICENSE", set()),
    ],
)
def test_what_has_changed_leads_to_its_tests(tmp_path: Path, changed: str, found: set[str]) -> None:
    files = {"core/test_plan.py": "", "verbs/test_plan_verb.py": "", "io/test_s3.py": "from stores import serve_s3\n"}
    files |= {"project/test_docs.py": "", "executors/test_native.py": ""}
    for name, text in files.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text(text)
    assert touched_by(tmp_path, [changed]) == {tmp_path / "tests" / name for name in found}
