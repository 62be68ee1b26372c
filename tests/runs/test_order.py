"""The order of commits: rollbacks, copies, tags without a time of their own, and a ``latest`` that was pointed back."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import save_id_of, write_checkpoint, write_history

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.errors import CheckpointError, UsageError
from zeroelastic.runs.candidates import check_quickly, committed_after, list_run
from zeroelastic.runs.latest import find_latest, fix_latest, set_latest
from zeroelastic.runs.order import (
    Tag,
    left_behind,
    left_out_of_run,
    newest_first,
    pointed_at,
    runs_at_once,
    runs_of,
    without_other_runs,
)

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
    from zeroelastic.runs import run_store

    write = run_store.write_atomically

    def late(path: Path, data: bytes, **times: float) -> None:
        if not (run / "s2").exists():
            shutil.copytree(tmp_path / "job" / "s2", run / "s2")
            path.write_text("s2")
        write(path, data, **times)
        if data == b"s1":
            assert find_latest(run, check_quickly).at == 0, "a mended latest is no rollback"

    monkeypatch.setattr(run_store, "write_atomically", late)
    assert fix_latest(run, check_quickly).written and (run / "latest").read_text() == "s2"


def test_the_record_states_the_time_and_the_save_before_it(run: Path) -> None:
    first, second = read_record(run / "s1"), read_record(run / "s2")
    assert first is not None and first.parent is None and first.committed_at is not None
    assert second is not None and second.parent == save_id_of("s1") == first.save_id
    assert second.committed_at is not None and second.committed_at > first.committed_at


G, D = "a" * 32, "b" * 32


def run_id(began: float, number: int = 0) -> str:
    return f"{round(began * 1e6):016x}{number:016x}"


def recorded(name: str, run: str | None, params: str | None, at: float, *, parent: str | None = None) -> Tag:
    path = Path("ckpt") / name
    return Tag(name, path, path, int(at), "record", at, at, True, f"id of {name}", parent, run, params)


def stock(name: str, step: int, params: str | None) -> Tag:
    path = Path("ckpt") / name
    return Tag(name, path, path, step, "header", step, step, trained_params=params)


def by_run(runs) -> list[list[str]]:
    return [[tag.name for tag in run] for run in runs]


GAN = (
    recorded("D_1", run_id(10, 1), D, 40),
    recorded("G_1", run_id(10), G, 30),
    recorded("D_0", run_id(10, 1), D, 20),
    recorded("G_0", run_id(10), G, 15),
)


def test_engines_of_other_parameters_and_twins_of_the_same_are_runs_of_their_own() -> None:
    assert by_run(runs_of(GAN)) == [["D_1", "D_0"], ["G_1", "G_0"]]
    twins = [replace(tag, trained_params=G) for tag in GAN]
    assert by_run(runs_of(twins)) == [["D_1", "D_0"], ["G_1", "G_0"]]


def test_a_run_whose_parameters_change_stays_one_while_its_tags_are_linked() -> None:
    run = run_id(10)
    before = [recorded("s2", run, G, 20, parent="id of s1"), recorded("s1", run, G, 15)]
    unfrozen = recorded("s3", run, D, 30, parent="id of s2")
    assert by_run(runs_of([unfrozen, *before])) == [["s3", "s2", "s1"]]
    # Its parent was removed by hand: it may as well be an engine of its own that began from a tag of this run.
    cut = [unfrozen, before[1]]
    assert by_run(runs_of(cut)) == [["s3"], ["s1"]]
    assert left_out_of_run(without_other_runs(cut, G), cut, None) == unfrozen
    assert left_out_of_run(without_other_runs(cut, D), cut, "s3") is None  # nothing that is left out is later
    assert left_out_of_run(without_other_runs(cut, D), cut, "s1") == before[1]  # the run was rolled back to it
    assert left_out_of_run(without_other_runs(GAN, G), GAN, "D_0") is None  # of another run


def test_a_gap_in_the_chain_of_one_run_splits_nothing() -> None:
    assert by_run(runs_of([recorded("s9", run_id(1), G, 9, parent="gone"), recorded("s1", run_id(1), G, 2)])) == [
        ["s9", "s1"]
    ]


def test_tags_without_a_record_go_by_parameters_names_and_steps() -> None:
    run = [stock("G_2", 2, G), stock("D_2", 2, D), stock("G_1", 1, G), stock("D_1", 1, D)]
    assert by_run(runs_of(run)) == [["G_2", "G_1"], ["D_2", "D_1"]]
    assert by_run(runs_of([recorded("G_3", run_id(1), G, 3), *run])) == [["G_3", "G_2", "G_1"], ["D_2", "D_1"]]
    twins = [stock("A_2", 2, G), stock("B_2", 2, G), stock("A_1", 1, G)]
    assert by_run(runs_of(twins)) == [["A_2", "A_1"], ["B_2"]]


def test_a_run_that_began_without_records_goes_on_with_them() -> None:
    run = [recorded("s3", run_id(1), G, 3), stock("s2", 2, G), recorded("other_1", run_id(1, 1), D, 2)]
    assert by_run(runs_of(run)) == [["s3", "s2"], ["other_1"]]
    two = [*run, recorded("s1", run_id(1, 2), G, 1)]  # of which of the two?
    assert by_run(runs_of(two)) == [["s3"], ["s2"], ["other_1"], ["s1"]]


def test_numbered_engines_without_records_cannot_be_told_apart() -> None:
    run = [stock("model0_5", 5, G), stock("model1_5", 5, G), stock("other_5", 5, D), stock("more_5", 5, D)]
    assert by_run(runs_of(run)) == [["other_5"], ["more_5"]]
    assert runs_of(run[:2]) == ()


def test_what_nothing_is_known_of_belongs_to_the_only_run() -> None:
    damaged = Tag("D_9", Path("ckpt/D_9"), Path("ckpt/D_9"), 9, "name", 9, 9)
    assert by_run(runs_of([damaged, GAN[0]])) == [["D_9", "D_1"]]
    assert by_run(runs_of([damaged, *GAN])) == [["D_1", "D_0"], ["G_1", "G_0"]]
    assert runs_of([damaged]) == ((damaged,),)


def test_a_load_passes_over_runs_of_other_parameters_and_keeps_what_may_be_its_own() -> None:
    damaged = Tag("D_9", Path("ckpt/D_9"), Path("ckpt/D_9"), 9, "name", 9, 9)
    assert [tag.name for tag in without_other_runs([damaged, *GAN], G)] == ["D_9", "G_1", "G_0"]
    assert without_other_runs(GAN, "c" * 32) == GAN  # changed parameters: the load says what differs
    assert without_other_runs(GAN, None) == GAN


def test_two_engines_at_once_are_named_and_one_after_the_other_is_not() -> None:
    twins = tuple(replace(tag, trained_params=G) for tag in GAN)
    assert runs_at_once(twins) == ("D_1", "G_1")
    assert runs_at_once(twins[2:]) is not None  # before the second save of either
    after = [recorded("s2", run_id(30), G, 40), recorded("s1", run_id(10), G, 20)]  # begun anew in the same directory
    assert runs_at_once(after) is None
    assert runs_at_once(without_other_runs(GAN, G)) is None


@given(st.lists(st.tuples(st.sampled_from("AB"), st.booleans()), min_size=1, max_size=8))
def test_every_tag_is_in_one_run_at_most_and_keeps_its_place(saves) -> None:
    run = [
        recorded(f"{who}{i}", run_id(1, ord(who)), G, 1 + i) if record else stock(f"{who}{i}", i, G)
        for i, (who, record) in enumerate(saves)
    ]
    found = runs_of(run)
    assigned = [tag.name for one in found for tag in one]
    assert len(assigned) == len(set(assigned))
    for one in found:
        assert [tag for tag in run if tag in one] == list(one)
        assert len({tag.name[0] for tag in one}) == 1
