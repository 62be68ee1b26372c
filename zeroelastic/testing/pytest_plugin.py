"""The fixture ``rank_pool``; a conftest.py has ``pytest_plugins = ["zeroelastic.testing.pytest_plugin"]``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zeroelastic.testing.pool import RankPool


@pytest.fixture(scope="session")
def rank_pool_preload() -> tuple[str, ...]:
    """The modules that ranks of ``rank_pool`` find imported; a conftest.py has its own where many ranks import some."""
    return ()


@pytest.fixture(scope="session")
def rank_pool(rank_pool_preload: tuple[str, ...]) -> Iterator[RankPool]:
    """A RankPool, one per pytest process (so one per worker under pytest-xdist)."""
    # The module of a test that has a function for ranks imports pytest, which takes a quarter of a short run.
    with RankPool(preload=("pytest", *rank_pool_preload)) as pool:
        yield pool
