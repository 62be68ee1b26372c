"""Hostile files of runs with experts and tensor parallelism: every verb refuses them, in little time and memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bounded import bounded
from commands import ARGUMENTS
from synthetic import edit
from topologies import TopologyJob, build, train
from typer.testing import CliRunner

import zeroelastic
from zeroelastic.cli.app import app
from zeroelastic.errors import CheckpointError, UnsupportedError
from zeroelastic.testing import RankPool

JOBS = {
    "AutoTP": TopologyJob("llama", tp=2, installed=False),
    "AutoEP": TopologyJob("autoep", ep=2, installed=False),
    "MoE": TopologyJob("moe", ep=2, stage=2, installed=False),
}
VERBS = {verb: ARGUMENTS[verb] for verb in ARGUMENTS if verb != "prune"}


@pytest.fixture(scope="module")
def honest(topology_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A save of stock DeepSpeed for each kind of slices."""
    root = tmp_path_factory.mktemp("honest")
    for kind, job in JOBS.items():
        topology_pool.run(save, 2, job, str(root / kind))
    return {kind: root / kind for kind in JOBS}


def save(job: TopologyJob, directory: str) -> None:
    engine = build(job)
    train(engine, 0, 1)
    engine.save_checkpoint(directory, tag="t")


def in_models(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A change of every model states file."""

    def bend(tag: Path) -> None:
        for path in tag.glob("*model_states.pt"):
            if not path.name.startswith("layer_"):
                edit(path, change)

    return bend


def of_another_layer(tag: Path) -> None:
    """The files of experts name a layer whose experts no optimizer file has."""

    def rename(weights: dict[str, Any]) -> None:
        for name in [*weights]:
            weights[f"other.{name}"] = weights.pop(name)

    for path in tag.glob("layer_*_model_states.pt"):
        edit(path, rename)


def in_optimizers(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def bend(tag: Path) -> None:
        for path in tag.glob("*optim_states.pt"):
            edit(path, lambda data: change(data["optimizer_state_dict"]))

    return bend


def every_piece(model: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> None:
    tables = [layer["affine_maps"] for layer in model.get("ds_autoep_layers") or ()]
    tables += [(model.get("universal_checkpoint_info") or {}).get("affine_map") or {}]
    for table in tables:
        for entry in table.get("params", {}).values():
            for own in entry["ranks"].values():
                for piece in own["pieces"]:
                    change(piece)


def inside_itself(model: dict[str, Any]) -> None:
    pieces: list[Any] = []
    pieces.append({"shape": pieces, "source": [0, pieces], "dest": [0, pieces]})
    every_piece(model, lambda piece: piece.update(shape=pieces))


def patterns(model: dict[str, Any]) -> None:
    """Of an older save, that take for ever."""
    model["universal_checkpoint_info"].pop("affine_map")
    name = "a" * 40 + "b"
    model["universal_checkpoint_info"]["tp_replicated_parameter_patterns"] = ["^(a+)+$"]
    for table in model["param_shapes"]:
        table[name] = table.pop(next(iter(table)))


def layers(**changes: Any) -> Callable[[Path], None]:
    return in_models(lambda model: [layer.update(changes) for layer in model["ds_autoep_layers"]])


BENT: dict[str, tuple[str, Callable[[Path], None]]] = {
    "pieces of pieces of themselves": ("AutoTP", in_models(inside_itself)),
    "pieces far away": ("AutoTP", in_models(lambda m: every_piece(m, lambda p: p.update(source=[1 << 59, [1, 1]])))),
    "scales": ("AutoTP", in_models(lambda m: every_piece(m, lambda p: p.update(scale=float("nan"))))),
    "one slice for all": ("AutoTP", in_models(lambda m: every_piece(m, lambda p: p.update(source=p["dest"])))),
    "patterns without end": ("AutoTP", in_models(patterns)),
    "another number of tensor parallel ranks": ("AutoTP", in_models(lambda m: m.update(mp_world_size=1 << 40))),
    "no maps": ("AutoTP", in_models(lambda m: m.pop("universal_checkpoint_info"))),
    "experts of 2^40 ranks": ("AutoEP", layers(ep_size=1 << 40)),
    "experts of no ranks": ("AutoEP", layers(ep_size=0)),
    "layers that are none": ("AutoEP", in_models(lambda m: m.update(ds_autoep_layers=[7, "x"]))),
    "experts far away": ("AutoEP", in_models(lambda m: every_piece(m, lambda p: p.update(source=[1 << 59, [1]])))),
    "parts of groups that are none": ("AutoEP", in_optimizers(lambda o: o.update(ds_zero_partition_groups=[{}]))),
    "2^40 experts": ("MoE", in_models(lambda m: m.update(num_experts=[1 << 40]))),
    "layers without end": ("MoE", in_models(lambda m: m.update(num_experts=[1 << 16] * 100_000))),
    "experts below zero": ("MoE", in_models(lambda m: m.update(num_experts=[-4]))),
    "parts of experts: 0": ("MoE", in_optimizers(lambda o: o.update(partition_count=[2, 0, 2, 0]))),
    "parts of experts: 2^40": ("MoE", in_optimizers(lambda o: o.update(partition_count=[2, 1 << 40, 2, 1 << 40]))),
    "parts of experts: text": ("MoE", in_optimizers(lambda o: o.update(partition_count=["x"]))),
}


LAYERS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no number": (
        "AutoEP",
        in_models(lambda m: m["ds_autoep_layers"][0].pop("moe_layer_id")),
        "model_states.pt: a layer of ds_autoep_layers has moe_layer_id None",
    ),
    "no experts": ("AutoEP", layers(num_experts=0), "num_experts 0"),
    "2^40 experts": ("AutoEP", layers(num_experts=1 << 40), "more than 65536 experts"),
    "not a layer that is trained": ("MoE", of_another_layer, "model_states.pt: other.*experts that are frozen"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_reshard_refuses_layers_of_experts_by_name(honest: dict[str, Path], tmp_path: Path, name: str) -> None:
    kind, bend, message = LAYERS[name]
    root = tmp_path / "run"
    shutil.copytree(honest[kind], root)
    bend(root / "t")
    with bounded(), pytest.raises((CheckpointError, UnsupportedError), match=message):
        zeroelastic.reshard(root, tmp_path / "dst", world_size=4, stage=2)


@pytest.mark.parametrize("name", BENT)
def test_every_verb_refuses_hostile_files_of_slices(honest: dict[str, Path], tmp_path: Path, name: str) -> None:
    kind, bend = BENT[name]
    root = tmp_path / "run"
    shutil.copytree(honest[kind], root)
    bend(root / "t")
    for verb, options in VERBS.items():
        given = [option.format(dst=tmp_path / f"dst-{verb}", good=honest[kind]) for option in options]
        with bounded():
            done = CliRunner().invoke(app, [verb, str(root), *given])
        assert done.exception is None or isinstance(done.exception, SystemExit), (verb, done.exception)
        assert done.exit_code in (0, 1, 2, 3), (verb, done.output)
        assert verb in ("inspect", "latest") or done.exit_code or "t: " in done.output, (verb, done.output)
