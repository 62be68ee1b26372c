"""Files of stage 0 made of checkpoints of ZeRO: what is in them, and what is refused by name.

Stock DeepSpeed loads them in test_reshard_stock.py; what all stages share is in test_reshard_stages.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import run_command
from places import GOLDEN
from synthetic import edit, make_tag, model_name, optim_name

import zeroelastic
from zeroelastic.core.layout import Param
from zeroelastic.distributed.processes import Processes
from zeroelastic.errors import CheckpointError, UnsupportedError
from zeroelastic.io.atomic import write_atomically
from zeroelastic.testing import RankPool

MODEL = "mp_rank_00_model_states.pt"
SOURCES = ("elastic3", "rigid2", "stage1_rank2", "stage2_rank2", "stage2_round_robin_aligned_rank3")
ORDER = (("inner.weight", "tail.weight"), ("gain", "inner.bias", "tail.bias"))
"""The parameters of the golden checkpoints as their optimizer lists them, by group."""


def read(directory: Path) -> dict[str, Any]:
    tag = (directory / "latest").read_text()
    assert os.listdir(directory / tag) == [MODEL], "stage 0 has one file, and no commit record"
    found: dict[str, Any] = torch.load(directory / tag / MODEL, weights_only=False)
    return found


def tensor_of(tensors: dict[str, str], shape: list[int]) -> dict[str, torch.Tensor]:
    return {
        key: torch.frombuffer(bytearray.fromhex(raw), dtype=torch.float32).view(shape) for key, raw in tensors.items()
    }


@pytest.mark.support(
    "Using it",
    "`zeroelastic reshard --stage 0`: the file of plain data parallel, from stages 1, 2 and 3",
    "exact",
    "the same content root; DeepSpeed alone reads it",
)
@pytest.mark.parametrize("source", SOURCES)
def test_the_file_has_every_tensor_whole_in_the_order_of_the_optimizer(source: str, tmp_path: Path) -> None:
    report = zeroelastic.reshard(GOLDEN / source, tmp_path / "b", world_size=5, stage=0, verify=True)
    assert report.content_root == zeroelastic.verify(GOLDEN / source).content_root
    data = read(tmp_path / "b")
    expected = json.loads((GOLDEN / source / "expected.json").read_text())
    optimizer = data["optimizer"]
    groups = optimizer["optimizer_state_dict"]["param_groups"]
    assert [group["params"] for group in groups] == [[0, 1], [2, 3, 4]]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [len(masters) for masters in optimizer["fp32_groups"]] == [2, 3]
    masters = [master for group in optimizer["fp32_groups"] for master in group]
    for number, name in enumerate(name for group in ORDER for name in group):
        truth = tensor_of(expected[name]["tensors"], expected[name]["shape"])
        assert torch.equal(masters[number], truth["fp32"]) and masters[number].requires_grad
        state = optimizer["optimizer_state_dict"]["state"][number]
        assert list(state) == ["step", "exp_avg", "exp_avg_sq"] and state["step"].item() == 2.0
        assert all(torch.equal(state[key], truth[key]) for key in ("exp_avg", "exp_avg_sq"))
        weight = data["module"][name]
        assert torch.equal(weight, truth["fp32"].to(torch.bfloat16)) and not weight.requires_grad
    frozen = torch.frombuffer(bytearray.fromhex(expected["frozen"]["tensors"]["frozen"]), dtype=torch.bfloat16)
    assert torch.equal(data["module"]["frozen"], frozen) and data["module"]["seen"].tolist() == [0, 1, 2]
    assert (optimizer["dynamic_loss_scale"], optimizer["cur_scale"], optimizer["cur_iter"]) == (False, 1.0, 2)
    assert (data["dp_world_size"], data["global_steps"], data["ds_config"]["zero_optimization"]) == (5, 2, {"stage": 0})
    tables = ("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params")
    assert all(data[key] is None for key in tables)


def test_as_a_source_stage_0_is_refused_by_name(tmp_path: Path) -> None:
    zeroelastic.reshard(GOLDEN / "stage2_rank2", tmp_path / "b", world_size=1, stage=0)
    said = "of ZeRO stage 0, whose optimizer state does not name its parameters, so that only a stage 0 run resumes"
    report = zeroelastic.verify(tmp_path / "b")
    assert report.valid and said in report.unsupported[0]
    found = zeroelastic.inspect(tmp_path / "b")
    assert (found.stage, found.world_size, found.step, found.params) == (0, 1, 2, [])
    assert not found.ok and not found.problems and said in found.unsupported[0]
    assert found.files.missing == [] and found.buffers and (found.totals.files, found.headers_read) == (1, 1)
    with pytest.raises(UnsupportedError, match=said):
        zeroelastic.open(tmp_path / "b")
    with pytest.raises(UnsupportedError, match=said):
        zeroelastic.reshard(tmp_path / "b", tmp_path / "c", world_size=1)
    # Without an optimizer in it the file is one of stage 1 or 2, whose optimizer files are lost.
    edit(tmp_path / "b" / "global_step2" / MODEL, lambda data: data.update(optimizer=None))
    assert zeroelastic.inspect(tmp_path / "b").problems


def make(root: Path, change: Callable[[dict[str, Any]], object] = dict.copy, **options: Any) -> Any:
    """A tag of stage 3 on 2 ranks, of a run in fp32 without a word on it; every optimizer file is changed."""
    truth = make_tag(root, 2, **{"format": "rigid", "frozen": None, **options})
    weights = {name: torch.empty(0) for name, tensors in truth.items() if "fp32" in tensors}
    for rank in range(2):
        edit(root / "tag" / model_name(rank), lambda data: data["module"].update(weights))
        edit(root / "tag" / optim_name(rank), change)
    return truth


def bf16(data: dict[str, Any]) -> None:
    data["ds_config"]["bf16"] = {"enabled": True}


def fused(data: dict[str, Any]) -> None:
    """A run in bf16 with DeepSpeed's FusedAdam, which its hyper-parameters show."""
    bf16(data)
    for group in groups_of(data):
        group["bias_correction"] = True


