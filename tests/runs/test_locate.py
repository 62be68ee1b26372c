"""What users call a checkpoint: tag directories, the directories above, and what is neither."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from synthetic import write_checkpoint

from zeroelastic.errors import CheckpointError, MissingFileError, UnsupportedError, UsageError
from zeroelastic.runs.locate import find_source, list_tags, read_latest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for tag in ("global_step2", "global_step4"):
        write_checkpoint(tmp_path / "run" / tag, world_size=2)
    (tmp_path / "run" / "latest").write_text("global_step4\n")
    (tmp_path / "run" / "logs").mkdir()
    return tmp_path / "run"


def test_the_directory_above_means_its_latest_tag(root: Path) -> None:
    found = find_source(root)
    assert (found.root, found.tag, found.tag_dir) == (root, "global_step4", root / "global_step4")
    assert found.latest == "global_step4" and found.framework == "deepspeed"
    assert find_source(str(root), tag="global_step2").tag_dir == root / "global_step2"
    assert list_tags(root) == ("global_step2", "global_step4")


def test_a_tag_directory_means_itself_however_it_is_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_source(root / "global_step2") == find_source(root, tag="global_step2")
    monkeypatch.chdir(root / "global_step2")
    assert find_source(".").tag == "global_step2" and find_source("../global_step4/").tag == "global_step4"
    assert find_source("..").root == root


@pytest.mark.parametrize(
    ("tag", "files", "framework"),
    [
        ("global_step9", ["trainer_state.json"], "hf-trainer"),
        ("pytorch_model", [], "accelerate"),
        ("checkpoint", [], "lightning"),
        ("mine", [], "deepspeed"),
    ],
)
def test_who_laid_it_out(tmp_path: Path, tag: str, files: list[str], framework: str) -> None:
    write_checkpoint(tmp_path / tag, world_size=1)
    (tmp_path / "latest").write_text(tag)
    for name in files:
        (tmp_path / name).write_text("{}")
    assert find_source(tmp_path).framework == framework


def test_what_is_no_checkpoint_is_said_with_what_is_there(root: Path, tmp_path: Path) -> None:
    def said(path: Path, **options: str) -> str:
        with pytest.raises(UsageError) as error:
            find_source(path, **options)
        return str(error.value)

    assert "no such directory" in said(root / "nothing")
    assert "is a file" in said(root / "latest")
    assert "holds no ZeRO checkpoint" in said(root / "logs")
    assert "Give one that it holds: run" in said(tmp_path)
    assert "There are: global_step2, global_step4" in said(root, tag="global_step3")
    assert "give the directory above" in said(root / "global_step2", tag="global_step4")
    assert "not the name of a tag" in said(root, tag="../run/global_step2")
    assert "'' is not the name of a tag" in said(root, tag="")  # as of --tag "$TAG" without a TAG
    assert "./ is not the name of a tag: no files of ranks lie in" in said(root, tag="./")
    (root / "latest").unlink()
    assert "There are: global_step2, global_step4. Give the path of one, such as" in said(root)
    for path in root.glob("*/*rank_0_mp*"):  # the disk of another node
        path.unlink()
    for words in (said(root), said(root, tag="global_step3")):
        assert "global_step4, with files of rank 1 and none of rank 0" in words and "into one directory" in words


def test_the_only_tag_is_taken_where_there_is_no_latest(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(root / "global_step2")
    (root / "latest").unlink()
    assert find_source(root).tag_dir == root / "global_step4" and find_source(root).latest is None
    assert f"{root}: has no latest file; global_step4 is its only tag" in caplog.messages


def test_directories_in_formats_of_others_are_named(tmp_path: Path) -> None:
    """Universal (its tag directory, the one above, and above that), torch.distributed.checkpoint, safetensors."""
    (tmp_path / "a/universal/global_step2/zero").mkdir(parents=True)
    for name in ("zero/optimizer_state.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        (tmp_path / "a/universal/global_step2" / name).touch()
    (tmp_path / "a/universal/latest_universal").write_text("global_step2")
    (tmp_path / "b/dcp").mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp"):
        (tmp_path / "b/dcp" / name).touch()
    (tmp_path / "c/weights").mkdir(parents=True)
    (tmp_path / "c/weights/model.safetensors").touch()
    for path, what in (
        ("a/universal", "is a Universal checkpoint"),
        ("a/universal/global_step2", "is a Universal checkpoint"),
        ("b/dcp", "is a torch.distributed.checkpoint directory"),
        ("c/weights", "is a directory of safetensors files"),
    ):
        with pytest.raises(UnsupportedError, match=what):
            find_source(tmp_path / path)
    for path, what in (
        ("b", "dcp is a torch.distributed.checkpoint"),
        ("c", "weights is a directory of safetensors"),
    ):
        with pytest.raises(UsageError, match=what):
            find_source(tmp_path / path)
    assert find_source(tmp_path / "a/universal/global_step2", universal=True).tag == "global_step2"


def test_latest_that_names_nothing_is_the_checkpoints_fault(root: Path) -> None:
    (root / "latest").write_text("global_step8")
    with pytest.raises(MissingFileError, match=r"names global_step8, which is not there. There are: global_step2"):
        find_source(root)
    for text in (b"", b"..", b"/a", b"a/../../b", b"\xff\xfe", b"x" * 5000):
        (root / "latest").write_bytes(text)
        with pytest.raises(CheckpointError, match="latest"):
            read_latest(root)
    os.unlink(root / "latest")
    assert read_latest(root) is None


@pytest.mark.parametrize("url", [False, True])
def test_each_directory_is_listed_once(root: Path, monkeypatch: pytest.MonkeyPatch, url: bool) -> None:
    """A listing is what costs time behind a URL."""
    import fsspec

    from zeroelastic.io import paths
    from zeroelastic.io.paths import FilePath
    from zeroelastic.io.remote import RemotePath

    listed: list[str] = []

    def counted(entries: Any, directory: FilePath) -> object:
        listed.append(directory.name)
        return entries(directory)

    monkeypatch.setattr(paths, "_listed", partial(counted, paths._listed))
    entries = RemotePath.entries
    monkeypatch.setattr(RemotePath, "entries", lambda directory: counted(entries, directory))
    memory = fsspec.filesystem("memory")
    memory.put(str(root), "/bucket/run", recursive=True)
    try:
        where = "memory://bucket/run" if url else str(root)
        assert find_source(where).tag == "global_step4" and listed == ["run"]
        listed.clear()
        assert find_source(f"{where}/global_step2").latest == "global_step4" and listed == ["global_step2", "run"]
    finally:
        memory.rm("/bucket", recursive=True)


def test_a_url_that_nothing_reads_says_so() -> None:
    with pytest.raises(UsageError, match="no file system of this name"):
        find_source("nosuch://bucket/run")


def test_a_url_is_looked_at_as_a_directory(root: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(root), "/bucket/run", recursive=True)
    try:
        found = find_source("memory://bucket/run")
        assert str(found.tag_dir) == "memory://bucket/run/global_step4" and found.latest == "global_step4"
        assert find_source("memory://bucket/run/global_step2").root == found.root
    finally:
        memory.rm("/bucket", recursive=True)


def test_a_file_url_with_one_slash_is_a_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Give the path without file:, which is /somewhere/ckpt\."):
        find_source("file:/somewhere/ckpt")
