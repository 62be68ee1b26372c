"""The weights of the module in a save of stages 1 and 2, compared with the master weights that they are rounded from.

DeepSpeed makes the weights from the master weights in each optimizer step. A job may change single weights after the
step, by a mask or a limit: weights of zero, and the largest of a tensor, are not compared. Schedule-free optimizers
leave other weights in ``eval()``: where the optimizer has as many steps as the module states count, weights that differ
are no contradiction.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zeroelastic.checkpoint.contradictions import MIXED, steps_agree
from zeroelastic.checkpoint.model_states import ModuleHeader
from zeroelastic.checkpoint.optimizer_file import FP32, OptimizerHeader
from zeroelastic.checkpoint.saved_state import TensorSet
from zeroelastic.errors import CheckpointError, counted, some
from zeroelastic.io.paths import FilePath, local_path
from zeroelastic.io.storage import Blocks, open_blocks
from zeroelastic.torch_file.header import DTYPE_BYTES

SAMPLE = 64
"""How many elements of each parameter a load compares."""

_WINDOW = 1 << 20
_ROUNDING = {"float32": 0.0, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""By how much of its master weight a weight of a dtype differs at most."""
_LEAST = 2.0**-24  # the difference of two float16 next to zero


class ComparedWeights(NamedTuple):
    """The names of parameters whose weights were compared, and of the ones whose weights differ."""

    compared: frozenset[str] = frozenset()
    differing: frozenset[str] = frozenset()


def compare_weights(
    part: TensorSet, ranks: Iterable[int], model: ModuleHeader, *, sample: int | None = None
) -> ComparedWeights:
    """Compare the weights in a file of the whole module with the master weights in the files of some ranks.

    ``sample`` is the number of elements of each rank's part of a parameter, by default all. Files behind a URL, and
    layouts with slices, are left out. Raises CheckpointError for a file that ends early, UnreadableError.
    """
    compared: set[str] = set()
    differing: set[str] = set()
    if part.layout.slices is not None or local_path(model.path) is None:
        return ComparedWeights()
    with ExitStack() as stack:
        files: dict[FilePath, Blocks] = {}

        def read(path: FilePath, dtype: str, offset: int, numel: int) -> npt.NDArray[np.float32]:
            if path not in files:
                files[path] = stack.enter_context(open_blocks(path))
            data = files[path].read(offset, numel * DTYPE_BYTES[dtype])
            if len(data) != numel * DTYPE_BYTES[dtype]:
                raise CheckpointError(f"{path}: ends at byte {offset + len(data)}. The file is truncated.")
            return _as_float32(data, dtype)

        for rank in ranks:
            tensors, rows = part.rank_rows(rank)
            columns = (column.tolist() for column in (rows.target, rows.file, rows.file_offset, rows.numel, rows.start))
            for number, file, offset, numel, start in zip(*columns, strict=True):
                tensor = tensors[number]
                dtype, weight = model.weight_places.get(tensor.param.name, ("", 0))
                if tensor.key != FP32 or {tensor.dtype, dtype} - _ROUNDING.keys():
                    continue
                first = 0 if sample is None or numel <= sample else (numel - sample) // 2
                end = numel if sample is None else min(numel, first + sample)
                for at in range(first, end, _WINDOW):
                    count = min(_WINDOW, end - at)
                    master = read(rows.paths[file], tensor.dtype, offset + at * DTYPE_BYTES[tensor.dtype], count)
                    place = weight + (start + at) * DTYPE_BYTES[dtype]
                    comparable, differs = _differ(read(model.path, dtype, place, count), master, dtype)
                    compared |= {tensor.param.name} if comparable else set()
                    differing |= {tensor.param.name} if differs else set()
    return ComparedWeights(frozenset(compared), frozenset(differing))


def other_weights(model: ModuleHeader, shard: OptimizerHeader, found: ComparedWeights) -> str | None:
    """Whether the weights of the module and the master weights are of two saves."""
    differing, compared = len(found.differing), len(found.compared)
    if not differing or 2 * differing < compared or steps_agree(model, shard):
        return None
    return (
        f"{model.path}: the weights of {differing} of {counted(compared, 'parameter')} are not what the master weights "
        f"in the optimizer files are rounded to, such as {some(sorted(found.differing), 2)}. {MIXED} (If the job "
        'changes weights after each step: "verify": "off" in the "zeroelastic" block loads the master weights.)'
    )


@np.errstate(invalid="ignore", over="ignore")
def _differ(weight: npt.NDArray[np.float32], master: npt.NDArray[np.float32], dtype: str) -> tuple[bool, bool]:
    """Whether any weights can be compared, and whether one of these is not what its master weight is rounded to."""
    size = np.abs(weight)
    comparable = (size > 0) & (size < size.max(initial=0)) & np.isfinite(weight) & np.isfinite(master)
    rounding = _ROUNDING[dtype]
    allowed = np.abs(master) * rounding + (_LEAST if rounding else 0)
    return bool(comparable.any()), bool((comparable & (np.abs(weight - master) > allowed)).any())


def _as_float32(data: bytes, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        bits: npt.NDArray[np.uint32] = np.frombuffer(data, dtype="<u2").astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    return np.frombuffer(data, dtype={"float32": "<f4", "float16": "<f2"}[dtype]).astype(np.float32)