def groups_of(data: dict[str, Any]) -> Any:
    return data["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"]


def test_in_fp32_the_weights_are_the_master_weights_and_tied_ones_are_one_tensor(tmp_path: Path) -> None:
    truth = make(tmp_path / "a")
    tied = {"head": torch.empty(0)}
    edit(
        tmp_path / "a" / "tag" / model_name(0),
        lambda data: (data["module"].update(tied), data.update(shared_params={"head": "w"}, mine="note")),
    )
    zeroelastic.reshard(tmp_path / "a", tmp_path / "b", world_size=3, stage=0, verify=True)
    data = read(tmp_path / "b")
    assert list(data["optimizer"]) == ["state", "param_groups"]
    for name, tensors in truth.items():
        assert data["module"][name].view(-1).view(torch.uint8).numpy().tobytes() == tensors["fp32"][1], name
    assert data["module"]["head"].data_ptr() == data["module"]["w"].data_ptr() and data["mine"] == "note"
    assert len(data["optimizer"]["state"]) == len(truth)
    payload = sum(len(raw) for tensors in truth.values() for _, raw in tensors.values())
    size = (tmp_path / "b" / "tag" / MODEL).stat().st_size
    assert size < payload + 100 * 64 + 10_000, "the weights are in the file more than once"


def test_fused_adam_has_a_flat_buffer_for_each_group(tmp_path: Path) -> None:
    truth = make(tmp_path / "a", fused)
    report = zeroelastic.reshard(tmp_path / "a", tmp_path / "b", world_size=3, stage=0)
    assert any("FP16_Optimizer" in note for note in report.notes)
    optimizer = read(tmp_path / "b")["optimizer"]
    assert list(optimizer) == ["optimizer_state_dict", "fp32_groups_flat", "clip_grad"]
    assert [group["params"] for group in optimizer["optimizer_state_dict"]["param_groups"]] == [[0], [1]]
    for i, flat in enumerate(optimizer["fp32_groups_flat"]):
        whole = {"fp32": flat, **optimizer["optimizer_state_dict"]["state"][i]}
        assert whole.pop("step") == 3.0
        for key, value in whole.items():
            expected = b"".join(truth[name][key][1] for name in (("w", "v"), ("b", "gain", "scale"))[i])
            assert value.detach().view(torch.uint8).numpy().tobytes() == expected, key


def test_adagrad_and_state_that_a_load_would_convert_are_refused(tmp_path: Path) -> None:
    """torch converts optimizer state to the dtype of what the optimizer steps, without a word."""
    options: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], object], str]] = {
        "adagrad": ({"states": {"sum": torch.float32}}, bf16, "was saved with Adagrad in 16 bits"),
        "moments": (
            {"states": {"exp_avg": torch.bfloat16}},
            bf16,
            "its exp_avg are bfloat16; DeepSpeed at stage 0 has",
        ),
        "masters": (
            {"master": torch.bfloat16},
            bf16,
            "its master weights are bfloat16; DeepSpeed at stage 0 has float32",
        ),
        "in fp32": ({"states": {"exp_avg": torch.float64}}, dict.copy, "its exp_avg are float64; DeepSpeed at stage 0"),
    }
    for name, (given, change, said) in options.items():
        make(tmp_path / name, change, **given)
        with pytest.raises(UnsupportedError, match=said):
            zeroelastic.reshard(tmp_path / name, tmp_path / "b", world_size=3, stage=0, dry_run=True)


