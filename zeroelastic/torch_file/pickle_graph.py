"""The object tree of a torch.save file that is rewritten: nodes that know how they were made, and nothing else.

Every global of the pickle becomes an inert class that knows nothing but its name, every object a ``Node`` that knows
how it was made; plain containers, numbers and text are themselves. Written back, a tree is the same pickle again, up
to the numbering of its memo, so objects of classes that are not installed here (or not to be trusted) survive in a
file that is rewritten around them. Nothing that a file names is imported or called.

Source: the pickle protocols 2 to 4, and ``torch.serialization._save`` (2.13) for how storages are named.
"""

from __future__ import annotations

import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from zeroelastic.errors import UnsafePickleError, UnsupportedError
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import Extent, TorchFile, pickle_errors, read_pickle
from zeroelastic.torch_file.inert_objects import DTYPE_BYTES, STORAGE_DTYPES, StorageRef, storage_id
from zeroelastic.torch_file.safe_unpickler import PickleFile, check_opcodes

_NO_STATE = object()
_UNTYPED = "UntypedStorage"


class Global(type):
    """A name in a pickle: ``module`` and ``name``. Two of the same name are one object; see ``global_named``.

    A class within a class is an attribute of its ``owner``: protocol 2 has no other way to name it.
    """

    module: str
    name: str
    owner: Global | None
    attribute: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # pickle's REDUCE; NEWOBJ goes to __new__ itself
        if (cls.module, cls.name) == ("builtins", "getattr") and len(args) == 2 and isinstance(args[0], Global):
            return _attribute(args[0], str(args[1]))
        return _call(cls, *args, **kwargs)


class Node(metaclass=Global):
    """An object of a pickle: its class or function, the arguments it was made with, and what was added afterwards.

    ``function`` is the object that was called: its own class, unless another object was called to make it.
    ``items`` were appended, ``pairs`` were set by key, ``state`` was given to ``__setstate__`` if ``has_state``;
    ``by_new`` tells ``cls.__new__(cls, *args)`` from ``function(*args)``.
    """

    module = ""
    name = ""
    owner = None
    attribute = ""

    function: object
    args: tuple[object, ...]
    kwargs: dict[str, object]
    items: list[object]
    pairs: list[tuple[object, object]]
    state: object
    by_new: bool

    def __new__(cls, *args: Any, **kwargs: Any) -> Node:
        node = object.__new__(cls)
        node.function = cls
        node.args, node.kwargs, node.items, node.pairs = args, kwargs, [], []
        node.state, node.by_new = _NO_STATE, True
        return node

    def __call__(self, *args: Any) -> Node:
        """What pickle does with an object that can be called."""
        node = Node.__new__(Node, *args)
        node.function, node.by_new = self, False
        return node

    def append(self, item: object) -> None:
        """What pickle does to something like a list."""
        self.items.append(item)

    def extend(self, items: Iterable[object]) -> None:
        """What pickle does to something like a list."""
        self.items.extend(items)

    def add(self, item: object) -> None:
        """What pickle does to something like a set, of which torch.save writes none."""
        raise UnsafePickleError(f"the pickle adds to a {type(self).module}.{type(self).name}")

    def __setitem__(self, key: object, value: object) -> None:
        self.pairs.append((key, value))

    def __setstate__(self, state: object) -> None:
        self.state = state

    @property
    def has_state(self) -> bool:
        """Whether something was given to ``__setstate__``."""
        return self.state is not _NO_STATE

    def __repr__(self) -> str:
        return f"<{type(self).module}.{type(self).name} (not loaded)>"


def _call(function: Global, *args: Any, **kwargs: Any) -> Node:
    """What calling a global with these arguments gives."""
    node = Node.__new__(function, *args, **kwargs)  # type: ignore[arg-type]
    node.by_new = False
    return node


# Weak, so that what one file names is forgotten with it.
_globals: WeakValueDictionary[tuple[str, str], Global] = WeakValueDictionary()
_attributes: WeakValueDictionary[tuple[Global, str], Global] = WeakValueDictionary()


def global_named(module: str, name: str) -> Global:
    """The global of this name."""
    found = _globals.get((module, name))
    if found is None:
        found = _globals[module, name] = Global("Node", (Node,), {"module": module, "name": name})
    return found


def _attribute(owner: Global, name: str) -> Global:
    """The class or function that another one holds under a name."""
    found = _attributes.get((owner, name))
    if found is None:
        names = {"module": owner.module, "name": f"{owner.name}.{name}", "owner": owner, "attribute": name}
        found = _attributes[owner, name] = Global("Node", (Node,), names)
    return found


