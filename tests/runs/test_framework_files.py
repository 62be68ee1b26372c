"""The note on which save a framework's files beside a tag are of, and who reads it: loads of frameworks, and verbs."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import write_checkpoint

import zeroelastic
from zeroelastic.errors import CheckpointError
from zeroelastic.runs.locate import find_source
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.tags import NOTE, UNFINISHED, expect_files, note_files, require_own_files, saved_id
from zeroelastic.verbs.reshard.sidecar_files import plan_sidecar_files

TAG = "global_step4"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of the Trainer, complete."""
    folder = tmp_path / "out" / "checkpoint-4"
    write_checkpoint(folder / TAG, world_size=2, global_steps=4, record=True)
    (folder / "latest").write_text(TAG)
    (folder / "trainer_state.json").write_text("{}")
    note_files(folder, {TAG: saved_id(folder, TAG)})
    return folder


def test_files_are_of_a_save_until_the_tag_is_saved_again(folder: Path) -> None:
    require_own_files(folder)
    expect_files(folder, TAG)
    require_own_files(folder)
    (folder / NOTE).unlink()  # a directory in which nothing was noted yet
    require_own_files(folder)
    expect_files(folder, TAG)
    require_own_files(folder)
    write_checkpoint(folder / TAG, world_size=2, global_steps=4, record=True, save_id="8" * 32)
    with pytest.raises(CheckpointError, match=f"{TAG} was cut short: .* load this mix .* remove {folder / NOTE}"):
        require_own_files(folder)
    note_files(folder, {TAG: UNFINISHED})
    with pytest.raises(CheckpointError, match="cut short"):
        require_own_files(folder)
    note_files(folder, {TAG: saved_id(folder, TAG)})
    require_own_files(folder)


def test_a_new_directory_has_no_files_of_any_save(tmp_path: Path) -> None:
    expect_files(tmp_path / "a", TAG)
    require_own_files(tmp_path / "a")  # nor a tag
    write_checkpoint(tmp_path / "a" / TAG, world_size=2, global_steps=4, record=True)
    with pytest.raises(CheckpointError, match="cut short"):
        require_own_files(tmp_path / "a")


def test_files_of_a_tag_without_a_record_are_its_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / TAG, world_size=2, global_steps=4, record=False)
    expect_files(tmp_path, TAG)
    require_own_files(tmp_path)
    write_checkpoint(tmp_path / TAG, world_size=2, global_steps=4, record=True)
    with pytest.raises(CheckpointError, match="cut short"):
        require_own_files(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', "[" * 100_000])
def test_a_damaged_note_is_said_and_written_anew(folder: Path, text: str) -> None:
    (folder / NOTE).write_text(text)
    with pytest.raises(CheckpointError, match="is damaged"):
        require_own_files(folder)
    expect_files(folder, TAG)
    with pytest.raises(CheckpointError, match="cut short"):
        require_own_files(folder)


def test_verbs_do_not_take_it_for_whole(folder: Path) -> None:
    assert zeroelastic.verify(folder).valid
    assert [tag.unfinished for tag in RunStore(folder.parent).tags()] == [None]
    note_files(folder, {TAG: UNFINISHED})
    report = zeroelastic.verify(folder)
    assert not report.valid and "was cut short" in report.problems[0].sentence
    (tag,) = RunStore(folder.parent).tags()
    assert tag.unfinished is not None and "was cut short" in tag.unfinished
    with pytest.raises(CheckpointError, match="cut short"):
        plan_sidecar_files(find_source(folder), saved_world_size=2, world_size=3)
