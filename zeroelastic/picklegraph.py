"""A torch.save file's object tree, kept and written back without loading anything of it.

Every global of the pickle becomes an inert class that knows nothing but its name, every object a ``Node`` that knows
how it was made; plain containers, numbers and text are themselves. Written back, a tree is the same pickle again, up
to the numbering of its memo, so objects of classes that are not installed here (or not to be trusted) survive in a
file that is rewritten around them. Nothing that a file names is imported or called.

Source: the pickle protocols 2 to 4, and ``torch.serialization._save`` (2.13) for how storages are named.
"""

from __future__ import annotations

import io
import pickle
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from zeroelastic.errors import CheckpointError, UnsafePickleError, UnsupportedError
from zeroelastic.storage import FilePath
from zeroelastic.torchfile import (
    DTYPE_BYTES,
    STORAGE_DTYPES,
    Extent,
    StorageRef,
    TorchFile,
    check_opcodes,
    read_pickle,
)

_NO_STATE = object()
_BATCH = 1000
_MOST_NESTED = 250
_MOST_GLOBALS = 4096


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

    ``function`` is what was called: its own class, but for what another object was called for.
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

    Compared by identity: tensors that share a storage hold the same object.
    """

    __slots__ = ("_find", "kind", "location", "numel")

    def __init__(
        self, kind: Global, numel: int, *, location: str = "cpu", find: Callable[[], Extent] | None = None
    ) -> None:
        self.kind, self.numel, self.location, self._find = kind, numel, location, find

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
        """Its element type, as ``torchfile.DTYPE_BYTES`` has it."""
        return STORAGE_DTYPES[self.kind.name]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.numel * DTYPE_BYTES[self.dtype]

    def __repr__(self) -> str:
        return f"<Storage of {self.numel} {self.dtype}>"


def new_storage(dtype: str, numel: int) -> Storage:
    """A storage whose bytes are yet to come. Raises UnsupportedError for a dtype without a storage class of torch."""
    for kind, known in STORAGE_DTYPES.items():
        if known == dtype and kind != "UntypedStorage":
            return Storage(global_named("torch", kind), numel)
    raise UnsupportedError(f"a storage of {dtype} cannot be written.")


def tensor(storage: Storage, offset: int, shape: Sequence[int], *, requires_grad: bool = False) -> Node:
    """A contiguous tensor of ``shape`` that begins ``offset`` elements into its storage."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    rebuild = global_named("torch._utils", "_rebuild_tensor_v2")
    return _call(rebuild, storage, offset, tuple(shape), tuple(strides), requires_grad, ordered_dict([]))


def ordered_dict(pairs: Iterable[tuple[object, object]]) -> Node:
    """A ``collections.OrderedDict``."""
    node = _call(global_named("collections", "OrderedDict"))
    node.pairs.extend(pairs)
    return node


def torch_size(shape: Sequence[int]) -> Node:
    """A ``torch.Size``."""
    return _call(global_named("torch", "Size"), tuple(shape))


def read_graph(path: FilePath) -> object:
    """The object tree of a torch.save file; its storages know where their bytes are, which are not read.

    Raises MissingFileError, CheckpointError for a damaged file, UnsafePickleError for a pickle that torch.save does
    not write.
    """
    data, file = read_pickle(path)
    try:
        check_opcodes(data)
        return _GraphUnpickler(data, file).load()
    except CheckpointError as error:
        raise error if str(path) in str(error) else type(error)(f"{path}: {error}") from None
    except MemoryError:  # of this machine, not of the file
        raise
    except RecursionError:
        raise CheckpointError(f"{path}: the pickle nests too deeply. The file is damaged.") from None
    except Exception as error:  # a damaged pickle may fail in any way; nothing of it has run
        raise CheckpointError(f"{path}: the pickle cannot be read ({error}). The file is damaged.") from None


