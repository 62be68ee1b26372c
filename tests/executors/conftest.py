"""The executors, each of which runs a test, and a folder for a module's files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import ENGINES, Engine, open_engine

from zeroelastic.executors.dispatch import OPERATIONS


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with open_engine(request.param) as found:
        yield found


@pytest.fixture(scope="module", params=[name for name in OPERATIONS if "scan" in OPERATIONS[name]])
def scanner(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The executors of files and host memory, which scan and move files and make checksums."""
    with open_engine(request.param) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")
