"""Conversions to and from FSDP2: there and back nothing is lost, torch reads what was written, misfits are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import TESTS
from programs import peak_memory
from programs import run_command as verb
from sample import write_sample
from synthetic import (
    Param,
    add_to_model,
    buffers,
    edit,
    grid,
    job_state,
    load_alone,
    model_name,
    raw,
    rows,
    same,
    write_checkpoint,
    write_dcp,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import zeroelastic
from zeroelastic.errors import DigestMismatchError, UnsupportedError, UsageError

SHAPES = {"w": (7, 5), "b": (7,), "deep.scale": ()}
SECTION, FEATURE = "Using it", "From FSDP2 and to FSDP2, with the optimizer (`convert`)"
NOTE = "state to the bit, losses of the uninterrupted run; torch and accelerate load what is written"


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    world_size=st.integers(1, 4),
    target=st.integers(1, 4),
    format=st.sampled_from(["elastic", "rigid"]),
    layout=st.sampled_from(["torch", "accelerate"]),
    step=st.sampled_from([3, torch.tensor(3.0)]),
    states=st.sampled_from(
        [
            {"exp_avg": torch.float32, "exp_avg_sq": torch.float32},
            {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32},
            {"momentum_buffer": torch.float32},
        ]
    ),
    stage=st.sampled_from([None, 2]),
)
@pytest.mark.support(SECTION, FEATURE, "exact", NOTE)
def test_there_and_back_is_the_same_state(
    tmp_path_factory: Any, stage: int | None, target: int, layout: Any, **saved: Any
) -> None:
    root = tmp_path_factory.mktemp("ckpt")
    groups = [[Param("w.x", (5, 4)), Param("v", (7,))], [Param("deep", (1, 2, 3, 2)), Param("scale", ())]]
    options = [{"lr": 0.5, "betas": (0.9, 0.95), "bias_correction": True}, {"lr": 0.25}]
    write_checkpoint(root / "tag", groups=groups, options=options, record=True, **saved)
    there = zeroelastic.convert(root / "tag", root / "fsdp", to="fsdp2", layout=layout)
    assert there.digests_compared == there.tensors
    back = zeroelastic.convert(root / "fsdp", root / "back", from_="fsdp2", world_size=target, stage=stage)
    assert back.content_root == zeroelastic.verify(root / "tag").content_root
    with zeroelastic.open(root / "tag") as one, zeroelastic.open(root / "back") as two:
        assert one.groups == two.groups and one.step == two.step == 3
        assert set(one) == set(two) and one.stage == 3 and two.stage == (stage or 3)


@pytest.mark.parametrize("layout", ["torch", "accelerate"])
def test_buffers_and_tied_names_come_back_as_such(tmp_path: Path, layout: Any) -> None:
    write_checkpoint(tmp_path / "tag", world_size=2, format="rigid")
    add_to_model(tmp_path / "tag", 2)
    zeroelastic.convert(tmp_path / "tag", tmp_path / "fsdp", to="fsdp2", layout=layout)
    zeroelastic.convert(tmp_path / "fsdp", tmp_path / "back", from_="fsdp2", world_size=3)
    with zeroelastic.open(tmp_path / "tag") as one, zeroelastic.open(tmp_path / "back") as two:
        assert dict(one.tied) == dict(two.tied) and set(one) == set(two)
        for name, tensor in buffers().items():
            assert two[name].kind == "buffer" and same(two[name].torch(), tensor)


@pytest.mark.parametrize("golden", ["rigid3", "elastic2", "stage1_rank2", "stage2_round_robin_aligned_rank3"])
def test_what_deepspeed_saved_at_any_stage_comes_back(tmp_path: Path, golden: str) -> None:
    tag = TESTS / "golden" / golden / "global_step2"
    zeroelastic.convert(tag, tmp_path / "fsdp", to="fsdp2")
    report = zeroelastic.convert(tmp_path / "fsdp", tmp_path / "back", from_="fsdp2", world_size=5)
    assert report.content_root == zeroelastic.verify(tag).content_root
    with zeroelastic.open(tag) as one, zeroelastic.open(tmp_path / "back") as two:
        assert one.stage == two.stage and one.groups == two.groups


def test_the_state_of_a_scheduler_that_cannot_be_carried_is_named(tmp_path: Path) -> None:
    """That of SequentialLR has the states of its schedulers; a list may hold itself."""
    write_checkpoint(tmp_path / "src", world_size=2, format="rigid")
    state = {"last_epoch": 3, "_last_lr": [0.1], "_schedulers": [{"last_epoch": 1}, {"last_epoch": 2}], "endless": []}
    state["endless"].append(state["endless"])
    edit(tmp_path / "src" / model_name(0), lambda data: data.update(lr_scheduler=state))
    report = zeroelastic.convert(tmp_path / "src", tmp_path / "out", to="fsdp2")
    said = "not carried: _schedulers, endless of the lr_scheduler, which a checkpoint of FSDP2 cannot hold"
    assert said in report.notes


def test_another_checkpoint_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tag", world_size=2, format="rigid")
    with pytest.raises(UsageError, match="holds no checkpoint of FSDP2"):
        zeroelastic.convert(tmp_path / "tag", tmp_path / "out", from_="fsdp2", world_size=2)


def test_files_without_hyper_parameters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="holds no hyper-parameters"):
        zeroelastic.convert(TESTS / "golden/stage2_elastic_rank2/global_step2", tmp_path / "fsdp", to="fsdp2")
    assert not (tmp_path / "fsdp").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_torchs_own_functions_load_the_optimizer_in_either_form(tmp_path: Path, flat: bool) -> None:
    groups = [[Param("w", (5, 4))], [Param("b", (3,))]]
    options = [{"lr": 0.5, "weight_decay": 0.1, "betas": (0.7, 0.8)}, {"lr": 0.25, "weight_decay": 0.0}]
    truth = write_checkpoint(
        tmp_path / "tag", world_size=3, groups=groups, frozen=None, options=options, step=3, format="rigid"
    )
    zeroelastic.convert(tmp_path / "tag", tmp_path / "out", to="fsdp2")
    model = torch.nn.ParameterDict({"w": torch.zeros(5, 4), "b": torch.zeros(3)})
    optimizer = torch.optim.AdamW([{"params": [model.w], "weight_decay": 0.3}, {"params": [model.b]}], lr=7.0)
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer, options=how), strict=True))
    load_alone(state, tmp_path / "out")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=how)
    for name, param in model.named_parameters():
        assert raw(param) == truth[name]["fp32"][1]
        for key in ("exp_avg", "exp_avg_sq"):
            assert raw(optimizer.state[param][key]) == truth[name][key][1]
        assert same(optimizer.state[param]["step"], torch.tensor(3.0))
    found = [(group["lr"], group["weight_decay"], group["betas"]) for group in optimizer.param_groups]
    assert found == [(0.5, 0.1, (0.7, 0.8)), (0.25, 0.0, (0.9, 0.999))]


@pytest.mark.parametrize("prefix", ["model.", "", "app.model.", "model._orig_mod.", "model.module."])
@pytest.mark.parametrize("optim", ["optim.", "app.optimizer."])
def test_names_are_those_of_the_module_without_wrappers(tmp_path: Path, prefix: str, optim: str) -> None:
    wrapper = "module." if prefix.endswith("module.") else "_orig_mod." if "_orig" in prefix else ""
    tensors, objects = job_state(SHAPES, lambda shape: rows(shape, 2), model=prefix, optim=optim)
    if wrapper:
        tensors = {key.replace(f"{optim}state.", f"{optim}state.{wrapper}"): value for key, value in tensors.items()}
        objects[f"{optim}param_groups.0.params"] = [wrapper + name for name in SHAPES]
    write_dcp(tmp_path / "fsdp", tensors, {**objects, "epoch": 3})
    report = zeroelastic.convert(tmp_path / "fsdp", tmp_path / "native", from_="fsdp2", world_size=3)
    assert any(note.startswith("not carried: epoch") for note in report.notes)
    with zeroelastic.open(tmp_path / "native") as ck:
        assert list(ck) == list(SHAPES) and ck.step == 5
        assert ck.groups[0].options["lr"] == 0.25 and ck.groups[0].params == tuple(SHAPES)
        for name in SHAPES:
            assert same(ck[name].torch(), tensors[f"{prefix}{name}"][0])


def test_the_configuration_of_the_run_decides_the_form_of_the_values(tmp_path: Path) -> None:
    tensors, objects = job_state(SHAPES, lambda shape: rows(shape, 2))
    schedule = {"lr_scheduler.last_epoch": 5, "lr_scheduler.base_lrs": [0.5]}
    write_dcp(tmp_path / "fsdp", tensors, objects | schedule)
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "train_batch_size": 8}
    plain = zeroelastic.convert(tmp_path / "fsdp", tmp_path / "plain", from_="fsdp2", world_size=2)
    assert any("without a DeepSpeed configuration" in note for note in plain.notes)
    (tmp_path / "ds.json").write_text(json.dumps({**config, "scheduler": {"type": "WarmupLR"}}))
    options: dict[str, Any] = {"from_": "fsdp2", "world_size": 2, "stage": 2, "ds_config": tmp_path / "ds.json"}
    own = zeroelastic.convert(tmp_path / "fsdp", tmp_path / "own", **options)
    assert any("WarmupLR of DeepSpeed goes on at step 5" in note for note in own.notes)
    assert not any("in the configuration" in note for note in own.notes)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": "auto", "betas": [0.9, 0.95]}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    other = zeroelastic.convert(tmp_path / "fsdp", tmp_path / "other", **options)
    (said,) = [note for note in other.notes if note.startswith("hyper-parameters are those of the checkpoint")]
    assert said.endswith(": lr of group 0 is 0.25, and 0.1 in the configuration")
    with zeroelastic.open(tmp_path / "plain") as one, zeroelastic.open(tmp_path / "own") as two:
        assert one.optimizer("w")["step"] == 5.0 and isinstance(one.optimizer("w")["step"], float)
        assert two.optimizer("w")["step"] == 5 and isinstance(two.optimizer("w")["step"], int)
    states = torch.load(next(tmp_path.glob("own/*/mp_rank_00_model_states.pt")), weights_only=False)
    assert states["lr_scheduler"] == {"last_batch_iteration": 4} and states["global_samples"] == 40
    assert states["module"]["w"].dtype == torch.bfloat16
    states = torch.load(next(tmp_path.glob("plain/*/*0_mp_rank_00_model_states.pt")), weights_only=False)
    assert states["lr_scheduler"] == {"last_epoch": 5, "base_lrs": [0.5]}


@pytest.mark.parametrize("layout", ["torch", "accelerate"])
def test_opening_a_checkpoint_of_fsdp2_is_refused_with_what_to_do(tmp_path: Path, layout: Any) -> None:
    write_checkpoint(tmp_path / "tag", world_size=2, format="rigid")
    zeroelastic.convert(tmp_path / "tag", tmp_path / "fsdp", to="fsdp2", layout=layout)
    with pytest.raises((UnsupportedError, UsageError), match=r"torch\.distributed\.checkpoint.*convert --from fsdp2"):
        zeroelastic.open(tmp_path / "fsdp")


@pytest.mark.parametrize("layout", ["torch", "accelerate"])
@pytest.mark.parametrize(("name", "key"), [("param_groups.x", "exp_avg"), ("a.param_groups", "m"), ("a.b", "q.k")])
def test_names_that_read_as_other_entries_come_back(tmp_path: Path, name: str, key: str, layout: Any) -> None:
    """Modules with the optimizer's word for its groups, and a key of the optimizer's state that has a dot."""
    states = {key: torch.float32, "exp_avg_sq": torch.float32}
    groups = [[Param(name, (5, 4)), Param("a.w", (7,))]]
    write_checkpoint(tmp_path / "tag", world_size=2, groups=groups, states=states, record=True)
    zeroelastic.convert(tmp_path / "tag", tmp_path / "fsdp", to="fsdp2", layout=layout)
    back = zeroelastic.convert(tmp_path / "fsdp", tmp_path / "back", from_="fsdp2", world_size=3)
    assert back.content_root == zeroelastic.verify(tmp_path / "tag").content_root


def test_steps_that_differ_by_parameter_are_kept_at_stage_3_and_refused_below(tmp_path: Path) -> None:
    tensors, objects = job_state({"w": (7, 5), "late": (4,)}, lambda shape: rows(shape, 2))
    tensors["optim.state.late.step"] = torch.tensor(3.0), [[]]
    write_dcp(tmp_path / "fsdp", tensors, objects)
    for stage in (1, 2):
        with pytest.raises(UnsupportedError) as refused:
            zeroelastic.convert(tmp_path / "fsdp", tmp_path / "no", from_="fsdp2", world_size=2, stage=stage)
        said = str(refused.value)
        assert "w and late share an optimizer group" in said and "(step: 5.0 (float32) and 3.0 (float32))" in said
        assert "choose stage 3, with --stage 3, and a --sub-group-size that keeps them apart; 1 gives" in said
    with pytest.raises(UnsupportedError, match=r"share a sub-group on 2 ranks .* Choose a --sub-group-size that keeps"):
        zeroelastic.convert(tmp_path / "fsdp", tmp_path / "no", from_="fsdp2", world_size=2)
    zeroelastic.convert(tmp_path / "fsdp", tmp_path / "zero", from_="fsdp2", world_size=2, sub_group_size=1)
    with zeroelastic.open(tmp_path / "zero") as checkpoint:
        assert checkpoint.optimizer("w")["step"] == 5 and checkpoint.optimizer("late")["step"] == 3


def test_a_parameter_with_the_name_of_an_optimizer_group_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tag", world_size=2, groups=[[Param("0", (5, 4)), Param("w", (7,))]], format="rigid")
    with pytest.raises(UnsupportedError, match=r"tag: 0: a parameter whose name is a number .* --layout accelerate"):
        zeroelastic.convert(tmp_path / "tag", tmp_path / "fsdp", to="fsdp2")
    zeroelastic.convert(tmp_path / "tag", tmp_path / "fsdp", to="fsdp2", layout="accelerate")
    zeroelastic.convert(tmp_path / "fsdp", tmp_path / "back", from_="fsdp2", world_size=1)
    with zeroelastic.open(tmp_path / "back") as opened:
        assert {"0", "w"} < set(opened)


@pytest.mark.support(SECTION, FEATURE, "exact", NOTE)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_mesh_of_two_dimensions_becomes_native(tmp_path: Path, stage: int) -> None:
    tensors, objects = job_state(SHAPES, lambda shape: grid(shape, (2, 3)[: len(shape)]))
    write_dcp(tmp_path / "fsdp", tensors, objects)
    zeroelastic.convert(tmp_path / "fsdp", tmp_path / "native", from_="fsdp2", world_size=3, stage=stage)
    assert zeroelastic.verify(tmp_path / "native").valid
    with zeroelastic.open(tmp_path / "native") as ck:
        for name in SHAPES:
            assert same(ck[name].torch(), tensors[f"model.{name}"][0])
            state = ck.optimizer(name)["exp_avg"]
            assert same(state.torch(), tensors[f"optim.state.{name}.exp_avg"][0])  # type: ignore[attr-defined]


def _by_number(tensors: dict[str, Any], objects: dict[str, Any]) -> None:
    for number, name in enumerate(SHAPES):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            tensors[f"optim.state.{number}.{key}"] = tensors.pop(f"optim.state.{name}.{key}")


def _without(tensors: dict[str, Any], objects: dict[str, Any], text: str) -> None:
    for table in (tensors, objects):
        for key in [key for key in table if text in key]:
            del table[key]


MISFITS = {
    "state by number": (_by_number, "by the number of the parameter"),
    "weights alone": (lambda t, o: (_without(t, o, "optim")), "holds no optimizer"),
    "no weights": (lambda t, o: _without(t, o, "model.w"), "has state of w, of which there is no weight"),
    "two optimizers": (lambda t, o: o.update({"other.param_groups.0.lr": 1.0}), "holds 2 optimizers"),
    "another shape": (
        lambda t, o: t.update({"optim.state.w.exp_avg": (torch.zeros(7), [[(0, 7)]])}), "ZeRO cuts state like"
    ),
    "two models": (lambda t, o: t.update({f"ema.{n}": t[f"model.{n}"] for n in SHAPES} | {
        f"x.{n}": t.pop(f"model.{n}") for n in SHAPES}), "several models"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISFITS)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    tensors, objects = job_state(SHAPES, lambda shape: rows(shape, 2))
    change, text = MISFITS[kind]
    change(tensors, objects)
    write_dcp(tmp_path / "fsdp", tensors, objects)
    with pytest.raises(UnsupportedError, match=text):
        zeroelastic.convert(tmp_path / "fsdp", tmp_path / "native", from_="fsdp2", world_size=3)
    assert not (tmp_path / "native").exists()


def test_weights_in_16_bits_are_refused(tmp_path: Path) -> None:
    write_dcp(tmp_path / "fsdp", *job_state(SHAPES, lambda shape: rows(shape, 2), dtype=torch.bfloat16))
    with pytest.raises(UnsupportedError, match=r"w is bfloat16\. ZeRO keeps float32 master weights"):
        zeroelastic.convert(tmp_path / "fsdp", tmp_path / "native", from_="fsdp2", world_size=3)


def test_changed_bytes_are_found_and_nothing_is_left(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tag", world_size=2, record=True)
    with zeroelastic.open(tmp_path / "tag") as ck:
        name = next(name for name in ck if ck[name].kind == "trained")
        place = ck.places(name, key="exp_avg")[0]
    with open(ck.path / place.file, "r+b") as file:
        file.seek(place.offset)
        file.write(b"\x01\x02\x03\x04")
    with pytest.raises(DigestMismatchError):
        zeroelastic.convert(tmp_path / "tag", tmp_path / "out", to="fsdp2")
    assert [path.name for path in tmp_path.iterdir()] == ["tag"]


def test_the_verb(tmp_path: Path) -> None:
    write_sample(tmp_path / "ckpt", steps=[2])
    done = verb("convert", "ckpt", "fsdp", "--to", "fsdp2", "--json", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    done = verb("convert", "fsdp", "back", "--from", "fsdp2", "-n", "3", "--json", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert json.loads(done.stdout)["content_root"] == zeroelastic.verify(tmp_path / "ckpt").content_root


@pytest.mark.extended
def test_memory_stays_within_the_limit_both_ways(tmp_path: Path) -> None:
    """The same process with a state of 150 MiB and with a tiny one."""
    peaks: dict[tuple[str, str], int] = {}
    for name, size in (("tiny", 24), ("large", 512)):
        write_sample(tmp_path / name, steps=[2], hidden=size, layers=4, sub_group_size=10**6)
        limit = ("--max-memory", "64MiB")
        there = ("convert", tmp_path / name, tmp_path / f"{name}-out", "--to", "fsdp2", *limit)
        back = ("convert", tmp_path / f"{name}-out", tmp_path / f"{name}-back", "--from", "fsdp2", "-n", "3", *limit)
        peaks[name, "there"], peaks[name, "back"] = peak_memory(*there) >> 20, peak_memory(*back) >> 20
    for way in ("there", "back"):
        assert peaks["large", way] <= peaks["tiny", way] + 64, peaks
