"""The example that reads the format with numpy alone, on checkpoints that the package has written, and on damage."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from places import ROOT
from saved_files import flip

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.core.digest import digest_range, stream_seed

VECTORS = ROOT / "docs/assets/digest-vectors.json"
WITHOUT_US = """
import runpy, sys
sys.modules |= dict.fromkeys(["torch", "zeroelastic", "deepspeed"])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def read(*arguments: object) -> tuple[int, str]:
    """What the example says, and its exit code, where neither torch nor zeroelastic can be imported."""
    command = [sys.executable, "-c", WITHOUT_US, str(ROOT / "examples/read_format.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.parametrize("name", ["elastic2", "elastic3"])
def test_what_was_saved_is_what_the_specification_says(tmp_path: Path, name: str) -> None:
    golden = ROOT / f"tests/golden/{name}/global_step2"
    assert read(golden) == (0, f"{golden}: as the specification says\n")
    shutil.copytree(golden, tmp_path / "tag")
    record = tmp_path / "tag" / RECORD_NAME
    record.write_text(record.read_text().replace('"global_steps": 2', '"global_steps": 3'))
    assert read(tmp_path / "tag") == (1, "the record was changed\n")
    shutil.copy(golden / RECORD_NAME, record)
    weights = open_checkpoint(tmp_path / "tag").shard(0).extents["fp32"]
    flip(weights.path, int(weights.offset[0]))
    code, said = read(tmp_path / "tag")
    assert code == 1 and said.startswith("Bad CRC-32 for file")


def test_the_vectors_are_those_of_the_package_and_of_the_example(tmp_path: Path) -> None:
    document = json.loads(VECTORS.read_text())
    for vector in document["vectors"]:
        bits = mixed(vector["numel"]).astype(f"<u{vector['itemsize']}")
        seed = stream_seed(vector["name"], vector["key"])
        found = digest_range(bits.view(np.uint8), vector["itemsize"], seed=seed, start=vector["start"])
        assert f"{found:016x}" == vector["digest"]
    assert read("--vectors", VECTORS)[0] == 0
    document["vectors"][3]["digest"] = "0" * 16
    (tmp_path / "other.json").write_text(json.dumps(document))
    code, said = read("--vectors", tmp_path / "other.json")
    assert code == 1 and said.count("this gives") == 1


def mixed(numel: int) -> np.ndarray:
    """The elements of a vector: splitmix64 of 1, 2, ..."""
    v = np.arange(1, numel + 1, dtype=np.uint64)
    v = (v ^ (v >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    v = (v ^ (v >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return v ^ (v >> np.uint64(31))
