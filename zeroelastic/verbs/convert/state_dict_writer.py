"""Write a state dict through torch.distributed.checkpoint, each tensor read when torch asks for it.

torch plans and writes. A SavePlanner reads one tensor at a time, or one piece of a large one, from all ranks' files
into memory. torch is imported by the functions that write.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroelastic.core.digest import ScalarValue
from zeroelastic.errors import UnsupportedError
from zeroelastic.io.atomic import errors_of_the_system, name_in_errors
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.verbs.model_tensors import ModelTensor, StoredBuffer
from zeroelastic.verbs.reading import Reading

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem


def write_state_dict(state_dict: dict[str, Any], writer: FileSystemWriter, reader: TensorReader) -> None:
    """Let torch write a state dict whose meta tensors are read when they are due. Raises what reading raises."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException

    save = state_dict_saver.save
    if "no_dist" not in inspect.signature(save).parameters:  # torch 2.6
        save = state_dict_saver.save_state_dict
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        warnings.filterwarnings("ignore", message="`save_state_dict` is deprecated", category=FutureWarning)
        try:
            with name_in_errors(Path(writer.path)):
                save(state_dict, storage_writer=writer, planner=_planner_class()(reader), no_dist=True)
        except CheckpointException as error:
            directory = Path(writer.path)
            with name_in_errors(directory), errors_of_the_system(directory):
                for failure in error.failures.values():
                    raise failure[0] from None
            raise


class TensorReader:
    """Reads tensors by the flattened keys of torch's state dict."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._most = reading.max_memory // 4  # bytes of a tensor that are in memory at once
        self._held = 0  # since the collector ran
        self._tensors: dict[str, ModelTensor] = {}

    def placeholder(self, key: str, tensor: ModelTensor) -> torch.Tensor:
        """A meta tensor for the key, which is read when torch writes it. Raises UnsupportedError."""
        import torch

        if key in self._tensors:
            raise UnsupportedError(f"{key}: two tensors would have this key in a distributed checkpoint.")
        self._tensors[key] = replace(tensor, name=key)  # each of its names is digested by itself
        return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")

    def pieces(self, key: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes of the blocks of a large tensor, each one contiguous run that fits in memory.

        Empty for a tensor that is written as a whole.
        """
        tensor = self._tensors.get(key)
        if tensor is None or isinstance(tensor.source, StoredBuffer) or tensor.nbytes <= self._most:
            return []
        shape, row_nbytes, dim = tensor.shape, tensor.nbytes, -1
        while row_nbytes > self._most and dim + 1 < len(shape):
            dim += 1
            row_nbytes //= shape[dim]
        step = max(1, self._most // row_nbytes)
        return [
            ((*outer, first, *(0 for _ in shape[dim + 1 :])), (*(1 for _ in outer), count, *shape[dim + 1 :]))
            for outer in itertools.product(*map(range, shape[:dim]))
            for first in range(0, shape[dim], step)
            for count in (min(step, shape[dim] - first),)
        ]

    def read(self, key: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor | None:
        """A whole tensor or one of the ``pieces``; None for a key that is not one of these tensors."""
        import torch

        tensor = self._tensors.get(key)
        if tensor is None:
            return None
        numel = math.prod(shape)
        self._held += numel * DTYPE_BYTES[tensor.dtype]
        if self._held > self._most:  # torch 2.6 leaves what it has written to the collector
            gc.collect(1)
            self._held = numel * DTYPE_BYTES[tensor.dtype]
        first = sum(o * math.prod(tensor.shape[dim + 1 :]) for dim, o in enumerate(offsets))
        dtype = getattr(torch, tensor.dtype)
        if not numel:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.from_numpy(self._reading.read(tensor, first, first + numel)).view(dtype).view(shape)


def scalar_value(value: ScalarValue) -> Any:
    """A scalar of optimizer state as it was saved: a 0-dim tensor or a Python value."""
    import torch

    if value.value is None or value.kind.startswith("py"):
        return value.value
    return torch.tensor(value.value, dtype=getattr(torch, value.kind), device="cpu")


@cache
def _planner_class() -> Any:
    """torch's own planner, except that it cuts large tensors and reads data when torch writes it.

    The class is made once: it refers to itself, and one that referred to a reader would keep its files open.
    """
    from torch import Size
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

    class Planner(DefaultSavePlanner):
        def __init__(self, reader: TensorReader) -> None:
            super().__init__()
            self._reader = reader

        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            self.plan = replace(plan, items=[piece for item in plan.items for piece in self._cut(item)])
            return self.plan

        def _cut(self, item: WriteItem) -> Iterator[WriteItem]:
            whole = item.tensor_data
            pieces = self._reader.pieces(item.index.fqn)
            if whole is None or not pieces:
                yield item
                return
            for offsets, sizes in pieces:
                chunk = ChunkStorageMetadata(Size(offsets), Size(sizes))
                data = TensorWriteData(chunk=chunk, properties=whole.properties, size=whole.size)
                index = MetadataIndex(item.index.fqn, Size(offsets))
                yield replace(item, index=index, type=WriteItemType.SHARD, tensor_data=data)

        def resolve_data(self, write_item: WriteItem) -> Any:
            if write_item.tensor_data is not None:
                chunk = write_item.tensor_data.chunk
                found = self._reader.read(write_item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes))
                if found is not None:
                    return found
            return super().resolve_data(write_item)

    return Planner
