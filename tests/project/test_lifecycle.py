"""Sequences of what people do with checkpoints, on real engines: disk and memory are what a simple model says.

The long form is `make lifecycle`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from extended import with_swept
from lifecycle.campaign import kind_of
from lifecycle.found import FOUND, Sequence
from lifecycle.jobs import Server
from lifecycle.machine import Plan, run
from lifecycle.model import Saved
from lifecycle.world import Failed, World


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("jobs")) as made:
        yield made


@pytest.mark.parametrize("sequence", [pytest.param(sequence, id=name) for name, sequence in FOUND.items()])
def test_a_sequence_that_once_failed_holds(server: Server, tmp_path: Path, sequence: Sequence) -> None:
    world = World(server, tmp_path / "world")
    try:
        for name, params in sequence:
            world.act(name, **params)
    finally:
        world.close()


@pytest.mark.parametrize("stage", with_swept((3, 2, None), {2, None}))
def test_drawn_sequences_leave_what_the_model_says(server: Server, tmp_path: Path, stage: int | None) -> None:
    """Without a stage each sequence has its own kind of jobs."""
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


def test_failures_that_say_the_same_are_of_one_kind() -> None:
    first = "/home/run: the tags are listed as ['best', 'global_step2'], newest first they are ['global_step2', 'best']"
    second = "/copy1: the tags are listed as ['last', 'global_step11'], newest first they are ['global_step11', 'last']"
    assert kind_of(first) == kind_of(second) != kind_of("/copy1: latest is 'last', expected 'best'")
