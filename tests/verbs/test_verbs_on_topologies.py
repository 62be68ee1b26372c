"""The verbs on checkpoints with experts and tensor parallelism, compared with a gather without zeroelastic.

The checkpoints are DeepSpeed's own, saved without zeroelastic, but for those that have a commit record.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import topologies
import torch
from programs import run_command
from safetensors.torch import load_file
from saved_files import flip
from synthetic import edit, read_dcp
from synthetic import same as same_bits
from topologies import EXPERTS, TopologyJob, differences

import zeroelastic
from zeroelastic.errors import LayoutMismatchError, UnsupportedError
from zeroelastic.testing import RankPool

STOCK = partial(TopologyJob, elastic=False, installed=False)

JOBS = {
    "llama-3": (4, STOCK("llama", tp=2, stage=3)),
    "neox-2": (4, STOCK("neox", tp=4, stage=2)),
    "qwen3-1": (2, STOCK("qwen3", tp=2, stage=1)),
    "lora-3": (4, STOCK("llama", tp=2, stage=3, adapters=True)),
    "frozen-2": (2, STOCK("llama", tp=2, stage=2, frozen=True, precision="bf16")),
    "autoep-3": (4, STOCK("autoep", ep=2, stage=3)),
    "autoep-2": (4, STOCK("autoep", ep=4, stage=2)),
    "frozen-autoep-2": (4, STOCK("autoep", ep=2, stage=2, frozen=True)),
    "frozen-moe-1": (4, STOCK("moe", ep=4, stage=1, frozen=True)),
    "moe-2": (4, STOCK("moe", ep=2, stage=2)),
    "lora-2": (4, STOCK("llama", tp=2, stage=2, adapters=True)),
    "dealt-neox-2": (4, STOCK("neox", tp=2, stage=2, frozen=True, zero={"round_robin_gradients": True})),
    "mixtral-3": (2, STOCK("mixtral", tp=2, stage=3)),
    "frozen-experts-autoep-2": (4, STOCK("autoep", ep=2, stage=2, frozen=True, frozen_experts=True)),
    "frozen-experts-moe-1": (2, STOCK("moe", ep=2, stage=1, frozen=True, frozen_experts=True)),
    "data-first-moe-1": (4, STOCK("moe", ep=2, stage=1, config={"use_data_before_expert_parallelism": 1})),  # as true
    "recorded lora-3": (4, TopologyJob("llama", tp=4, stage=3, adapters=True)),
    "recorded neox-2": (4, TopologyJob("neox", tp=4, stage=2, elastic=False)),
    "recorded autoep-3": (4, TopologyJob("autoep", ep=2, stage=3)),
    "recorded moe-1": (4, TopologyJob("moe", ep=2, stage=1, elastic=False)),
}


def save(job: TopologyJob, directory: str, steps: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Train and save; the state that was saved, and the model's state dict before DeepSpeed changed it."""
    engine = topologies.build(job)
    topologies.train(engine, 0, steps)
    engine.save_checkpoint(directory, tag="t")
    whole = {name: tensor.detach().clone() for name, tensor in topologies.build_model(job, ep=1).state_dict().items()}
    return topologies.logical_state(engine), whole


