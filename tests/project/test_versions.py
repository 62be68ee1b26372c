"""The oldest and a middle DeepSpeed that are supported pass the core suite, as the newest passes all of it.

The core suite are the tests marked `core`: both formats, up and down, each kind of optimizer, precision and offload
that all versions have, the arguments of a load, what is refused, installing, and DeepSpeed's own tools. `make versions`
installs the versions beside the environment, each in a folder of its own that goes in front of the module path.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from places import OLDER_DEEPSPEEDS, TESTS

from zeroelastic.testing import RankPool

FEWEST_TESTS = 29


def core_files() -> list[str]:
    """The test files that have tests of the core suite; to collect the others too would take as long as to run it."""
    return [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "mark.core" in path.read_text()]


@pytest.mark.extended
@pytest.mark.parametrize(
    "version",
    [
        pytest.param(version, marks=pytest.mark.support("Using it", f"DeepSpeed {version}", "exact", "the core suite"))
        for version in OLDER_DEEPSPEEDS
    ],
)
def test_the_core_suite_passes_with_an_older_deepspeed(version: str, tmp_path: Path) -> None:
    folder = Path(sys.prefix) / f"deepspeed-{version}"
    if not folder.is_dir():
        pytest.skip(f"DeepSpeed {version} is not in {folder}; `make versions` puts it there")
    environment = {
        **os.environ,
        "CI": "1",  # a test of the core suite that is skipped has failed
        "PYTHONPATH": os.pathsep.join([str(folder), str(TESTS.parent)]),
        "ZEROELASTIC_EXPECT_DEEPSPEED": version,
        "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions"),  # ops are compiled from each version's own sources
    }
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "core", "--durations", "15"]
    result = subprocess.run(
        [*command, "--basetemp", str(tmp_path / "core"), *core_files()],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    passed = re.search(r"^(\d+) passed, (\d+) deselected(?:, \d+ warnings?)? in ", result.stdout, flags=re.MULTILINE)
    assert passed is not None and int(passed[1]) >= FEWEST_TESTS, result.stdout[-500:]


@pytest.mark.core
@pytest.mark.extended
def test_the_deepspeed_that_runs_is_the_one_that_was_asked_for(rank_pool: RankPool) -> None:
    """Here, in the ranks, and in the processes that tests start by themselves."""
    asked = os.environ.get("ZEROELASTIC_EXPECT_DEEPSPEED", metadata.version("deepspeed"))
    script = f"import {deepspeed_version.__module__} as m; print(m.{deepspeed_version.__name__}())"
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TESTS), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert [deepspeed_version(), *rank_pool.run(deepspeed_version, 2), done.stdout.split()[-1]] == [asked] * 4


def deepspeed_version() -> str:
    import deepspeed

    assert metadata.version("deepspeed") == deepspeed.__version__.partition("+")[0]
    return metadata.version("deepspeed")
