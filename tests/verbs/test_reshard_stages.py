"""Checkpoints of stages 1, 2 and 3 made of each other: the same content root, and the files DeepSpeed would write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import GOLDEN
from programs import run_command
from saved_files import record_again, tag_of
from synthetic import edit, edit_optim, make_tag, model_name, optim_name, plain

import zeroelastic
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.core.layout import Param
from zeroelastic.errors import CheckpointError, UnsupportedError

SOURCES = (
    "elastic3",
    "rigid2",
    "stage1_rank2",
    "stage1_bf16_optimizer_rank2",
    "stage2_rank2",
    "stage2_round_robin_aligned_rank3",
)
MODEL = "mp_rank_00_model_states.pt"
WEIGHTS = ("gain", "inner.weight", "inner.bias", "tail.weight", "tail.bias")


def stage_of(name: str) -> int:
    return int(name[5]) if name.startswith("stage") else 3


def root_of(directory: Path) -> str | None:
    report = zeroelastic.verify(directory)
    assert report.valid, report.problems
    return report.content_root


def test_the_default_is_the_stage_of_the_source(tmp_path: Path) -> None:
    for source in SOURCES:
        zeroelastic.reshard(GOLDEN / source, tmp_path / source, world_size=5)
        with zeroelastic.open(tmp_path / source) as made:
            assert made.stage == stage_of(source)


@pytest.mark.parametrize("source", ["stage1_rank2", "stage2_rank2", "stage2_round_robin_aligned_rank3"])
@pytest.mark.parametrize("over", [1, 2, 3])
def test_there_and_back_every_object_is_the_one_that_deepspeed_wrote(source: str, over: int, tmp_path: Path) -> None:
    """Through another stage and size, the module's weights included, which are made of master weights from stage 3."""
    saved = tag_of(GOLDEN / source)
    world_size = open_checkpoint(saved).world_size
    zeroelastic.reshard(GOLDEN / source, tmp_path / "there", world_size=4, stage=over)
    zeroelastic.reshard(tmp_path / "there", tmp_path / "back", world_size=world_size, stage=stage_of(source))
    files = sorted(path.name for path in saved.iterdir())
    assert sorted(path.name for path in tag_of(tmp_path / "back").glob("*.pt")) == files
    for name in files:
        want, got = (torch.load(folder / name, weights_only=False) for folder in (saved, tag_of(tmp_path / "back")))
        assert {*got} == {*want, "zeroelastic_save_id"}
        for key in want:
            assert plain(got[key]) == plain(want[key]), (name, key)


@pytest.mark.parametrize(
    ("world_size", "orders"),
    [
        (1, [["inner.weight", "tail.weight"], ["gain", "inner.bias", "tail.bias"]]),
        (2, [["inner.weight", "tail.weight"], ["gain", "tail.bias", "inner.bias"]]),
        (3, [["inner.weight", "tail.weight"], ["gain", "inner.bias", "tail.bias"]]),
    ],
)
@pytest.mark.parametrize("source", ["rigid3", "stage2_round_robin_aligned_rank3"])
def test_a_run_with_round_robin_gradients_gets_its_own_order(
    source: str, world_size: int, orders: list[list[str]], tmp_path: Path
) -> None:
    """The buffers are read here with plain slices, by the offsets that the order implies."""
    shutil.copytree(GOLDEN / source, tmp_path / "a")
    for path in tag_of(tmp_path / "a").glob("*optim_states.pt"):
        edit(path, lambda data: data["ds_config"]["zero_optimization"].update(round_robin_gradients=True))
        edit(path, lambda data: data["ds_config"]["zero_optimization"].pop("parameter_alignment", None))
    report = zeroelastic.reshard(tmp_path / "a", tmp_path / "b", world_size=world_size, stage=1)
    assert any("round_robin_gradients true" in note for note in report.notes)
    model = torch.load(tag_of(tmp_path / "b") / MODEL, weights_only=False)
    assert [list(group) for group in model["param_shapes"]] == orders
    states = [
        torch.load(tag_of(tmp_path / "b") / optim_name(rank), weights_only=False)["optimizer_state_dict"]
        for rank in range(world_size)
    ]
    expected = json.loads((GOLDEN / source / "expected.json").read_text())
    for i, names in enumerate(orders):
        masters = torch.cat([state["single_partition_of_fp32_groups"][i] for state in states]).detach()
        moments = torch.cat([state["base_optimizer_state"]["state"][i]["exp_avg"] for state in states])
        want = [np.frombuffer(bytes.fromhex(expected[name]["tensors"]["fp32"]), np.float32) for name in names]
        assert np.array_equal(masters.numpy(), np.concatenate(want))
        assert len(moments) % (2 * world_size) == 0
        want = [np.frombuffer(bytes.fromhex(expected[name]["tensors"]["exp_avg"]), np.float32) for name in names]
        assert np.array_equal(moments.numpy()[: sum(map(len, want))], np.concatenate(want))
        for rank, state in enumerate(states):  # where it is wrong in files of DeepSpeed, it is right here
            assert state["partition_count"] == [world_size] * 2
            for name, place in state["param_slice_mappings"][i].items():
                own = state["base_optimizer_state"]["state"][i]["exp_avg"][place.start : place.start + place.numel]
                whole = np.frombuffer(bytes.fromhex(expected[name]["tensors"]["exp_avg"]), np.float32)
                assert own.numpy().tobytes() in whole.tobytes(), (rank, name)


