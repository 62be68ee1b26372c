"""The mark of a damaged checkpoint: who heeds it, who shows it, and how it goes away again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from saved_files import flip
from synthetic import optim_name, write_checkpoint
from typer.testing import CliRunner

import zeroelastic
from zeroelastic.checkpoint.marks import MARK_NAME, lift_mark, read_mark, write_mark
from zeroelastic.cli.app import app
from zeroelastic.errors import UnreadableError
from zeroelastic.runs.candidates import check_quickly, check_tag, committed_after, find_newest, list_run

WHY = f"/ckpt/global_step11/{optim_name(1)}: record data/0 has CRC-32 00000000. The file is damaged."


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (9, 10, 11):
        write_checkpoint(tmp_path / f"global_step{step}", world_size=2, global_steps=step, record=True)
    (tmp_path / "latest").write_text("global_step11")
    return tmp_path


def cli(*arguments: object) -> SimpleNamespace:
    done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "300", "TERM": "dumb"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return SimpleNamespace(code=done.exit_code, out=done.stdout, err=done.stderr)


def test_a_mark_says_why_when_where_and_by_which_version(run: Path) -> None:
    tag = run / "global_step11"
    assert read_mark(tag) is None and not lift_mark(tag)
    before = sorted(path.name for path in tag.iterdir())
    mark = write_mark(tag, WHY)
    assert mark == read_mark(tag)
    assert (mark.why, mark.files, mark.version) == (WHY, (optim_name(1),), zeroelastic.__version__)
    assert mark.marked_at.endswith("+00:00") and mark.sentence.startswith(
        f"is quarantined since {mark.marked_at}: /ckpt"
    )
    assert sorted(path.name for path in tag.iterdir()) == sorted([*before, MARK_NAME])
    assert write_mark(tag, "something else") == mark, "the first reason stays"
    assert lift_mark(tag) and read_mark(tag) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', '{"why": 3, "files": 4}'])
def test_a_damaged_mark_is_a_mark(tmp_path: Path, text: str) -> None:
    (tmp_path / MARK_NAME).write_text(text)
    mark = read_mark(tmp_path)
    assert mark is not None and mark.sentence.startswith("is quarantined: ") and mark.files == ()


def test_a_mark_that_cannot_be_read_now_is_not_guessed_at(run: Path) -> None:
    (run / "global_step11" / MARK_NAME).mkdir()
    with pytest.raises(UnreadableError):
        read_mark(run / "global_step11")
    verdict = check_tag(list_run(run).tags[0], check_quickly)
    assert verdict is not None and verdict.undecided and not verdict.quarantined


def test_a_marked_tag_is_passed_over_unread(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mark(run / "global_step11", WHY)
    looked: list[str] = []

    def check(tag_dir: Path) -> tuple[str, ...]:
        looked.append(tag_dir.name)
        return ()

    newest, passed = find_newest(list_run(run).tags, check)
    assert newest is not None and newest.name == "global_step10" and looked == ["global_step10"]
    assert passed[0].quarantined and WHY in passed[0].problems[0]
    done = cli("latest", run, "--quick", "--fix")
    assert done.code == 0 and done.out == "global_step10\n" and "is quarantined since" in done.err
    assert (run / "latest").read_text() == "global_step10"


def test_prune_neither_counts_nor_removes_it_unless_asked(run: Path) -> None:
    write_mark(run / "global_step10", WHY)
    found = json.loads(cli("prune", run, "--keep", 2, "--dry-run", "--json").out)
    fates = {tag["tag"]: tag for tag in found["tags"]}
    assert not any(tag["removed"] for tag in fates.values() if "removed" in tag)
    assert fates["global_step10"]["valid"] is False and "quarantined" in fates["global_step10"]["reason"]
    assert fates["global_step9"]["valid"] and "newest" in fates["global_step9"]["reason"]
    assert cli("prune", run, "--keep", 1, "--yes").code == 0
    assert sorted(path.name for path in run.glob("global_step*")) == ["global_step10", "global_step11"]
    assert cli("prune", run, "--keep", 1, "--invalid", "--min-age", "0s", "--yes").code == 0
    assert [path.name for path in run.glob("global_step*")] == ["global_step11"]


def test_inspect_shows_it(run: Path) -> None:
    sound = json.loads(cli("inspect", run, "--json").out)
    assert sound["ok"] and sound["quarantine"] is None
    write_mark(run / "global_step11", WHY)
    found = json.loads(cli("inspect", run, "--json").out)
    assert (
        not found["ok"] and found["quarantine"]["files"] == [optim_name(1)] and MARK_NAME not in found["files"]["odd"]
    )
    assert any("is quarantined since" in problem for problem in found["problems"])


def test_verify_lifts_it_from_a_whole_tag_only_and_only_when_asked(run: Path) -> None:
    tag = run / "global_step11"
    write_mark(tag, WHY)
    done = cli("verify", tag)
    assert done.code == 0 and "--lift-quarantine removes the mark" in done.out and read_mark(tag) is not None
    assert cli("verify", tag, "--quick", "--lift-quarantine").code == 2
    path = tag / optim_name(1)
    flip(path)
    found = json.loads(cli("verify", tag, "--lift-quarantine", "--json").out)
    assert not found["ok"] and not found["lifted"] and read_mark(tag) is not None
    flip(path)
    found = json.loads(cli("verify", tag, "--lift-quarantine", "--json").out)
    assert found["ok"] and found["lifted"] and found["quarantine"]["why"] == WHY and read_mark(tag) is None


def test_what_was_committed_later(run: Path) -> None:
    assert committed_after(run, "global_step9") == ("global_step11", "global_step10")
    assert committed_after(run, "global_step11") == () == committed_after(run, "nothing")
    write_mark(run / "global_step11", WHY)
    (run / "global_step10" / "zeroelastic.json").unlink()
    assert committed_after(run, "global_step9") == ()