class Storage:
    """A storage of a torch.save file: what its elements are, how many, and the bytes of the file it was read from.

    Compared by identity: tensors that share a storage hold the same object. Dtypes without a storage class of torch are
    in an ``UntypedStorage``; ``dtype`` is given then, and the tensors name it.
    """

    __slots__ = ("_dtype", "_find", "kind", "location", "numel")

    def __init__(
        self,
        kind: Global,
        numel: int,
        *,
        location: str = "cpu",
        find: Callable[[], Extent] | None = None,
        dtype: str | None = None,
    ) -> None:
        self.kind, self.numel, self.location, self._find = kind, numel, location, find
        self._dtype = STORAGE_DTYPES[kind.name] if dtype is None else dtype

    @property
    def is_new(self) -> bool:
        """Whether it was read from no file."""
        return self._find is None

    @property
    def extent(self) -> Extent | None:
        """Its bytes in the file that it was read from, if it was: looked up there. Raises CheckpointError."""
        return None if self._find is None else self._find()

    @property
    def dtype(self) -> str:
        """Its element type, a key of ``DTYPE_BYTES``."""
        return self._dtype

    @property
    def stated_numel(self) -> int:
        """The number of elements that a pickle states: of an ``UntypedStorage``, that of its bytes."""
        return self.nbytes if self.kind.name == _UNTYPED else self.numel

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.numel * DTYPE_BYTES[self.dtype]

    def __repr__(self) -> str:
        return f"<Storage of {self.numel} {self.dtype}>"


def new_storage(dtype: str, numel: int) -> Storage:
    """A storage whose bytes are yet to come. Raises UnsupportedError for a dtype that torch.save does not write."""
    if dtype not in DTYPE_BYTES:
        raise UnsupportedError(f"a storage of {dtype} cannot be written.")
    for kind, known in STORAGE_DTYPES.items():
        if known == dtype and kind != _UNTYPED:
            return Storage(global_named("torch", kind), numel)
    return Storage(global_named("torch.storage", _UNTYPED), numel, dtype=dtype)


def tensor(storage: Storage, offset: int, shape: Sequence[int], *, requires_grad: bool = False) -> Node:
    """A contiguous tensor of ``shape`` that begins ``offset`` elements into its storage."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    parts = (storage, offset, tuple(shape), tuple(strides), requires_grad, ordered_dict([]))
    if storage.dtype == STORAGE_DTYPES[storage.kind.name]:
        return _call(global_named("torch._utils", "_rebuild_tensor_v2"), *parts)
    return _call(global_named("torch._utils", "_rebuild_tensor_v3"), *parts, global_named("torch", storage.dtype))


def ordered_dict(pairs: Iterable[tuple[object, object]]) -> Node:
    """A ``collections.OrderedDict``."""
    node = _call(global_named("collections", "OrderedDict"))
    node.pairs.extend(pairs)
    return node


def torch_size(shape: Sequence[int]) -> Node:
    """A ``torch.Size``."""
    return _call(global_named("torch", "Size"), tuple(shape))


def called(module: str, name: str, *args: object) -> Node:
    """What a call of a function or class gives."""
    return _call(global_named(module, name), *args)


def instance(module: str, name: str, attributes: Mapping[str, object]) -> Node:
    """An object of a class without ``__init__`` arguments, with these attributes."""
    node = Node.__new__(global_named(module, name))  # type: ignore[arg-type]
    node.state = dict(attributes)
    return node


def entry(tree: object, *keys: object) -> object:
    """What is under these keys of nested dictionaries, plain or OrderedDict nodes; None where one is missing."""
    for key in keys:
        if isinstance(tree, dict):
            tree = tree.get(key)
        elif isinstance(tree, Node):
            tree = dict(tree.pairs).get(key) if all(isinstance(k, str) for k, _ in tree.pairs) else None
        else:
            return None
    return tree


def pairs_of(tree: object) -> Mapping[object, object]:
    """A dictionary or an OrderedDict node as a dictionary; empty for anything else."""
    if isinstance(tree, dict):
        return tree
    return dict(tree.pairs) if isinstance(tree, Node) else {}


_MAX_GLOBALS = 4096


def read_graph(path: FilePath) -> object:
    """The object tree of a torch.save file; its storages know where their bytes are, which are not read.

    Raises MissingFileError, CheckpointError for a damaged file, UnsafePickleError for a pickle that torch.save does
    not write.
    """
    data, file = read_pickle(path)
    with pickle_errors(path):
        check_opcodes(data)
        return _GraphUnpickler(data, file).load()


class _GraphUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, file: TorchFile) -> None:
        super().__init__(PickleFile(data), encoding="utf-8")
        self._file = file
        self._old_names = data[:1] != b"\x80" or data[1] < 3
        self._storages: dict[str, Storage] = {}
        self._named: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Global:
        self._named.add((module, name))
        if len(self._named) > _MAX_GLOBALS:
            raise UnsafePickleError(f"the pickle names more than {_MAX_GLOBALS} globals")
        if "\n" in module or "\n" in name:
            raise UnsafePickleError("the pickle has a global whose name has two lines")
        if self._old_names:  # protocol 2 has Python 2's names of some modules
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        return global_named(module, name)

    def persistent_load(self, pid: object) -> Storage:
        kind, key, location, numel = storage_id(pid)
        if not isinstance(kind, Global) or kind.name not in STORAGE_DTYPES or not isinstance(location, str):
            raise UnsafePickleError("a persistent id does not describe a torch storage")
        if key not in self._storages:
            find = partial(self._file.storage_extent, StorageRef(key, STORAGE_DTYPES[kind.name], numel))
            self._storages[key] = Storage(kind, numel, location=location, find=find)
        return self._storages[key]
