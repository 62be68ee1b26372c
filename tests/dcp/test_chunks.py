"""Chunks of any cut are read as the tensors that they are of, whatever ranks ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import CountedFileSystem, counted, put
from synthetic import Box, grid, job_state, rows, whole_tensor, write_dcp

from zeroelastic.checkpoint.saved_state import TensorSet
from zeroelastic.core.layout import unpacked_layout
from zeroelastic.core.plan import check_plan, make_plan
from zeroelastic.dcp.saved import open_dcp
from zeroelastic.errors import CheckpointError, UnsupportedError
from zeroelastic.io.paths import as_path
from zeroelastic.io.retries import Retries, retrying
from zeroelastic.io.storage import read_exactly

__all__ = ["counted"]

SHAPES = {"a.weight": (7, 5), "a.bias": (7,), "b.weight": (2, 3, 4), "one": (1,), "scale": ()}


def check(folder: Path, tensors: Mapping[str, tuple[torch.Tensor, Any]]) -> TensorSet:
    part = open_dcp(folder).trained
    assert [param.name for param in part.params] == list(SHAPES)
    for number, param in enumerate(part.params):
        assert param.shape == SHAPES[param.name]
        for key, stored in (("fp32", f"model.{param.name}"), ("exp_avg", f"optim.state.{param.name}.exp_avg")):
            assert whole_tensor(part, number, key) == tensors[stored][0].numpy().tobytes()
    for ranks in (1, 3):
        for rank in range(ranks):
            check_plan(make_plan(part.layout, unpacked_layout(part.params, ranks), rank))
    return part


@settings(max_examples=12, deadline=None)
@given(world_size=st.integers(1, 9))
def test_chunks_of_dimension_0_are_a_plain_layout(tmp_path_factory: Any, world_size: int) -> None:
    folder = tmp_path_factory.mktemp("dcp") / "ckpt"
    tensors, objects = job_state(SHAPES, lambda shape: rows(shape, world_size))
    write_dcp(folder, tensors, objects)
    assert check(folder, tensors).layout.slices is None


@settings(max_examples=12, deadline=None)
@given(over=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)))
def test_chunks_of_a_mesh_are_slices(tmp_path_factory: Any, over: tuple[int, ...]) -> None:
    folder = tmp_path_factory.mktemp("dcp") / "ckpt"
    tensors, objects = job_state(SHAPES, lambda shape: grid(shape, over[: len(shape)]))
    write_dcp(folder, tensors, objects)
    check(folder, tensors)


def test_state_that_is_cut_into_other_rows_than_its_weight_is_read(tmp_path: Path) -> None:
    tensors, objects = job_state(SHAPES, lambda shape: rows(shape, 2))
    for name in ("a.weight", "b.weight"):
        key = f"optim.state.{name}.exp_avg"
        tensors[key] = tensors[key][0], rows(SHAPES[name], 3)
    write_dcp(tmp_path / "ckpt", tensors, objects)
    check(tmp_path / "ckpt", tensors)


def test_state_that_is_cut_into_other_columns_than_its_weight_is_refused(tmp_path: Path) -> None:
    tensors, objects = job_state(SHAPES, lambda shape: rows(shape, 2))
    key = "optim.state.a.weight.exp_avg"
    tensors[key] = tensors[key][0], grid((7, 5), (1, 2))
    write_dcp(tmp_path / "ckpt", tensors, objects)
    with pytest.raises(UnsupportedError, match=r"a\.weight: the tensors of its optimizer state are cut"):
        open_dcp(tmp_path / "ckpt")


def test_chunks_that_overlap_are_refused(tmp_path: Path) -> None:
    boxes: Sequence[Box] = [[(0, 3), (0, 5)], [(2, 3), (0, 5)], [(6, 1), (0, 5)]]
    tensors, objects = job_state(SHAPES, lambda shape: rows(shape, 1))
    tensors["model.a.weight"] = tensors["model.a.weight"][0], boxes
    for key in ("exp_avg", "exp_avg_sq"):
        tensors[f"optim.state.a.weight.{key}"] = tensors[f"optim.state.a.weight.{key}"][0], boxes
    write_dcp(tmp_path / "ckpt", tensors, objects)
    with pytest.raises(CheckpointError, match="overlap"):
        open_dcp(tmp_path / "ckpt")


def test_a_short_answer_of_a_store_is_no_buffer_and_unties_nothing(
    tmp_path: Path, counted: type[CountedFileSystem]
) -> None:
    tensors, objects = job_state(SHAPES, lambda shape: rows(shape, 1))
    tied, table = "model.tied.weight", torch.arange(50)
    tensors[tied] = tensors["model.a.weight"]
    tensors["model.table"] = table, rows(table.shape, 1)
    write_dcp(tmp_path / "ckpt", tensors, objects)
    for path in (tmp_path / "ckpt").iterdir():
        put(f"counted://b/ckpt/{path.name}", path.read_bytes())
    asked = set[tuple[str, int, int]]()

    def answer(path: str, start: int, data: bytes) -> bytes:
        """The first answer to each request is too short, and no two are alike."""
        if path.endswith(".metadata") or (path, start, len(data)) in asked:
            return data
        asked.add((path, start, len(data)))
        return data[: max(0, len(data) - len(asked))]

    counted.answer = answer
    with retrying(Retries(1, first_pause_s=0.0)):
        found = open_dcp(as_path("counted://b/ckpt"))
        shape, extent = found.buffers["table"]
        data = read_exactly(extent.path, extent.offset, extent.nbytes)
    assert asked and shape == (50,) and data == table.numpy().tobytes()
    assert found.tied == {"tied.weight": "a.weight"}
