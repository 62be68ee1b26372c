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

import numpy as np

from zeroelastic.checkpoint.extents import ExtentTable
from zeroelastic.checkpoint.saved_state import SavedTensor
from zeroelastic.core.digest import ByteArray, ScalarValue
from zeroelastic.errors import UnsupportedError
from zeroelastic.executors.dispatch import CopyTable, DigestRows, read_segments
from zeroelastic.io.atomic import errors_of_the_system, name_in_errors
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.verbs.model_tensors import Buffer, ModelTensor, Place, read_buffer
from zeroelastic.verbs.new_files import Reading

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem


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
                save(state_dict, storage_writer=writer, planner=_planner(reader), no_dist=True)
        except CheckpointException as error:
            directory = Path(writer.path)
            with name_in_errors(directory), errors_of_the_system(directory):
                for failure in error.failures.values():
                    raise failure[0] from None
            raise


class TensorReader:
    """Reads tensors by the flattened keys of torch's state dict.

    The digests of pieces are added up; ``compare`` compares them with the record's in the end.
    """

    def __init__(self, reading: Reading) -> None:
        self._state, self._digests, self._progress = reading.state, reading.digests, reading.progress
        self._most = reading.max_memory // 4  # bytes of a tensor that are in memory at once
        self._held = 0  # since the collector ran
        self._tensors: dict[str, ModelTensor] = {}
        self._rows: tuple[str, SavedTensor, ExtentTable] | None = None
        self._found: dict[str, tuple[SavedTensor, int]] = {}

    def placeholder(self, key: str, tensor: ModelTensor) -> torch.Tensor:
        """A meta tensor for the key, which is read when torch writes it. Raises UnsupportedError."""
        import torch

        if key in self._tensors:
            raise UnsupportedError(f"{key}: two tensors would have this key in a distributed checkpoint.")
        self._tensors[key] = tensor
        return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")

    def pieces(self, key: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes of the blocks of a large tensor, each one contiguous run that fits in memory.

        Empty for a tensor that is written as a whole.
        """
        tensor = self._tensors.get(key)
        if tensor is None or isinstance(tensor.source, Buffer) or tensor.nbytes <= self._most:
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
        """A whole tensor or one of its ``pieces``; None for a key that is not one of these tensors."""
        import torch

        tensor = self._tensors.get(key)
        if tensor is None:
            return None
        dtype = getattr(torch, tensor.dtype)
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype, device="cpu")
        if isinstance(tensor.source, Buffer):
            data = read_buffer(tensor, limit=self._most)
            if self._progress is not None:
                self._progress(len(data))
        else:
            first = sum(o * math.prod(tensor.shape[dim + 1 :]) for dim, o in enumerate(offsets))
            data = self._param_bytes(key, tensor, first, math.prod(shape))
        return torch.from_numpy(data).view(dtype).view(shape)

    def _param_bytes(self, key: str, tensor: ModelTensor, first: int, numel: int) -> ByteArray:
        """The bytes of some elements of a tensor, from all ranks' files."""
        if self._rows is None or self._rows[0] != key:
            place = tensor.source
            assert isinstance(place, Place)
            (whole,), all_rows = self._state.parts[place.part].whole_rows([place.param], keys=(place.key,))
            self._rows = (key, whole, all_rows)
        _, saved, rows = self._rows
        size = DTYPE_BYTES[tensor.dtype]
        self._held += numel * size
        if self._held > self._most:  # torch 2.6 leaves what it has written to the collector
            gc.collect(1)
            self._held = numel * size
        buffer = np.empty(numel * size, dtype=np.uint8)
        at = rows.target_offset
        begin, end = np.maximum(at, first), np.minimum(at + rows.numel, first + numel)
        chosen = np.flatnonzero(end > begin)
        wanted = rows.pieces(chosen, (begin - at)[chosen], (end - begin)[chosen])
        zeros = np.zeros(wanted.num_rows, dtype=np.int64)
        seeds = self._digests.seeds([saved])
        digest = None if seeds is None else DigestRows(seeds, zeros, wanted.start, wanted.itemsize)
        table = CopyTable(wanted.file, wanted.file_offset, zeros, (wanted.target_offset - first) * size, wanted.nbytes)
        found = read_segments(table, wanted.paths, [buffer], digest=digest, progress=self._progress).digests
        if found is not None:
            total = self._found.get(key, (saved, 0))[1] + int(found[0])
            self._found[key] = saved, total % (1 << 64)
        return buffer

    def compare(self) -> None:
        """Compare all digests with the record's. Raises DigestMismatchError."""
        found = self._found.values()
        self._digests.compare([tensor for tensor, _ in found], [digest for _, digest in found])


def scalar_value(value: ScalarValue) -> Any:
    """A scalar of optimizer state as it was saved: a 0-dim tensor or a Python value."""
    import torch

    if value.value is None or value.kind.startswith("py"):
        return value.value
    return torch.tensor(value.value, dtype=getattr(torch, value.kind), device="cpu")


def _planner(reader: TensorReader) -> SavePlanner:
    """torch's own planner, except that it cuts large tensors and reads data when torch writes it."""
    planner: SavePlanner = _planner_class()(reader)
    return planner


@cache
def _planner_class() -> Any:
    """Made once: a class refers to itself, and one that referred to a reader would keep its files open."""
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
