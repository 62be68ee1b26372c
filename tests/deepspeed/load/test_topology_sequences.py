"""Runs with slices that go on: at one size after another, from older tags, and past damage from disks of nodes.

What each load restores is compared with what was saved by ``topologies.logical_state``, which shares no code with it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from saved_files import flip
from saves import Nodes, on_nodes
from topologies import TopologyJob, build, differences, logical_hashes, train

import zeroelastic
from zeroelastic.testing import RankPool

FALLBACK = {"fallback": True}
NODE_LOCAL = {"checkpoint": {"use_node_local_storage": True}}


class Went(NamedTuple):
    """The tag that was loaded, if any; the state after that, and the one that was saved."""

    tag: str | None
    loaded: dict[str, Any]
    saved: dict[str, Any]


def start(job: TopologyJob, directory: str, *tags: str) -> list[dict[str, Any]]:
    """A new run: a step and a save for each tag; the states."""
    engine = build(job)
    states = []
    for number, tag in enumerate(tags):
        train(engine, number, 1)
        states.append(logical_hashes(engine))
        engine.save_checkpoint(directory, tag=tag)
    return states


def go_on(job: TopologyJob, directory: str, *, tag: str | None = None, save: str | None = None, **flags: bool) -> Went:
    """A run of other weights that resumes from a tag, and trains on and saves under another one."""
    engine = build(job.other())
    path, _ = engine.load_checkpoint(directory, tag=tag, **flags)
    loaded = logical_hashes(engine)
    if save is not None:
        train(engine, 3, 1)
        engine.save_checkpoint(directory, tag=save)
        zeroelastic.wait_for_save(engine)
    return Went(None if path is None else Path(path).parent.name, loaded, logical_hashes(engine))


def weights(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key.endswith(("/weight", "/fp32"))}


SLICED = {
    "MoE": TopologyJob("moe", ep=2, stage=2, frozen_experts=True),
    "AutoEP": TopologyJob("autoep", ep=2, stage=2),
    "AutoTP": TopologyJob("llama", tp=2),
}


def at(job: TopologyJob, size: int, **config: Any) -> TopologyJob:
    """A job at another tensor or expert parallel size, with more of the configuration."""
    axis = "tp" if job.tp > 1 else "ep"
    return replace(job, **{axis: size}, config={**job.config, **config})


@pytest.mark.parametrize("name", SLICED)
def test_a_run_goes_from_size_to_size_and_back_to_an_older_tag(
    topology_pool: RankPool, tmp_path: Path, name: str
) -> None:
    job, directory = SLICED[name], str(tmp_path)
    (one,) = topology_pool.run(start, 4, job, directory, "one")[0]
    second = topology_pool.run(go_on, 2, at(job, 1), directory, tag="one", save="two")[0]
    assert not differences(one, second.loaded)
    assert not differences(one, topology_pool.run(go_on, 4, at(job, 4), directory, tag="one")[0].loaded)
    third = topology_pool.run(
        go_on, 4, at(job, 4, zeroelastic={"async_save": True, "keep": 2}), directory, save="three"
    )[0]
    assert third.tag == "two" and not differences(second.saved, third.loaded)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"two", "three"}
    for flag in ({"load_module_only": True}, {"load_optimizer_states": False}):
        went = topology_pool.run(go_on, 2, job, directory, **flag)[0]
        assert went.tag == "three" and not differences(weights(third.saved), weights(went.loaded)), flag
    whole = topology_pool.run(go_on, 3, at(job, 1), directory, load_module_strict=False)[0]
    assert not differences(third.saved, whole.loaded)


ON_NODES = {
    "AutoTP": TopologyJob("llama", tp=2, config=NODE_LOCAL),
    "AutoEP": TopologyJob("autoep", ep=2, config=NODE_LOCAL),
}


@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize("name", ON_NODES)
def test_slices_are_on_disks_of_nodes(topology_pool: RankPool, tmp_path: Path, name: str) -> None:
    """Ranks take what they need from the disks of all nodes; damage on one of them leads to the tag before."""
    job, nodes = ON_NODES[name], Nodes(tmp_path)
    one, two = topology_pool.run(on_nodes, 4, nodes, (0, 0, 1, 1), start, job, nodes.path, "one", "two")[0]
    went = topology_pool.run(on_nodes, 3, nodes, (1, 0, 0), go_on, at(job, 1), nodes.path)
    assert all(each.tag == "two" and not differences(two, each.loaded) for each in went)
    flip(max((nodes.disk(1) / "two").glob("*_optim_states.pt")))
    run = at(job, 4, zeroelastic=FALLBACK)
    for each in topology_pool.run(on_nodes, 4, nodes, (0, 1, 1, 0), go_on, run, nodes.path):
        assert each.tag == "one" and not differences(one, each.loaded)
