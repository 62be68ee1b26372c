"""Which tag of a run is the newest: what ``latest`` names, else the newest committed tag of the same parameters."""

from __future__ import annotations

import os
import shutil
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import write_checkpoint, write_history

import zeroelastic
from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.tags import Tag, about_newer, by_params, committed_after, newest_first, tags_to_try
from zeroelastic.verbs import tags as latest_module

G, D = "a" * 32, "b" * 32

ROLLED_BACK = [("s1", 1), ("s2", 2), ("s3", 3), ("s6", 6), ("s4", 4)]
"""A run that was at step 6, went back to step 3 and committed step 4."""


def committed(name: str, at: float, params: str = G, *, step: int | None = None) -> Tag:
    path = Path("ckpt") / name
    return Tag(name, path, path, int(at) if step is None else step, "record", 1.0, at, f"id of {name}", params)


def stock(name: str, step: int, params: str | None = G) -> Tag:
    path = Path("ckpt") / name
    return Tag(name, path, path, step, "header", 99.0, trained_params=params)


def in_folder(step: int, *, unfinished: str | None = None) -> Tag:
    path = Path("out") / f"checkpoint-{step}"
    return Tag(path.name, path, path / "global_step5", step, "header", 1.0, trained_params=G, unfinished=unfinished)


RUN = (committed("s1", 10, step=1), committed("s2", 20, step=2), committed("s9", 15, step=9))
GAN = (committed("G_1", 10), committed("D_1", 15, D), committed("G_2", 20), committed("D_2", 25, D))


@pytest.mark.parametrize(
    ("tags", "latest", "params", "tried"),
    [
        (RUN, "s2", G, ["s2", "s9", "s1"]),  # what latest names, then what was committed before it
        (RUN, "s9", G, ["s9", "s1"]),  # it was set back: what was committed later is left alone
        (RUN, None, G, ["s2", "s9", "s1"]),  # there is no latest: the last commit, whatever its step
        (RUN, "gone", G, ["s2", "s9", "s1"]),
        (GAN, "D_2", G, ["D_2", "G_2", "G_1"]),  # whose parameters differ: the load says so
        (GAN, "G_2", D, ["G_2", "D_1"]),
        (GAN, None, G, ["G_2", "G_1"]),
        (GAN, None, D, ["D_2", "D_1"]),
        (GAN, None, "c" * 32, []),  # none is of this engine: never a silent start from another one's
        (GAN, None, None, ["D_2", "G_2", "D_1", "G_1"]),
        ((stock("s3", 3), stock("s4", 4)), "s3", G, ["s3"]),  # without a record only latest, or a caller, names a tag
        ((stock("s3", 3), stock("s4", 4)), None, G, []),
        ((stock("s3", 3), *RUN), "s3", G, ["s3", "s2", "s9", "s1"]),
        ((in_folder(5), in_folder(7), in_folder(9, unfinished="torn")), None, G, ["checkpoint-7", "checkpoint-5"]),
        ((committed("a", 10, step=1), committed("b", 10, step=2)), None, G, ["b", "a"]),  # one time: the greater step
        ((), "s1", G, []),
    ],
)  # fmt: skip
def test_the_rule(tags: tuple[Tag, ...], latest: str | None, params: str | None, tried: list[str]) -> None:
    assert [tag.name for tag in tags_to_try(tags, latest, params)] == tried
    assert [tag.name for tag in tags_to_try(tags[::-1], latest, params)] == tried


def test_newer_tags_of_the_same_parameters_are_named() -> None:
    root, by_name = Path("ckpt"), {tag.name: tag for tag in (*GAN, stock("s9", 9))}
    (note,) = about_newer(root, "G_1", ["G_2"])
    assert note.startswith("NOT THE NEWEST: ckpt/latest names G_1, and G_2 was committed later.")
    assert about_newer(root, "G_2", []) == []
    found = committed_after(tuple(by_name.values()), by_name["G_1"])
    assert [tag.name for tag in found] == ["G_2"]