@pytest.mark.parametrize("source", ["elastic2", "stage2_rank2", "stage2_round_robin_aligned_rank3"])
@pytest.mark.parametrize("round_robin", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
def test_the_options_of_another_run_can_be_given(source: str, round_robin: bool, aligned: bool, tmp_path: Path) -> None:
    """At 2 ranks and then at 3, so that the order of the first result has to be understood to make the second one."""
    options = {"round_robin_gradients": round_robin, "parameter_alignment": aligned}
    report = zeroelastic.reshard(GOLDEN / source, tmp_path / "b", world_size=2, stage=2, **options)
    assert report.content_root == root_of(GOLDEN / source) == root_of(tmp_path / "b")
    said = f"round_robin_gradients {str(round_robin).lower()} and parameter_alignment {str(aligned).lower()}, "
    assert any(said in note for note in report.notes)
    for name in (MODEL, optim_name(1)):
        zero = torch.load(tag_of(tmp_path / "b") / name, weights_only=False)["ds_config"]["zero_optimization"]
        assert {key: zero[key] for key in options} == options
    first = ["gain", "tail.bias", "inner.bias"] if round_robin else ["gain", "inner.bias", "tail.bias"]
    model = torch.load(tag_of(tmp_path / "b") / MODEL, weights_only=False)
    assert list(model["param_shapes"][1]) == first
    state = torch.load(tag_of(tmp_path / "b") / optim_name(0), weights_only=False)["optimizer_state_dict"]
    assert any(state["param_alignment_paddings"][1]) == aligned
    report = zeroelastic.reshard(tmp_path / "b", tmp_path / "c", world_size=3)
    assert report.content_root == root_of(tmp_path / "c")
    model = torch.load(tag_of(tmp_path / "c") / MODEL, weights_only=False)
    assert list(model["param_shapes"][1]) == ["gain", "inner.bias", "tail.bias"]


@pytest.mark.parametrize("stage", [1, 2])
def test_the_module_has_whole_weights_rounded_to_the_precision_of_the_run(stage: int, tmp_path: Path) -> None:
    zeroelastic.reshard(GOLDEN / "rigid3", tmp_path / "b", world_size=2, stage=stage)
    expected = json.loads((GOLDEN / "rigid3" / "expected.json").read_text())
    model = torch.load(tag_of(tmp_path / "b") / MODEL, weights_only=False)
    assert list(model["module"]) == ["gain", "frozen", "seen", "inner.weight", "inner.bias", "tail.weight", "tail.bias"]
    for name in WEIGHTS:
        master = torch.frombuffer(bytearray.fromhex(expected[name]["tensors"]["fp32"]), dtype=torch.float32)
        assert torch.equal(model["module"][name], master.to(torch.bfloat16).view(expected[name]["shape"])), name
    frozen = torch.frombuffer(bytearray.fromhex(expected["frozen"]["tensors"]["frozen"]), dtype=torch.bfloat16)
    assert torch.equal(model["module"]["frozen"], frozen)
    assert model["module"]["seen"].tolist() == [0, 1, 2]
    if stage == 1:
        assert model["frozen_param_shapes"] is None and model["frozen_param_fragments"] is None
    else:
        assert model["frozen_param_shapes"] == {"frozen": torch.Size([7])}
        assert torch.equal(model["frozen_param_fragments"]["frozen"], frozen)


@pytest.mark.parametrize("weights", [torch.float16, torch.float32, torch.bfloat16])
def test_weights_have_the_dtype_of_the_module_that_was_saved(weights: torch.dtype, tmp_path: Path) -> None:
    truth = make_tag(tmp_path / "a", 3, frozen=None, prefix="", format="rigid")
    for rank in range(3):
        edit(
            tmp_path / "a" / "tag" / model_name(rank),
            lambda data: data["module"].update({name: torch.empty(0, dtype=weights) for name in truth}),
        )
    zeroelastic.reshard(tmp_path / "a", tmp_path / "b", world_size=2, stage=2)
    module = torch.load(tmp_path / "b" / "tag" / MODEL, weights_only=False)["module"]
    for name, tensors in truth.items():
        master = torch.frombuffer(bytearray(tensors["fp32"][1]), dtype=torch.float32)
        assert module[name].dtype == weights and torch.equal(module[name].view(-1), master.to(weights)), name
    assert root_of(tmp_path / "b") == root_of(tmp_path / "a")


def test_tied_weights_are_one_tensor_and_client_state_is_rank_0s(tmp_path: Path) -> None:
    make_tag(tmp_path / "a", 2, frozen=None, format="rigid")
    for rank in range(2):

        def change(data: dict[str, Any], rank: int = rank) -> None:
            data["module"]["head"] = torch.empty(0, dtype=torch.bfloat16)
            data["module"]["seen"] = torch.full((3,), float(rank))
            data["buffer_names"] = ["seen"]
            data["shared_params"] = {"head": "w"} if rank == 0 else {}
            data["mine"] = {"rank": rank}

        edit(tmp_path / "a" / "tag" / model_name(rank), change)
    for world_size, stage, lost in ((1, 3, True), (2, 3, False), (3, 3, False), (3, 2, True)):
        planned = zeroelastic.reshard(tmp_path / "a", tmp_path / "b", world_size=world_size, stage=stage, dry_run=True)
        assert ("not carried: buffers and client state of saved rank 1" in planned.notes) == lost
    zeroelastic.reshard(tmp_path / "a", tmp_path / "b", world_size=3, stage=2)
    model = torch.load(tmp_path / "b" / "tag" / MODEL, weights_only=False)
    assert model["module"]["head"].data_ptr() == model["module"]["w"].data_ptr()
    assert model["module"]["head"].shape == (5, 4) and model["shared_params"] == {"head": "w"}
    assert model["mine"] == {"rank": 0} and model["module"]["seen"].tolist() == [0, 0, 0]
    assert root_of(tmp_path / "b") == root_of(tmp_path / "a")


def inner(data: dict[str, Any]) -> Any:
    return data["optimizer_state_dict"]["optimizer_state_dict"]


STEPS = "share an optimizer group but were saved with different optimizer state"
REFUSED: dict[str, tuple[int, Callable[[dict[str, Any]], object], str]] = {
    "Muon": (1, lambda data: inner(data)["param_groups"][0].update(use_muon=True), "Muon"),
    "Adagrad": (
        1,
        lambda data: inner(data)["param_groups"][0].update(params=inner(data)["param_groups"][0]["params"] * 2),
        "Adagrad",
    ),
    "MoE": (1, lambda data: inner(data)["param_groups"][0].update(moe=True), r"nothing says which experts"),
    "steps": (1, lambda data: inner(data)["state"][1].update(step=torch.tensor(9.0)), f"w and v {STEPS}"),
    "an empty group": (
        1,
        lambda data: inner(data)["param_groups"].append({"params": []}),
        "optimizer group 2 has no trained parameters",
    ),
}


@pytest.mark.support("Using it", "`zeroelastic reshard --stage 1`, `2`: Adagrad, Muon", "refused")
@pytest.mark.parametrize("name", REFUSED)
def test_what_deepspeed_writes_in_another_way_is_refused_by_name(name: str, tmp_path: Path) -> None:
    stage, change, said = REFUSED[name]
    truth = make_tag(tmp_path / "a", 2, format="rigid", frozen=None)
    for rank in range(2):
        edit(tmp_path / "a" / "tag" / optim_name(rank), change)
        edit(
            tmp_path / "a" / "tag" / model_name(rank),
            lambda data: data["module"].update({param: torch.empty(0) for param in truth}),
        )
    with pytest.raises((UnsupportedError, CheckpointError), match=said) as raised:
        zeroelastic.reshard(tmp_path / "a", tmp_path / "b", world_size=3, stage=stage)
    if isinstance(raised.value, UnsupportedError):
        assert "--stage" in str(raised.value) and str(tmp_path / "a" / "tag") in str(raised.value)
    assert not (tmp_path / "b").exists()


def test_frozen_parameters_that_the_module_does_not_show_are_refused(tmp_path: Path) -> None:
    make_tag(tmp_path / "a", 2, format="rigid")
    with pytest.raises(UnsupportedError, match="no entry for embedding, mask, frozen parameters"):
        zeroelastic.reshard(tmp_path / "a", tmp_path / "b", world_size=3, stage=2)
    make_tag(tmp_path / "c", 2, frozen=None, format="rigid")
    for rank in range(2):
        edit(tmp_path / "c" / "tag" / model_name(rank), lambda data: data["module"].update(leftover=torch.zeros(3)))
    with pytest.raises(UnsupportedError, match="has leftover, neither parameters nor buffers"):
        zeroelastic.reshard(tmp_path / "c", tmp_path / "d", world_size=3, stage=2)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_weight_without_a_place_in_the_module_is_refused(stage: int, tmp_path: Path) -> None:
    make_tag(tmp_path / "a", 2, frozen=None, format="rigid")
    for rank in range(2):
        edit(tmp_path / "a" / "tag" / model_name(rank), lambda data: data["module"].pop("b"))
    with pytest.raises(UnsupportedError, match="the module's state has no entry for b, whose weights stages 1 and 2"):
        zeroelastic.reshard(tmp_path / "a", tmp_path / "b", world_size=3, stage=stage)
    assert zeroelastic.reshard(tmp_path / "a", tmp_path / "b", world_size=3, stage=3).content_root


def test_sub_groups_that_contradict_the_configuration_do_not_matter_at_stages_1_and_2(tmp_path: Path) -> None:
    groups = [[Param("a", (4,)), Param("b", (4,))]]
    make_tag(tmp_path / "a", 2, groups=groups, sub_group_size=1, frozen=None, format="rigid")
    for rank in range(2):
        edit(tmp_path / "a" / "tag" / optim_name(rank), lambda data: data["ds_config"].pop("zero_optimization"))
    report = zeroelastic.reshard(tmp_path / "a", tmp_path / "b", world_size=3, stage=1)
    assert report.content_root == root_of(tmp_path / "a") == root_of(tmp_path / "b")
    assert report.sub_groups == 1 and report.files == 4


@pytest.mark.parametrize(("killed", "stage", "resumed"), [(2, 2, 3), (2, 1, 0)])
def test_a_killed_run_goes_on_at_the_same_stage_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: int, stage: int, resumed: int
) -> None:
    def end(*args: object) -> None:
        raise SystemExit(143)

    with monkeypatch.context() as patch:
        patch.setattr("zeroelastic.verbs.new_directory.flush_tree", end)
        with pytest.raises(SystemExit):
            zeroelastic.reshard(GOLDEN / "rigid2", tmp_path / "b", world_size=3, stage=killed)
    report = zeroelastic.reshard(GOLDEN / "rigid2", tmp_path / "b", world_size=3, stage=stage, verify=True)
    assert (report.target_stage, report.resumed_ranks) == (stage, resumed)
    assert report.content_root == root_of(GOLDEN / "rigid2")


