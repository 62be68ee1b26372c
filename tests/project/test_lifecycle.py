"""Sequences of what people do with checkpoints, on real engines: disk and memory are what a simple model says.

The long form is `make lifecycle`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from extended import with_swept
from lifecycle.campaign import kind_of, shortened
from lifecycle.found import FOUND, LATER, Sequence
from lifecycle.jobs import Server
from lifecycle.machine import Plan, run
from lifecycle.model import Directory, Kept, Memory, Origin, Saved, interrupted
from lifecycle.world import Failed, World


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("jobs")) as made:
        yield made


SWEPT = {"client state with a number of ranks", "the same, where no payload is verified"}
"""Sequences beside which others differ in a word alone."""


@pytest.mark.parametrize(
    "sequence",
    [
        pytest.param(sequence, marks=[pytest.mark.sweep] * (name in SWEPT), id=name)
        for name, sequence in {**FOUND, **LATER}.items()
    ],
)
def test_a_sequence_that_once_failed_holds(server: Server, tmp_path: Path, sequence: Sequence) -> None:
    world = World(server, tmp_path / "world")
    try:
        for name, params in sequence:
            world.act(name, **params)
    finally:
        world.close()


@pytest.mark.parametrize("stage", with_swept((3, 2), {2}))
def test_drawn_sequences_leave_what_the_model_says(server: Server, tmp_path: Path, stage: int) -> None:
    plan = Plan(server, tmp_path, stage=stage)
    run(plan, examples=8, steps=20)
    assert plan.actions > 60


def test_a_state_that_is_not_the_saved_one_fails(server: Server, tmp_path: Path) -> None:
    """The machine is no judge of nothing: another state, another tag and a changed file are found."""
    world = World(server, tmp_path / "world")
    try:
        world.act("start", job="a", world_size=1)
        world.act("save", job="a", tag="one")
        model = world.directories[str(tmp_path / "world/home/run")]
        right = model.tags["one"]
        model.tags["one"] = Saved("one", "another", right.step, 1, {}, right.save_id)
        with pytest.raises(Failed, match="loaded state"):
            world.act("load", job="a", tag="one")
        model.tags["one"] = right
        (tmp_path / "world/home/run/one/zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
        with pytest.raises(Failed, match="files changed that nothing wrote"):
            world.act("train", job="a")
        del model.tags["one"]
        with pytest.raises(Failed, match="tags differ"):
            world.act("chdir", job="a", to="elsewhere")
    finally:
        world.close()


def saved(tag: str, step: int = 1, save_id: str = "") -> Saved:
    return Saved(tag, f"state of {tag}", step, 2, {}, save_id)


def test_the_order_is_that_of_the_commits() -> None:
    directory = Directory()
    for tag, step in (("one", 1), ("six", 6), ("three", 3), ("one", 4)):
        directory.commit(saved(tag, step))
    assert [found.tag for found in directory.newest_first()] == ["one", "three", "six"]
    assert directory.latest == "one" and directory.kept(1) == {"one"} and directory.kept(2) == {"one", "three"}


def test_a_killed_save_left_the_old_or_the_new() -> None:
    before = Directory()
    before.commit(saved("last", 1, "old"))
    before.commit(saved("best", 1, "best"))
    kept = interrupted(before, saved("last", 2), ids={"last": "old"}, latest="best")
    assert kept.tags["last"].step == 1
    new = interrupted(before, saved("last", 2), ids={"last": "new"}, latest="best")
    assert new.tags["last"].step == 2 and new.latest == "best"
    assert interrupted(before, saved("last", 2), ids={"last": "new"}, latest="last").latest == "last"
    with pytest.raises(AssertionError, match="took 'last' away"):
        interrupted(before, saved("last", 2), ids={}, latest="best")
    with pytest.raises(AssertionError, match="latest names 'last'"):
        interrupted(before, saved("last", 2), ids={"last": "old"}, latest="last")


def test_a_resume_takes_what_latest_names_or_an_older_one() -> None:
    directory = Directory()
    for tag in ("one", "two", "three"):
        directory.commit(saved(tag))
    directory.latest = "two"
    assert [found.tag for found in directory.resumable("G")] == ["two"]
    directory.tags["two"] = replace(directory.tags["two"], damage="flip")
    assert [found.tag for found in directory.resumable("G")] == ["one"]
    directory.latest = None
    assert [found.tag for found in directory.resumable("G")] == ["three"]
    directory.commit(replace(saved("other"), origin=Origin(2, "D")))
    assert directory.resumable("G") == [] and [found.tag for found in directory.resumable("D")] == ["other"]
    directory.tags["other"] = replace(directory.tags["other"], damage="remove")
    assert [found.tag for found in directory.resumable("G")] == ["three"]


def kept(number: int, parent: int = 0, begun: int = 0, nodes: tuple[int, ...] = (1, 2)) -> Kept:
    made = Saved(f"in memory {number}", f"state {number}", number, 2, {}, number=number, committed=number)
    return Kept(made, parent, begun, nodes, 1)


def test_memory_is_newer_than_the_save_that_it_follows() -> None:
    directory = Directory()
    directory.commit(replace(saved("slow"), number=2, committed=9))
    assert kept(5, begun=2).newer(directory) and kept(5, parent=2).newer(directory)
    assert not kept(5).newer(directory) and not kept(10).newer(directory)
    assert kept(5).newer(Directory())


def test_what_a_resume_may_take_of_memory_and_disk() -> None:
    directory = Directory()
    assert Memory([kept(5)]).resumable(directory, "G", (1, 2)) == ([kept(5).saved], False)
    assert Memory([replace(kept(5), damaged=True)]).resumable(directory, "G", (1, 2)) == ([], True)
    assert Memory([kept(5)]).resumable(directory, "G", (2, 3)) == ([kept(5).saved], False)
    assert Memory([kept(5)]).resumable(directory, "G", (3, 4)) == ([], False)
    directory.commit(replace(saved("two"), number=2, committed=2))
    disk = directory.tags["two"]
    follows = kept(5, parent=2)
    assert Memory([replace(follows, damaged=True)]).resumable(directory, "G", (1, 2)) == ([disk], False)
    assert Memory([kept(5)]).resumable(directory, "G", (1, 2)) == ([disk], False)
    assert Memory([follows, kept(4, begun=2)], certain=False).resumable(directory, "G", (1,))[0] == [
        kept(5).saved,
        kept(4).saved,
        disk,
    ]


def test_prune_and_keep_leave_what_is_of_other_networks() -> None:
    directory = Directory()
    for name, origin in (("G_1", Origin(1, "G")), ("D_1", Origin(2, "D")), ("G_2", Origin(1, "G"))):
        directory.commit(replace(saved(name), origin=origin))
    assert directory.kept(1) == {"D_1", "G_2"} == directory.kept(1, only="G")
    assert directory.kept(1, only="D") == {"G_1", "D_1", "G_2"}
    assert [one.tag for one in directory.newest_first("D")] == ["D_1"] and directory.continued() == "G"


def test_a_failing_sequence_is_made_as_short_as_it_gets() -> None:
    sequence: Sequence = [("act", {"number": number}) for number in range(20)]

    def fails(some: Sequence) -> bool:
        return {3, 11} <= {params["number"] for _, params in some}

    assert [params["number"] for _, params in shortened(sequence, fails, 200)] == [3, 11]


def test_failures_that_say_the_same_are_of_one_kind() -> None:
    first = "/home/run: the tags are listed as ['best', 'global_step2'], newest first they are ['global_step2', 'best']"
    second = "/copy1: the tags are listed as ['last', 'global_step11'], newest first they are ['global_step11', 'last']"
    assert kind_of(first) == kind_of(second) != kind_of("/copy1: latest is 'last', expected 'best'")
