"""docs/guides/front-ends.md has the results of `make front-ends`, and what it promises of them is what they show."""

from __future__ import annotations

import json

import pytest
from front_ends.commands import FRONT_ENDS
from front_ends.run import table
from places import ROOT

RESULTS = ROOT / "benchmarks/results/front_ends.json"
PAGE = (ROOT / "docs/guides/front-ends.md").read_text()
FOUND = json.loads(RESULTS.read_text())["results"]


def test_the_table_is_that_of_the_raw_output():
    """After `make front-ends`: put benchmarks/results/front_ends.md into the page."""
    assert table(FOUND) == RESULTS.with_suffix(".md").read_text()
    assert table(FOUND) in PAGE


@pytest.mark.parametrize("one", FOUND, ids=lambda one: f"{one['front_end']} {one['stage']}")
def test_each_run_is_the_uninterrupted_one(one):
    whole, *resumed = one["runs"]
    assert [run["ranks"] for run in resumed] == [3, 1] and one["same"]
    for run in resumed:
        for step in range(run["resumed_at"] + 1, 13):
            assert run["samples"][str(step)] == whole["samples"][str(step)]
            assert len(run["samples"][str(step)]) == 6
            assert abs(run["losses"][str(step)] - whole["losses"][str(step)]) <= 0.01
        assert any("active by ZEROELASTIC=1" in line for line in run["said"])


def test_every_front_end_has_results_at_both_stages():
    assert {(one["front_end"], one["stage"]) for one in FOUND} == {(name, at) for name in FRONT_ENDS for at in (3, 2)}
