"""The table of a DCP directory: what torch wrote is read, and what was made to do harm is refused by name."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from places import GOLDEN
from synthetic import job_state, rows, whole_tensor, write_dcp, write_table
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex

from zeroelastic.dcp.metadata import read_metadata
from zeroelastic.dcp.saved import open_dcp
from zeroelastic.errors import CheckpointError, UnsafePickleError, UnsupportedError

SHAPES = {"w": (6, 4), "b": (6,)}
WEIGHT = MetadataIndex("model.w", torch.Size([0, 0]))


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Any]:
    tensors, objects = job_state(SHAPES, lambda shape: rows(shape, 2))
    return tmp_path / "ckpt", write_dcp(tmp_path / "ckpt", tensors, objects)


def test_the_table_of_torch_is_read(written: tuple[Path, Any]) -> None:
    found = read_metadata(written[0])
    assert found.parts == 2 and found.tensors["model.w"].shape == (6, 4)
    assert [chunk.begin for chunk in found.tensors["model.w"].chunks] == [(0, 0), (3, 0)]
    assert found.objects.keys() == {f"optim.param_groups.0.{k}" for k in ("lr", "betas", "weight_decay", "params")}


def test_a_checkpoint_that_a_job_of_fsdp2_saved_is_read_to_the_bit() -> None:
    """tests/golden/fsdp2, of torch 2.13 on 2 ranks."""
    found = open_dcp(GOLDEN / "fsdp2" / "ckpt")
    expected = json.loads((GOLDEN / "fsdp2" / "expected.json").read_text())
    assert found.frozen.params and found.world_size == 2
    read = {}
    for part in (found.trained, found.frozen):
        for number, param in enumerate(part.params):
            for key in part.dtypes[number]:
                stored = f"optim.state.{param.name}.{key}" if key.startswith("exp") else f"model.{param.name}"
                read[stored] = whole_tensor(part, number, key).hex()
    assert read == {key: value for key, value in expected.items() if key != "model.seen" and "step" not in key}
    assert found.named.scalars["first.weight"]["step"].value == 2.0 and found.buffers.keys() == {"seen"}


class Harm:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, ("touch harmed",)


def _outside(table: Any, name: str) -> None:
    table.storage_data[WEIGHT] = replace(table.storage_data[WEIGHT], relative_path=name)


def _at(table: Any, **changes: Any) -> None:
    table.storage_data[WEIGHT] = replace(table.storage_data[WEIGHT], **changes)


def _chunk(table: Any, begin: Any, sizes: Any) -> None:
    table.state_dict_metadata["model.w"].chunks[0] = ChunkStorageMetadata(begin, sizes)


BAD: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "a path that leads out": (lambda t: _outside(t, "../secret"), CheckpointError, "is not one of its folder"),
    "an absolute path": (lambda t: _outside(t, "/etc/passwd"), CheckpointError, "is not one of its folder"),
    "no such file": (lambda t: _outside(t, "__9_0.distcp"), CheckpointError, "no such file"),
    "a directory": (lambda t: _outside(t, "."), CheckpointError, "is not one of its folder"),
    "a negative offset": (lambda t: _at(t, offset=-1), CheckpointError, "bytes from -1"),
    "behind the end": (lambda t: _at(t, length=1 << 40), CheckpointError, "ends at byte"),
    "compressed": (lambda t: _at(t, transform_descriptors=["zstd"]), UnsupportedError, "was transformed"),
    "in the middle of an archive": (lambda t: _at(t, offset=3), CheckpointError, "distcp"),
    "another's archive": (
        lambda t: t.storage_data.update({WEIGHT: t.storage_data[MetadataIndex("model.b", torch.Size([0]))]}),
        CheckpointError,
        "of shape",
    ),
    "a chunk of huge size": (
        lambda t: _chunk(t, torch.Size([0, 0]), torch.Size([1 << 59, 4])), CheckpointError, "model.w"
    ),
    "a chunk that is missing": (
        lambda t: t.state_dict_metadata["model.w"].chunks.pop(), CheckpointError, "do not make up the tensor"
    ),
    "a place that is missing": (lambda t: t.storage_data.pop(WEIGHT), CheckpointError, "does not say where"),
    "an object in place of a tensor": (
        lambda t: t.state_dict_metadata.update({"model.w": BytesStorageMetadata()}), CheckpointError, "where model.w is"
    ),
    "a number in place of a tensor": (lambda t: t.state_dict_metadata.update({"model.w": 3}), CheckpointError, "by 3"),
    "a key that is no text": (
        lambda t: t.state_dict_metadata.update({3: BytesStorageMetadata()}), CheckpointError, "holds 3 as"
    ),
    "no table": (lambda t: setattr(t, "state_dict_metadata", None), CheckpointError, "has no table"),
    "code": (lambda t: setattr(t, "planner_data", Harm()), UnsafePickleError, "posix.system"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_table_that_lies_is_refused_by_name(
    kind: str, written: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, table = written
    monkeypatch.chdir(tmp_path)
    change, error, text = BAD[kind]
    change(table)
    write_table(folder, table)
    with pytest.raises(error, match=text):
        open_dcp(folder)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"garbage", pickle.dumps({"a": 1}), pickle.dumps(None)])
def test_anything_else_is_no_table(data: bytes, written: tuple[Path, Any]) -> None:
    (written[0] / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        read_metadata(written[0])
