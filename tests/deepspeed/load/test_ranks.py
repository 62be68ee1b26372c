"""What a load asks of a shared file system does not grow with the number of ranks, but for the one that lists."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from bench_ranks import measure  # noqa: E402


def test_one_rank_lists_a_shared_directory_and_the_others_do_the_same_at_any_number() -> None:
    few, many = measure(4), measure(24)
    assert few["all"]["listed"] == many["all"]["listed"] == 1
    assert few["rank 1"] == many["rank 1"]
    assert many["rank 1"]["headers"] == 2  # the model states of one rank, and the one optimizer file that it needs
    # rank 0 looks at each file besides: two for each rank, and the record
    assert many["worst"]["stats"] - few["worst"]["stats"] == 2 * (24 - 4)
