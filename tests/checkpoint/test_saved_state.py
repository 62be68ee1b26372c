"""All headers of a checkpoint as one table: every element of every tensor, found once, where the files have it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sliced import sliced_part, tensor_lists, topologies
from synthetic import GROUPS, edit_optim, model_name, optim_name, write_checkpoint

from zeroelastic.checkpoint.extents import ExtentTable
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.saved_state import SavedTensor, TensorSet, open_state
from zeroelastic.errors import CheckpointError, UnsupportedError
from zeroelastic.torch_file.header import DTYPE_BYTES


def read_rows(tensors: list[SavedTensor], rows: ExtentTable, into: dict[tuple[str, str], np.ndarray]) -> None:
    for i in range(rows.num_rows):
        tensor = tensors[int(rows.target[i])]
        with open(rows.paths[int(rows.file[i])], "rb") as file:
            data = os.pread(file.fileno(), int(rows.nbytes[i]), int(rows.file_offset[i]))
        size = DTYPE_BYTES[tensor.dtype]
        begin = int(rows.start[i]) * size
        into.setdefault((tensor.param.name, tensor.key), np.full(tensor.nbytes, 254, np.uint8))[
            begin : begin + len(data)
        ] = np.frombuffer(data, np.uint8)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    world_size=st.integers(1, 9),
    format=st.sampled_from(["elastic", "rigid"]),
    sub_group_size=st.sampled_from([1, 7, 10, None]),
    states=st.sampled_from([{}, {"m": torch.float32}, {"a": torch.bfloat16, "b": torch.float32}]),
)
def test_both_views_hold_every_element_once(tmp_path_factory, world_size, format, sub_group_size, states):
    tag_dir = tmp_path_factory.mktemp("tag")
    truth = write_checkpoint(
        tag_dir, world_size=world_size, format=format, sub_group_size=sub_group_size, states=states
    )
    state = open_state(open_checkpoint(tag_dir))
    for view in ("by rank", "whole"):
        found: dict[tuple[str, str], np.ndarray] = {}
        nbytes = 0
        for part in state.parts:
            if view == "by rank":
                for rank in range(world_size):
                    tensors, rows = part.rank_rows(rank)
                    nbytes += int(rows.nbytes.sum())
                    read_rows(tensors, rows, found)
            else:
                for p in range(part.layout.num_params):
                    tensors, rows = part.whole_rows([p])
                    assert (rows.target_offset == rows.start).all()
                    nbytes += int(rows.nbytes.sum())
                    read_rows(tensors, rows, found)
        assert {stream: data.tobytes() for stream, data in found.items()} == {
            (name, key): data for name, keys in truth.items() for key, (_, data) in keys.items() if data
        }
        assert nbytes == state.nbytes


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=tensor_lists, topology=topologies, data=st.data())
def test_views_of_slices_have_the_whole_tensors(tmp_path_factory, tensors, topology, data):
    part = sliced_part(tmp_path_factory.mktemp("tag"), tensors, topology)
    assert [param.name for param in part.params] == [*dict.fromkeys(tensor.name for tensor in part.layout.tensors)]
    number = {tensor.name: i for i, (tensor, _) in enumerate(tensors)}
    truth = {
        (tensor.name, "fp32"): (np.arange(tensor.numel, dtype=np.int64) + number[tensor.name] * 10**6).tobytes()
        for tensor, _ in tensors
    }
    by_rank: dict[tuple[str, str], np.ndarray] = {}
    for rank in range(topology.world_size):
        read_rows(*part.rank_rows(rank), by_rank)
    whole: dict[tuple[str, str], np.ndarray] = {}
    read_rows(*part.whole_rows(range(len(part.params))), whole)
    for found in (by_rank, whole):
        assert {stream: data.tobytes() for stream, data in found.items()} == truth
    p = data.draw(st.integers(0, len(part.params) - 1))
    param = part.params[p]
    start = data.draw(st.integers(0, param.numel - 1))
    rows = part.tensor_rows(p, "fp32", start, param.numel)
    values = np.full(param.numel, -1, dtype=np.int64)
    read_rows([tensor for tensor in part.tensors() if tensor.param == param], rows, some := {})
    values[start:] = some[param.name, "fp32"].view("<i8")[start:]
    assert int(rows.numel.sum()) == param.numel - start and (rows.target_offset == rows.start - start).all()
    assert values[start:].tobytes() == truth[param.name, "fp32"][start * 8 :]
    holders = [rank for rank in range(topology.world_size) if param.name in names_on(part, rank)]
    assert part.holders(p) == holders


def names_on(part: TensorSet, rank: int) -> set[str]:
    """The names of the tensors that a rank has elements of."""
    tensors, rows = part.rank_rows(rank)
    return {tensors[target].param.name for target in rows.target.tolist()}


def test_keys_can_be_chosen(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, world_size=3)
    part = open_state(open_checkpoint(tmp_path)).parts[0]
    tensors, rows = part.whole_rows([1, 0], keys=["fp32"])
    assert [(tensor.param, tensor.key) for tensor in tensors] == [
        (part.layout.params[1], "fp32"),
        (part.layout.params[0], "fp32"),
    ]
    assert set(rows.target.tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"save_id": "f" * 32}, "differ in save id"),
        ({"options": [{"lr": 7.0}, {"lr": 8.0}]}, "differ in hyper-parameters"),
        ({"step": torch.tensor(9.0)}, "differ in step and other scalars"),
        ({"format": "rigid"}, "differ in format"),
        ({"states": {"exp_avg": torch.float32}}, "differ in optimizer state keys"),
    ],
)
def test_a_rank_of_another_save_is_found(tmp_path: Path, change: dict[str, object], said: str) -> None:
    write_checkpoint(tmp_path / "a", world_size=3)
    write_checkpoint(tmp_path / "b", world_size=3, **change)
    (tmp_path / "b" / optim_name(2)).replace(tmp_path / "a" / optim_name(2))
    with pytest.raises(CheckpointError, match=said) as error:
        open_state(open_checkpoint(tmp_path / "a"))
    assert optim_name(2) in str(error.value)


def test_module_states_of_another_save_are_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", world_size=2)
    write_checkpoint(tmp_path / "b", world_size=2, global_steps=9)
    write_checkpoint(tmp_path / "c", world_size=2, groups=GROUPS[:1])
    (tmp_path / "b" / model_name(1)).replace(tmp_path / "a" / model_name(1))
    with pytest.raises(CheckpointError, match=f"{model_name(1)}.*differ in the step"):
        open_state(open_checkpoint(tmp_path / "a"))
    (tmp_path / "c" / model_name(1)).replace(tmp_path / "a" / model_name(1))
    with pytest.raises(CheckpointError, match=f"{model_name(1)}.*differ in parameters"):
        open_state(open_checkpoint(tmp_path / "a"))


def test_a_record_of_another_step_is_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, world_size=2, record=True, global_steps=3)
    (tmp_path / "x").mkdir()
    write_checkpoint(tmp_path / "x", world_size=2, record=True, global_steps=4)
    for rank in range(2):
        (tmp_path / "x" / model_name(rank)).replace(tmp_path / model_name(rank))
    with pytest.raises(CheckpointError, match="was saved at step 4, the commit record at step 3"):
        open_state(open_checkpoint(tmp_path))


def test_a_damaged_header_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, world_size=2)
    edit_optim(tmp_path / optim_name(1), lambda state: state.update(partition_count=7))
    with pytest.raises(CheckpointError, match=optim_name(1)):
        open_state(open_checkpoint(tmp_path))


BY_RANK = [{"lr": 0.1, "d": 0.5, "k": 3, "betas": (0.9, 0.95)}] * len(GROUPS)
"""Hyper-parameters of an optimizer as Prodigy: a rank's own ``d``, and a count of steps."""


