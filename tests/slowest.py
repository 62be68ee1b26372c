"""How long the tests take: ``pytest --slowest FILE`` writes the total and the slowest tests (`make slowest`).

A pytest plugin. A test's time is that of its call and of the fixtures that are made and taken down for it; under
pytest-xdist the total adds up the times of all workers, and the wall time stands beside it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest

NUM_SHOWN = 50


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slowest", metavar="FILE", help=f"write the total and the {NUM_SHOWN} slowest tests to FILE")


def pytest_configure(config: pytest.Config) -> None:
    target = config.getoption("--slowest")
    if target and "PYTEST_XDIST_WORKER" not in os.environ:  # the controller sees the reports of all workers
        config.pluginmanager.register(Durations(Path(target)), "durations-to-file")


class Durations:
    """Adds up the phases of each test, and writes the file when the run is over."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.seconds: Counter[str] = Counter()
        self.start = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        workers = session.config.getoption("numprocesses", None) or 1
        self.target.write_text(render(self.seconds, time.monotonic() - self.start, workers))


def render(seconds: Counter[str], wall_s: float, workers: int) -> str:
    """The file: a line for the total, one per folder of tests, and one per slow test, slowest first."""
    folders: Counter[str] = Counter()
    for nodeid, duration in seconds.items():
        folders[nodeid.partition("::")[0].rpartition("/")[0]] += duration
    lines = [f"{len(seconds)} tests, {sum(seconds.values()):.0f} s in all, {wall_s:.0f} s with {workers} workers", ""]
    lines += [f"{duration:8.1f} s  {folder}" for folder, duration in folders.most_common()]
    lines += ["", *(f"{duration:8.1f} s  {nodeid}" for nodeid, duration in seconds.most_common(NUM_SHOWN))]
    return "\n".join(lines) + "\n"