Saved = Callable[..., tuple[Path, dict[str, Any], dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def saved(topology_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Save a job of JOBS after some steps, once."""
    made: dict[tuple[str, int], tuple[Path, dict[str, Any], dict[str, torch.Tensor]]] = {}

    def get(name: str, steps: int = 2) -> tuple[Path, dict[str, Any], dict[str, torch.Tensor]]:
        if (name, steps) not in made:
            ranks, job = JOBS[name] if name in JOBS else (1, STOCK(name, stage=2))
            directory = tmp_path_factory.mktemp(name)
            made[name, steps] = (directory / "t", *topology_pool.run(save, ranks, job, str(directory), steps)[0])
        return made[name, steps]

    return get


@pytest.mark.parametrize("name", JOBS)
def test_open_gives_whole_tensors_by_name(saved: Saved, name: str) -> None:
    tag_dir, state, _ = saved(name)
    ranks, _ = JOBS[name]
    with zeroelastic.open(tag_dir) as ck:
        assert ck.world_size == ranks and ck.step == 2
        params = {key.removesuffix("/weight") for key in state if key.endswith("/weight")}
        assert {tensor for tensor in ck if ck[tensor].kind != "buffer"} - ck.tied.keys() == params
        for param in params:
            is_trained = f"{param}/fp32" in state
            assert ck[param].kind == ("trained" if is_trained else "frozen")
            assert torch.equal(ck[param].torch(), state[f"{param}/fp32" if is_trained else f"{param}/weight"]), param
            for key, value in ck.optimizer(param).items():
                want = state[f"{param}/{key}"]
                same = torch.equal(value.torch(), want) if torch.is_tensor(want) and want.ndim else value == want
                assert same, f"{param}/{key}"
        for group in ck.groups:
            assert {*group.params} <= params
        assert {param for group in ck.groups for param in group.params} == {
            param for param in params if f"{param}/fp32" in state
        }


@pytest.mark.parametrize("name", JOBS)
def test_a_sound_checkpoint_verifies(saved: Saved, name: str) -> None:
    tag_dir, _, _ = saved(name)
    ranks, job = JOBS[name]
    report = zeroelastic.verify(tag_dir)
    assert report.valid and not report.unsupported and report.world_size == ranks, report.problems
    assert report.content_root is not None
    assert report.recorded_root == (report.content_root if job.installed else None)
    assert any("copies that ranks have" in sentence for sentence in report.checked) == (job.tp > 1)
    assert zeroelastic.latest(tag_dir.parent).ok
    for options in ((), ("--all-ranks",)):
        assert run_command("inspect", tag_dir, "--json", *options).returncode == 0
    assert zeroelastic.inspect(tag_dir, all_ranks=True).record.content_root == report.recorded_root


def test_parts_of_slices_are_shown_with_their_places(saved: Saved) -> None:
    tag_dir, state, _ = saved("llama-3")
    name = "model.layers.0.self_attn.o_proj.weight"  # its columns are cut
    with zeroelastic.open(tag_dir) as ck:
        places, tensor = ck.places(name), state[f"{name}/fp32"].reshape(-1)
        assert {place.rank for place in places} == {0, 1, 2, 3}
        assert sum(place.numel for place in places) == tensor.numel()
        for place in places:
            raw = bytearray((ck.path / place.file).read_bytes()[place.offset : place.offset + place.bytes])
            assert torch.equal(torch.frombuffer(raw, dtype=torch.float32), tensor[place.start :][: place.numel])
        assert torch.equal(ck[name][1:3].torch(), state[f"{name}/fp32"][1:3])
    shown = zeroelastic.inspect(tag_dir, tensor=name).tensor
    assert shown is not None and shown.shape == list(state[f"{name}/fp32"].shape)
    assert len(shown.stored[0].places) == len(places)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama-3", (2, 2, [])),
        ("neox-2", (1, 4, [])),
        ("autoep-3", (4, 1, [2])),
        ("autoep-2", (4, 1, [4])),
        ("moe-2", (4, 1, [2])),
    ],
)
def test_inspect_says_how_tensors_are_cut(saved: Saved, name: str, sizes: tuple[int, int, list[int]]) -> None:
    tag_dir, state, _ = saved(name)
    report = zeroelastic.inspect(tag_dir)
    found = report.topology
    assert report.ok and found is not None
    assert (found.data_parallel, found.tensor_parallel, found.expert_parallel) == sizes
    assert report.world_size == JOBS[name][0] and report.layout is None
    trained = {key.removesuffix("/fp32") for key in state if key.endswith("/fp32")}
    assert {param.name for param in report.params if param.kind == "trained"} == trained
    known = [param for param in report.params if param.kind != "tied"]
    assert all(tuple(param.shape) == tuple(state[f"{param.name}/weight"].shape) for param in known)
    cuts = {cut.name: cut for cut in found.cuts}
    assert len(cuts) + found.num_whole == len(trained)
    if name == "llama-3":
        assert cuts["model.layers.0.self_attn.q_proj.weight"].dim == 0
        assert cuts["model.layers.0.mlp.down_proj.weight"].dim == 1
        assert all((cut.by, cut.slices, cut.ranks) == ("tensor", 2, 4) for cut in found.cuts)
    elif name.startswith("autoep"):
        assert {(layer.kind, layer.num_experts) for layer in found.experts} == {("autoep", EXPERTS)}
        assert all((cut.by, cut.dim, cut.slices) == ("expert", 0, sizes[2][0]) for cut in found.cuts)
    elif name == "moe-2":
        assert {(layer.kind, layer.num_experts) for layer in found.experts} == {("deepspeed", EXPERTS)}
        assert all((cut.by, cut.dim, cut.slices, cut.ranks) == ("expert", None, 1, 2) for cut in found.cuts)


@pytest.mark.parametrize("name", ["lora-3", "frozen-2", "frozen-autoep-2", "frozen-moe-1"])
def test_inspect_lists_frozen_parameters_whole(saved: Saved, name: str) -> None:
    tag_dir, state, _ = saved(name)
    found = {param.name: tuple(param.shape) for param in zeroelastic.inspect(tag_dir).params if param.kind == "frozen"}
    weights = {key.removesuffix("/weight"): value for key, value in state.items() if key.endswith("/weight")}
    assert found == {name: tuple(value.shape) for name, value in weights.items() if f"{name}/fp32" not in state}


def test_inspect_shows_the_topology(saved: Saved, tmp_path: Path) -> None:
    tag_dir, _, _ = saved("llama-3")
    done = run_command("inspect", tag_dir, "--html", tmp_path / "page.html", env={"COLUMNS": "200"})
    assert "2 data parallel, 2 tensor parallel" in done.stdout
    assert "2 slices of dimension 1 over tensor parallel ranks" in done.stdout
    page = (tmp_path / "page.html").read_text()
    assert "2 data parallel, 2 tensor parallel" in page and "2 slices of dimension 1" in page
    done = run_command("inspect", saved("autoep-3")[0], env={"COLUMNS": "200"})
    assert "4 data parallel, 2 expert parallel" in done.stdout and f"{2 * EXPERTS} in 2 layers" in done.stdout


@pytest.mark.parametrize("name", ["autoep-2", "frozen-autoep-2", "moe-2"])
@pytest.mark.parametrize("damage", ["missing", "damaged", "empty"])
def test_a_missing_or_damaged_expert_file_is_named(saved: Saved, tmp_path: Path, name: str, damage: str) -> None:
    shutil.copytree(saved(name)[0].parent, tmp_path / "run")
    path = tmp_path / "run" / "t" / "layer_0_expert_1_mp_rank_00_model_states.pt"
    if damage == "missing":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        flip(path, path.stat().st_size // 3, 255)
    report = zeroelastic.verify(tmp_path / "run")
    assert not report.valid and not report.unsupported
    assert [problem.file for problem in report.problems] == [path.name]
    assert run_command("verify", tmp_path / "run").returncode == 3
    assert not zeroelastic.latest(tmp_path / "run").ok
    if damage == "missing":
        assert not zeroelastic.latest(tmp_path / "run", quick=True).ok


@pytest.mark.parametrize("stage", ["llama-3", "neox-2"])
def test_a_copy_that_other_ranks_do_not_have_is_named(saved: Saved, tmp_path: Path, stage: str) -> None:
    """A file is written anew with another value: its checksums are right."""
    shutil.copytree(saved(stage)[0], tmp_path / "t")
    (name,) = (path.name for path in (tmp_path / "t").glob("*zero_pp_rank_0_mp_rank_01_optim_states.pt"))

    def change(root: dict[str, Any]) -> None:
        inner = root["optimizer_state_dict"]
        flats = inner["fp32_flat_groups" if "fp32_flat_groups" in inner else "single_partition_of_fp32_groups"]
        for flat in flats:
            flat.detach()[:] += 1

    edit(tmp_path / "t" / name, change)
    report = zeroelastic.verify(tmp_path / "t")
    assert not report.valid and {problem.key for problem in report.problems} == {"fp32"}
    assert all("The copies of fp32 of" in problem.sentence and name in problem.sentence for problem in report.problems)
    certain = JOBS[stage][1].tp > 2
    assert all((problem.file == name) == certain for problem in report.problems)


@pytest.mark.parametrize(
    ("name", "alone"), [("llama-3", "llama"), ("neox-2", "neox"), ("autoep-3", "autoep"), ("moe-2", "moe")]
)
def test_the_same_state_is_equal_whatever_the_topology(saved: Saved, name: str, alone: str) -> None:
    """Runs that have not trained yet: DeepSpeed gives all of them the same state."""
    (one, _, _), (other, _, _) = saved(name, 0), saved(alone, 0)
    report = zeroelastic.diff(one, other)
    assert report.weights_equal and not report.tensors and not report.only_a and not report.only_b
    assert not report.state, report.state
    assert report.equal and zeroelastic.inspect(one).world_size > zeroelastic.inspect(other).world_size
    assert not zeroelastic.diff(one, saved(name)[0]).equal


@pytest.mark.parametrize("name", ["llama-3", "recorded lora-3", "autoep-2", "recorded autoep-3", "moe-2"])
def test_exported_weights_are_those_of_the_model(saved: Saved, tmp_path: Path, name: str) -> None:
    """At step 0 they are the weights that the model had before DeepSpeed changed it.

    They have the names of the model, but for the layers of AutoEP, which have DeepSpeed's names and shapes.
    """
    tag_dir, _, model = saved(name, 0)
    job = JOBS[name][1]
    whole = {key: part for param, tensor in model.items() for key, part in topologies.as_run(job, param, tensor)}
    report = zeroelastic.export(tag_dir, tmp_path / "out", optimizer=True)
    assert bool(report.digests_compared) == job.installed
    found = load_file(tmp_path / "out" / "model.safetensors")
    params = {tensor for tensor in found if tensor in whole}
    assert params == {*whole}.difference(report.tied)
    if job.model == "autoep":
        assert report.notes is not None and ["experts.w1" in note for note in report.notes] == [True]
        assert any(param.endswith(".experts.w1") for param in params)
    else:
        assert report.notes is None
    for tensor in params:
        assert torch.equal(found[tensor].float(), whole[tensor].float()), tensor
    state = load_file(tmp_path / "out" / "optimizer.safetensors")
    _, later, _ = saved(name, 0)
    assert all(
        torch.equal(state[key.replace("/exp_avg", ".exp_avg")], later[key]) for key in later if "/exp_avg" in key
    )


PLANS = [
    ("llama-3", (4, 4, None, 3)),
    ("llama-3", (3, 1, None, 2)),
    ("qwen3-1", (2, 2, None, 1)),
    ("frozen-2", (4, 2, None, 3)),
    ("autoep-3", (2, None, 1, 2)),
    ("autoep-2", (8, None, 2, 3)),
    ("moe-2", (4, None, 4, 1)),
]


@pytest.mark.parametrize(("name", "target"), PLANS)
def test_a_plan_for_other_sizes_reads_what_ranks_own(
    saved: Saved, name: str, target: tuple[int, int | None, int | None, int]
) -> None:
    world_size, tp, ep, stage = target
    tag_dir, state, _ = saved(name)
    report = zeroelastic.plan(tag_dir, world_size=world_size, tp=tp, ep=ep, stage=stage)
    topology = report.topology
    assert topology is not None and (topology.target_tensor_parallel, topology.target_expert_parallel) == (
        tp or 1,
        ep or 1,
    )
    trained = {key: value for key, value in state.items() if key.endswith(("/fp32", "/exp_avg", "/exp_avg_sq"))}
    frozen = [
        value
        for key, value in state.items()
        if key.endswith("/weight") and f"{key.removesuffix('/weight')}/fp32" not in state
    ]
    whole = sum(tensor.nbytes for tensor in (*trained.values(), *frozen))
    owned = [rank.bytes_owned for rank in report.ranks]
    assert report.state.bytes == whole and [rank.bytes_read for rank in report.ranks] == owned
    assert sum(owned) == whole if (tp or 1) == 1 else sum(owned) > whole
    assert len(report.ranks) == world_size and all(rank.files >= 2 for rank in report.ranks)


def test_plans_that_cannot_be_are_refused_by_name(saved: Saved) -> None:
    for name, options, said in (
        ("llama-3", ("-n", 3), "not a multiple of the tensor parallel size 2"),
        ("moe-2", ("-n", 4, "--stage", 3), "does not start at stage 3"),
        ("autoep-3", ("-n", 3, "--ep", 3), "cannot share evenly"),
        ("llama", ("-n", 4, "--tp", 2), "--like"),
    ):
        done = run_command("plan", saved(name)[0], *options)
        assert done.returncode != 0 and said in done.stderr.replace("\n", " "), done.stderr
    done = run_command("plan", saved("llama")[0], "-n", 4, "--tp", 2, "--like", saved("llama-3")[0], "--json")
    assert done.returncode == 0, done.stderr
    shown = run_command("plan", saved("llama-3")[0], "-n", 4, "--tp", 4)
    assert "  topology  tensor parallel 2 to 4\n" in shown.stdout


# To FSDP2: whole tensors under the names that the model has for them.


TO_FSDP2 = (
    "Using it",
    "From tensor parallel ranks and experts to FSDP2 (`convert`)",
    "exact",
    "AutoTP, DeepSpeed's own MoE: whole tensors under the model's names, bit for bit",
)
CONVERTED = ("llama-3", "qwen3-1", "frozen-2", "recorded neox-2", "recorded lora-3", "moe-2", "recorded moe-1")
STATE_KEYS = ("exp_avg", "exp_avg_sq")


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
    assert all(same_bits(found[f"model.{alias}"], found[f"model.{name}"]) for alias, name in tied.items())
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


@pytest.mark.support(*TO_FSDP2)
@pytest.mark.parametrize("name", CONVERTED)
def test_whole_tensors_are_written_under_the_names_of_the_model(saved: Saved, tmp_path: Path, name: str) -> None:
    tag_dir, state, model = saved(name)
    _, job = JOBS[name]
    report = zeroelastic.convert(tag_dir, tmp_path / "fsdp", to="fsdp2")
    assert bool(report.digests_compared) == job.installed, "the others have no record"
    assert not any("frozen parameters: the checkpoint was saved without them" in note for note in report.notes)
    found = read_dcp(tmp_path / "fsdp")
    assert {key.removeprefix("model.") for key in found if key.startswith("model.")} == {*model}
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


@pytest.mark.support(*TO_FSDP2)
@pytest.mark.parametrize("name", [name for name in CONVERTED if JOBS[name][1].tp > 1])
def test_what_comes_back_from_tensor_parallel_ranks_is_the_same(
    topology_pool: RankPool, saved: Saved, tmp_path: Path, name: str
) -> None:
    tag_dir, state, _ = saved(name)
    zeroelastic.convert(tag_dir, tmp_path / "fsdp", to="fsdp2")
    back = zeroelastic.convert(tmp_path / "fsdp", tmp_path / "back", from_="fsdp2", world_size=3)
    assert back.content_root == zeroelastic.verify(tag_dir).content_root
    if name in ("llama-3", "recorded lora-3"):
        for ranks, tp, stage in ((2, 1, 3), (4, 2, 2)):
            job = JOBS[name][1].other(tp=tp, stage=stage, elastic=True, installed=True)
            assert differences(state, topology_pool.run(resume, ranks, job, str(tmp_path / "back"))[0]) == []


def test_deepspeeds_own_experts_do_not_come_back(saved: Saved, tmp_path: Path) -> None:
    zeroelastic.convert(saved("moe-2")[0], tmp_path / "fsdp", to="fsdp2")
    with pytest.raises(UnsupportedError, match=r"deepspeed_experts.*own MoE layer.*Begin a run from the weights"):
        zeroelastic.convert(tmp_path / "fsdp", tmp_path / "back", from_="fsdp2", world_size=2)
    assert not (tmp_path / "back").exists()


def test_layers_of_autoep_are_refused_by_name(saved: Saved, tmp_path: Path) -> None:
    tag_dir, _, _ = saved("autoep-2")
    with pytest.raises(UnsupportedError, match=r"model\.layers\.\d\.mlp is a layer of AutoEP.*zeroelastic export"):
        zeroelastic.convert(tag_dir, tmp_path / "fsdp", to="fsdp2")
    assert not (tmp_path / "fsdp").exists()
