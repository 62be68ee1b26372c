"""Where the repository, its tests and the golden checkpoints are, and which DeepSpeed versions are tested."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
OLDER_DEEPSPEEDS = ("0.18.9", "0.19.5")
"""Versions that pass the tests marked `core`; `make versions` installs them."""