class _GraphUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, file: TorchFile) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._file = file
        self._old_names = data[:1] != b"\x80" or data[1] < 3
        self._storages: dict[str, Storage] = {}
        self._named: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Global:
        self._named.add((module, name))
        if len(self._named) > _MOST_GLOBALS:
            raise UnsafePickleError(f"the pickle names more than {_MOST_GLOBALS} globals")
        if "\n" in module or "\n" in name:
            raise UnsafePickleError("the pickle has a global whose name has two lines")
        if self._old_names:  # protocol 2 calls some modules as Python 2 did; whoever loads knows both
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        return global_named(module, name)

    def persistent_load(self, pid: object) -> Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise UnsafePickleError("a persistent id is not a torch storage")
        _, kind, key, location, numel = pid
        if not isinstance(kind, Global) or kind.name not in STORAGE_DTYPES or not isinstance(location, str):
            raise UnsafePickleError("a persistent id does not describe a torch storage")
        if not isinstance(key, str) or not key.isalnum() or type(numel) is not int or not 0 <= numel < 1 << 62:
            raise UnsafePickleError("a persistent id does not describe a torch storage")
        if key not in self._storages:
            find = partial(self._file.storage_extent, StorageRef(key, STORAGE_DTYPES[kind.name], numel))
            self._storages[key] = Storage(kind, numel, location=location, find=find)
        return self._storages[key]


def walk_storages(root: object) -> Iterator[Storage]:
    """Every storage of a graph once, in the order in which a pickle of it names them."""
    return iter(write_graph(root)[1])


def write_graph(root: object) -> tuple[bytes, list[Storage]]:
    """The pickle of a graph, and its storages: storage number i is record ``data/i`` of the archive.

    Of protocol 2, which torch.save writes, or 4 where a name has dots in it (a class within a class).

    Raises UnsupportedError for an object that is neither a Node nor plain, and for one that nests too deeply.
    """
    writer = _GraphWriter()
    return writer.pickle(root), writer.storages


