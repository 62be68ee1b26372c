"""Distributed checkpoints of torch: read back by torch's own library, equal to the bit, and written piece by piece."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import Param, add_to_model, buffers, raw, read_dcp, same, write_checkpoint
from torch.distributed.checkpoint import FileSystemReader, state_dict_saver
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.errors import UnsupportedError
from zeroelastic.verbs.convert import to_fsdp2 as ours
from zeroelastic.verbs.convert.convert import write_plan
from zeroelastic.verbs.convert.to_fsdp2 import plan_fsdp2


def convert(tag_dir: Path, target: Path, **options: Any) -> int:
    return write_plan(plan_fsdp2(open_state(open_checkpoint(tag_dir))), target, **options)


def everything(target: Path) -> dict[str, Any]:
    dcp_to_torch_save(target, target.parent / "all.pt")
    return torch.load(target.parent / "all.pt", weights_only=False)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    world_size=st.integers(1, 5),
    format=st.sampled_from(["elastic", "rigid"]),
    record=st.booleans(),
    max_memory=st.sampled_from([16, 48, 200, 1 << 30]),
    states=st.sampled_from([{}, {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32}]),
)
def test_torch_reads_back_what_was_saved(tmp_path_factory, world_size, format, record, max_memory, states):
    tag_dir = tmp_path_factory.mktemp("ckpt") / "tag"
    groups = [[Param("w.x", (5, 4)), Param("v", (7,))], [Param("deep", (1, 2, 3, 2)), Param("scale", ())]]
    truth = write_checkpoint(
        tag_dir, world_size=world_size, format=format, record=record, states=states, groups=groups,
        options=[{"lr": 0.5, "betas": (0.9, 0.95)}, {"lr": 0.25}],
    )  # fmt: skip
    target = tag_dir.parent / "out"
    assert convert(tag_dir, target, max_memory=max_memory) == (sum(map(len, truth.values())) if record else 0)
    found = everything(target)
    shapes = {param.name: param.shape for group in groups for param in group}
    assert found["model"].keys() == truth.keys()
    for name, keys in truth.items():
        tensor = found["model"][name]
        key = "fp32" if "fp32" in keys else "frozen"
        assert (str(tensor.dtype), raw(tensor)) == (f"torch.{keys[key][0]}", keys[key][1])
        assert tensor.shape == shapes.get(name, tensor.shape)
    trained = {name: keys for name, keys in truth.items() if "fp32" in keys}
    assert found["optim"]["state"].keys() == trained.keys()
    for name, keys in trained.items():
        state = found["optim"]["state"][name]
        assert state.keys() == {"step", *states} and same(state["step"], torch.tensor(3.0))
        for key in states:
            assert (str(state[key].dtype), raw(state[key])) == (f"torch.{keys[key][0]}", keys[key][1])
            assert state[key].shape == shapes[name]
    groups = found["optim"]["param_groups"]
    assert [(group["lr"], group["params"]) for group in groups] == [(0.5, ["w.x", "v"]), (0.25, ["deep", "scale"])]
    assert groups[0]["betas"] == (0.9, 0.95)


def test_a_torch_whose_save_has_no_argument_for_one_process_writes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.6, the oldest that is supported; its ``save_state_dict`` has it."""

    def save(
        state_dict: Any,
        *,
        checkpoint_id: Any = None,
        storage_writer: Any = None,
        planner: Any = None,
        process_group: Any = None,
    ) -> Any:
        raise AssertionError("in a job, all ranks would have to call it")

    write_checkpoint(tmp_path / "tag", world_size=2)
    convert(tmp_path / "tag", tmp_path / "new")
    monkeypatch.setattr(state_dict_saver, "save", save)
    convert(tmp_path / "tag", tmp_path / "old")
    new, old = (read_dcp(tmp_path / name) for name in ("new", "old"))
    assert new and new.keys() == old.keys()
    for key, value in new.items():
        assert same(value, old[key]) if isinstance(value, torch.Tensor) else value == old[key], key


def test_large_tensors_are_written_in_pieces_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [[Param("tall", (100, 3)), Param("flat", (1, 1, 500)), Param("thick", (2, 3, 40)), Param("line", (333,))]]
    truth = write_checkpoint(tmp_path / "tag", world_size=3, groups=groups, record=True, sub_group_size=None)
    largest = 0
    original = ours.TensorReader.read

    def watch(self: Any, key: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor | None:
        nonlocal largest
        found = original(self, key, offsets, shape)
        largest = max(largest, 0 if found is None else found.nbytes)
        return found

    monkeypatch.setattr(ours.TensorReader, "read", watch)
    convert(tmp_path / "tag", tmp_path / "out", max_memory=4 * 128)
    assert 64 < largest <= 128
    metadata = FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert {name: len(metadata[f"model.{name}"].chunks) for name in ("tall", "flat", "thick", "line")} == {
        "tall": 10,
        "flat": 16,
        "thick": 12,
        "line": 11,
    }
    found = everything(tmp_path / "out")["model"]
    assert all(raw(found[param.name]) == truth[param.name]["fp32"][1] for param in groups[0])


def test_buffers_and_every_name_of_a_tied_weight_are_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tag", world_size=2)
    add_to_model(tmp_path / "tag", 2)
    plan = plan_fsdp2(open_state(open_checkpoint(tmp_path / "tag")))
    read: list[int] = []
    write_plan(plan, tmp_path / "out", progress=read.append)
    assert sum(read) == plan.nbytes
    found = everything(tmp_path / "out")["model"]
    assert all(same(found[name], tensor) for name, tensor in buffers().items())
    assert same(found["head again"], found["w"]) and same(found["lookup"], found["embedding"])
    assert same(found["counter"], torch.tensor(7)) and len(found) + 10 == plan.num_tensors


def test_two_tensors_of_one_key_are_refused(tmp_path: Path) -> None:
    groups = [[Param("a", (2,)), Param("a.b", (2,))]]
    write_checkpoint(tmp_path / "tag", world_size=1, groups=groups, states={"b.c": torch.float32, "c": torch.float32})
    with pytest.raises(UnsupportedError, match="this key"):
        convert(tmp_path / "tag", tmp_path / "out")
    assert os.listdir(tmp_path) == ["tag"]
