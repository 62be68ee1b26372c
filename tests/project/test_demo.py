"""The demonstration runs, and says so in its exit status."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from places import ROOT
from warm_python import executable


def test_quick_demo(tmp_path: Path) -> None:
    python = executable()  # the demonstration starts torchrun by it, and torchrun the ranks
    command = [python, str(ROOT / "examples" / "demo.py"), "--quick", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON_EXEC": python}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "demo.json").read_text())
    assert "matches" in result.stdout or "content root" in result.stdout
