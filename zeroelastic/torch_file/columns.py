"""Long lists and dictionaries of a header as arrays: of integers, of parts of one storage, of named tensors and shapes.

A list of a million tensors takes Python half a gigabyte; as a column it takes 16 MB. To a pickle, a column is an object
that it can neither change nor look into.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zeroelastic.core.layout import Int64Array
from zeroelastic.torch_file.inert_objects import DTYPE_BYTES, StorageRef, Stub, TensorRef, sealed


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

    Invariant: every part lies inside the storage. Both arrays have shape ``(num_tensors,)``, in elements.
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

    Invariants: names differ; every tensor lies inside its storage. The arrays have shape ``(num_names,)``.
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
