"""The oldest and a middle DeepSpeed that are supported pass the same end-to-end tests as the newest.

`make versions` installs them beside the environment, each in a folder of its own that goes in front of the module path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
VERSIONS = ("0.18.9", "0.19.5")
SUBSET = (
    "elastic_resume_is and (4-3 or 3-8) or stock_rigid and 3-4 "
    "or variant and (fp32-elastic or sgd_momentum-rigid or offload_both-elastic)"
)


@pytest.mark.parametrize("version", VERSIONS)
def test_resumes_with_an_older_deepspeed(version: str) -> None:
    folder = Path(sys.prefix) / f"deepspeed-{version}"
    if not folder.is_dir():
        pytest.skip(f"DeepSpeed {version} is not in {folder}; `make versions` puts it there")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(TESTS.parent)]),
        "ZEROELASTIC_EXPECT_DEEPSPEED": version,
    }
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(TESTS / "test_resume.py")]
    result = subprocess.run(
        [*command, "-k", SUBSET], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "6 passed" in result.stdout, result.stdout[-500:]
