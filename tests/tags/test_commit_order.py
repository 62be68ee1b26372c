"""The order of commits: rollbacks, copies, tags without a time of their own, and a ``latest`` that was pointed back."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from synthetic import save_id_of, write_checkpoint, write_history

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.errors import CheckpointError, UsageError
from zeroelastic.tags.candidates import check_quickly, committed_after, list_run
from zeroelastic.tags.commit_order import Tag, left_behind, newest_first, pointed_at
from zeroelastic.tags.latest import find_latest, fix_latest, set_latest

ROLLED_BACK = [("s1", 1, None), ("s2", 2, "s1"), ("s3", 3, "s2"), ("s6", 6, "s3"), ("s4", 4, "s3")]
"""A run that was at step 6, went back to step 3 and committed step 4."""


def names(root: Path) -> list[str]:
    return [tag.name for tag in list_run(root).tags]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_history(tmp_path / "run", ROLLED_BACK)
    return tmp_path / "run"


def undated(name: str, step: int, modified_at: float) -> Tag:
    return Tag(name, Path(name), Path(name), step, "header", modified_at, modified_at)


def test_what_was_committed_last_is_the_newest_and_the_branch_that_was_left_is_named(run: Path) -> None:
    assert names(run) == ["s4", "s6", "s3", "s2", "s1"]
    found = find_latest(run, check_quickly)
    assert found.tag is not None and found.tag.name == "s4" and [tag.name for tag in found.left] == ["s6"]
    assert committed_after(run, "s6") == ("s4",) and committed_after(run, "s4") == ()
    assert fix_latest(run, check_quickly).written is False and (run / "latest").read_text() == "s4"


def test_a_branch_is_known_by_its_lineage_after_the_live_one_has_passed_it(tmp_path: Path) -> None:
    write_history(tmp_path, [*ROLLED_BACK, ("s5", 5, "s4"), ("s7", 7, "s5")])
    tags = list_run(tmp_path).tags
    assert [tag.name for tag in left_behind(tags, tags[0])] == ["s6"]
    shutil.rmtree(tmp_path / "s5")  # the line of s7 ends there: nothing says any more that s6 is on another one
    assert left_behind(list_run(tmp_path).tags, list_run(tmp_path).tags[0]) == ()


def test_records_in_a_circle_are_no_lineage_without_end(tmp_path: Path) -> None:
    write_history(tmp_path, [("a", 1, "b"), ("b", 2, "a"), ("c", 3, "c")])
    tags = list_run(tmp_path).tags
    assert left_behind(tags, tags[0]) == () == left_behind(tags, tags[1])


@pytest.mark.parametrize("order", [ROLLED_BACK, ROLLED_BACK[::-1]])
def test_a_copy_with_new_times_keeps_the_order_of_commits(
    run: Path, tmp_path: Path, order: list[tuple[str, int]]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for i, (name, *_) in enumerate(order):
        os.utime(copy / name / RECORD_NAME, (time.time() + i,) * 2)
    os.utime(copy / "latest")
    assert names(copy) == names(run)
    found = find_latest(copy, check_quickly)
    assert found.tag is not None and found.tag.name == "s4" and found.at == 0


@pytest.mark.parametrize("copied", [False, True])
def test_tags_of_before_are_older_than_tags_with_a_time_of_a_later_step(tmp_path: Path, copied: bool) -> None:
    write_history(tmp_path, [("s5", 5, None), ("s8", 8, "s5")])
    for step in (3, 4):
        write_checkpoint(tmp_path / f"s{step}", world_size=1, global_steps=step, record=step == 3, format="rigid")
        for path in (tmp_path / f"s{step}").iterdir():
            os.utime(path, (time.time() - (step if copied else 10_000 - step),) * 2)
    assert names(tmp_path) == ["s8", "s5", "s4", "s3"]


def test_without_times_the_steps_decide_unless_latest_and_the_files_agree_on_a_rollback() -> None:
    copied = [undated("s3", 3, 30.0), undated("s6", 6, 10.0), undated("s4", 4, 20.0)]
    for latest in ("s6", "s4", None, "gone"):
        assert [tag.name for tag in newest_first(copied, latest)] == ["s6", "s4", "s3"], latest
    rolled_back = [undated("s4", 4, 30.0), undated("s6", 6, 20.0), undated("s3", 3, 10.0)]
    assert [tag.name for tag in newest_first(rolled_back, "s4")] == ["s4", "s6", "s3"]
    assert [tag.name for tag in newest_first(newest_first(rolled_back, None), "s4")] == ["s4", "s6", "s3"]
    assert [tag.name for tag in left_behind(newest_first(rolled_back, "s4"), rolled_back[0])] == ["s6"]


def test_latest_decides_where_it_was_written_after_the_last_commit() -> None:
    tags = newest_first([undated("s6", 6, 20.0), undated("s3", 3, 10.0)], None)
    assert pointed_at(tags, "s3", 20.5) == 1
    assert pointed_at(tags, "s3", 10.1) == 0  # of before the commit of s6, whose latest was never written
    assert pointed_at(tags, "s6", 20.1) == 0 == pointed_at(tags, None, 0.0) == pointed_at(tags, "gone", 99.0)


def test_latest_set_rolls_back_and_stays_until_the_next_commit(run: Path) -> None:
    (run / "latest").unlink()
    done = set_latest(run, "s2")
    assert done.written and (run / "latest").read_text() == "s2"
    found = find_latest(run, check_quickly)
    assert found.tag is not None and found.tag.name == "s2" and [tag.name for tag in found.newer] == ["s4", "s6", "s3"]
    assert fix_latest(run, check_quickly).written is False and (run / "latest").read_text() == "s2"
    os.utime(run / "s4" / RECORD_NAME, (time.time() + 100,) * 2)  # a commit after it
    assert find_latest(run, check_quickly).at == 0
    next((run / "s1").glob("*_optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match=r"s1.*latest was not changed"):
        set_latest(run, "s1")
    with pytest.raises(UsageError, match=r"has no tag s9\. There are, newest first: s4, s6"):
        set_latest(run, "s9")
    assert (run / "latest").read_text() == "s2"


def test_a_pointed_tag_that_is_damaged_leads_to_an_older_one_and_fix_keeps_the_rollback(run: Path) -> None:
    set_latest(run, "s3")
    next((run / "s3").glob("*_optim_states.pt")).unlink()
    assert fix_latest(run, check_quickly).written and (run / "latest").read_text() == "s2"
    found = find_latest(run, check_quickly)
    assert found.tag is not None and found.tag.name == "s2" and found.at > 0


def test_fix_beside_a_saving_job_never_leaves_latest_behind_its_commits(tmp_path: Path) -> None:
    write_history(tmp_path / "job", [(f"s{step}", step, f"s{step - 1}") for step in range(1, 5)])
    run = tmp_path / "run"
    run.mkdir()
    shutil.copytree(tmp_path / "job" / "s1", run / "s1")
    to_come = ["s2", "s3", "s4"]

    def check(tag_dir: Path) -> tuple[str, ...]:
        """Between the look and the write the job commits, and moves latest."""
        if to_come:
            name = to_come.pop(0)
            shutil.copytree(tmp_path / "job" / name, run / name)
            (run / "latest").write_text(name)
        return check_quickly(tag_dir)

    fix_latest(run, check)
    assert (run / "latest").read_text() == names(run)[0] != "s1"


def test_a_commit_between_the_last_look_and_the_write_is_seen_after_it(tmp_path: Path, monkeypatch) -> None:
    write_history(tmp_path / "job", [("s1", 1, None), ("s2", 2, "s1")])
    run = tmp_path / "run"
    run.mkdir()
    shutil.copytree(tmp_path / "job" / "s1", run / "s1")
    from zeroelastic.tags import latest

    write = latest.write_atomically

    def late(path: Path, data: bytes, **times: float) -> None:
        if not (run / "s2").exists():
            shutil.copytree(tmp_path / "job" / "s2", run / "s2")
            path.write_text("s2")
        write(path, data, **times)
        if data == b"s1":
            assert find_latest(run, check_quickly).at == 0, "a mended latest is no rollback"

    monkeypatch.setattr(latest, "write_atomically", late)
    assert fix_latest(run, check_quickly).written and (run / "latest").read_text() == "s2"


def test_the_record_states_the_time_and_the_save_before_it(run: Path) -> None:
    first, second = read_record(run / "s1"), read_record(run / "s2")
    assert first is not None and first.parent is None and first.committed_at is not None
    assert second is not None and second.parent == save_id_of("s1") == first.save_id
    assert second.committed_at is not None and second.committed_at > first.committed_at