def test_the_state_of_a_grad_scaler_that_no_file_of_deepspeed_keeps_is_named(tmp_path: Path) -> None:
    make_tag(tmp_path / "a", 2, frozen=None, record=True)
    scaler = dict.fromkeys(("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"), 2)
    for rank in range(2):
        edit_optim(tmp_path / "a" / "tag" / optim_name(rank), lambda s: s["zeroelastic"].update(grad_scaler=scaler))
    record_again(tmp_path / "a" / "tag")
    for stage, named in ((2, True), (3, False)):
        forecast = zeroelastic.reshard(tmp_path / "a", tmp_path / "b", world_size=3, stage=stage, dry_run=True)
        assert any("GradScaler" in note for note in forecast.notes) == named


def test_the_command_says_the_stage(tmp_path: Path) -> None:
    source = GOLDEN / "elastic2"
    dry = run_command("reshard", source, tmp_path / "b", "-n", 3, "--stage", 2, "--dry-run")
    assert (
        dry.returncode == 0
        and "(stage 2), 2 -> 3 ranks" in dry.stdout
        and "in 4 files, 2 optimizer groups" in (dry.stdout)
    )
    done = run_command("reshard", source, tmp_path / "b", "-n", 3, "--stage", 2, "--verify", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and (report["target_stage"], report["format"]) == (2, "rigid") and report["verified"]
    assert report["content_root"] == report["recorded_root"]
    names = sorted(path.name for path in (tmp_path / "b" / "global_step2").iterdir())
    assert names == [*map(optim_name, range(3)), MODEL, "zeroelastic.json"]
