"""Long lists of a header as arrays: of integers, and of tensors that are parts of one storage.

A list of a million tensors takes Python half a gigabyte; as a column it takes 16 MB. To a pickle, a column is an object
that it can neither change nor look into.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroelastic.core.layout import Int64Array
from zeroelastic.torch_file.inert_objects import StorageRef, Stub, TensorRef, sealed


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


_MOST_NESTED = 200  # more than a tree that was checked has; stand-ins may hold themselves


def with_lists(tree: object) -> object:
    """A tree in which columns are lists again, also inside of stand-ins, which are changed in place.

    What is in the tree twice is made once, so the result is not larger than the tree with lists was.
    """
    return _with_lists(tree, {}, 0)


def _with_lists(tree: object, made: dict[int, object], depth: int) -> object:
    """``made`` has what was made of each object so far, by the object's identity."""
    if not isinstance(tree, (IntColumn, TensorColumn, dict, list, tuple, Stub)) or depth > _MOST_NESTED:
        return tree
    if id(tree) in made:
        return made[id(tree)]
    depth += 1
    if isinstance(tree, (IntColumn, TensorColumn)):
        made[id(tree)] = tree.as_list()
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
