"""The tensors of two checkpoints, compared element by element: both sides are read once, in pieces of bounded size."""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from zeroelastic.checkpoint.saved_state import SavedPart, SavedState
from zeroelastic.core.digest import ByteArray
from zeroelastic.executors.batches import Batch, batches
from zeroelastic.executors.dispatch import ReadTable, read_segments
from zeroelastic.executors.progress import ProgressFunction
from zeroelastic.torch_file.header import DTYPE_BYTES, TensorRef, TorchFile
from zeroelastic.verbs.diff.element_stats import CHUNK, ElementStats, compare_elements

BUFFER = "buffer"
"""The state key of the module's tensors that are not parameters. Every rank's model states file holds them whole."""

_Tensor = tuple[str, str]


class TensorDifference(NamedTuple):
    """One tensor that both sides have. Dtypes, or shapes, differ where left and right are not the same.

    ``stats`` is None where the shapes differ.
    """

    param: str
    key: str
    left_dtype: str
    right_dtype: str
    left_shape: tuple[int, ...]
    right_shape: tuple[int, ...]
    stats: ElementStats | None

    @property
    def equal(self) -> bool:
        """Whether both sides are the same, bit for bit."""
        alike = self.left_dtype == self.right_dtype and self.stats is not None
        return alike and self.stats is not None and self.stats.num_different == 0

    @property
    def norm(self) -> float | None:
        """The Euclidean norm of the difference of the finite elements."""
        return None if self.stats is None else math.sqrt(self.stats.square)

    @property
    def relative_norm(self) -> float | None:
        """``norm`` by the norm of the left side; None where that is 0 and the difference is not."""
        if self.stats is None or self.norm is None:
            return None
        if self.stats.left_square == 0:
            return 0.0 if self.norm == 0 else None
        return self.norm / math.sqrt(self.stats.left_square)

    def to_json(self) -> dict[str, object]:
        """The tensor in the document of ``zeroelastic diff --json``; what is not finite is null there."""
        stats = self.stats
        return {
            "param": self.param,
            "key": self.key,
            "dtype": {"a": self.left_dtype, "b": self.right_dtype},
            "shape": {"a": list(self.left_shape), "b": list(self.right_shape)},
            "num_elements": stats and stats.num,
            "num_different": stats and stats.num_different,
            "num_nonfinite": stats and stats.num_nonfinite,
            "num_sign_changed": stats and stats.num_sign_changed,
            "max_abs": stats and _finite(stats.max_abs),
            "max_ulp": stats and stats.max_ulp,
            "norm": _finite(self.norm),
            "relative_norm": _finite(self.relative_norm),
            "num_nan": stats and {"a": stats.left_nan, "b": stats.right_nan},
            "num_inf": stats and {"a": stats.left_inf, "b": stats.right_inf},
        }


class TensorComparison(NamedTuple):
    """The tensors that both sides have, and the (parameter, state key) of those that one side alone has."""

    tensors: list[TensorDifference]
    only_left: list[tuple[str, str]]
    only_right: list[tuple[str, str]]


class Side(NamedTuple):
    """Where one side has a tensor: the number of its part, and of the parameter in that."""

    part: int
    param: int
    dtype: str
    shape: tuple[int, ...]


