"""Sample checkpoints for the tests of the library."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample import write_sample
from stores import counted

__all__ = ["counted", "samples"]


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders ``elastic`` and ``rigid``, each of four ranks, with the tags global_step2 and global_step4."""
    root = tmp_path_factory.mktemp("samples")
    for format in ("elastic", "rigid"):
        write_sample(root / format, format=format)
    return root
