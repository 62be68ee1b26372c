"""Checkpoints of ZeRO stages 1 and 2, as DeepSpeed wrote them: read bit for bit, and refused where they are damaged."""

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
from synthetic import edit

import zeroelastic
from zeroelastic.checkpoint.model_states import model_states_of, open_model_states
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.errors import CheckpointError, MissingFileError, UnsupportedError
from zeroelastic.torch_file.header import read_torch_file

STAGE_1 = ("stage1_rank2", "stage1_bf16_optimizer_rank2")
STAGE_2 = ("stage2_rank2", "stage2_round_robin_aligned_rank3", "stage2_elastic_rank2")
NAMES = STAGE_1 + STAGE_2
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


@pytest.fixture
def tag_dir(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a golden checkpoint's tag directory."""
    return lambda name: shutil.copytree(next((GOLDEN / name).glob("global_step*")), tmp_path / name)


@pytest.mark.support(
    "Using it",
    "stage 1 and 2 checkpoints: inspect, verify, diff, export, open",
    "exact",
    "`round_robin_gradients` included",
)
@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_read_bit_for_bit(name: str) -> None:
    expected = json.loads((GOLDEN / name / "expected.json").read_text())
    with zeroelastic.open(GOLDEN / name) as checkpoint:
        assert checkpoint.stage == int(name[5]) and checkpoint.world_size == int(name[-1]) and checkpoint.step == 2
        assert set(checkpoint.keys()) == {*expected, "seen"}
        for param, entry in expected.items():
            assert checkpoint[param].shape == tuple(entry["shape"])
            state = checkpoint.optimizer(param) if "fp32" in entry["tensors"] else {}
            for key, data in entry["tensors"].items():
                tensor = checkpoint[param] if key in ("fp32", "frozen") else state[key]
                raw = tensor.torch().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                assert raw == bytes.fromhex(data), (param, key)
            if state:
                assert state["step"] == 2


@pytest.mark.parametrize("name", NAMES)
def test_groups_list_their_parameters_in_the_order_of_the_optimizer(name: str) -> None:
    shard = open_checkpoint(next((GOLDEN / name).glob("global_step*"))).shard(1)
    assert [group.params for group in shard.groups] == [
        ("inner.weight", "tail.weight"),
        ("gain", "inner.bias", "tail.bias"),
    ]
    if "elastic" not in name:  # stock writes no hyper-parameters with elastic_checkpoint
        assert [group.options["weight_decay"] for group in shard.groups] == [0.1, 0.0]
        assert shard.groups[0].options["betas"] == (0.9, 0.95)


def test_the_buffer_order_is_that_of_round_robin_gradients() -> None:
    shard = open_checkpoint(next((GOLDEN / "stage2_round_robin_aligned_rank3").glob("global_step*"))).shard(0)
    origin = dict(zip((param.name for param in shard.layout.params), shard.layout.origin.tolist(), strict=True))
    assert origin["gain"] == 0 and origin["inner.bias"] % 8 == 0 and origin["tail.bias"] % 8 == 0
    assert len({origin["gain"], origin["inner.bias"], origin["tail.bias"]}) == 3


def test_sub_groups_are_not_shown_where_there_are_none() -> None:
    assert zeroelastic.inspect(GOLDEN / "stage2_rank2").sub_group_size is None
    assert "sub-group" not in run_command("inspect", GOLDEN / "stage2_rank2").stdout
    assert zeroelastic.inspect(GOLDEN / "rigid2").sub_group_size == 10
    assert "sub-group size  10, " in run_command("inspect", GOLDEN / "rigid2").stdout


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_has_no_hyper_parameters_is_not_resharded(tmp_path: Path, stage: int) -> None:
    with pytest.raises(UnsupportedError, match="holds no hyper-parameters"):
        zeroelastic.reshard(GOLDEN / "stage2_elastic_rank2", tmp_path / "out", world_size=3, stage=stage)
    assert not (tmp_path / "out").exists()


DAMAGE: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "fewer groups": (OPTIM, lambda d: d["single_partition_of_fp32_groups"].pop(), "1 entries; .* has 2 groups"),
    "no groups": (OPTIM, lambda d: d.update(single_partition_of_fp32_groups=None), "holds no single_partition"),
    "short part": (
        OPTIM,
        lambda d: d["single_partition_of_fp32_groups"].__setitem__(0, torch.zeros(3)),
        "has 3 elements; 3 ranks imply",
    ),
    "longer part": (
        OPTIM,
        lambda d: d["single_partition_of_fp32_groups"].__setitem__(0, torch.zeros(300)),
        "has 300 elements; 3 ranks imply",
    ),
    "gaps": (OPTIM, lambda d: d.update(param_alignment_paddings=[[-1, 0], [0, 0, 0]]), "param_alignment_paddings"),
    "gaps of others": (OPTIM, lambda d: d.update(param_alignment_paddings=[[0], [0, 0, 0]]), "gaps are not one"),
    "ranks": (OPTIM, lambda d: d.update(partition_count=[2, 2]), "saved by 2 ranks, the rest .* by 3"),
    "state": (
        OPTIM,
        lambda d: d["base_optimizer_state"]["state"][0].update(exp_avg=torch.zeros(5)),
        r"has shape \(5,\)",
    ),
    "no state": (OPTIM, lambda d: d.update(base_optimizer_state=7), "holds no optimizer state"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(damage: str, tag_dir: Callable[[str], Path]) -> None:
    tag = tag_dir("stage2_round_robin_aligned_rank3")
    name, change, message = DAMAGE[damage]
    edit(tag / name.format(1), lambda data: change(data["optimizer_state_dict"]))
    with pytest.raises((CheckpointError, UnsupportedError), match=message) as raised:
        open_state(open_checkpoint(tag))
    assert name.format(1) in str(raised.value)


def test_groups_of_experts_are_refused_by_name(tag_dir: Callable[[str], Path]) -> None:
    tag = tag_dir("stage2_rank2")
    edit(tag / OPTIM.format(0), lambda data: data["optimizer_state_dict"].update(partition_count=[2, 1]))
    with pytest.raises(UnsupportedError, match="experts"):
        open_checkpoint(tag).shard(0)


def test_missing_files_are_named(tag_dir: Callable[[str], Path]) -> None:
    tag = tag_dir("stage2_round_robin_aligned_rank3")
    (tag / OPTIM.format(2)).unlink()
    with pytest.raises(MissingFileError, match=r"1 of the files of 3 ranks is missing: .*zero_pp_rank_2"):
        open_checkpoint(tag)
    (tag / MODEL).unlink()
    with pytest.raises(MissingFileError, match="model_states"):
        open_checkpoint(tag)


def test_files_of_another_save_are_noticed(tag_dir: Callable[[str], Path]) -> None:
    tag = tag_dir("stage2_rank2")
    edit(
        tag / OPTIM.format(1),
        lambda d: d["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0].update(lr=9),
    )
    with pytest.raises(CheckpointError, match="differ in hyper-parameters"):
        open_state(open_checkpoint(tag))


def test_files_of_another_stage_are_noticed(tag_dir: Callable[[str], Path]) -> None:
    tag = tag_dir("stage2_rank2")
    shutil.copy(GOLDEN / "elastic2" / "global_step2" / OPTIM.format(0), tag)
    with pytest.raises(CheckpointError, match=r"was saved with ZeRO stage 3, mp_rank_00_model_states\.pt with another"):
        open_checkpoint(tag).shard(0)


def test_frozen_parameters_come_from_the_whole_module() -> None:
    for name in NAMES:
        state = open_state(open_checkpoint(next((GOLDEN / name).glob("global_step*"))))
        assert [param.name for param in state.parts[1].layout.params] == ["frozen"]
        assert state.parts[1].layout.world_size == 1 and np.all(state.parts[1].layout.owned(0)[1] == 7)


@pytest.mark.parametrize("name", NAMES)
def test_tied_parameters_are_known_by_their_place(tag_dir: Callable[[str], Path], name: str) -> None:
    """DeepSpeed lists them on rank 0 alone, so not in the file of another node with a disk of its own."""
    path = tag_dir(name) / MODEL

    def tie(data: Any) -> None:
        module, trained = data["module"], {name for table in data["param_shapes"] for name in table}
        frozen = next(name for name in module if name not in trained | set(data["buffer_names"]))
        module["also.tail"], module["also.frozen"] = module["tail.weight"].view(-1), module[frozen]
        data["shared_params"] = {"also.tail": "tail.weight", "also.frozen": frozen}

    before = open_model_states(path, 0, world_size=None)
    edit(path, tie)
    listed = open_model_states(path, 0, world_size=None)
    edit(path, lambda data: data.update(shared_params={}))
    found = open_model_states(path, 0, world_size=None)
    for states in (listed, found):
        assert states.frozen.params == before.frozen.params and states.others == before.others
    assert sorted(nbytes for _, nbytes in found.weights) == sorted(nbytes for _, nbytes in listed.weights)


@pytest.mark.parametrize("name", NAMES)
def test_payload_of_parameters_alone_is_nothing_elses(tag_dir: Callable[[str], Path], name: str) -> None:
    """What lies in the memory of a parameter is kept where client state uses it, too, however deep it is hidden."""
    path = tag_dir(name) / MODEL

    def hide(data: Any) -> None:
        gain = data["module"]["gain"] = data["module"]["gain"].clone()
        loop: list[Any] = []
        loop += [loop, {"deep": (gain[:1],)}]
        data["client"] = loop

    before = open_model_states(path, 0, world_size=None)
    assert {*map(tuple, before.params_alone.tolist())} == {*map(tuple, before.weights.tolist()), *before.fragments()}
    edit(path, hide)
    file = read_torch_file(path, foreign="inert")
    after = model_states_of(file, 0, world_size=None)
    gain = file.extent(file.root["module"]["gain"])  # type: ignore[index]
    assert len(after.params_alone) == len(before.params_alone) - 1
    assert all(at + nbytes <= gain.offset or at >= gain.offset + gain.nbytes for at, nbytes in after.params_alone)
