"""Files of runs with slices that contradict each other, are damaged or hostile: refused by name of file and entry.

Every verb refuses them, in little time and memory.
"""

from __future__ import annotations

import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import topologies
import torch
from programs import ARGUMENTS, run_command
from saved_files import bounded, swap
from synthetic import edit
from topologies import TopologyJob

import zeroelastic
from zeroelastic.checkpoint.checker import check_headers
from zeroelastic.checkpoint.open import Checkpoint, open_checkpoint
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.checkpoint.tag_files import TensorParallel
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    UndescribedSlicesError,
    UnsupportedError,
    ZeroElasticError,
)
from zeroelastic.testing import RankPool

TAG = "t"
STOCK = TopologyJob(installed=False, elastic=False)
RUNS = {
    "AutoTP": replace(STOCK, model="neox", tp=2, stage=3, frozen=True),
    "AutoTP, stage 2": replace(STOCK, model="neox", tp=2, stage=2),
    "AutoEP": replace(STOCK, model="autoep", ep=2, stage=3),
    "MoE": replace(STOCK, model="moe", ep=2, stage=2),
    "frozen MoE": replace(STOCK, model="moe", ep=2, stage=2, frozen=True, frozen_experts=True),
}
MODEL = "zero_pp_rank_{}_mp_rank_{:02d}_model_states.pt"
OPTIM = "zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"
WHOLE = "mp_rank_{:02d}_model_states.pt"
EXPERT = "layer_0_expert_{}_mp_rank_00_model_states.pt"
ROW = "gpt_neox.layers.0.mlp.dense_4h_to_h.weight"


def save(job: TopologyJob, directory: str) -> None:
    topologies.build(job).save_checkpoint(directory, tag=TAG)


@pytest.fixture(scope="module")
def saves(topology_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp("run") for name in RUNS}
    for name, job in RUNS.items():
        topology_pool.run(save, 2, job, str(found[name]))
    return found


def read(tag: Path) -> Checkpoint:
    """Open everything that a load, and the command line, may look at."""
    checkpoint = open_checkpoint(tag)
    open_state(checkpoint, resizable=False)
    for rank in range(checkpoint.world_size):
        checkpoint.extents(rank)
    return checkpoint


