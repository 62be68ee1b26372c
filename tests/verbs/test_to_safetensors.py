"""Exported weights: what zero_to_fp32 gives, in files that safetensors and transformers load, or nothing at all."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import GOLDEN, ROOT
from programs import peak_memory
from programs import run_command as verb
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from sample import BUFFER, EMBEDDING, TIED, write_sample
from saved_files import flip
from synthetic import (
    Param,
    add_to_model,
    buffers,
    edit,
    edit_optim,
    model_name,
    optim_name,
    raw,
    same,
    write_checkpoint,
)
from training import initialize

from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.errors import CheckpointError, DigestMismatchError, UnsupportedError, UsageError
from zeroelastic.runs.tag_directory import life_of_owner
from zeroelastic.testing import RankPool
from zeroelastic.verbs.convert.convert import write_plan
from zeroelastic.verbs.convert.to_safetensors import DTYPES, HF_FILES, plan_export
from zeroelastic.verbs.new_directory import new_directory


def merged(tag_dir: Path) -> dict[str, torch.Tensor]:
    """What DeepSpeed's own script gives."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(str(tag_dir.parent), tag=tag_dir.name)


def export(tag_dir: Path, target: Path, max_memory: int = 1 << 26, **options: Any) -> dict[str, torch.Tensor]:
    """Every tensor of every file that an export writes."""
    write_plan(plan_export(open_state(open_checkpoint(tag_dir)), **options), target, max_memory=max_memory)
    found: dict[str, torch.Tensor] = {}
    for path in sorted(target.glob("*.safetensors")):
        found |= load_file(path)
    return found


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    world_size=st.integers(1, 7),
    format=st.sampled_from(["elastic", "rigid"]),
    sub_group_size=st.sampled_from([1, 7, None]),
    record=st.booleans(),
    max_shard_size=st.sampled_from([1, 100, 10**9]),
    master=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_it_is_what_zero_to_fp32_gives(
    tmp_path_factory, world_size, format, sub_group_size, record, max_shard_size, master
):
    tag_dir = tmp_path_factory.mktemp("ckpt") / "tag"
    write_checkpoint(
        tag_dir, world_size=world_size, format=format, sub_group_size=sub_group_size, record=False, master=master
    )
    add_to_model(tag_dir, world_size)
    found = export(tag_dir, tag_dir.parent / "out", max_shard_size=max_shard_size, tied="all")
    expected = merged(tag_dir)
    assert list(sorted(found)) == sorted(expected) and len(found) == 7 + 11 + 4
    different = {name for name, tensor in expected.items() if not same(found[name], tensor)}
    # zero_to_fp32 rounds these to 32 bits.
    assert different == {"torch.float64"}
    assert same(found["torch.float64"], buffers()["torch.float64"])


@pytest.mark.support(
    "Using it", "`zeroelastic export` to safetensors", "exact", "the weights that `zero_to_fp32.py` merges"
)
@pytest.mark.parametrize("folder", ["rigid2", "rigid3", "elastic2", "elastic3"])
def test_checkpoints_of_deepspeed_give_what_its_own_script_gives(folder: str, tmp_path: Path) -> None:
    tag_dir = GOLDEN / folder / "global_step2"
    found, expected = export(tag_dir, tmp_path / "out"), merged(tag_dir)
    assert found.keys() == expected.keys() and len(found) == 7
    assert all(same(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_conversion_rounds_as_torch_does(tmp_path: Path, dtype: Any, master: torch.dtype) -> None:
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-40, 65519.9, 3.4e38, 1e-8, 2.0**-25, 1 + 2**-9])
    tag_dir = tmp_path / "ckpt" / "tag"
    groups = [[Param("w", (101, 10)), Param("edges", (10,))]]
    write_checkpoint(tag_dir, world_size=1, groups=groups, master=master, sub_group_size=None)
    edit_optim(tag_dir / optim_name(0), lambda s: s["fp32_flat_groups"][0].data[-10:].copy_(special.to(torch.float64)))
    add_to_model(tag_dir, 1)
    found, expected = export(tag_dir, tmp_path / "out", dtype=dtype, max_memory=1 << 14), merged(tag_dir)
    plan, read = plan_export(open_state(open_checkpoint(tag_dir)), dtype=dtype), list[int]()
    write_plan(plan, tmp_path / "again", progress=read.append)
    assert sum(read) == plan.nbytes
    to = getattr(torch, DTYPES[dtype])
    for name, tensor in found.items():
        saved = buffers().get(name, expected[name])
        assert same(tensor, saved.to(to) if saved.is_floating_point() else saved), name


