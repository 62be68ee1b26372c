"""What `make test` leaves to `make test-all`: the marker ``extended``, and the rule that sets it on further cases.

A pytest plugin. A test or a case marked ``extended`` by hand is slow or repeats a point at another size: a benchmark,
a demonstration, a campaign, an example job, the matrix of versions. The rule marks most of what starts ranks of real
DeepSpeed or is marked ``starts_processes``, and most of tests/project. `make test` runs of these the cases that are the
first to show a row of docs/support.md, those marked ``quick``, and one case of each module of which nothing else would
run.

Nothing is skipped: `make test` deselects the marker (``-m "not extended"``). `make test SINCE=COMMIT` also runs all
tests of what has changed since a commit: test files, those that use a helper, and those named like a module of the
package or like its folder. `make test-all` runs all but what is marked ``sweep``: more cases of what others show
already, which `make sweep` runs. A plain `pytest` runs everything.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet
from places import ROOT

RANKS = {"rank_pool", "topology_pool", "frameworks_pool", "pool"}
"""The fixtures by which a test says that it starts ranks."""

QUICK_IN_PROJECT = {"test_docs.py", "test_imports.py", "test_support.py"}
"""Modules of tests/project that `make test` runs: links, imports and the table of support."""

NIGHTLY = {"test_trl.py", "test_versions.py", "test_wheel.py"}
"""Modules that need other DeepSpeeds, front ends or wheels, which `make test-all` makes first."""

TESTS_OF = {
    "csrc": ("executors/", "io/test_machine_faults.py"),
    "docs": ("project/test_docs.py", "project/test_site.py", "integrations/test_frameworks.py"),
    "README.md": ("project/test_docs.py",),
    "examples": ("project/test_example_programs.py", "project/test_docs.py", "integrations/test_frameworks.py"),
    "benchmarks": ("project/test_bench", "project/test_campaigns.py"),
}
"""What runs the files of a folder that is neither the package nor its tests: how the paths of the tests begin."""


def with_swept(cases: Iterable[Any], swept: Collection[Any]) -> list[ParameterSet]:
    """The cases of a parametrised test, of which those in ``swept`` run in `make sweep` alone.

    What stays in `make test-all` has each value of each axis at least once.
    """
    listed = list(cases)
    assert set(swept) <= set(listed), "a case that is to be swept is no case"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.sweep] * (case in swept))
        for case in listed
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--touched-since", metavar="COMMIT", help="mark the tests of what has changed since: touched")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "extended: only `make test-all` runs this test, not `make test`")
    config.addinivalue_line("markers", "touched: the test is of what has changed since the commit of --touched-since")
    config.addinivalue_line("markers", "sweep: only `make sweep` runs this case, of which there are others like it")
    config.addinivalue_line("markers", "starts_processes: a test of processes, of which `make test` runs a part")
    config.addinivalue_line("markers", "quick: `make test` runs this test, although it starts ranks or processes")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in [*repeated_cases(items), *filter(is_swept, items)]:
        item.add_marker(pytest.mark.extended)
    if commit := config.getoption("touched_since"):
        found = subprocess.run(
            ["git", "diff", "--name-only", commit], cwd=ROOT, check=False, capture_output=True, text=True
        )
        if found.returncode:
            raise pytest.UsageError(f"--touched-since={commit}: git knows no such commit here: {found.stderr.strip()}")
        touched = touched_by(ROOT, found.stdout.splitlines())
        for item in items:
            if item.path in touched:
                item.add_marker(pytest.mark.touched)


def touched_by(root: Path, changed: Iterable[str]) -> set[Path]:
    """The test files of changed files; ``changed`` are paths from the root."""
    tests = {path: path.read_text() for path in root.glob("tests/**/test_*.py") if path.name not in NIGHTLY}
    found: set[Path] = set()
    for path in map(Path, changed):
        if path.suffix == ".py" and path.parts[0] == "tests":
            uses = re.compile(rf"^(?:from|import) {path.stem}\b", flags=re.MULTILINE)
            found |= {test for test, text in tests.items() if test == root / path or uses.search(text)}
        elif path.suffix == ".py" and path.parts[0] == "zeroelastic":
            packages = [root / "tests" / Path(*path.parts[1:depth]) for depth in range(2, len(path.parts))]
            near = next((folder for folder in reversed(packages) if folder.is_dir()), None)
            found |= {test for test in tests if near in test.parents or test.stem.startswith(f"test_{path.stem}")}
        begins = TESTS_OF.get(path.parts[0], ())
        found |= {test for test in tests if str(test.relative_to(root / "tests")).startswith(begins)}
    return found


def repeated_cases(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The cases that `make test` leaves out by the rule: they cost much, and others show the same."""
    candidates = [item for item in items if item.get_closest_marker("gpu") is None and not is_extended(item)]
    optional = [item for item in candidates if is_optional(item)]
    cheap = [item for item in candidates if not is_optional(item)]
    shown = {row for item in cheap for row in rows_of(item)}
    modules = {item.path for item in cheap}
    repeated = []
    for item in optional:
        new = rows_of(item) - shown
        if new:
            shown |= new
            modules.add(item.path)
        else:
            repeated.append(item)
    first = {item.path: item for item in reversed(repeated) if not in_project(item)}
    kept = {id(item) for path, item in first.items() if path not in modules}
    return [item for item in repeated if id(item) not in kept]


def is_optional(item: pytest.Item) -> bool:
    """Whether `make test` runs a case only where nothing else shows the same."""
    if item.get_closest_marker("quick") is not None:
        return False
    return starts_processes(item) or (in_project(item) and item.path.name not in QUICK_IN_PROJECT)


def in_project(item: pytest.Item) -> bool:
    """Whether a test is of the project itself: its pages, wheels, benchmarks and campaigns."""
    return item.path.parent.name == "project"


def starts_processes(item: pytest.Item) -> bool:
    """Whether a test uses a pool of ranks, or says that it starts other processes."""
    if item.get_closest_marker("starts_processes") is not None:
        return True
    return not RANKS.isdisjoint(getattr(item, "fixturenames", ()))


def is_extended(item: pytest.Item) -> bool:
    return item.get_closest_marker("extended") is not None or is_swept(item)


def is_swept(item: pytest.Item) -> bool:
    return item.get_closest_marker("sweep") is not None


def rows_of(item: pytest.Item) -> set[str]:
    """The features of docs/support.md that a test shows."""
    return {str(mark.args[1]) for mark in item.iter_markers("support")}
