"""The reproductions of docs/deepspeed-faults.md: what DeepSpeed alone does is still what the page says.

Three of them run here, and the raw result of all is read (`make deepspeed-faults`). Where one of these fails with a
newer DeepSpeed, the fault is mended, and the page and what works around it can go.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from warm_python import executable

ROOT = Path(__file__).parents[2]
RUN = runpy.run_path(str(ROOT / "examples" / "deepspeed_faults" / "run.py"))
SEEN = {
    "round_robin": "Universal Checkpoint: [1-9] of 8 parameters are wrong",
    "autoep_size": r"rank 0: .* wrong: \[2, 3\]",
    "frozen_experts": r"rank 1: .* wrong: \[2, 3\]",
    "more_ranks": "rank 1: AssertionError ''",
    "latest_first": r"there: \[(?!.*zero_pp_rank_1_mp_rank_00_optim_states)",
    "no_optimizer": "AttributeError: 'DeepSpeedZeRoOffload'",
}


@pytest.mark.parametrize("name", ["frozen_experts", "more_ranks", "latest_first"])
def test_deepspeed_alone_does_what_the_page_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_EXEC", executable())  # torchrun starts ranks by it
    lines = RUN["results"](name)
    assert any(re.search(SEEN[name], line) for line in lines), lines


def test_the_raw_result_is_what_the_page_says() -> None:
    result = (ROOT / "benchmarks" / "results" / "deepspeed_faults.txt").read_text()
    found = {part.split(".py: ")[0]: part for part in result.split("\n\n")[1:]}
    assert found.keys() == SEEN.keys()
    assert all(re.search(SEEN[name], found[name]) for name in SEEN)


def test_reproductions_are_short_and_on_the_page() -> None:
    page = (ROOT / "docs" / "deepspeed-faults.md").read_text()
    assert SEEN.keys() == RUN["STEPS"].keys()
    for name in SEEN:
        source = (ROOT / "examples" / "deepspeed_faults" / f"{name}.py").read_text()
        assert f"{name}.py" in page and len(source.splitlines()) <= 40
        assert "zeroelastic" not in source