def test_tied_weights_are_stored_once_and_named_in_the_metadata(tmp_path: Path) -> None:
    tag_dir = tmp_path / "tag"
    write_checkpoint(tag_dir, world_size=3)
    add_to_model(tag_dir, 3, {"head": "w", "head again": "head", "ghost": "gone"})
    plan = plan_export(open_state(open_checkpoint(tag_dir)))
    assert plan.tied == {"head": "w", "head again": "w"}
    assert plan.left_out == ("parameter ghost: it is tied to gone, which was not saved",)
    write_plan(plan, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head": "w", "head again": "w"}
        assert "head" not in file.keys() and "w" in file.keys()  # noqa: SIM118
    everything = export(tag_dir, tmp_path / "all", tied="all")
    assert same(everything["head again"], everything["w"])
    export(tag_dir, tmp_path / "sharded", max_shard_size=50)
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert index["metadata"].pop("total_size") == sum(t.nbytes for n, t in everything.items() if n not in plan.tied)
    assert index["metadata"] == {"head": "w", "head again": "w"}
    with safe_open(tmp_path / "sharded" / index["weight_map"]["w"], "pt") as file:
        assert file.metadata()["head"] == "w"


def test_a_tied_module_loads_by_safetensors(tmp_path: Path) -> None:
    write_sample(tmp_path / "ckpt", steps=[2])
    export(tmp_path / "ckpt" / "global_step2", tmp_path / "out")
    expected = merged(tmp_path / "ckpt" / "global_step2")

    def module() -> torch.nn.Module:
        made = torch.nn.Module()
        for name, tensor in expected.items():
            at = made
            *folders, last = name.split(".")
            for folder in folders:
                if not hasattr(at, folder):
                    at.add_module(folder, torch.nn.Module())
                at = getattr(at, folder)
            if name == BUFFER:
                at.register_buffer(last, torch.zeros_like(tensor))
            else:
                at.register_parameter(last, torch.nn.Parameter(torch.zeros_like(tensor)))
        made.get_submodule(TIED.rpartition(".")[0]).weight = made.get_parameter(EMBEDDING)
        return made

    model = module()
    assert load_model(model, tmp_path / "out" / "model.safetensors") == (set(), [])
    assert all(same(tensor, expected[name]) for name, tensor in model.state_dict().items())

    from huggingface_hub import load_torch_model

    export(tmp_path / "ckpt" / "global_step2", tmp_path / "sharded", max_shard_size=20_000)
    assert len(list((tmp_path / "sharded").glob("model-*-of-*.safetensors"))) > 2
    model = module()
    load_torch_model(model, tmp_path / "sharded", strict=False)
    assert all(same(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_files_are_split_as_asked_and_every_tensor_is_aligned(tmp_path: Path) -> None:
    tag_dir = tmp_path / "tag"
    write_checkpoint(tag_dir, world_size=2)
    add_to_model(tag_dir, 2, {})
    found = export(tag_dir, tmp_path / "out", max_shard_size=150)
    paths = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(found)
    names = []
    for number, path in enumerate(paths, 1):
        assert path.name == f"model-{number:05d}-of-{len(paths):05d}.safetensors"
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        assert size % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
        assert sum(tensor.nbytes for tensor in load_file(path).values()) <= 150 or len(header) == 1
        end = 0
        for name, entry in header.items():
            begin, stop = entry["data_offsets"]
            assert begin == end and begin % found[name].element_size() == 0
            end = stop
            assert index["weight_map"][name] == path.name
            names.append(name)
        assert 8 + size + end == len(data)
    assert len(names) == len(found)


def test_optimizer_state_comes_along_when_asked_for(tmp_path: Path) -> None:
    truth = write_checkpoint(
        tmp_path / "tag", world_size=3, states={"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32},
        options=[{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": float("inf"), "fused": None}],
    )  # fmt: skip
    add_to_model(tmp_path / "tag", 3)
    export(tmp_path / "tag", tmp_path / "out", optimizer=True)
    found = load_file(tmp_path / "out" / "optimizer.safetensors")
    trained = {name: keys for name, keys in truth.items() if "fp32" in keys}
    assert found.keys() == {f"{name}.{key}" for name in trained for key in ("exp_avg", "exp_avg_sq")}
    for name, keys in trained.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert (str(found[f"{name}.{key}"].dtype), raw(found[f"{name}.{key}"])) == (
                f"torch.{keys[key][0]}",
                keys[key][1],
            )
    document = json.loads((tmp_path / "out" / "optimizer.json").read_text())
    assert document["groups"] == [
        {"params": ["w", "v"], "options": {"lr": 0.1, "betas": [0.9, 0.95]}},
        {"params": ["b", "gain", "scale"], "options": {"lr": "Infinity", "fused": None}},
    ]
    assert document["scalars"]["gain"] == {"step": {"kind": "float32", "value": 3.0}}
    assert document["global_steps"] == 3 and document["loss_scaler"] is None
    export(tmp_path / "tag", tmp_path / "bf16", optimizer=True, dtype="bf16", max_shard_size=100)
    index = json.loads((tmp_path / "bf16" / "optimizer.safetensors.index.json").read_text())
    with safe_open(tmp_path / "bf16" / index["weight_map"]["w.fp32"], "pt") as file:
        assert raw(file.get_tensor("w.fp32")) == truth["w"]["fp32"][1]


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    groups = [[Param("a", (2,)), Param("a.b", (2,))]]
    states = {"b.c": torch.float32, "c": torch.float32}
    write_checkpoint(tmp_path / "tag", world_size=1, groups=groups, states=states)
    state = open_state(open_checkpoint(tmp_path / "tag"))
    with pytest.raises(UnsupportedError, match="same name"):
        plan_export(state, optimizer=True)
    plan_export(state)


@pytest.mark.parametrize("format", ["elastic", "rigid"])
def test_changed_bytes_are_found_by_the_record_and_nothing_is_left(tmp_path: Path, format: str) -> None:
    tag_dir = tmp_path / "tag"
    write_checkpoint(tag_dir, world_size=3, record=True, format=format)
    state = open_state(open_checkpoint(tag_dir))
    assert write_plan(plan_export(state), tmp_path / "good") == 7
    tensors, rows = state.parts[0].whole_rows([1], keys=["fp32"])
    flip(Path(rows.paths[int(rows.file[0])]), int(rows.file_offset[0]))
    for dtype in (None, "bf16"):
        with pytest.raises(DigestMismatchError, match=f"{tensors[0].param.name}: fp32 has digest"):
            write_plan(plan_export(state, dtype=dtype), tmp_path / "bad")
    assert sorted(os.listdir(tmp_path)) == ["good", "tag"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(shared_params=["w"]), "shared_params"),
        (lambda d: d.update(shared_params={"w": "v"}), "shared_params holds 'w'"),
        (lambda d: d.update(shared_params={"x": 3}), "shared_params holds 'x'"),
        (lambda d: d.update(buffer_names=None), "holds no module and buffer_names"),
        (lambda d: d.update(buffer_names=["w"]), "buffer_names holds 'w'"),
        (lambda d: d.update(module=7), "holds no state of the module: 7"),
    ],
)
def test_damaged_module_states_are_named(tmp_path: Path, change: Any, said: str) -> None:
    write_checkpoint(tmp_path / "tag", world_size=2)
    add_to_model(tmp_path / "tag", 2, {})
    edit(tmp_path / "tag" / model_name(0), change)
    with pytest.raises(CheckpointError, match=said) as error:
        plan_export(open_state(open_checkpoint(tmp_path / "tag")))
    assert model_name(0) in str(error.value)


def test_what_the_format_cannot_hold_is_refused_or_reported(tmp_path: Path) -> None:
    tag_dir = tmp_path / "tag"
    write_checkpoint(tag_dir, world_size=1, groups=[[Param("__metadata__", (2,))]], frozen=None)
    state = open_state(open_checkpoint(tag_dir))
    with pytest.raises(UnsupportedError, match="keep for themselves"):
        plan_export(state)
    write_checkpoint(tag_dir, world_size=1, groups=[[Param("\ud800", (2,))]], frozen=None)
    with pytest.raises(UnsupportedError, match="is not Unicode"):
        plan_export(open_state(open_checkpoint(tag_dir)))
    write_checkpoint(tag_dir, world_size=1, frozen=None)
    edit(
        tag_dir / model_name(0),
        lambda d: d.update(
            buffer_names=["angles", "turned", "small", "cycles"],
            shared_params={"again": "angles"},
            module={
                "angles": (angles := torch.zeros(2, dtype=torch.complex128)),
                "again": angles,
                "turned": torch.ones(2, dtype=torch.complex64).conj(),
                "small": torch.zeros(4).to(torch.float8_e4m3fn),
            },
        ),
    )
    plan = plan_export(open_state(open_checkpoint(tag_dir)), tied="all")
    first = ["buffer turned", "frozen parameters", "buffer angles"]
    assert [sentence.partition(":")[0] for sentence in plan.left_out] == first
    assert "torch.Tensor.conj view" in plan.left_out[0], "its storage holds other values"
    with pytest.raises(UnsupportedError, match=r"buffer tensor small is float8_e4m3fn, .* not converted to float32"):
        plan_export(open_state(open_checkpoint(tag_dir)), dtype="fp32")
    write_plan(plan, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["small"].dtype == torch.float8_e4m3fn


def test_a_buffer_that_needs_more_memory_than_given_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tag", world_size=1)
    huge = torch.zeros(1).expand(1 << 40)
    edit(tmp_path / "tag" / model_name(0), lambda d: d.update(buffer_names=["huge"], module={"huge": huge}))
    plan = plan_export(open_state(open_checkpoint(tmp_path / "tag")))
    with pytest.raises((UnsupportedError, OSError)):
        write_plan(plan, tmp_path / "out")
    assert os.listdir(tmp_path) == ["tag"]


def test_a_directory_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    with new_directory(tmp_path / "a") as (directory, _):
        (directory / "x").write_text("x")
        assert not (tmp_path / "a").exists() and directory.parent.name.startswith(".a.")
        assert life_of_owner(directory.parent) == "lives"
    assert os.listdir(tmp_path) == ["a"]
    for target, said in (("a", "already exists"), ("b/c", "no such directory")):
        with pytest.raises(UsageError, match=said), new_directory(tmp_path / target):
            pass
    os.symlink("nowhere", tmp_path / "link")
    with pytest.raises(UsageError, match="already exists"), new_directory(tmp_path / "link"):
        pass
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), new_directory(tmp_path / "b") as (directory, _):
            (directory / "x").write_text("x")
            raise error
    with pytest.raises(UsageError, match="already exists"), new_directory(tmp_path / "b"):
        (tmp_path / "b").mkdir()  # somebody else was faster
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "link"] and os.listdir(tmp_path / "b") == []


# ---- the verb


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sample")
    write_sample(root / "ckpt")
    return root


def test_the_verb_says_what_it_wrote(sample: Path) -> None:
    done = verb("export", "ckpt", "said", "--json", "--optimizer", "--tag", "global_step2", cwd=sample)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    document = json.loads(done.stdout)
    assert document["digests_compared"] == 19 + 2 * 18 and document["tag"] == "global_step2"
    on_disk = {path.name: path.stat().st_size for path in (sample / "said").iterdir()}
    assert {file["name"]: file["bytes"] for file in document["files"]} == on_disk
    assert document["bytes"] == sum(on_disk.values())
    expected = merged(sample / "ckpt" / "global_step2")
    found = load_file(sample / "said" / "model.safetensors")
    assert {**found, TIED: found[EMBEDDING]}.keys() == expected.keys()
    assert all(same(tensor, expected[name]) for name, tensor in found.items())
    text = verb("export", "ckpt", "text", cwd=sample).stdout
    assert "wrote text" in text and f"tied: {TIED} is {EMBEDDING}" in text and "digests agree" in text


def test_a_full_disk_is_an_error_that_leaves_nothing(sample: Path) -> None:
    before = sorted(os.listdir(sample))
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))  # noqa: E731
    command = [sys.executable, "-m", "zeroelastic", "export", "ckpt", "full"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=sample, env=env, capture_output=True, text=True, timeout=120, preexec_fn=limit)
    assert done.returncode == 1 and "model.safetensors: File too large" in done.stderr
    assert sorted(os.listdir(sample)) == before


def test_the_verb_stays_within_its_memory(tmp_path: Path) -> None:
    """16 MiB and 150 MiB for Python and its libraries, of which torch is none: it takes more."""
    write_sample(tmp_path / "ckpt", steps=[2], hidden=512, layers=4, sub_group_size=10**6)
    for out, options in (("all", ["--optimizer"]), ("weights", ["--dtype", "fp16", "--tied", "all"])):
        peak = peak_memory("export", tmp_path / "ckpt", tmp_path / out, "--max-memory", "16MiB", *options)
        assert peak <= (16 + 150) << 20, f"{options}: {peak >> 20} MiB"


# ---- a model of transformers


def llama_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip


def train_llama(directory: str) -> dict[str, torch.Tensor]:
    """Two steps of a tiny Llama under ZeRO-3; returns its weights and logits as DeepSpeed gathers them."""
    from deepspeed.utils import safe_get_full_fp32_param
    from transformers import LlamaForCausalLM

    torch.manual_seed(3)
    zero = {"stage": 3, "sub_group_size": 2000, "stage3_param_persistence_threshold": 40}
    model = LlamaForCausalLM(llama_config())
    engine = initialize(model, zero, installed=False, train_micro_batch_size_per_gpu=1)
    tokens = torch.arange(24).view(2, 12) * 7 % 67
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(directory, tag="global_step2")
    weights = {name: safe_get_full_fp32_param(param).clone() for name, param in engine.module.named_parameters()}
    with torch.no_grad():
        weights["logits"] = engine(input_ids=tokens).logits.clone()
    return weights


@pytest.mark.support("Frameworks", "`from_pretrained` on exported weights", "exact", "tied embeddings too")
def test_a_llama_with_tied_embeddings_loads_by_from_pretrained(topology_pool: RankPool, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    save = tmp_path / "checkpoint-2"
    weights = topology_pool.run(train_llama, 2, str(save), timeout=200)[0]
    logits = weights.pop("logits")
    llama_config().save_pretrained(save)
    (save / "tokenizer_config.json").write_text("{}")
    (save / "trainer_state.json").write_text("{}")
    for name, options in {
        "one": [],
        "many": ["--max-shard-size", "10KB", "--dtype", "fp32"],
        "all": ["--tied", "all"],
    }.items():
        done = verb("export", save, name, *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert sorted(p.name for p in (tmp_path / name).iterdir() if p.name in HF_FILES) == [
            "config.json",
            "tokenizer_config.json",
        ]
        model, report = LlamaForCausalLM.from_pretrained(
            tmp_path / name, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert model.lm_head.weight is model.model.embed_tokens.weight
        found = dict(model.named_parameters())
        assert found.keys() == weights.keys() and all(same(found[n].detach(), t) for n, t in weights.items())
        with torch.no_grad():
            assert torch.equal(model(input_ids=torch.arange(24).view(2, 12) * 7 % 67).logits, logits)
    expected = merged(save / "global_step2")
    everything = load_file(tmp_path / "all" / "model.safetensors")
    assert everything.keys() == expected.keys() and all(same(everything[n], t) for n, t in expected.items())
