"""DCP directories written by hand, any chunks, with torch's own classes, without ranks; as ``dcp.load`` reads them."""

from __future__ import annotations

import inspect
import io
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

Box = Sequence[tuple[int, int]]
"""The beginning and the size of a chunk in each dimension."""


def rows(shape: Sequence[int], world_size: int) -> list[Box]:
    """The chunks of FSDP2, empty ones included: dimension 0 as ``torch.chunk`` cuts it."""
    count = -(-shape[0] // world_size)
    begins = [min(rank * count, shape[0]) for rank in range(world_size)]
    sizes = [min(count, shape[0] - begin) for begin in begins]
    return [[(begin, size), *((0, n) for n in shape[1:])] for begin, size in zip(begins, sizes, strict=True)]


def grid(shape: Sequence[int], over: Sequence[int]) -> list[Box]:
    """The chunks of a mesh of as many dimensions as ``over`` has: FSDP2 over tensor parallelism."""
    boxes: list[Box] = [[]]
    for size, parts in zip(shape, over, strict=True):
        along = [chunk[0] for chunk in rows([size], parts) if chunk[0][1]]
        boxes = [[*box, piece] for box in boxes for piece in along]
    return boxes


def write_dcp(
    folder: Path,
    tensors: Mapping[str, tuple[torch.Tensor, Sequence[Box]]],
    objects: Mapping[str, Any] | None = None,
    *,
    change: Callable[[Metadata], object] = lambda metadata: None,
) -> Metadata:
    """Write a DCP directory: every tensor in its chunks, those of one number in a file of their own."""
    folder.mkdir(parents=True)
    files: dict[str, io.BytesIO] = {}
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}

    def store(index: MetadataIndex, name: str, value: Any) -> None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        file = files.setdefault(name, io.BytesIO())
        stored[index] = _StorageInfo(name, file.tell(), len(buffer.getvalue()))
        file.write(buffer.getvalue())

    for key, (tensor, boxes) in tensors.items():
        chunks = [
            ChunkStorageMetadata(torch.Size([begin for begin, _ in box]), torch.Size([size for _, size in box]))
            for box in boxes
        ]
        described[key] = TensorStorageMetadata(
            TensorProperties.create_from_tensor(tensor.detach()), tensor.shape, chunks
        )
        for rank, (box, chunk) in enumerate(zip(boxes, chunks, strict=True)):
            piece = tensor[tuple(slice(begin, begin + size) for begin, size in box)] if box else tensor
            store(MetadataIndex(key, chunk.offsets, rank), f"__{rank}_0.distcp", piece.clone().contiguous())
    for key, value in (objects or {}).items():
        described[key] = BytesStorageMetadata()
        store(MetadataIndex(key), "__0_0.distcp", value)
    for name, file in files.items():
        (folder / name).write_bytes(file.getvalue())
    metadata = Metadata(described, storage_data=stored, storage_meta=StorageMeta(folder))
    change(metadata)
    write_table(folder, metadata)
    return metadata


def write_table(folder: Path, metadata: object) -> None:
    """Replace the table of a DCP directory."""
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def job_state(
    shapes: Mapping[str, Sequence[int]],
    cut: Callable[[Sequence[int]], Sequence[Box]],
    *,
    model: str = "model.",
    optim: str = "optim.",
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, tuple[torch.Tensor, Sequence[Box]]], dict[str, Any]]:
    """What a job with AdamW saves, nested: tensors with their chunks, and objects."""
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, tuple[torch.Tensor, Sequence[Box]]] = {}
    for name, shape in shapes.items():
        boxes = cut(shape) if shape else [[]]
        tensors[f"{model}{name}"] = torch.randn(tuple(shape), generator=generator).to(dtype), boxes
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"{optim}state.{name}.{key}"] = torch.randn(tuple(shape), generator=generator).to(dtype), boxes
        tensors[f"{optim}state.{name}.step"] = torch.tensor(5.0), [[]]
    group = {"lr": 0.25, "betas": (0.9, 0.95), "weight_decay": 0.5, "params": list(shapes)}
    return tensors, {f"{optim}param_groups.0.{key}": value for key, value in group.items()}


def load_alone(state: dict[str, Any], folder: Path) -> None:
    """torch's own load in this process alone, which torch 2.6 does where there are no process groups."""
    alone = {"no_dist": True} if "no_dist" in inspect.signature(dcp.load).parameters else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        dcp.load(state, checkpoint_id=folder, **alone)


def read_dcp(folder: Path) -> dict[str, object]:
    """What is in a directory, loaded into empty tensors of the shapes and dtypes that its table states."""
    table = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, object] = {
        key: torch.empty(found.size, dtype=found.properties.dtype) if isinstance(found, TensorStorageMetadata) else None
        for key, found in table.items()
    }
    load_alone(state, folder)
    return state
