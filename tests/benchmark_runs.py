"""Runs of the benchmarks at a small size, as programs of their own."""

from __future__ import annotations

import os
import subprocess
import sys

from places import ROOT


def run_benchmark(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script of benchmarks/ with these arguments."""
    path = os.pathsep.join([os.fspath(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, f"benchmarks/{script}", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