def maps_of(root: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = root["universal_checkpoint_info"]["affine_map"]["params"]
    return found


def of_entry(name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda root: maps_of(root)[f"^{re.escape(name)}$"].update(changes)


def without_maps(root: dict[str, Any]) -> None:
    root.pop("universal_checkpoint_info")


def with_part_of_one(root: dict[str, Any]) -> None:
    """Both tensor parallel ranks keep the first half of the columns."""
    ranks = maps_of(root)[f"^{re.escape(ROW)}$"]["ranks"]
    ranks[1] = ranks[0]


def other_frozen_shapes(root: dict[str, Any]) -> None:
    root["frozen_param_shapes"].update(dict.fromkeys(root["frozen_param_shapes"], (1,)))


def in_files(change: Callable[[dict[str, Any]], object], *names: str) -> Callable[[Path], None]:
    def changed(tag: Path) -> None:
        for name in names:
            edit(tag / name, change)

    return changed


def maps_of_eight_ranks(tag: Path) -> None:
    """Beside DeepSpeed's own experts, for a run in which those that share an expert are neighbours."""
    ranks = {
        r: {"shard_shape": [1], "pieces": [{"shape": [1], "source": [r, [1]], "dest": [0, [1]]}]} for r in range(8)
    }
    table = {"version": 1, "params": {"other": {"logical_shape": [8], "ranks": ranks}}}
    layers = [{"ep_size": 8, "affine_maps": table}]
    in_files(lambda root: root.update(ds_autoep_layers=layers), WHOLE.format(0))(tag)
    in_files(lambda root: root["ds_config"].update(use_data_before_expert_parallelism=True), *OPTIMS)(tag)


def state_of(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda root: change(root["optimizer_state_dict"])


MODELS = (MODEL.format(0, 0), MODEL.format(0, 1))
OPTIMS = (OPTIM.format(0, 0), OPTIM.format(1, 0))
Case = tuple[str, Callable[[Path], None], str, type[ZeroElasticError]]
CASES: dict[str, Case] = {
    "no maps": ("AutoTP", in_files(without_maps, *MODELS), "does not say which slices", UndescribedSlicesError),
    "no map of one": (
        "AutoTP",
        in_files(lambda root: maps_of(root).pop(f"^{re.escape(ROW)}$"), *MODELS),
        f"does not say which slices of {ROW}",
        UndescribedSlicesError,
    ),
    "another shape": (
        "AutoTP",
        in_files(lambda root: root["param_shapes"][0].update({ROW: torch.Size([16, 31])}), MODELS[1]),
        rf"mp_rank_01_model_states.pt: {ROW} has shape \[16, 31\]; the maps say",
        CheckpointError,
    ),
    "columns twice": ("AutoTP", in_files(with_part_of_one, *MODELS), f"{ROW} is not held as a whole", CheckpointError),
    "a whole of another size": (
        "AutoTP", in_files(of_entry(ROW, logical_shape=[16, 65]), *MODELS), ROW, CheckpointError,
    ),
    "model files swapped": (
        "AutoTP",
        lambda tag: swap(*(tag / name for name in MODELS)),
        "was saved as .* changed places",
        CheckpointError,
    ),
    "a rank's files gone": (
        "AutoTP", lambda tag: (tag / OPTIM.format(0, 1)).unlink(), r"mp_rank_01_optim_states\.pt", MissingFileError,
    ),
    "a frozen parameter of another shape": (
        "AutoTP",
        in_files(other_frozen_shapes, MODELS[1]),
        "the part of frozen parameter",
        CheckpointError,
    ),
    "data parallel sizes differ": (
        "AutoTP", in_files(lambda root: root.update(dp_world_size=2), MODELS[1]), "saved by 2 ranks", CheckpointError,
    ),
    "tensor parallel sizes differ": (
        "AutoTP",
        in_files(lambda root: root.update(mp_world_size=4), MODELS[1]),
        "saved with tensor parallel size 4",
        UnsupportedError,
    ),
    "gone, stage 2": (
        "AutoTP, stage 2", lambda tag: (tag / WHOLE.format(1)).unlink(), WHOLE.format(1), MissingFileError,
    ),
    "buffers of another length": (
        "AutoTP, stage 2",
        in_files(state_of(lambda s: s["single_partition_of_fp32_groups"].append(torch.zeros(4))), OPTIM.format(0, 1)),
        r"mp_rank_01_optim_states\.pt: single_partition_of_fp32_groups has",
        CheckpointError,
    ),
    "AutoEP: other ranks": (
        "AutoEP",
        in_files(state_of(lambda s: s["ds_zero_partition_groups"][-1].update(partition_ranks=[1])), OPTIMS[0]),
        r"optim_states\.pt: the ranks \[1\] share its sub-group",
        UnsupportedError,
    ),
    "AutoEP: no maps": (
        "AutoEP",
        in_files(lambda root: root.update(ds_autoep_layers=None), MODEL.format(0, 0), MODEL.format(1, 0)),
        "nothing says which experts they are: model.layers.0.mlp.experts",
        UnsupportedError,
    ),
    "AutoEP: another size": (
        "AutoEP",
        in_files(state_of(lambda s: s.update(ds_zero_partition_groups=None)), *OPTIMS),
        "ranks imply",
        CheckpointError,
    ),
    "AutoEP: layers a text": (
        "AutoEP", in_files(lambda root: root.update(ds_autoep_layers="x"), *(MODEL.format(r, 0) for r in (0, 1))),
        "ds_autoep_layers is 'x'", CheckpointError,
    ),
    "AutoEP: sizes of layers differ": (
        "AutoEP",
        in_files(lambda root: root["ds_autoep_layers"][0].update(ep_size=4), *(MODEL.format(r, 0) for r in (0, 1))),
        r"expert parallel sizes \[2, 4\]",
        UnsupportedError,
    ),
    "MoE: a count that is no divisor": (
        "MoE",
        in_files(state_of(lambda s: s.update(partition_count=[2, 3, 3, 3])), OPTIMS[0]),
        "saved by 3 ranks",
        CheckpointError,
    ),
    "MoE: other layers": (
        "MoE",
        in_files(lambda root: root.update(num_experts=[5]), WHOLE.format(0)),
        r"trains 4 experts .* \[5\]",
        UnsupportedError,
    ),
    "MoE: counts of too few groups": (
        "MoE", in_files(state_of(lambda s: s["partition_count"].pop()), OPTIMS[0]), "flat buffers", CheckpointError,
    ),
    "MoE: maps of more ranks than there are": (
        "MoE", maps_of_eight_ranks, "has maps of 8 expert parallel ranks", CheckpointError,
    ),
    "a frozen expert less": (
        "frozen MoE", lambda tag: (tag / EXPERT.format(2)).unlink(), EXPERT.format(2), MissingFileError,
    ),
    "a frozen expert of another shape": (
        "frozen MoE",
        in_files(lambda root: root.update(dict.fromkeys(root, torch.zeros(3))), EXPERT.format(2)),
        rf"{EXPERT.format(2)}: has no moe.*experts\.2\.up\.\w+ of shape",
        CheckpointError,
    ),
    "an expert's file a list": (
        "frozen MoE",
        lambda tag: torch.save([1], tag / EXPERT.format(0)),
        "holds no weights of an expert",
        CheckpointError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_files_that_contradict_each_other_are_refused_by_name(
    saves: dict[str, Path], tmp_path: Path, name: str
) -> None:
    run, change, message, kind = CASES[name]
    tag = shutil.copytree(saves[run] / TAG, tmp_path / TAG)
    read(tag)
    change(tag)
    with pytest.raises(kind, match=message):
        read(tag)
    checked = check_headers(tag)
    assert checked.problems or checked.unsupported


def test_a_million_expert_parallel_ranks_take_no_time(saves: dict[str, Path], tmp_path: Path) -> None:
    """Two files of a few KB; the checker goes on where those of the other ranks are missing."""
    tag, ranks = shutil.copytree(saves["MoE"] / TAG, tmp_path / TAG), 1 << 20
    counts = [ranks, 1, ranks, 1]
    in_files(lambda root: root.update(dp_world_size=ranks, num_experts=[2 * ranks]), WHOLE.format(0))(tag)
    in_files(state_of(lambda s: s.update(partition_count=counts)), *OPTIMS)(tag)
    began = time.monotonic()
    assert any("expert parallel ranks" in sentence for sentence in check_headers(tag).unsupported)
    assert time.monotonic() - began < 5


def test_without_maps_each_tensor_parallel_rank_is_a_checkpoint_of_its_own(
    saves: dict[str, Path], tmp_path: Path
) -> None:
    tag = shutil.copytree(saves["AutoTP"] / TAG, tmp_path / TAG)
    in_files(without_maps, *MODELS)(tag)
    for tp_rank in (0, 1):
        checkpoint = open_checkpoint(tag, tp=TensorParallel(tp_rank, 2))
        assert checkpoint.world_size == 1 and checkpoint.layout.slices is None
        assert checkpoint.shard(0).path.name == OPTIM.format(0, tp_rank)


def test_patterns_of_an_older_deepspeed_say_what_maps_say(saves: dict[str, Path], tmp_path: Path) -> None:
    for run in ("AutoTP", "AutoTP, stage 2"):
        tag = shutil.copytree(saves[run] / TAG, tmp_path / run)
        names = MODELS if run == "AutoTP" else (WHOLE.format(0), WHOLE.format(1))
        in_files(lambda root: root["universal_checkpoint_info"].pop("affine_map"), *names)(tag)
        mapped, by_pattern = read(saves[run] / TAG).layout, read(tag).layout
        assert by_pattern.params == mapped.params and by_pattern.tensors == mapped.tensors


JUNK = (None, -1, 0, 1, 2, 3, 7, 1 << 40, 1 << 70, "x", True, [], {}, (), [0], [1 << 62], {0: 1}, 1.5, [[[]]], "0")


def bend(tree: Any, rng: random.Random) -> None:
    """Replace, remove or repeat an entry somewhere in a tree of lists and dictionaries."""
    while isinstance(tree, (dict, list)) and tree:
        key = rng.choice([*tree]) if isinstance(tree, dict) else rng.randrange(len(tree))
        if isinstance(tree[key], (dict, list)) and tree[key] and rng.random() < 0.85:
            tree = tree[key]
            continue
        how = rng.randrange(4)
        if how == 0:
            tree.pop(key)
        elif how == 1:
            other = rng.choice([*tree]) if isinstance(tree, dict) else rng.randrange(len(tree))
            tree[key] = tree[other]
        elif how == 2 and type(tree[key]) is int:
            tree[key] += rng.choice((-1, 1, 1 << 20))
        else:
            tree[key] = rng.choice(JUNK)
        return


ENTRIES = ("universal_checkpoint_info", "ds_autoep_layers", "param_shapes", "num_experts", "frozen_param_shapes")
STATES = ("partition_count", "ds_zero_partition_groups", "param_alignment_paddings")


@pytest.mark.parametrize("run", RUNS)
def test_whatever_the_entries_of_slices_are_only_errors_of_ours_come_out(
    saves: dict[str, Path], tmp_path: Path, run: str
) -> None:
    rng = random.Random(run)
    original = saves[run] / TAG
    tag = shutil.copytree(original, tmp_path / TAG)
    models = sorted(path.name for path in tag.glob("*mp_rank_*_model_states.pt") if not path.name.startswith("layer"))
    trees = {path.name: torch.load(path, weights_only=False) for path in tag.glob("*.pt")}
    outcomes = set()
    for number in range(40):
        name = models[-1] if number % 3 else rng.choice([*trees])
        root = torch.load(original / name, weights_only=False)
        state = root.get("optimizer_state_dict", root)
        keys = [key for key in (*ENTRIES, *STATES) if state.get(key)]
        if not keys:
            continue
        bend(state[rng.choice(keys)], rng)
        torch.save(root, tag / name)
        began = time.monotonic()
        try:
            read(tag)
            outcomes.add("read")
        except ZeroElasticError as error:
            assert str(tag) in str(error) or name in str(error)
            outcomes.add("refused")
        check_headers(tag)
        assert time.monotonic() - began < 5
        shutil.copy(original / name, tag / name)
    assert "refused" in outcomes


# --- the verbs


VERBS = {verb: ARGUMENTS[verb] for verb in ARGUMENTS if verb != "prune"}


def in_models(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A change of every model states file."""

    def changed(tag: Path) -> None:
        for path in tag.glob("*model_states.pt"):
            if not path.name.startswith("layer_"):
                edit(path, change)

    return changed


def of_another_layer(tag: Path) -> None:
    """The files of experts name a layer whose experts no optimizer file has."""

    def rename(weights: dict[str, Any]) -> None:
        for name in [*weights]:
            weights[f"other.{name}"] = weights.pop(name)

    for path in tag.glob("layer_*_model_states.pt"):
        edit(path, rename)


def in_optimizers(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return in_files(state_of(change), *OPTIMS)


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
def test_a_reshard_refuses_layers_of_experts_by_name(saves: dict[str, Path], tmp_path: Path, name: str) -> None:
    kind, change, message = LAYERS[name]
    root = tmp_path / "run"
    shutil.copytree(saves[kind], root)
    change(root / TAG)
    with bounded(), pytest.raises((CheckpointError, UnsupportedError), match=message):
        zeroelastic.reshard(root, tmp_path / "dst", world_size=4, stage=2)


@pytest.mark.parametrize("name", BENT)
def test_every_verb_refuses_hostile_files_of_slices(saves: dict[str, Path], tmp_path: Path, name: str) -> None:
    kind, change = BENT[name]
    root = tmp_path / "run"
    shutil.copytree(saves[kind], root)
    change(root / TAG)
    for verb, options in VERBS.items():
        given = [option.format(dst=tmp_path / f"dst-{verb}", good=saves[kind]) for option in options]
        with bounded():
            done = run_command(verb, root, *given)
        assert done.returncode in (0, 1, 2, 3), (verb, done.output)
        assert verb in ("inspect", "latest") or done.returncode or "t: " in done.output, (verb, done.output)
