"""Paths derived from a pinned directory stay in it, or say that they do not."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest

from zeroelastic.io.paths import PinnedPath, pin_directory


@pytest.fixture
def replaced(tmp_path: Path) -> Path:
    """A pinned directory in whose place there is another one by now."""
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / "file").write_text("old")
    pinned = pin_directory(tmp_path / "tag")
    (tmp_path / "tag").rename(tmp_path / "aside")
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / "file").write_text("new")
    return pinned


def test_what_stays_pinned(replaced: Path) -> None:
    for path in (
        replaced / "file",
        replaced.joinpath("file"),
        (replaced / "other").with_name("file"),
        (replaced / "x").with_stem("file"),
    ):
        assert isinstance(path, PinnedPath) and path.read_text() == "old"
    assert [entry.name for entry in os.scandir(replaced)] == ["file"]
    assert type(replaced.resolve()) is type(Path()) and replaced.resolve().name == "aside"


@pytest.mark.parametrize(
    "derive",
    [
        lambda path: (path / "file").with_suffix(".pt"),
        lambda path: (path / "a" / "file").parents[0],
        lambda path: path.relative_to(path.parent),
    ],
)
def test_what_loses_the_pin_says_so(replaced: Path, derive) -> None:
    found = derive(replaced)
    with pytest.raises(AssertionError, match="loses the pin"):
        os.fspath(found)


def test_a_copy_for_another_process_is_a_plain_path(replaced: Path) -> None:
    for made in (pickle.loads(pickle.dumps(replaced / "file")), copy.deepcopy(replaced / "file")):
        assert type(made) is type(Path()) and made.read_text() == "new"
