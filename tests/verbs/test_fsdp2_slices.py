"""Runs with tensor parallelism and experts become whole tensors of FSDP2 under the names that the model has for them.

What is written is compared with a gather without zeroelastic, and loaded by jobs of FSDP2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import topologies
from dcp_writers import read_dcp
from exports import same
from safetensors.torch import load_file
from topologies import TopologyJob, differences

import zeroelastic
from zeroelastic.errors import LayoutMismatchError, UnsupportedError
from zeroelastic.testing import RankPool

SECTION, FEATURE = "Using it", "From tensor parallel ranks and experts to FSDP2 (`convert`)"
NOTE = "AutoTP, DeepSpeed's own MoE: whole tensors under the model's names, bit for bit"
STATE_KEYS = ("exp_avg", "exp_avg_sq")

JOBS = {
    "llama-3": (4, TopologyJob("llama", tp=2, stage=3)),
    "llama-2": (2, TopologyJob("llama", tp=2, stage=2, elastic=False, installed=False)),
    "frozen-1": (4, TopologyJob("neox", tp=2, stage=1, frozen=True, precision="bf16")),
    "lora-3": (4, TopologyJob("llama", tp=2, stage=3, adapters=True)),
    "moe-2": (4, TopologyJob("moe", ep=2, stage=2)),
    "moe-1": (2, TopologyJob("moe", ep=2, stage=1, elastic=False, installed=False)),
}
TENSOR_PARALLEL = [name for name, (_, job) in JOBS.items() if job.tp > 1]


def save(job: TopologyJob, directory: str) -> tuple[dict[str, Any], list[str]]:
    """Train and save; the state that was saved, and the names of the model's own state dict."""
    engine = topologies.build(job)
    topologies.train(engine, 0, 2)
    engine.save_checkpoint(directory, tag="t")
    return topologies.logical_state(engine), [*topologies.build_model(job, ep=1).state_dict()]


Saved = Callable[[str], tuple[Path, dict[str, Any], list[str]]]


