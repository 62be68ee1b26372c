"""Programs of examples/: the demonstration, DeepSpeed's faults as their page has them, and the reader of the format.

What DeepSpeed alone does is still what the page says: three of its reproductions run here, and the raw result of all is
read (`make deepspeed-faults`). Where one of these fails with a newer DeepSpeed, the fault is mended, and the page and
what works around it can go. The reader of the format needs numpy alone.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from places import ROOT
from saved_files import flip
from warm_python import executable

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.core.digest import digest_range, stream_seed


def test_quick_demo(tmp_path: Path) -> None:
    python = executable()  # the demonstration starts torchrun by it, and torchrun the ranks
    command = [python, str(ROOT / "examples" / "demo.py"), "--quick", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON_EXEC": python}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "demo.json").read_text())
    assert "matches" in result.stdout or "content root" in result.stdout


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


VECTORS = ROOT / "docs/assets/digest-vectors.json"
WITHOUT_US = """
import runpy, sys
sys.modules |= dict.fromkeys(["torch", "zeroelastic", "deepspeed"])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def read_format(*arguments: object) -> tuple[int, str]:
    """What the example says, and its exit code, where neither torch nor zeroelastic can be imported."""
    command = [sys.executable, "-c", WITHOUT_US, str(ROOT / "examples/read_format.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.parametrize("name", ["elastic2", "elastic3"])
def test_what_was_saved_is_what_the_specification_says(tmp_path: Path, name: str) -> None:
    golden = ROOT / f"tests/golden/{name}/global_step2"
    assert read_format(golden) == (0, f"{golden}: as the specification says\n")
    shutil.copytree(golden, tmp_path / "tag")
    record = tmp_path / "tag" / RECORD_NAME
    record.write_text(record.read_text().replace('"global_steps": 2', '"global_steps": 3'))
    assert read_format(tmp_path / "tag") == (1, "the record was changed\n")
    shutil.copy(golden / RECORD_NAME, record)
    weights = open_checkpoint(tmp_path / "tag").shard(0).extents["fp32"]
    flip(weights.path, int(weights.offset[0]))
    code, said = read_format(tmp_path / "tag")
    assert code == 1 and said.startswith("Bad CRC-32 for file")


def test_the_vectors_are_those_of_the_package_and_of_the_example(tmp_path: Path) -> None:
    document = json.loads(VECTORS.read_text())
    for vector in document["vectors"]:
        bits = mixed(vector["numel"]).astype(f"<u{vector['itemsize']}")
        seed = stream_seed(vector["name"], vector["key"])
        found = digest_range(bits.view(np.uint8), vector["itemsize"], seed=seed, start=vector["start"])
        assert f"{found:016x}" == vector["digest"]
    assert read_format("--vectors", VECTORS)[0] == 0
    document["vectors"][3]["digest"] = "0" * 16
    (tmp_path / "other.json").write_text(json.dumps(document))
    code, said = read_format("--vectors", tmp_path / "other.json")
    assert code == 1 and said.count("this gives") == 1


def mixed(numel: int) -> np.ndarray:
    """The elements of a vector: splitmix64 of 1, 2, ..."""
    v = np.arange(1, numel + 1, dtype=np.uint64)
    v = (v ^ (v >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    v = (v ^ (v >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return v ^ (v >> np.uint64(31))
