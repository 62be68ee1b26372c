"""Long lists and dictionaries of a header as arrays: of integers, of parts of one storage, of named tensors and shapes.

A list of a million tensors takes Python half a gigabyte; as a column it takes 16 MB. To a pickle, a column is an object
that it can neither change nor look into. ``pack_pickle`` makes them: a list of a million tensors takes a pickle 25
opcodes for each, and Python a microsecond and a hundred bytes of memory for each opcode. The native engine follows the
pickle as ``check_opcodes`` does, and makes a shorter one that says the same. Where there is no engine, or it leaves a
pickle to Python, files are read without columns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress

import numpy as np
import numpy.typing as npt

from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import CheckpointError, UnsafePickleError
from zeroelastic.torch_file.inert_objects import DTYPE_BYTES, Dict, StorageRef, Stub, TensorRef, sealed


@sealed
@dataclass(frozen=True, slots=True, eq=False)
class IntColumn:
    """A list of integers; ``values`` has shape ``(num_items,)``."""

    values: Int64Array
    __hash__ = None  # type: ignore[assignment]  # as a list

    def __len__(self) -> int:
        return len(self.values)

    def as_list(self) -> list[object]:
        """The integers one by one."""
        values: list[object] = self.values.tolist()
        return values


@sealed
@dataclass(frozen=True, slots=True, eq=False)
class TensorColumn:
    """A list of one-dimensional tensors without gaps, all of them parts of one storage: where each one begins, and its
    elements.

    Invariant: every part is inside the storage. Both arrays have shape ``(num_tensors,)``, in elements.
    """

    storage: StorageRef
    offset: Int64Array
    numel: Int64Array
    __hash__ = None  # type: ignore[assignment]  # as a list

    def __len__(self) -> int:
        return len(self.offset)

    def as_list(self) -> list[object]:
        """The tensors one by one."""
        places = zip(self.offset.tolist(), self.numel.tolist(), strict=True)
        return [TensorRef(self.storage, self.storage.dtype, offset, (numel,), (1,)) for offset, numel in places]


class NamedColumn(Mapping[object, object]):
    """An OrderedDict by columns: ``names``, and the ``form`` of each value, an index into ``forms``.

    A form is a tuple, a small dictionary, or a ``TensorRef`` that stands for all tensors of its dtype, shape and
    strides: ``key`` and ``numel`` say which storage each one is a part of, as its number and elements, ``offset`` where
    it begins there. Values are made when they are asked for; those of one form without a tensor are one object.

    Invariants: names differ; every tensor is inside its storage. The arrays have shape ``(num_names,)``.
    """

    __slots__ = ("_index", "form", "forms", "key", "names", "numel", "offset")

    def __init__(
        self,
        names: Sequence[str],
        forms: Sequence[object],
        form: Int64Array,
        key: Int64Array,
        numel: Int64Array,
        offset: Int64Array,
    ) -> None:
        self.names, self.forms, self.form = names, forms, form
        self.key, self.numel, self.offset = key, numel, offset
        self._index: dict[object, int] | None = None

    def __setstate__(self, state: object) -> None:
        """Attributes that are set on an OrderedDict, as torch does for module states, are left out."""

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, name: object) -> object:
        if self._index is None:
            self._index = {name: row for row, name in enumerate(self.names)}
        return self.value(self._index[name])

    @property
    def facts(self) -> Int64Array:
        """Of each form: whether it is contiguous, its elements, the bytes of one, and those of one of its storage.

        Zeros for a form that is no tensor.
        """
        facts = [
            (form.is_contiguous, form.numel, DTYPE_BYTES[form.dtype], DTYPE_BYTES[form.storage.dtype])
            if isinstance(form, TensorRef)
            else (0, 0, 0, 0)
            for form in self.forms
        ]
        return np.array(facts, dtype=np.int64).reshape(-1, 4)

    def is_in(self, names: Collection[object]) -> npt.NDArray[np.bool_]:
        """Which names are among these."""
        if not names:
            return np.zeros(len(self.names), dtype=bool)
        return np.fromiter(map(names.__contains__, self.names), dtype=bool, count=len(self.names))

    def only(self, rows: Int64Array) -> dict[object, object]:
        """The values of some names, by their places."""
        return {self.names[row]: self.value(row) for row in rows.tolist()}

    def listed(self) -> list[object]:
        """All values."""
        if (self.key < 0).all():
            return [*map(self.forms.__getitem__, self.form.tolist())]
        return [*map(self.value, range(len(self.names)))]

    def tensor(self, row: int) -> TensorRef:
        """The value of one name, which is a tensor."""
        value = self.value(row)
        assert isinstance(value, TensorRef)
        return value

    @property
    def num_held(self) -> int:
        """The most items that all values hold together, where they are containers."""
        sizes = [len(form) if isinstance(form, (tuple, dict)) else 0 for form in self.forms]
        return len(self.names) * max(sizes, default=0)

    def value(self, row: int) -> object:
        """The value of one name, by its place."""
        form = self.forms[self.form[row]]
        if not isinstance(form, TensorRef):
            return form
        storage = StorageRef(str(self.key[row]), form.storage.dtype, int(self.numel[row]))
        return TensorRef(storage, form.dtype, int(self.offset[row]), form.shape, form.stride)

    def as_dict(self) -> dict[object, object]:
        """The values one by one; no two of them are one object, as those of a module's state."""
        values = (dict(value) if isinstance(value, dict) else value for value in self.listed())
        return dict(zip(self.names, values, strict=True))


_MOST_NESTED = 200  # more than a tree that was checked has; stand-ins may hold themselves


COLUMNS = (IntColumn, TensorColumn, NamedColumn)


def with_lists(tree: object) -> object:
    """A tree in which columns are lists and dictionaries again, also inside of stand-ins, which are changed in place.

    What is in the tree twice is made once, so the result is not larger than the tree with lists was.
    """
    return _with_lists(tree, {}, 0)


def _with_lists(tree: object, made: dict[int, object], depth: int) -> object:
    """``made`` has what was made of each object so far, by the object's identity."""
    if not isinstance(tree, (*COLUMNS, dict, list, tuple, Stub)) or depth > _MOST_NESTED:
        return tree
    if id(tree) in made:
        return made[id(tree)]
    depth += 1
    if isinstance(tree, (IntColumn, TensorColumn)):
        made[id(tree)] = tree.as_list()
    elif isinstance(tree, NamedColumn):
        made[id(tree)] = tree.as_dict()
    elif isinstance(tree, tuple):
        made[id(tree)] = tuple(_with_lists(value, made, depth) for value in tree)
    elif isinstance(tree, list):
        items: list[object] = []
        made[id(tree)] = items
        items += (_with_lists(value, made, depth) for value in tree)
    elif isinstance(tree, dict):
        entries: dict[object, object] = {}
        made[id(tree)] = entries
        entries.update((key, _with_lists(value, made, depth)) for key, value in tree.items())
    else:
        made[id(tree)] = tree
        tree.args = tuple(_with_lists(value, made, depth) for value in tree.args)
        tree.items = [_with_lists(value, made, depth) for value in tree.items]
        tree.attributes = {key: _with_lists(value, made, depth) for key, value in tree.attributes.items()}
    return made[id(tree)]


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