def compare_tensors(
    left: SavedState,
    right: SavedState,
    params: str | None,
    *,
    max_memory: int,
    progress: ProgressFunction | None,
) -> TensorComparison | None:
    """Compare the parameters' tensors; None where the pattern ``params`` fits no parameter of either side."""
    sides = _sides(left, params), _sides(right, params)
    if params is not None and not any(sides):
        return None
    common = [tensor for tensor in sides[0] if tensor in sides[1]]
    groups: dict[tuple[int, str, int, str], list[_Tensor]] = {}
    for tensor in common:
        x, y = (side[tensor] for side in sides)
        if x.shape == y.shape:
            groups.setdefault((x.part, x.dtype, y.part, y.dtype), []).append(tensor)
    stats = {tensor: ElementStats() for tensors in groups.values() for tensor in tensors}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (left_part, left_dtype, right_part, right_dtype), tensors in groups.items():
            parts, dtypes = (left.parts[left_part], right.parts[right_part]), (left_dtype, right_dtype)
            itemsizes = DTYPE_BYTES[left_dtype], DTYPE_BYTES[right_dtype]
            numel = np.array([math.prod(sides[0][tensor].shape) for tensor in tensors], dtype=np.int64)
            room = max(1 << 16, max_memory // 3)  # for both sides; the rest is for tables and for what is computed
            for batch in batches(numel, room // sum(itemsizes)):  # in elements instead of bytes
                buffers = [_read(batch, tensors, parts[i], sides[i], itemsizes[i], progress) for i in (0, 1)]
                _compare_batch(batch, tensors, buffers, dtypes, stats, pool)
    found = [
        TensorDifference(*tensor, x.dtype, y.dtype, x.shape, y.shape, stats.get(tensor))
        for tensor, x, y in ((tensor, sides[0][tensor], sides[1][tensor]) for tensor in common)
    ]
    only_left = [tensor for tensor in sides[0] if tensor not in sides[1]]
    only_right = [tensor for tensor in sides[1] if tensor not in sides[0]]
    return TensorComparison(found, only_left, only_right)


def compare_buffers(left: SavedState, right: SavedState, files: tuple[TorchFile, TorchFile]) -> TensorComparison:
    """Compare the buffers in two model states files."""
    x, y = (_buffers(file, side) for file, side in zip(files, (left, right), strict=True))
    found = [_compare_buffer(name, x[name], y[name], *files) for name in x if name in y]
    return TensorComparison(
        found, [(name, BUFFER) for name in x if name not in y], [(name, BUFFER) for name in y if name not in x]
    )


def comparison_nbytes(left: SavedState, right: SavedState, *, params: str | None = None) -> int:
    """Bytes of both sides that ``compare_checkpoints`` reads."""
    sides = _sides(left, params), _sides(right, params)
    return sum(
        math.prod(side[tensor].shape) * DTYPE_BYTES[side[tensor].dtype]
        for side in sides
        for tensor in side
        if tensor in sides[0] and tensor in sides[1] and sides[0][tensor].shape == sides[1][tensor].shape
    )


def _sides(state: SavedState, params: str | None) -> dict[_Tensor, Side]:
    """Where a checkpoint has each (parameter, state key) that is compared."""
    return {
        (param.name, key): Side(number, p, dtype, param.shape)
        for number, part in enumerate(state.parts)
        for p, param in enumerate(part.layout.params)
        if params is None or fnmatch.fnmatchcase(param.name, params)
        for key, dtype in part.dtypes[p].items()
    }


def _read(
    batch: Batch,
    tensors: Sequence[_Tensor],
    part: SavedPart,
    side: Mapping[_Tensor, Side],
    itemsize: int,
    progress: ProgressFunction | None,
) -> ByteArray:
    """One side's elements of a batch, one piece of a tensor behind the other."""
    chosen = [tensors[row] for row in batch.row.tolist()]
    saved, rows = part.whole_rows(
        list(dict.fromkeys(side[tensor].param for tensor in chosen)), keys={key for _, key in chosen}
    )
    number = {(tensor.param.name, tensor.key): i for i, tensor in enumerate(saved)}
    wanted = np.array([number[tensor] for tensor in chosen], dtype=np.int64)
    first, count, offset = np.zeros((3, len(saved)), dtype=np.int64)
    first[wanted], count[wanted], offset[wanted] = batch.start, batch.nbytes, batch.offset
    begin = np.maximum(rows.target_offset, first[rows.target])
    end = np.minimum(rows.target_offset + rows.numel, (first + count)[rows.target])
    inside = np.flatnonzero(end > begin)
    rows = rows.pieces(inside, (begin - rows.target_offset)[inside], (end - begin)[inside])
    at = offset[rows.target] + rows.target_offset - first[rows.target]
    buffer = np.empty(int(batch.offset[-1] + batch.nbytes[-1]) * itemsize, dtype=np.uint8)
    table = ReadTable(rows.paths, rows.file, rows.file_offset, np.zeros_like(at), at * itemsize, rows.nbytes)
    read_segments(table, [buffer], progress=progress)
    return buffer


def _compare_batch(
    batch: Batch,
    tensors: Sequence[_Tensor],
    buffers: Sequence[ByteArray],
    dtypes: tuple[str, str],
    stats: dict[_Tensor, ElementStats],
    pool: ThreadPoolExecutor,
) -> None:
    """Add what the pieces of a batch have to the statistics of their tensors."""
    jobs = [
        (tensors[row], at, min(at + CHUNK * 4, offset + numel))
        for row, offset, numel in zip(batch.row.tolist(), batch.offset.tolist(), batch.nbytes.tolist(), strict=True)
        for at in range(offset, offset + numel, CHUNK * 4)
    ]

    def compare(job: tuple[_Tensor, int, int]) -> ElementStats:
        left, right = (
            buffer[job[1] * DTYPE_BYTES[dtype] : job[2] * DTYPE_BYTES[dtype]]
            for buffer, dtype in zip(buffers, dtypes, strict=True)
        )
        return compare_elements(left, right, *dtypes)

    for job, found in zip(jobs, pool.map(compare, jobs), strict=True):
        stats[job[0]] += found


def _buffers(file: TorchFile, state: SavedState) -> dict[str, TensorRef]:
    """The tensors of the module that hold something; parameters are empty there at stage 3, and whole at 1 and 2."""
    root = file.root
    module = root.get("module") if isinstance(root, dict) else None
    if not isinstance(module, dict):
        return {}
    names = state.models[0].others if state.checkpoint.whole_model else module
    tensors = {str(key): value for key, value in module.items() if key in names and isinstance(value, TensorRef)}
    return {name: ref for name, ref in tensors.items() if ref.numel and ref.is_contiguous}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _compare_buffer(
    name: str, x: TensorRef, y: TensorRef, left_file: TorchFile, right_file: TorchFile
) -> TensorDifference:
    stats = None
    if x.shape == y.shape:
        stats = compare_elements(left_file.read(x), right_file.read(y), x.dtype, y.dtype)
    return TensorDifference(name, BUFFER, x.dtype, y.dtype, x.shape, y.shape, stats)
