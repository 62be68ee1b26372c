"""The one rename that makes a tag, and what is left when a process ends before or after it."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic import optim_name, write_checkpoint

from zeroelastic import save_place
from zeroelastic.record import RECORD_NAME
from zeroelastic.save_place import (
    begin,
    carry_over,
    is_unfinished,
    making_of,
    put_in_place,
    recover,
    recover_all,
    replaces_nothing,
    unfinished,
)
from zeroelastic.source import list_tags

OLD, NEW = "0" * 32, "1" * 32


def files(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def make(tag_dir: Path, save_id: str, content: str) -> Path:
    making = begin(tag_dir, save_id)
    (making / optim_name(0)).write_text(content)
    (making / RECORD_NAME).write_text(content)
    return making


def saved(tag_dir: Path, save_id: str, content: str) -> None:
    making = make(tag_dir, save_id, content)
    carry_over(tag_dir, making)
    put_in_place(making, tag_dir)


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(save_place, "_exchange", lambda making, place: False)
    return bool(request.param)


def test_a_tag_appears_and_is_replaced_as_a_whole(tmp_path: Path, exchange: bool) -> None:
    tag = tmp_path / "deep" / "tag"
    making = make(tag, OLD, "old")
    assert not tag.exists() and is_unfinished(making.name) and list_tags(tmp_path / "deep") == ()
    put_in_place(making, tag)
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
        begin(tmp_path / "tag", NEW)
    making = make(tmp_path / "other", NEW, "new")
    with pytest.raises(NotADirectoryError):
        put_in_place(making, tmp_path / "tag")
    assert (tmp_path / "tag").read_text() == "mine"


def test_what_dead_saves_left_goes_with_the_next_save_of_the_tag_only(tmp_path: Path) -> None:
    saved(tmp_path / "tag", OLD, "old")
    for tag in ("tag", "tag1", "ta"):
        make(tmp_path / tag, "2" * 32, "dead")
    (tmp_path / ".tag.backup.tmp").mkdir()
    assert unfinished(tmp_path / "tag") == (making_of(tmp_path / "tag", "2" * 32),)
    saved(tmp_path / "tag", NEW, "new")
    left = {f".{tag}.{'2' * 32}.tmp" for tag in ("tag1", "ta")}
    assert set(os.listdir(tmp_path)) == {"tag", ".tag.backup.tmp", *left}


LONG = "x" * 200


def test_tags_that_begin_alike_are_not_one(tmp_path: Path) -> None:
    """Of 255 bytes that a name may have, hidden names have 200 for the tag."""
    first, second = tmp_path / f"{LONG}-first", tmp_path / f"{LONG}-second"
    making = make(first, OLD, "first")
    other = make(second, OLD, "second")
    assert making != other and is_unfinished(other.name) and len(os.fsencode(other.name)) < 255
    put_in_place(making, first)
    assert files(first)[RECORD_NAME] == "first" and unfinished(first) == () and unfinished(second) == (other,)
    saved(second, NEW, "new")
    aside = making_of(second, OLD).with_suffix(".old")
    second.rename(aside)
    assert replaces_nothing(aside) and not recover(first) and recover(second)
    assert files(first)[RECORD_NAME] == "first" and files(second)[RECORD_NAME] == "new"


def test_hidden_names_that_were_cut_without_a_digest_are_understood(tmp_path: Path) -> None:
    first, second = tmp_path / f"{LONG}-first", tmp_path / f"{LONG}-second"
    write_checkpoint(second, world_size=1, record=True)
    aside, torn = (tmp_path / f".{LONG}.{name}.{suffix}" for name, suffix in ((OLD, "old"), (NEW, "tmp")))
    second.rename(aside)
    torn.mkdir()
    assert unfinished(first) == () and unfinished(second) == (aside,)
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
        making = make(tag, NEW, "new")
        left = iter([None] * len(found))

        def counted(call: Callable[..., Any], left: Iterator[None] = left) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                for _ in left:
                    return call(*args, **kwargs)
                raise Killed

            return run

        with monkeypatch.context() as patched:
            patched.setattr(save_place.os, "rename", counted(os.rename))
            patched.setattr(save_place, "sync_directory", counted(save_place.sync_directory))
            patched.setattr(save_place.shutil, "rmtree", counted(shutil.rmtree))
            try:
                put_in_place(making, tag)
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
