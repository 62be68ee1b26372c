"""Runs of the benchmarks at a small size, as programs of their own."""

from __future__ import annotations

import os
import subprocess
import sys

from places import ROOT
from programs import run_program


def run_benchmark(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script of benchmarks/ with these arguments."""
    path = os.pathsep.join([os.fspath(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return run_program(sys.executable, f"benchmarks/{script}", *arguments, cwd=ROOT, timeout=400, PYTHONPATH=path)