@pytest.fixture(scope="module")
def saved(topology_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Save a job of JOBS, once: the tag, the gathered state, the names of the model."""
    made: dict[str, tuple[Path, dict[str, Any], list[str]]] = {}

    def get(name: str) -> tuple[Path, dict[str, Any], list[str]]:
        if name not in made:
            ranks, job = JOBS[name]
            directory = tmp_path_factory.mktemp(name)
            made[name] = (directory / "t", *topology_pool.run(save, ranks, job, str(directory))[0])
        return made[name]

    return get


def written(folder: Path, tied: dict[str, str]) -> dict[str, Any]:
    """What torch reads of a directory, by the keys of a gathered state."""
    found = read_dcp(folder)
    state: dict[str, Any] = {}
    names = {key.removeprefix("model.") for key in found if key.startswith("model.")} - tied.keys()
    trained = {key.removeprefix("optim.state.").removesuffix(".exp_avg") for key in found if key.endswith(".exp_avg")}
    for name in names:
        state[f"{name}/{'fp32' if name in trained else 'weight'}"] = found[f"model.{name}"]
    for name in trained:
        state |= {f"{name}/{key}": found[f"optim.state.{name}.{key}"] for key in STATE_KEYS}
        state[f"{name}/step"] = float(found[f"optim.state.{name}.step"])
        for option in ("lr", "weight_decay", "betas", "eps"):
            state[f"{name}/group/{option}"] = found[f"optim.param_groups.{name}.{option}"]
    assert all(same(found[f"model.{alias}"], found[f"model.{name}"]) for alias, name in tied.items())
    return state


def expected(state: dict[str, Any]) -> dict[str, Any]:
    """Of a gathered state what a checkpoint of FSDP2 has: master weights, of frozen parameters weights, buffers."""
    found = {key: value for key, value in state.items() if not key.startswith(("engine/", "buffer/"))}
    masters = {key.removesuffix("/fp32") for key in found if key.endswith("/fp32")}
    kept = {
        key: value
        for key, value in found.items()
        if not (key.endswith("/weight") and key.removesuffix("/weight") in masters)
    }
    buffers = {key.split("/")[1]: value for key, value in state.items() if key.startswith("buffer/")}
    return kept | {f"{name}/weight": value for name, value in buffers.items()}


@pytest.mark.support(SECTION, FEATURE, "exact", NOTE)
@pytest.mark.parametrize("name", JOBS)
def test_whole_tensors_are_written_under_the_names_of_the_model(saved: Saved, tmp_path: Path, name: str) -> None:
    tag_dir, state, names = saved(name)
    _, job = JOBS[name]
    report = zeroelastic.convert(tag_dir, tmp_path / "fsdp", to="fsdp2")
    assert bool(report.digests_compared) == job.installed, "the others have no record"
    assert not any("frozen parameters: the checkpoint was saved without them" in note for note in report.notes)
    found = read_dcp(tmp_path / "fsdp")
    assert {key.removeprefix("model.") for key in found if key.startswith("model.")} == {*names}
    groups = {key.split(".")[2] for key in found if re.fullmatch(r"optim\.param_groups\.\d+\.params", key)}
    assert len(groups) == (1 if job.adapters else 2), "none is of experts alone"
    kept = json.loads(str(found["zeroelastic"]))
    assert differences(expected(state), written(tmp_path / "fsdp", kept["tied"])) == []
    assert kept["counters"]["global_steps"] == 2
    assert "tensor_parallel" not in kept["ds_config"], "what comes back is of whole tensors"


def resume(job: TopologyJob, directory: str) -> dict[str, Any] | str:
    engine = topologies.build(job)
    try:
        engine.load_checkpoint(directory)
    except LayoutMismatchError as error:
        return str(error)
    return topologies.logical_state(engine)


@pytest.mark.support(SECTION, FEATURE, "exact", NOTE)
@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_what_comes_back_from_tensor_parallel_ranks_is_the_same(
    topology_pool: RankPool, saved: Saved, tmp_path: Path, name: str
) -> None:
    tag_dir, state, _ = saved(name)
    zeroelastic.convert(tag_dir, tmp_path / "fsdp", to="fsdp2")
    back = zeroelastic.convert(tmp_path / "fsdp", tmp_path / "back", from_="fsdp2", world_size=3)
    assert back.content_root == zeroelastic.verify(tag_dir).content_root
    if name in ("llama-3", "lora-3"):
        for ranks, tp, stage in ((2, 1, 3), (4, 2, 2)):
            job = JOBS[name][1].other(tp=tp, stage=stage, adapters=JOBS[name][1].adapters)
            assert differences(state, topology_pool.run(resume, ranks, job, str(tmp_path / "back"))[0]) == []


def test_deepspeeds_own_experts_do_not_come_back(saved: Saved, tmp_path: Path) -> None:
    zeroelastic.convert(saved("moe-2")[0], tmp_path / "fsdp", to="fsdp2")
    with pytest.raises(UnsupportedError, match=r"deepspeed_experts.*own MoE layer.*Begin a run from the weights"):
        zeroelastic.convert(tmp_path / "fsdp", tmp_path / "back", from_="fsdp2", world_size=2)
    assert not (tmp_path / "back").exists()


def test_layers_of_autoep_are_refused_by_name(topology_pool: RankPool, tmp_path: Path) -> None:
    topology_pool.run(save, 2, TopologyJob("autoep", ep=2, stage=2), str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"model\.layers\.\d\.mlp is a layer of AutoEP.*zeroelastic export"):
        zeroelastic.convert(tmp_path / "t", tmp_path / "fsdp", to="fsdp2")
    assert not (tmp_path / "fsdp").exists()
    report = zeroelastic.export(tmp_path / "t", tmp_path / "weights")
    assert report.notes is not None and "DeepSpeed's names and shapes" in report.notes[0]
    assert any(name.endswith(".experts.w1") for name in load_file(tmp_path / "weights" / "model.safetensors"))
