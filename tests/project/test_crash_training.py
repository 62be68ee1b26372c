"""A few rounds of the kill campaign of benchmarks/crash_training.py, whose full run is committed with its results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from places import ROOT

from zeroelastic.testing import RankPool

sys.path.insert(0, str(ROOT / "benchmarks"))

from crash_training import campaign


def test_a_killed_training_job_resumes_at_another_size_from_a_whole_checkpoint(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    result = campaign(tmp_path, rank_pool, kills=4, seed=3, stage=3)
    outcomes = result["outcomes"]
    assert isinstance(outcomes, dict) and outcomes["killed while saving"] >= 1
    assert outcomes["resumed on 2 ranks"] + outcomes["resumed on 3 ranks"] >= 2


@pytest.mark.parametrize(("name", "kills"), [("crash_training", 200), ("crash_training_stage2", 60)])
def test_the_committed_campaign_has_so_many_kills(name: str, kills: int) -> None:
    result = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    outcomes = result["outcomes"]
    assert result["kills"] >= kills and outcomes["killed while saving"] >= kills // 2
    resumed = sum(outcomes.get(f"resumed on {size} ranks", 0) for size in (2, 3))
    assert resumed + outcomes.get("no save yet", 0) == result["kills"]
