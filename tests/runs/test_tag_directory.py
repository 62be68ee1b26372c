"""The one rename that makes a tag, and what is left when a process ends before or after it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic import optim_name, write_checkpoint

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.runs import tag_directory
from zeroelastic.runs.locate import list_tags
from zeroelastic.runs.tag_directory import (
    carry_over,
    is_unfinished,
    make_staging_dir,
    publish_tag,
    recover,
    recover_all,
    replaces_nothing,
    staging_dir_of,
    unfinished,
)

OLD, NEW = "0" * 32, "1" * 32


def files(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def make(tag_dir: Path, save_id: str, content: str) -> Path:
    staging_dir = make_staging_dir(tag_dir, save_id)
    (staging_dir / optim_name(0)).write_text(content)
    (staging_dir / RECORD_NAME).write_text(content)
    return staging_dir


def saved(tag_dir: Path, save_id: str, content: str) -> None:
    staging_dir = make(tag_dir, save_id, content)
    carry_over(tag_dir, staging_dir)
    publish_tag(staging_dir, tag_dir).finish()


@pytest.fixture(autouse=True)
def dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are killed are played in this one, which lives: what it has left is of a dead one all the same."""
    monkeypatch.setattr(tag_directory, "life_of_owner", lambda directory: "ended")


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(tag_directory, "exchange", lambda staging_dir, place: False)
    return bool(request.param)


