"""pytest plugin with the ``rank_pool`` fixture.

A conftest.py uses it by name:

    pytest_plugins = ["zeroelastic.testing.pytest_plugin"]

It is not registered by being installed. The ini option ``rank_pool_preload`` names modules that the pool imports once,
before it forks ranks: those that ranks of many tests import.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zeroelastic.testing.pool import RankPool

_PRELOAD = "rank_pool_preload"


@pytest.fixture(scope="session")
def rank_pool(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """A RankPool, one per pytest process (so one per worker under pytest-xdist)."""
    # The module of a test that has a function for ranks imports pytest, which takes a quarter of a short run.
    with RankPool(preload=("pytest", *pytestconfig.getini(_PRELOAD))) as pool:
        yield pool


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the ini option ``rank_pool_preload``."""
    parser.addini(_PRELOAD, "modules that ranks of the fixture rank_pool find imported", type="args", default=[])
