"""pytest plugin with the ``rank_pool`` fixture and the ``gpu`` marker.

A conftest.py uses it by name:

    pytest_plugins = ["zeroelastic.testing.pytest_plugin"]

It is not registered by being installed. The ini option ``rank_pool_preload`` names modules that the pool imports once,
before it forks ranks: those that ranks of many tests import.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zeroelastic.testing.pool import RankPool
from zeroelastic.testing.run import gpus_available

_MAX_RANKS = 8
_PRELOAD = "rank_pool_preload"


@pytest.fixture(scope="session")
def rank_pool(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """A RankPool of up to 8 ranks, one per pytest process (so one per worker under pytest-xdist)."""
    # The module of a test that has a function for ranks imports pytest, which takes a quarter of a short run.
    with RankPool(_MAX_RANKS, preload=("pytest", *pytestconfig.getini(_PRELOAD))) as pool:
        yield pool


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the ini option ``rank_pool_preload``."""
    parser.addini(_PRELOAD, "modules that ranks of the fixture rank_pool find imported", type="args", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker ``gpu(num=1)``."""
    config.addinivalue_line("markers", "gpu(num=1): needs this many CUDA GPUs; skipped, with the reason, elsewhere")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that is marked ``gpu`` where there are too few GPUs."""
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    needed = marker.args[0] if marker.args else marker.kwargs.get("num", 1)
    if (found := gpus_available()) < needed:
        pytest.skip(f"needs {needed} GPU(s) usable with NCCL, found {found}")
