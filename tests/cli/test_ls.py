"""``zeroelastic ls``: every checkpoint of a run, with what saved it and its status."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from commands import run_command
from lean_runs import FIRST, SECOND, THIRD, lean_tag, shared_path, write_shared
from places import GOLDEN
from saved_files import record_of

import zeroelastic
from zeroelastic.checkpoint.commit_record import RECORD_NAME, record_text
from zeroelastic.checkpoint.marks import write_mark
from zeroelastic.checkpoint.shared_files import SharedFile


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of seven tags: committed, of DeepSpeed at stages 3, 2 and 1, without a file, damaged, and Universal."""
    root = tmp_path / "run"
    sources = {
        "global_step2": "elastic2",
        "global_step3": "rigid3",
        "global_step4": "stage2_rank2",
        "global_step5": "stage1_bf16_optimizer_rank2",
        "global_step6": "elastic3",
        "global_step7": "elastic2",
    }
    for tag, golden in sources.items():
        shutil.copytree(GOLDEN / golden / "global_step2", root / tag)
    next((root / "global_step6").glob("*rank_1_*optim_states.pt")).unlink()
    write_mark(root / "global_step7", "it was damaged by a test")
    (root / "global_step8/zero").mkdir(parents=True)
    for name in ("zero/optimizer_state.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        (root / "global_step8" / name).touch()
    (root / "latest").write_text("global_step2")
    return root


def test_every_tag_is_listed_with_what_saved_it_and_its_status(run: Path) -> None:
    found = {tag.tag: tag for tag in zeroelastic.ls(run).tags}
    facts = {name[-1]: (tag.world_size, tag.stage, tag.status, tag.latest) for name, tag in found.items()}
    assert facts == {
        "2": (2, 3, "committed", True),
        "3": (3, 3, "no record", False),
        "4": (2, 2, "no record", False),
        "5": (2, 1, "no record", False),
        "6": (3, 3, "incomplete", False),
        "7": (2, 3, "quarantined", False),
        "8": (1, None, "universal", False),
    }
    assert "damaged by a test" in str(found["global_step7"].why)
    whole = found["global_step2"]
    assert whole.bytes == sum(file.stat().st_size for file in (run / "global_step2").iterdir())
    assert whole.step == 2 and whole.saved_at is not None and whole.path == str(run / "global_step2")


def test_for_people_it_is_a_table(run: Path) -> None:
    lines = run_command("ls", run).stdout.splitlines()
    assert lines[0].split() == ["tag", "step", "ranks", "stage", "size", "saved", "status", "run"] and len(lines) == 8
    (line,) = [line for line in lines if line.startswith("global_step2 ")]
    assert re.fullmatch(r"global_step2 +2 +2 +3 +[\d.]+ KiB  [-\d]{10} [:\d]{8}  committed, latest +\d", line)


def test_the_document_names_the_directory_and_its_latest(run: Path) -> None:
    found = json.loads(run_command("ls", run, "--json").stdout)
    assert found["latest"] == "global_step2" and found["directory"] == str(run)


@pytest.fixture
def lean(tmp_path: Path) -> Path:
    """Two tags that share a file, a third one with two files, and a file to which none refers."""
    root = tmp_path / "lean"
    for step, digests in ((1, [FIRST]), (2, [FIRST]), (3, [FIRST, SECOND])):
        lean_tag(root / f"s{step}", step, *digests)
    for digest in (FIRST, SECOND, THIRD):
        write_shared(root, digest)
    return root


def test_a_tag_has_its_own_bytes_and_those_that_it_shares(lean: Path) -> None:
    report = zeroelastic.ls(lean)
    own = {tag.tag: sum(file.stat().st_size for file in (lean / tag.tag).iterdir()) for tag in report.tags}
    assert {tag.tag: tag.bytes for tag in report.tags} == own
    assert {tag.tag: tag.shared_bytes for tag in report.tags} == {"s3": 2000, "s2": 1000, "s1": 1000}
    assert {tag.status for tag in report.tags} == {"committed"}
    files = {file.name: (file.bytes, file.tags) for file in report.shared}
    assert files == {
        str(shared_path(Path(), FIRST)): (1000, ("s3", "s2", "s1")),
        str(shared_path(Path(), SECOND)): (1000, ("s3",)),
        str(shared_path(Path(), THIRD)): (1000, ()),
    }
    assert report.bytes == sum(own.values()) + 3000 and report.saved_bytes == 2000


def test_for_people_what_is_shared_is_a_column_and_a_line(lean: Path) -> None:
    *lines, last = run_command("ls", lean).stdout.splitlines()
    assert lines[0].split() == ["tag", "step", "ranks", "stage", "size", "shared", "saved", "status"]
    assert re.fullmatch(r"s3 +3 +2 +3 +[\d.]+ KiB +2.0 KiB  [-\d]{10} [:\d]{8}  committed", lines[1]), lines[1]
    said = r"3 shared files of 2.9 KiB; the run takes [\d.]+ KiB, and would take 2.0 KiB more without sharing"
    assert re.fullmatch(said, last), last


def test_a_tag_whose_shared_file_is_gone_or_another_is_incomplete(lean: Path) -> None:
    shared_path(lean, FIRST).write_bytes(b"x")
    shared_path(lean, SECOND).unlink()
    found = {tag.tag: (tag.status, str(tag.why)) for tag in zeroelastic.ls(lean).tags}
    assert found["s1"][0] == found["s3"][0] == "incomplete" and str(shared_path(lean, FIRST)) in found["s1"][1]
    write_shared(lean, FIRST)
    found = {tag.tag: (tag.status, str(tag.why)) for tag in zeroelastic.ls(lean).tags}
    assert found["s1"][0] == "committed" and str(shared_path(lean, SECOND)) in found["s3"][1]


def test_folders_of_a_framework_share_the_files_beside_them(tmp_path: Path) -> None:
    for step in (1, 2):
        lean_tag(tmp_path / f"checkpoint-{step}" / f"global_step{step}", step, FIRST, depth=2)
        (tmp_path / f"checkpoint-{step}" / "latest").write_text(f"global_step{step}")
    write_shared(tmp_path, FIRST)
    report = zeroelastic.ls(tmp_path)
    assert [(file.name, file.tags) for file in report.shared] == [
        (str(shared_path(Path(), FIRST)), ("checkpoint-2", "checkpoint-1"))
    ]
    assert report.saved_bytes == 1000
    one = zeroelastic.ls(tmp_path / "checkpoint-1")
    assert [file.name for file in one.shared] == [str(shared_path(tmp_path, FIRST))] and one.saved_bytes == 0


def test_a_file_of_a_base_model_is_listed_by_its_path_and_is_not_the_run_s(tmp_path: Path) -> None:
    base = tmp_path / "base" / "model.safetensors"
    base.parent.mkdir()
    base.write_bytes(b"x" * 500)
    for step in (1, 2):
        tag_dir = lean_tag(tmp_path / "run" / f"s{step}", step)
        record = record_of(tag_dir)
        shared = (SharedFile(path=str(base), nbytes=500, digest=FIRST),)
        (tag_dir / RECORD_NAME).write_bytes(record_text(record.model_copy(update={"shared": shared})))
    report = zeroelastic.ls(tmp_path / "run")
    assert [(file.name, file.bytes, file.tags) for file in report.shared] == [(str(base), 500, ("s2", "s1"))]
    assert report.saved_bytes == 1000 and report.bytes == sum(tag.bytes for tag in report.tags)
    base.unlink()
    assert {tag.status for tag in zeroelastic.ls(tmp_path / "run").tags} == {"incomplete"}


def test_a_directory_without_checkpoints_is_misuse(tmp_path: Path) -> None:
    done = run_command("ls", tmp_path)
    assert done.returncode == 2 and "holds no ZeRO checkpoint" in done.stderr and done.stdout == ""
