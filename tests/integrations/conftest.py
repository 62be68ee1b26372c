"""Ranks that have imported the frameworks, for all files here that train with the Trainer, accelerate or Lightning."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from frameworks_job import PRELOAD

from zeroelastic.testing import RankPool


@pytest.fixture(scope="session")
def frameworks_pool() -> Iterator[RankPool]:
    more = ("transformers.trainer", "zeroelastic.integrations.transformers")
    with RankPool(preload=("pytest", *PRELOAD, *more)) as pool:
        yield pool