def test_tags_are_counted_by_their_parameters() -> None:
    unknown = Tag("torn", Path("torn"), Path("torn"), 3, "name", 1.0)
    assert [[tag.name for tag in group] for group in by_params(GAN)] == [["G_1", "G_2"], ["D_1", "D_2"]]
    assert [[tag.name for tag in group] for group in by_params((unknown, *GAN))] == [["G_1", "G_2"], ["D_1", "D_2"]]
    assert [len(group) for group in by_params((unknown, *RUN))] == [4] and by_params(()) == ()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=6), st.integers(0, 6))
def test_whatever_the_tags_are_latest_is_first_and_the_rest_is_older(saves, named) -> None:
    tags = [
        committed(f"t{i}", 1.0 + at, step=step) if record else stock(f"t{i}", step)
        for i, (at, step, record) in enumerate(saves)
    ]
    tried = tags_to_try(tags, f"t{named}", G)
    assert (tried[0].name == f"t{named}") if named < len(tags) else all(tag.is_finished for tag in tried)
    assert list(tried[1:]) == list(newest_first(tried[1:])) and len(set(tried)) == len(tried)
    assert all(tag.is_finished for tag in tried[1:])
    if tried and tried[0].committed_at is not None:
        assert all(tag.age_key < tried[0].age_key for tag in tried[1:])


# --- on a disk --------------------------------------------------------------------------------------------------------


newest = partial(zeroelastic.latest, quick=True)


def names(root: Path) -> list[str]:
    return [tag.name for tag in RunStore(root).tags()]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_history(tmp_path / "run", ROLLED_BACK)
    return tmp_path / "run"


def test_what_was_committed_last_is_the_newest(run: Path) -> None:
    assert names(run) == ["s4", "s6", "s3", "s2", "s1"]
    found = newest(run)
    assert found.tag_name == "s4" and found.newer == ()
    store = RunStore(run)
    assert store.committed_after("s6") == ("s4",) and store.committed_after("s4") == ()
    assert not newest(run, fix=True).latest.fixed and (run / "latest").read_text() == "s4"


def test_a_copy_with_new_times_keeps_the_order_of_commits(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for i, (name, _) in enumerate(ROLLED_BACK):
        os.utime(copy / name / RECORD_NAME, (time.time() - i,) * 2)
    os.utime(copy / "latest")
    (copy / "latest").unlink()
    assert names(copy) == names(run)
    assert newest(copy).tag_name == "s4"


def test_tags_without_a_time_come_before_those_with_one(tmp_path: Path) -> None:
    write_history(tmp_path, [("s5", 5), ("s8", 8)])
    for step in (3, 9):
        write_checkpoint(tmp_path / f"s{step}", world_size=1, global_steps=step, format="rigid")
    assert names(tmp_path) == ["s8", "s5", "s9", "s3"]
    (tmp_path / "latest").write_text("s9")
    assert newest(tmp_path).tag_name == "s9", "latest names what DeepSpeed alone has saved, too"


def test_a_damaged_tag_that_latest_names_leads_to_an_older_one(run: Path) -> None:
    assert newest(run, set_to="s3").latest.fixed
    next((run / "s3").glob("*_optim_states.pt")).unlink()
    assert newest(run, fix=True).latest.fixed and (run / "latest").read_text() == "s2"


def test_fix_keeps_what_a_save_has_written_meanwhile(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "latest").unlink()

    def check(tag_dir: Path) -> tuple[str, ...]:
        """Between the look and the write the job moves latest."""
        if to_come:
            (run / "latest").write_text(to_come.pop())
        return () if tag_dir.name != "s4" else ("is damaged as far as this test goes.",)

    to_come = ["s6"]
    monkeypatch.setattr(latest_module, "_check_quickly", check)
    assert not newest(run, fix=True).latest.fixed and (run / "latest").read_text() == "s6"
