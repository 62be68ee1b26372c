"""The tensors of two checkpoints, compared element by element: both sides are read once, in pieces of bounded size."""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from pydantic import Field

from zeroelastic.checkpoint.read_ranges import ReadFiles, compare_files
from zeroelastic.checkpoint.saved_state import SavedPart, SavedState
from zeroelastic.core.digest import ByteArray
from zeroelastic.executors.batches import Batch, batches
from zeroelastic.executors.tables import ProgressFunction
from zeroelastic.torch_file.header import DTYPE_BYTES, TensorRef, TorchFile
from zeroelastic.verbs.diff.element_stats import CHUNK, ElementStats, compare_elements
from zeroelastic.verbs.model_tensors import ModelTensor, read_buffer, stored_tensor
from zeroelastic.verbs.new_files import RecordedDigests, SourceCheck
from zeroelastic.verbs.report import Part, Sides

BUFFER = "buffer"
"""The state key of the module's tensors that are not parameters. Every rank's model states file holds them whole."""

_Tensor = tuple[str, str]
_NO_LIMIT = 1 << 62


class ComparedTensor(Part):
    """One tensor that both sides have. Numbers are None where the shapes differ, or where they are not finite.

    ``num_nonfinite`` counts the different elements where a side is infinite or no number; ``max_abs`` to
    ``relative_norm`` are about the others. ``norm`` is the Euclidean norm of the difference, ``relative_norm`` that by
    the norm of the left side: None where that is 0 and the difference is not. ``stats`` is not in the document.
    """

    param: str
    key: str
    dtype: Sides[str]
    shape: Sides[list[int]]
    num_elements: int | None = None
    num_different: int | None = None
    num_nonfinite: int | None = None
    num_sign_changed: int | None = None
    max_abs: float | None = None
    max_ulp: int | None = None
    norm: float | None = None
    relative_norm: float | None = None
    num_nan: Sides[int] | None = None
    num_inf: Sides[int] | None = None
    stats: ElementStats | None = Field(default=None, exclude=True)

    @property
    def equal(self) -> bool:
        """Whether both sides are the same, bit for bit."""
        return self.dtype.a == self.dtype.b and self.num_different == 0

    @property
    def other_forms(self) -> list[str]:
        """The shape and the dtype of both sides, each where it differs."""
        shape = [f"shape {self.shape.a} and {self.shape.b}"] if self.shape.a != self.shape.b else []
        return shape + ([f"{self.dtype.a} and {self.dtype.b}"] if self.dtype.a != self.dtype.b else [])

    @property
    def difference_key(self) -> tuple[float, float, str, str]:
        """What sorts the worst difference first: what has no norm or is not finite, then by relative norm."""
        relative = math.inf if self.relative_norm is None or self.num_nonfinite else self.relative_norm
        share = (self.num_different or 0) / self.num_elements if self.num_elements else 0.0
        return (-relative, -share, self.param, self.key)


def _compared(
    tensor: _Tensor, left: Side | ModelTensor, right: Side | ModelTensor, stats: ElementStats | None
) -> ComparedTensor:
    dtype, shape = Sides(a=left.dtype, b=right.dtype), Sides(a=list(left.shape), b=list(right.shape))
    if stats is None:
        return ComparedTensor(param=tensor[0], key=tensor[1], dtype=dtype, shape=shape)
    norm = math.sqrt(stats.square)
    relative: float | None = norm
    if norm:
        relative = norm / math.sqrt(stats.left_square) if stats.left_square else None
    return ComparedTensor(
        param=tensor[0],
        key=tensor[1],
        dtype=dtype,
        shape=shape,
        num_elements=stats.num,
        num_different=stats.num_different,
        num_nonfinite=stats.num_nonfinite,
        num_sign_changed=stats.num_sign_changed,
        max_abs=_finite(stats.max_abs),
        max_ulp=stats.max_ulp,
        norm=_finite(norm),
        relative_norm=_finite(relative),
        num_nan=Sides(a=stats.left_nan, b=stats.right_nan),
        num_inf=Sides(a=stats.left_inf, b=stats.right_inf),
        stats=stats,
    )


class TensorComparison(NamedTuple):
    """The tensors that both sides have, and the (parameter, state key) of those that one side alone has."""

    tensors: list[ComparedTensor]
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
    checks = [SourceCheck(RecordedDigests(side.checkpoint), side.checkpoint.archives) for side in (left, right)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (left_part, left_dtype, right_part, right_dtype), tensors in groups.items():
            parts, dtypes = (left.parts[left_part], right.parts[right_part]), (left_dtype, right_dtype)
            itemsizes = DTYPE_BYTES[left_dtype], DTYPE_BYTES[right_dtype]
            numel = np.array([math.prod(sides[0][tensor].shape) for tensor in tensors], dtype=np.int64)
            room = max(1 << 16, max_memory // 3)  # for both sides; the rest is for tables and for what is computed
            for batch in batches(numel, room // sum(itemsizes)):  # in elements instead of bytes
                buffers = [_read(batch, tensors, parts[i], sides[i], itemsizes[i], checks[i], progress) for i in (0, 1)]
                _compare_batch(batch, tensors, buffers, dtypes, stats, pool)
    for check in checks:
        check.end()
    found = [_compared(tensor, sides[0][tensor], sides[1][tensor], stats.get(tensor)) for tensor in common]
    only_left = [tensor for tensor in sides[0] if tensor not in sides[1]]
    only_right = [tensor for tensor in sides[1] if tensor not in sides[0]]
    return TensorComparison(found, only_left, only_right)


def compare_buffers(left: SavedState, right: SavedState, files: tuple[TorchFile, TorchFile]) -> TensorComparison:
    """Compare the buffers in two model states files."""
    x, y = (_buffers(file, side) for file, side in zip(files, (left, right), strict=True))
    reads = ReadFiles(), ReadFiles()
    found = [_compare_buffer(name, x[name], y[name], reads) for name in x if name in y]
    for side, read in zip((left, right), reads, strict=True):
        compare_files(read, side.checkpoint.archives).check()
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
        for p, param in enumerate(part.params)
        if params is None or fnmatch.fnmatchcase(param.name, params)
        for key, dtype in part.dtypes[p].items()
    }


def _read(
    batch: Batch,
    tensors: Sequence[_Tensor],
    part: SavedPart,
    side: Mapping[_Tensor, Side],
    itemsize: int,
    check: SourceCheck,
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
    check.fill(buffer, rows, at * itemsize, saved, progress)
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


def _buffers(file: TorchFile, state: SavedState) -> dict[str, ModelTensor]:
    """The tensors of the module that hold something; parameters are empty there at stage 3, and whole at 1 and 2."""
    root = file.root
    module = root.get("module") if isinstance(root, dict) else None
    if not isinstance(module, dict):
        return {}
    names = state.models[0].others if state.checkpoint.whole_model else module
    tensors = {str(key): value for key, value in module.items() if key in names and isinstance(value, TensorRef)}
    tensors = {name: ref for name, ref in tensors.items() if ref.numel}
    file.locate(ref.storage.key for ref in tensors.values())
    return {name: stored_tensor(name, ref, file) for name, ref in tensors.items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _compare_buffer(name: str, x: ModelTensor, y: ModelTensor, reads: tuple[ReadFiles, ReadFiles]) -> ComparedTensor:
    stats = None
    if x.shape == y.shape:
        left, right = (read_buffer(one, limit=_NO_LIMIT, read=read) for one, read in zip((x, y), reads, strict=True))
        stats = compare_elements(left, right, x.dtype, y.dtype)
    return _compared((name, BUFFER), x, y, stats)
