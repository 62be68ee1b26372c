"""A few rounds of the kill campaign of benchmarks/crash_reshard.py, whose full run is committed with its results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from crash_reshard import campaign


def test_a_kill_leaves_no_target_or_a_whole_one_and_the_source_as_it_was(tmp_path: Path) -> None:
    result = campaign(tmp_path, kills=6, seed=3, world_size=8)
    outcomes = result["outcomes"]
    assert isinstance(outcomes, dict)
    assert outcomes["absent"] + outcomes["complete"] == 6 and outcomes["resumed"] >= 1


def test_the_committed_campaign_has_fifty_kills() -> None:
    result = json.loads((ROOT / "benchmarks/results/crash_reshard.json").read_text())
    assert result["kills"] >= 50 and result["outcomes"]["absent"] >= 25 and max(result["ranks_taken_over"]) >= 5
