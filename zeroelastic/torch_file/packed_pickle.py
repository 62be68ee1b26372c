"""The pickle of a large file: checked and packed by the native engine, its long lists as columns.

A list of a million tensors takes a pickle 25 opcodes for each of them, and Python a microsecond and a hundred bytes of
memory for each opcode. The engine follows the pickle as ``pickle_limits`` does, and makes a shorter one of it that says
the same. Where there is no engine, or it leaves a pickle to Python, files are read without columns.
"""

from __future__ import annotations

import sys

import numpy as np

from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import CheckpointError, UnsafePickleError
from zeroelastic.torch_file.columns import IntColumn, TensorColumn
from zeroelastic.torch_file.inert_objects import TensorRef, sealed

LONG_LIST = 4096
"""Items from which a list is worth a column."""

LARGE_PICKLE = 16 << 10
"""Bytes from which a pickle is worth loading the engine: Python checks fewer in the same time."""

_ENGINE = "zeroelastic.executors.native_executor"


@sealed
class TensorColumnMaker:
    """What a packed pickle calls with the first tensor of a list, to get the column."""

    __slots__ = ("places",)

    def __init__(self, places: Int64Array) -> None:
        """``places`` has the offset and the elements of each tensor: shape ``(num_tensors * 2,)``."""
        self.places = places

    def __call__(self, first: object) -> TensorColumn:
        offset, numel = np.ascontiguousarray(self.places.reshape(-1, 2).T)
        if not isinstance(first, TensorRef) or (first.offset, first.shape) != (offset[0], (numel[0],)):
            raise UnsafePickleError("a list of tensors does not begin with a tensor")
        if first.dtype != first.storage.dtype or (offset > first.storage.numel - numel).any():
            raise CheckpointError(f"a tensor reaches behind its storage of {first.storage.numel} elements")
        return TensorColumn(first.storage, offset, numel)


def is_worth_packing(num_bytes: int, *, large: int) -> bool:
    """Whether the engine is faster for a pickle: one of ``large`` bytes, or any where it has been imported already."""
    return num_bytes >= large or _ENGINE in sys.modules


def pack_pickle(data: bytes, *, long_list: int) -> tuple[bytes, list[object]] | None:
    """A pickle that is in proportion to its size, packed, and the objects of its persistent ids 0, 1, ...

    Lists of at least ``long_list`` items, if that is not 0, are columns where they are of integers that int64 holds, or
    of parts of one storage. None for a pickle that the engine does not take, of which ``check_opcodes`` says whether it
    is damaged; one that it takes may still be damaged in other ways. Raises MemoryError.
    """
    from zeroelastic.executors import native_executor  # most commands that read small headers need no engine
    from zeroelastic.executors.build_info import is_usable

    if not is_usable("native"):
        return None
    packed = native_executor.pack_pickle(data, long_list=long_list)
    if packed is None:
        return None
    return packed[0], [TensorColumnMaker(v) if is_tensors else IntColumn(v) for is_tensors, v in packed[1]]
