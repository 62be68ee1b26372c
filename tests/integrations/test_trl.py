"""TRL as it is installed, by torchrun, on 2 -> 1 ranks: two environment variables, and nothing else is changed.

`make front-ends` runs this and other front ends at stages 2 and 3, on 2 -> 3 -> 1 ranks.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from front_ends.commands import HERE, STEPS, Run
from front_ends.running import environment_of, run_front_end, take_checkpoint

pytestmark = [pytest.mark.extended, pytest.mark.starts_processes]

RESUMED_AT = 4


@pytest.fixture
def task(tmp_path: Path) -> Path:
    python = environment_of("TRL SFT") / "bin/python"
    if not python.exists() and not os.environ.get("CI"):
        pytest.skip("there is no TRL in .venv/front-ends; `make .venv/front-ends/trl/.stamp` installs it")
    subprocess.run([python, HERE / "task.py", tmp_path / "task"], check=True, timeout=300)
    return tmp_path / "task"


@pytest.mark.support(
    "Frameworks", "TRL, unchanged, by `ZEROELASTIC=1`", "exact", "other front ends: docs/guides/front-ends.md"
)
def test_an_unchanged_run_goes_on_on_another_number_of_ranks_with_its_losses_and_samples(
    task: Path, tmp_path: Path
) -> None:
    """With its losses and samples. The checkpoint is one of DeepSpeed alone, the batch per device that of 2 ranks."""
    whole = Run(task, tmp_path / "on2", 3, 2)
    seen = run_front_end("TRL SFT", whole, env={})
    assert seen.status == 0 and seen.said == [], seen.tail()
    resume = take_checkpoint("TRL SFT", whole, RESUMED_AT, tmp_path / "on1")
    found = run_front_end("TRL SFT", Run(task, tmp_path / "on1", 3, 1, resume))
    assert found.status == 0, found.tail()
    steps = range(RESUMED_AT + 1, STEPS + 1)
    assert found.samples == {step: seen.samples[step] for step in steps}
    assert all(len(samples) == 6 for samples in found.samples.values())
    assert found.losses == pytest.approx(seen.losses, abs=2e-3)
    said = "\n".join(found.said)
    assert said.count("active by ZEROELASTIC=1 on 1 rank:") == 1
    assert "gradient_accumulation_steps 1 -> 2" in said
    assert "resumed on 1 rank from 2: global batch 6 as before (micro batch 3 x 1 rank x 2 accumulated)" in said
