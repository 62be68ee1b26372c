"""What `make test` leaves to `make test-all`: the marker ``extended``, and the rule that sets it on further cases.

A pytest plugin. A test or a case marked ``extended`` by hand is slow or repeats a point at another size: a benchmark,
a demonstration, a campaign, an example job, the matrix of versions. Besides, most tests that start ranks of real
DeepSpeed, or are marked ``starts_processes``, are marked here. `make test` runs of them the first case of each module,
the first case of each test of the core suite, and every case that is the first to show a row of docs/support.md. A test
of which some cases are marked by hand is left as it is.

Nothing is skipped: `make test` deselects the marker (``-m "not extended"``), `make test-all` and a plain `pytest` run
everything.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

RANKS = {"rank_pool", "pool"}
"""The fixtures by which a test says that it starts ranks."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "extended: only `make test-all` runs this test, not `make test`")
    config.addinivalue_line("markers", "starts_processes: a test of processes, of which `make test` runs a part")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in repeated_cases(items):
        item.add_marker(pytest.mark.extended)


def repeated_cases(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The cases of tests that start processes and show nothing new: no row, and not first in their module."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("gpu") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept, optional, modules = [], [], set()
    for name, cases in tests.items():
        module = name.partition("::")[0]
        if not starts_processes(cases[0]) or any(is_extended(case) for case in cases):
            kept += [case for case in cases if not is_extended(case)]
        elif module not in modules or any(case.get_closest_marker("core") for case in cases):
            modules.add(module)
            kept.append(cases[0])
            optional += cases[1:]
        else:
            optional += cases
    shown = {row for case in kept for row in rows_of(case)}
    repeated = []
    for case in optional:
        new = rows_of(case) - shown
        shown |= new
        if not new:
            repeated.append(case)
    return repeated


def starts_processes(item: pytest.Item) -> bool:
    """Whether a test uses a pool of ranks, or says that it starts other processes."""
    if item.get_closest_marker("starts_processes") is not None:
        return True
    return not RANKS.isdisjoint(getattr(item, "fixturenames", ()))


def is_extended(item: pytest.Item) -> bool:
    return item.get_closest_marker("extended") is not None


def rows_of(item: pytest.Item) -> set[str]:
    """The features of docs/support.md that a test shows."""
    return {str(mark.args[1]) for mark in item.iter_markers("support")}