def test_weights_without_a_place_in_the_module_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "a", bf16, frozen=[Param("mask", (3,))])
    with pytest.raises(UnsupportedError, match="the module's state has no entry for mask, whose weights stages 0"):
        zeroelastic.reshard(tmp_path / "a", tmp_path / "b", world_size=3, stage=0)
    make(tmp_path / "c")
    edit(tmp_path / "c" / "tag" / model_name(0), lambda data: data["module"].pop("w"))
    with pytest.raises(UnsupportedError, match="the module's state has no entry for w, whose weights stages 0"):
        zeroelastic.reshard(tmp_path / "c", tmp_path / "b", world_size=3, stage=0)


def test_verify_reads_every_byte_of_the_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(path: Path, data: bytes) -> None:
        """``latest`` is the last file that is written before the result is verified."""
        write_atomically(path, data)
        written = path.parent / "global_step2" / MODEL
        with open(written, "r+b") as file:
            file.seek(written.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))

    monkeypatch.setattr("zeroelastic.verbs.reshard.reshard.write_atomically", damaged)
    with pytest.raises(CheckpointError, match=MODEL):
        zeroelastic.reshard(GOLDEN / "rigid2", tmp_path / "b", world_size=3, stage=0, verify=True)
    assert not (tmp_path / "b").exists()


def test_the_command_says_what_can_load_it(tmp_path: Path) -> None:
    source = tmp_path / "a"
    shutil.copytree(GOLDEN / "elastic2", source)
    (source / "zero_to_fp32.py").write_text("of no use without ZeRO")
    dry = run_command("reshard", source, tmp_path / "b", "-n", 3, "--stage", 0, "--dry-run")
    assert dry.returncode == 0 and "(stage 0), 2 -> 3 ranks" in dry.stdout
    assert "in 1 file, 2 optimizer groups" in dry.stdout and not (tmp_path / "b").exists()
    done = run_command("reshard", source, tmp_path / "b", "-n", 3, "--stage", 0, "--verify", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["format"] == "rigid"
    assert (report["target_stage"], report["target_world_size"]) == (0, 3)
    assert report["verified"] and report["content_root"] == report["recorded_root"]
    assert sorted(os.listdir(tmp_path / "b")) == ["global_step2", "latest"]
    said = " ".join(report["notes"])
    assert "that of FP16_UnfusedOptimizer, in which DeepSpeed wraps" in said
    assert "without a commit record: DeepSpeed alone reads files of stage 0" in said


def test_notes_name_what_the_run_must_not_have(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    def fp16(data: dict[str, Any]) -> None:
        data["ds_config"].update(fp16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})

    scaler = DynamicLossScaler(
        init_scale=2**11, scale_window=50, min_scale=1, delayed_shift=2, consecutive_hysteresis=False
    )
    scaler.cur_iter, scaler.last_overflow_iter = 40, 17
    make(tmp_path / "a", fp16, loss_scaler=scaler)
    report = zeroelastic.reshard(tmp_path / "a", tmp_path / "b", world_size=3, stage=0)
    said = " ".join(report.notes)
    assert "for a run without grad_accum_dtype fp32" in said and "hysteresis" in said
    assert "passes loss * engine.optimizer.loss_scale to engine.backward" in said
    optimizer = read(tmp_path / "b")["optimizer"]
    kept = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
    assert optimizer["dynamic_loss_scale"] is True
    assert {key: optimizer[key] for key in kept} == {key: getattr(scaler, key) for key in kept}
    make(tmp_path / "c", frozen=[Param("w2", (2,))])
    edit(tmp_path / "c" / "tag" / model_name(0), lambda data: data["module"].update(w2=torch.empty(0)))
    report = zeroelastic.reshard(tmp_path / "c", tmp_path / "d", world_size=3, stage=0)
    assert any("given the trained parameters alone" in note for note in report.notes)


def reshard_together(source: str, target: str) -> dict[str, object]:
    processes = Processes(dist.get_rank(), dist.get_world_size())
    return zeroelastic.reshard(source, target, world_size=2, stage=0, processes=processes).to_json()


def test_of_several_processes_one_writes_the_file(rank_pool: RankPool, tmp_path: Path) -> None:
    first, second = rank_pool.run(reshard_together, 2, str(GOLDEN / "elastic3"), str(tmp_path / "b"), timeout=100)
    assert first == second and first["content_root"] == first["recorded_root"]
    assert read(tmp_path / "b")["dp_world_size"] == 2
