"""What a load and a commit ask of a shared file system and of the store does not grow with the number of ranks.

The commit record does, which rank 0 reads and sends to the others: by some hundred bytes a rank that saved.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from bench_ranks import FILE_OPERATIONS, measure  # noqa: E402
from simulated_ranks import SimulatedRanks  # noqa: E402


def test_what_a_rank_asks_for_is_the_same_at_any_number_of_ranks() -> None:
    few, many = measure(8), measure(40)
    requests = (*FILE_OPERATIONS, "store requests", "headers", "collectives")
    for part in ("load", "commit"):
        for whose in ("rank 0", "worst"):
            assert {what: few[part][whose][what] for what in requests} == {
                what: many[part][whose][what] for what in requests
            }
        ordinary, first = (sum(many[part][whose][what] for what in FILE_OPERATIONS) for whose in ("worst", "rank 0"))
        assert first < 3 * ordinary
        assert many[part]["worst"]["listed"] == 0 and many[part]["all"]["listed"] <= 3
        assert many[part]["worst"]["headers"] == 2  # the two files of the rank itself
    assert few["commit"]["worst"]["received bytes"] == many["commit"]["worst"]["received bytes"] < 100
    assert many["load"]["worst"]["header bytes"] == pytest.approx(few["load"]["worst"]["header bytes"], rel=0.02)
    for whose, what in (("rank 0", "received bytes"), ("worst", "received bytes"), ("rank 0", "header bytes")):
        assert many["load"][whose][what] < few["load"][whose][what] + 400 * (40 - 8)
    for row in (few, many):
        # of either file of each rank a size and a digest
        assert row["commit"]["rank 0"]["received bytes"] < row["commit"]["world_size"] * 88 + 100


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    ranks = SimulatedRanks(3)
    with pytest.raises(RuntimeError, match="every simulated rank waits"):
        ranks.run(lambda rank: ranks.store.wait([f"key {rank}"], None))
