"""A few rounds of the kill campaign of benchmarks/crash_reshard.py, whose full run is committed with its results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from crash_reshard import campaign


@pytest.mark.extended
@pytest.mark.parametrize("stages", [(3, 3), (2, 3)])
def test_a_kill_leaves_no_target_or_a_whole_one_and_the_source_as_it_was(
    tmp_path: Path, stages: tuple[int, int]
) -> None:
    result = campaign(tmp_path, kills=6 if stages == (3, 3) else 3, seed=3, world_size=8, stages=stages)
    outcomes = result["outcomes"]
    assert isinstance(outcomes, dict)
    assert outcomes["absent"] + outcomes["complete"] == result["kills"]
    assert outcomes["resumed"] >= 1 or stages != (3, 3)  # of three kills, none may come in the middle


@pytest.mark.parametrize(
    ("name", "kills"),
    [("crash_reshard", 50), ("crash_reshard_stage3_to_stage2", 50), ("crash_reshard_stage2_to_stage3", 25)],
)
def test_the_committed_campaign_has_so_many_kills(name: str, kills: int) -> None:
    result = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    absent, taken_over = result["outcomes"]["absent"], max(result["ranks_taken_over"])
    assert result["kills"] >= kills and absent >= kills // 2 and taken_over >= 5