class _GraphWriter:
    """Pickles a graph; objects that are met again are taken from the memo, text by value."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self._numbers: dict[int, int] = {}
        self._described: dict[int, tuple[object, ...]] = {}  # by number: what a pickle says of a storage
        self._out = bytearray(b"\x80\x02")
        self._memo: dict[object, int] = {}
        self._kept: list[object] = []  # whatever the memo knows by its id must live on
        self._depth = 0

    def pickle(self, root: object) -> bytes:
        self._save(root)
        self._out += b"."
        return bytes(self._out)

    def _save(self, value: object) -> None:
        kind = type(value)
        if kind is str:
            self._text(value)  # type: ignore[arg-type]
        elif kind is int:
            self._int(value)  # type: ignore[arg-type]
        elif id(value) in self._memo:
            self._get(self._memo[id(value)])
        elif value is None:
            self._out += b"N"
        elif kind is bool:
            self._out += b"\x88" if value else b"\x89"
        elif kind is float:
            self._out += b"G" + struct.pack(">d", value)
        elif kind is Global:
            self._global(value)  # type: ignore[arg-type]
        else:
            self._depth += 1
            if self._depth > _MOST_NESTED:
                raise UnsupportedError(f"objects nest more than {_MOST_NESTED} deep, which is not rewritten.")
            self._object(value)
            self._depth -= 1

    def _object(self, value: object) -> None:
        if isinstance(value, Node):
            self._node(value)
        elif type(value) is dict:
            self._out += b"}"
            self._put(value)
            self._pairs(list(value.items()))
        elif type(value) is list:
            self._out += b"]"
            self._put(value)
            self._items(value)
        elif type(value) is tuple:
            self._tuple(value)
        elif isinstance(value, Storage):
            self._storage(value)
        elif type(value) is bytes:
            self._reduce(value, global_named("_codecs", "encode"), (value.decode("latin1"), "latin1"))
        elif type(value) in (set, frozenset):
            assert isinstance(value, (set, frozenset))
            self._reduce(value, global_named("builtins", type(value).__name__), (list(value),))
        elif isinstance(value, bytearray):
            self._reduce(value, global_named("builtins", "bytearray"), (bytes(value),))
        else:
            raise UnsupportedError(f"a {type(value).__name__} cannot be written into a checkpoint.")

    def _node(self, node: Node) -> None:
        if node.by_new:
            self._save(node.function)
            self._save(node.args)
            if node.kwargs:
                self._save(node.kwargs)
                self._out += b"\x92"
            else:
                self._out += b"\x81"
            self._put(node)
        else:
            self._reduce(node, node.function, node.args)
        if node.items:
            self._items(node.items)
        if node.pairs:
            self._pairs(node.pairs)
        if node.has_state:
            self._save(node.state)
            self._out += b"b"

    def _reduce(self, value: object, function: object, args: tuple[object, ...]) -> None:
        self._save(function)
        self._save(args)
        self._out += b"R"
        self._put(value)

    def _storage(self, storage: Storage) -> None:
        number = self._numbers.get(id(storage))
        if number is None:
            number = self._numbers[id(storage)] = len(self.storages)
            self.storages.append(storage)
            self._described[number] = ("storage", storage.kind, str(number), storage.location, storage.numel)
        self._save(self._described[number])
        self._out += b"Q"

    def _tuple(self, value: tuple[object, ...]) -> None:
        if not value:
            self._out += b")"
            return
        if len(value) > 3:
            self._out += b"("
        for item in value:
            self._save(item)
        if all(type(item) is int for item in value):  # a shape or a stride: shorter than what remembering it takes
            self._out += b"t" if len(value) > 3 else (b"\x85", b"\x86", b"\x87")[len(value) - 1]
            return
        known = self._memo.get(id(value))
        if known is not None:  # it holds itself, by way of a list; its first writing stands
            self._out += b"1" if len(value) > 3 else b"0" * len(value)
            self._get(known)
            return
        self._out += b"t" if len(value) > 3 else (b"\x85", b"\x86", b"\x87")[len(value) - 1]
        self._put(value)

    def _items(self, items: Sequence[object]) -> None:
        for at in range(0, len(items), _BATCH):
            self._out += b"("
            for item in items[at : at + _BATCH]:
                self._save(item)
            self._out += b"e"

    def _pairs(self, pairs: Sequence[tuple[object, object]]) -> None:
        for at in range(0, len(pairs), _BATCH):
            self._out += b"("
            for key, value in pairs[at : at + _BATCH]:
                self._save(key)
                self._save(value)
            self._out += b"u"

    def _int(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self._out += b"K" + bytes([value])
        elif 0 <= value < 1 << 16:
            self._out += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self._out += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) > 255:
                raise UnsupportedError("an integer of more than 2000 bits cannot be written into a checkpoint.")
            self._out += b"\x8a" + bytes([len(data)]) + data

    def _text(self, value: str) -> None:
        known = self._memo.get(value)
        if known is not None:
            self._get(known)
            return
        data = value.encode("utf-8", "surrogatepass")
        self._out += b"X" + struct.pack("<I", len(data)) + data
        self._remember(value)

    def _global(self, value: Global) -> None:
        known = self._memo.get(value)
        if known is not None:
            self._get(known)
            return
        if value.owner is not None:
            self._reduce(value, global_named("builtins", "getattr"), (value.owner, value.attribute))
            return
        if "." in value.name:
            self._out[1] = 4
        self._out += f"c{value.module}\n{value.name}\n".encode()
        self._remember(value)

    def _put(self, value: object) -> None:
        self._kept.append(value)
        self._remember(id(value))

    def _remember(self, key: object) -> None:
        number = self._memo[key] = len(self._memo)
        self._out += b"q" + bytes([number]) if number < 1 << 8 else b"r" + struct.pack("<I", number)

    def _get(self, number: int) -> None:
        self._out += b"h" + bytes([number]) if number < 1 << 8 else b"j" + struct.pack("<I", number)


def entry(tree: object, *keys: object) -> object:
    """What lies under these keys of nested dictionaries, plain or OrderedDict nodes; None where one is missing."""
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
