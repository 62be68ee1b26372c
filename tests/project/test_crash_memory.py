"""A few rounds of the kill campaign of benchmarks/crash_memory.py, whose full run is committed with its results."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from places import ROOT


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_a_job_with_checkpoints_in_memory_goes_on_after_kills() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/crash_memory.py"), "--kills", "3", "--kind", "copies"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["kills"] == 3 and result["files_left_in_memory"] == 0
    assert sum(count for what, count in result["outcomes"].items() if what.startswith("resumed from memory")) >= 2


def test_the_committed_campaign_has_so_many_kills() -> None:
    result = json.loads((ROOT / "benchmarks/results/crash_memory.json").read_text())
    outcomes = result["outcomes"]
    assert result["kills"] >= 200 and result["files_left_in_memory"] == 0
    assert min(outcomes["a node killed"], outcomes["a worker killed"]) >= 50
    assert min(outcomes[f"killed during the {phase}"] for phase in ("copy", "exchange", "swap")) >= 25
    assert {(job["kind"], job["stage"]) for job in result["jobs"]} == {("copies", 3), ("parity", 2)}
    assert not [what for what in outcomes if "steps lost, from memory" in what and what[0] not in "01"]