@pytest.mark.parametrize("before", [{}, {optim_name(0): "old", RECORD_NAME: "old"}], ids=["new", "replaced"])
def test_a_rename_that_cannot_be_made_durable_is_undone(
    tmp_path: Path, exchange: bool, before: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the save says that the tag is what it was before."""

    def fail(directory: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(directory))

    if before:
        saved(tmp_path / "tag", OLD, "old")
    staging_dir = make(tmp_path / "tag", NEW, "new")
    monkeypatch.setattr(tag_directory, "sync_directory", fail)
    with pytest.raises(OSError, match="Input/output error"):
        publish_tag(staging_dir, tmp_path / "tag")
    assert files(tmp_path / "tag") == before
    assert set(os.listdir(tmp_path)) == {staging_dir.name, *(["tag"] if before else [])}
    assert files(staging_dir) == {optim_name(0): "new", RECORD_NAME: "new"}


@pytest.mark.parametrize("before", [{}, {optim_name(0): "old", RECORD_NAME: "old"}], ids=["new", "replaced"])
def test_a_published_tag_is_taken_back_unless_another_save_has_replaced_it(
    tmp_path: Path, exchange: bool, before: dict[str, str]
) -> None:
    for name in ("tag", "again"):
        tag = tmp_path / name
        if before:
            saved(tag, OLD, "old")
        staging_dir = make(tag, NEW, "new")
        published = publish_tag(staging_dir, tag)
        assert files(tag)[RECORD_NAME] == "new"
        if name == "again":
            saved(tag, "3" * 32, "newest")
            published.take_back()
            assert files(tag)[RECORD_NAME] == "newest"
        else:
            published.take_back()
            assert (files(tag) if before else {}) == before and tag.exists() == bool(before)
            assert files(staging_dir) == {optim_name(0): "new", RECORD_NAME: "new"}


def test_a_tag_appears_and_is_replaced_as_a_whole(tmp_path: Path, exchange: bool) -> None:
    tag = tmp_path / "deep" / "tag"
    staging_dir = make(tag, OLD, "old")
    assert not tag.exists() and is_unfinished(staging_dir.name) and list_tags(tmp_path / "deep") == ()
    publish_tag(staging_dir, tag)
    assert files(tag) == {optim_name(0): "old", RECORD_NAME: "old"}
    (tag / optim_name(1)).write_text("a rank that the next save does not have")
    (tag / "notes.txt").write_text("mine")
    (tag / "mine").mkdir()
    (tag / "mine" / "deeper").write_text("mine too")
    (tag / "link").symlink_to("notes.txt")
    tag.chmod(0o2775)
    saved(tag, NEW, "new")
    assert files(tag) == {
        optim_name(0): "new",
        RECORD_NAME: "new",
        "notes.txt": "mine",
        "mine/deeper": "mine too",
        "link": "mine",
    }
    assert (tag / "link").is_symlink() and stat.S_IMODE(tag.stat().st_mode) == 0o2775
    assert os.listdir(tmp_path / "deep") == ["tag"]


def test_an_empty_directory_of_the_name_is_taken(tmp_path: Path) -> None:
    (tmp_path / "tag").mkdir()
    saved(tmp_path / "tag", NEW, "new")
    assert files(tmp_path / "tag")[RECORD_NAME] == "new" and os.listdir(tmp_path) == ["tag"]


def test_a_link_stays_a_link(tmp_path: Path, exchange: bool) -> None:
    (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "tag").symlink_to("disk/real")
    saved(tmp_path / "tag", OLD, "old")
    saved(tmp_path / "tag", NEW, "new")
    assert (tmp_path / "tag").is_symlink() and files(tmp_path / "disk" / "real")[RECORD_NAME] == "new"
    assert os.listdir(tmp_path / "disk") == ["real"]


def test_a_file_of_the_name_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "tag").write_text("mine")
    with pytest.raises(NotADirectoryError):
        make_staging_dir(tmp_path / "tag", NEW)
    staging_dir = make(tmp_path / "other", NEW, "new")
    with pytest.raises(NotADirectoryError):
        publish_tag(staging_dir, tmp_path / "tag")
    assert (tmp_path / "tag").read_text() == "mine"


def test_what_dead_saves_left_goes_with_the_next_save_of_the_tag_only(tmp_path: Path) -> None:
    saved(tmp_path / "tag", OLD, "old")
    for tag in ("tag", "tag1", "ta"):
        make(tmp_path / tag, "2" * 32, "dead")
    (tmp_path / ".tag.backup.tmp").mkdir()
    assert unfinished(tmp_path / "tag") == (staging_dir_of(tmp_path / "tag", "2" * 32),)
    saved(tmp_path / "tag", NEW, "new")
    left = {f".{tag}.{'2' * 32}.tmp" for tag in ("tag1", "ta")}
    assert set(os.listdir(tmp_path)) == {"tag", ".tag.backup.tmp", *left}


LONG = "x" * 200


def test_tags_that_begin_alike_are_not_one(tmp_path: Path) -> None:
    """Of 255 bytes that a name may have, hidden names have 200 for the tag."""
    first, second = tmp_path / f"{LONG}-first", tmp_path / f"{LONG}-second"
    staging_dir = make(first, OLD, "first")
    other = make(second, OLD, "second")
    assert staging_dir != other and is_unfinished(other.name) and len(os.fsencode(other.name)) < 255
    publish_tag(staging_dir, first)
    assert files(first)[RECORD_NAME] == "first" and unfinished(first) == () and unfinished(second) == (other,)
    saved(second, NEW, "new")
    aside = staging_dir_of(second, OLD).with_suffix(".old")
    second.rename(aside)
    assert replaces_nothing(aside) and not recover(first) and recover(second)
    assert files(first)[RECORD_NAME] == "first" and files(second)[RECORD_NAME] == "new"


def test_a_tag_whose_hidden_name_is_cut_is_recovered(tmp_path: Path) -> None:
    first, second = tmp_path / f"{LONG}-first", tmp_path / f"{LONG}-second"
    write_checkpoint(second, world_size=1, record=True)
    aside, torn = staging_dir_of(second, OLD).with_suffix(".old"), staging_dir_of(first, NEW)
    second.rename(aside)
    torn.mkdir()
    assert replaces_nothing(aside) and not replaces_nothing(torn)
    recover_all(tmp_path)
    assert (second / RECORD_NAME).exists() and not first.exists() and torn.is_dir()


class Killed(BaseException):
    """Ends everything at once."""


def test_a_kill_between_the_calls_of_a_replacement_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    """Where there are two renames, there is a moment between them that the next load or save ends well."""
    found: list[tuple[str, bool]] = []
    while True:
        root = tmp_path / str(len(found))
        tag = root / "tag"
        saved(tag, OLD, "old")
        staging_dir = make(tag, NEW, "new")
        left = iter([None] * len(found))

        def counted(call: Callable[..., Any], left: Iterator[None] = left) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                for _ in left:
                    return call(*args, **kwargs)
                raise Killed

            return run

        with monkeypatch.context() as patched:
            patched.setattr(tag_directory.os, "rename", counted(os.rename))
            patched.setattr(tag_directory, "sync_directory", counted(tag_directory.sync_directory))
            patched.setattr(tag_directory.shutil, "rmtree", counted(shutil.rmtree))
            try:
                publish_tag(staging_dir, tag).finish()
                break
            except Killed:
                pass
        mended = not tag.exists()
        assert recover(tag) is mended and recover(tag) is False
        told = files(tag)
        assert told[RECORD_NAME] == told[optim_name(0)]
        found.append((told[RECORD_NAME], mended))
        saved(tag, "3" * 32, "next")
        assert os.listdir(root) == ["tag"] and files(tag)[RECORD_NAME] == "next"
    if exchange:
        assert found == [("old", False), ("new", False), ("new", False)]
    else:
        assert found == [("old", False), ("old", False), ("new", True), ("new", False), ("new", False)]