def set_on_rank_1(tag_dir: Path, **options: object) -> None:
    """Give the optimizer groups of rank 1 other hyper-parameters, and its state another ``step``."""

    def change(data: dict) -> None:
        nested = data["optimizer_state_dict"]
        for group in nested["param_groups"]:
            group.update({key: value for key, value in options.items() if key != "step"})
        for state in nested["state"].values():
            state.update({key: value for key, value in options.items() if key == "step"})

    edit_optim(tag_dir / optim_name(1), change)


def test_values_of_a_ranks_own_part_are_not_damage(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, world_size=2, format="rigid", options=BY_RANK)
    set_on_rank_1(tmp_path, d=0.75)
    with pytest.raises(UnsupportedError, match=r"'d' of optimizer group 0 is 0\.5 on rank 0 and 0\.75 on rank 1"):
        open_state(open_checkpoint(tmp_path))
    assert open_state(open_checkpoint(tmp_path), resizable=False).head.rank == 0


@pytest.mark.parametrize(
    "options", [{"k": 4}, {"lr": 0.2}, {"step": torch.tensor(4.0)}, {"d": 0.75, "k": 4}, {"d": "far"}, {"more": 1.0}]
)
def test_counters_and_schedules_tell_of_another_save(tmp_path: Path, options: dict[str, object]) -> None:
    write_checkpoint(tmp_path, world_size=2, format="rigid", options=BY_RANK)
    set_on_rank_1(tmp_path, **options)
    for resizable in (True, False):
        with pytest.raises(CheckpointError, match="Files of two saves are mixed"):
            open_state(open_checkpoint(tmp_path), resizable=resizable)


def test_ranks_that_a_record_has_compared_cannot_differ(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, world_size=2, format="rigid", options=BY_RANK, record=True)
    checkpoint = open_checkpoint(tmp_path, compare_directories=False)
    set_on_rank_1(tmp_path, d=0.75)
    with pytest.raises(CheckpointError, match="differ in hyper-parameters"):
        open_state(checkpoint)
