"""The pickle of a large file: checked and packed by the native engine, its long lists and dictionaries as columns.

A list of a million tensors takes a pickle 25 opcodes for each of them, and Python a microsecond and a hundred bytes of
memory for each opcode. The engine follows the pickle as ``pickle_limits`` does, and makes a shorter one of it that says
the same. Where there is no engine, or it leaves a pickle to Python, files are read without columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import compress

import numpy as np

from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import CheckpointError, UnsafePickleError
from zeroelastic.torch_file.columns import IntColumn, NamedColumn, TensorColumn
from zeroelastic.torch_file.inert_objects import DTYPE_BYTES, TensorRef, sealed
from zeroelastic.torch_file.rebuild_functions import Dict

LONG_LIST = 4096
"""Items from which a list or a dictionary is worth a column."""

LARGE_PICKLE = 16 << 10
"""Bytes from which a pickle is worth loading the engine: Python checks fewer in the same time."""

_MAX_ITEMS = 32  # of a tuple or dictionary that many names have as their value
_MAX_NUMEL = 1 << 58


@sealed
class TensorColumnMaker:
    """What a packed pickle calls with the first tensor of a list, to get the column."""

    __slots__ = ("places",)

    def __init__(self, places: Int64Array) -> None:
        """``places`` has the offset and the elements of each tensor: shape ``(num_tensors * 2,)``."""
        self.places = places

    def __call__(self, first: object) -> TensorColumn:
        offset, numel = self.places.reshape(-1, 2).T
        if not isinstance(first, TensorRef) or (first.offset, first.shape) != (offset[0], (numel[0],)):
            raise UnsafePickleError("a list of tensors does not begin with a tensor")
        if first.dtype != first.storage.dtype or (offset > first.storage.numel - numel).any():
            raise CheckpointError(f"a tensor reaches behind its storage of {first.storage.numel} elements")
        return TensorColumn(first.storage, offset, numel)


@sealed
class NamedColumnMaker:
    """What a packed pickle calls with an OrderedDict that has no entries yet and with its names, to get the column.

    Behind the first name of each form the list has its value. Raises UnsafePickleError where the column would not be
    what the dictionary is.
    """

    __slots__ = ("columns",)

    def __init__(self, rows: Int64Array, *, tensors: bool) -> None:
        """``rows`` has the form of each value, and with ``tensors`` also key, elements and offset of each.

        Shape ``(num_names,)``, with tensors ``(num_names * 4,)``.
        """
        nothing = (np.broadcast_to(np.int64(fill), rows.shape) for fill in (-1, 0, 0))
        self.columns = tuple(rows.reshape(-1, 4).T) if tensors else (rows, *nothing)

    def __call__(self, empty: object, items: object) -> NamedColumn:
        form, key, numel, offset = self.columns
        first = np.flatnonzero(np.diff(np.maximum.accumulate(form), prepend=-1))  # the rows of new forms
        places = first + np.arange(1, len(first) + 1)
        if type(empty) is not Dict or not isinstance(items, list) or len(items) != len(form) + len(places):
            raise UnsafePickleError("a column is not made of an OrderedDict")
        is_name = np.ones(len(items), dtype=bool)
        is_name[places] = False
        names, forms = [*compress(items, is_name.tolist())], [items[place] for place in places.tolist()]
        if {*map(type, names)} != {str} or len({*names}) != len(names):
            raise UnsafePickleError("the names of a column are not names")
        is_tensor = np.array([isinstance(value, TensorRef) for value in forms], dtype=bool)
        if (is_tensor[form] != (key >= 0)).any() or not all(map(_is_form, forms)):
            raise UnsafePickleError("a column has values that are neither tensors nor plain")
        column = NamedColumn(names, forms, form, key, numel, offset)
        if any(column.value(row) != value for value, row in zip(forms, first.tolist(), strict=True)):
            raise UnsafePickleError("a column has other tensors than the file")
        if ((numel < 0) | (offset < 0) | (np.maximum(numel, offset) >= _MAX_NUMEL)).any():
            raise UnsafePickleError("a column has tensors of a size that no file has")
        itemsize, storage_itemsize, span = np.array([*map(_bytes_of, forms)], dtype=np.int64).T
        if (offset * itemsize[form] + span[form] > numel * storage_itemsize[form]).any():
            raise CheckpointError("a tensor reaches behind its storage")
        return column


@sealed
class StateMaker:
    """What a packed pickle calls in place of making the state of an OrderedDict, of which nothing is read."""

    __slots__ = ()

    def __call__(self, empty: object, forms: object) -> None:
        if type(empty) is not Dict or not isinstance(forms, list) or not all(map(_is_form, forms)):
            raise UnsafePickleError("a state is not made of an OrderedDict")


def _bytes_of(form: object) -> tuple[int, int, int]:
    """Bytes of an element of a tensor, and of its storage, and those from its first element to behind its last."""
    if not isinstance(form, TensorRef):
        return 1, 1, 0
    last = sum((size - 1) * stride for size, stride in zip(form.shape, form.stride, strict=True))
    itemsize = DTYPE_BYTES[form.dtype]
    return itemsize, DTYPE_BYTES[form.storage.dtype], (last + 1) * itemsize if form.numel else 0


def _is_form(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) <= _MAX_ITEMS and all(type(n) is int for n in value)
    if type(value) is dict:
        return len(value) <= _MAX_ITEMS and {*map(type, value)} <= {str} and {*map(type, value.values())} <= {int}
    return isinstance(value, TensorRef) and value.numel < _MAX_NUMEL


def pack_pickle(data: bytes, *, long_list: int) -> tuple[memoryview, list[object]] | None:
    """A pickle that is in proportion to its size, packed, and the objects of its persistent ids 0, 1, ...

    Lists of at least ``long_list`` items, if that is not 0, are columns where they are of integers that int64 holds, or
    of parts of one storage; OrderedDicts of as many, where their values are tensors or shapes. None for a pickle that
    the engine does not take, of which ``check_opcodes`` says whether it is damaged; one that it takes may still be
    damaged in other ways. Raises MemoryError.
    """
    from zeroelastic.executors import native_executor  # most commands that read small headers need no engine
    from zeroelastic.executors.build_info import is_usable

    if not is_usable("native"):
        return None
    packed = native_executor.pack_pickle(data, long_list=long_list)
    if packed is None:
        return None
    return packed[0], [_COLUMNS[kind](values) for kind, values in packed[1]]


_COLUMNS: tuple[Callable[[Int64Array], object], ...] = (
    IntColumn,
    TensorColumnMaker,
    partial(NamedColumnMaker, tensors=True),
    partial(NamedColumnMaker, tensors=False),
    lambda _: StateMaker(),
)
"""By the number that the engine gives each kind of column."""
