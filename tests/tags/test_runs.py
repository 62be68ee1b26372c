"""The runs that save to one directory: by what their tags are assigned to them, and which cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from zeroelastic.tags.commit_order import Tag
from zeroelastic.tags.runs import run_of, runs_at_once, runs_of, without_other_runs

G, D = "a" * 32, "b" * 32


def run_id(began: float, number: int = 0) -> str:
    return f"{round(began * 1e6):016x}{number:016x}"


def recorded(name: str, run: str | None, params: str | None, at: float, *, parent: str | None = None) -> Tag:
    path = Path("ckpt") / name
    return Tag(name, path, path, int(at), "record", at, at, True, f"id of {name}", parent, run, params)


def stock(name: str, step: int, params: str | None) -> Tag:
    path = Path("ckpt") / name
    return Tag(name, path, path, step, "header", step, step, trained_params=params)


def names(runs) -> list[list[str]]:
    return [[tag.name for tag in run] for run in runs]


GAN = (
    recorded("D_1", run_id(10, 1), D, 40),
    recorded("G_1", run_id(10), G, 30),
    recorded("D_0", run_id(10, 1), D, 20),
    recorded("G_0", run_id(10), G, 15),
)


def test_engines_of_other_parameters_and_twins_of_the_same_are_runs_of_their_own() -> None:
    assert names(runs_of(GAN)) == [["D_1", "D_0"], ["G_1", "G_0"]]
    twins = [replace(tag, trained_params=G) for tag in GAN]
    assert names(runs_of(twins)) == [["D_1", "D_0"], ["G_1", "G_0"]]
    assert names([run_of(twins, "G_0"), run_of(twins, "D_1")]) == [["G_1", "G_0"], ["D_1", "D_0"]]


def test_a_run_whose_parameters_change_stays_one_while_its_tags_are_linked() -> None:
    run = run_id(10)
    before = [recorded("s2", run, G, 20, parent="id of s1"), recorded("s1", run, G, 15)]
    unfrozen = recorded("s3", run, D, 30, parent="id of s2")
    assert names(runs_of([unfrozen, *before])) == [["s3", "s2", "s1"]]
    # Its parent was removed by hand: it may as well be an engine of its own that began from a tag of this run.
    assert names(runs_of([unfrozen, before[1]])) == [["s3"], ["s1"]]


def test_a_gap_in_the_chain_of_one_run_splits_nothing() -> None:
    assert names(runs_of([recorded("s9", run_id(1), G, 9, parent="gone"), recorded("s1", run_id(1), G, 2)])) == [
        ["s9", "s1"]
    ]


def test_tags_without_a_record_go_by_parameters_names_and_steps() -> None:
    run = [stock("G_2", 2, G), stock("D_2", 2, D), stock("G_1", 1, G), stock("D_1", 1, D)]
    assert names(runs_of(run)) == [["G_2", "G_1"], ["D_2", "D_1"]]
    assert names(runs_of([recorded("G_3", run_id(1), G, 3), *run])) == [["G_3", "G_2", "G_1"], ["D_2", "D_1"]]
    twins = [stock("A_2", 2, G), stock("B_2", 2, G), stock("A_1", 1, G)]
    assert names(runs_of(twins)) == [["A_2", "A_1"], ["B_2"]]


def test_a_run_that_began_without_records_goes_on_with_them() -> None:
    run = [recorded("s3", run_id(1), G, 3), stock("s2", 2, G), recorded("other_1", run_id(1, 1), D, 2)]
    assert names(runs_of(run)) == [["s3", "s2"], ["other_1"]]
    two = [*run, recorded("s1", run_id(1, 2), G, 1)]  # of which of the two?
    assert names(runs_of(two)) == [["s3"], ["s2"], ["other_1"], ["s1"]]


def test_numbered_engines_without_records_cannot_be_told_apart() -> None:
    run = [stock("model0_5", 5, G), stock("model1_5", 5, G), stock("other_5", 5, D), stock("more_5", 5, D)]
    assert names(runs_of(run)) == [["other_5"], ["more_5"]]
    assert names([run_of(run, "model0_5")]) == [["model0_5"]]
    assert runs_of(run[:2]) == ()


def test_what_nothing_is_known_of_belongs_to_the_only_run() -> None:
    damaged = Tag("D_9", Path("ckpt/D_9"), Path("ckpt/D_9"), 9, "name", 9, 9)
    assert names(runs_of([damaged, GAN[0]])) == [["D_9", "D_1"]]
    assert names(runs_of([damaged, *GAN])) == [["D_1", "D_0"], ["G_1", "G_0"]]
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
