"""The object tree of a torch.save file that is rewritten, read and written without torch and without its payload.

Every global of the pickle becomes an inert class that knows nothing but its name, every object a ``Node`` that knows
how it was made; plain containers, numbers and text are themselves. Written back, a tree is the same pickle again, up
to the numbering of its memo, so objects of classes that are not installed here (or not to be trusted) survive in a
file that is rewritten around them. Nothing that a file names is imported or called.

A file is laid out first: its records are named and placed, its space is reserved. Any engine then moves the payload to
``Archive.offsets``, and ``finish`` writes the headers, with the checksums of the payload. Until then the file has no
directory and is no archive, so it cannot be mistaken for a complete one.

Source: the pickle protocols 2 to 4; ``torch.serialization._save`` (2.13) for how storages are named, and
PyTorchStreamWriter (caffe2/serialize/inline_container.cc), which aligns payload to 64 bytes.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from zeroelastic.errors import UnsafePickleError, UnsupportedError
from zeroelastic.io.atomic import name_in_errors, reserve_space, write_fully
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import Extent, TorchFile, pickle_errors, read_pickle
from zeroelastic.torch_file.inert_objects import DTYPE_BYTES, STORAGE_DTYPES, StorageRef, storage_id
from zeroelastic.torch_file.safe_unpickler import check_opcodes, global_names, pickle_file
from zeroelastic.torch_file.zip_directory import (
    END,
    END64,
    END64_LOCATOR,
    END64_MARK,
    END_MARK,
    ENTRY,
    ENTRY_MARK,
    FIELD,
    LOCAL,
    LOCAL_MARK,
    LOCATOR_MARK,
    MANY,
    PADDING,
    UTF8_NAMES,
    WIDE,
    ZIP64,
)

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

    def __call__(cls, *args: Any) -> Any:  # pickle's REDUCE; NEWOBJ goes to __new__ itself
        if (cls.module, cls.name) == ("builtins", "getattr") and len(args) == 2 and isinstance(args[0], Global):
            return _attribute(args[0], str(args[1]))
        return _call(cls, *args)


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


def _call(function: Global, *args: Any) -> Node:
    """What calling a global with these arguments gives."""
    node = Node.__new__(function, *args)  # type: ignore[arg-type]
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


@dataclass(eq=False, slots=True, repr=False)
class Storage:
    """A storage of a torch.save file: what its elements are, how many, and where their bytes are, if it was read.

    Compared by identity: tensors that share a storage hold the same object. ``kind`` is its class in torch, ``dtype``
    a key of ``DTYPE_BYTES``. Dtypes without a storage class of torch are in an ``UntypedStorage``, and the tensors name
    them.
    """

    kind: Global
    numel: int
    dtype: str
    location: str = "cpu"
    find: Callable[[], Extent] | None = None
    data: bytes | None = None
    """Its bytes, where it was made and they are known."""

    @property
    def extent(self) -> Extent | None:
        """Its bytes in the file that it was read from, if it was: looked up there. Raises CheckpointError."""
        return None if self.find is None else self.find()

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.numel * DTYPE_BYTES[self.dtype]

    def __repr__(self) -> str:
        return f"<Storage of {self.numel} {self.dtype}>"


def new_storage(dtype: str, numel: int, data: bytes | None = None) -> Storage:
    """A storage of these bytes, or whose bytes are yet to come.

    Raises UnsupportedError for a dtype that torch.save does not write.
    """
    if dtype not in DTYPE_BYTES:
        raise UnsupportedError(f"a storage of {dtype} cannot be written.")
    for kind, known in STORAGE_DTYPES.items():
        if known == dtype and kind != _UNTYPED:
            return Storage(global_named("torch", kind), numel, dtype, data=data)
    return Storage(global_named("torch.storage", _UNTYPED), numel, dtype, data=data)


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


def storage_of(value: object) -> Storage | None:
    """The storage of a tensor; None for another object."""
    storage = value.args[0] if isinstance(value, Node) and value.args else None
    return storage if isinstance(storage, Storage) else None


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
        super().__init__(pickle_file(data), encoding="utf-8")
        self._file = file
        self._global_name = global_names(data)
        self._storages: dict[str, Storage] = {}
        self._named: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Global:
        self._named.add((module, name))
        if len(self._named) > _MAX_GLOBALS:
            raise UnsafePickleError(f"the pickle names more than {_MAX_GLOBALS} globals")
        if "\n" in module or "\n" in name:
            raise UnsafePickleError("the pickle has a global whose name has two lines")
        return global_named(*self._global_name(module, name))

    def persistent_load(self, pid: object) -> Storage:
        kind, key, location, numel = storage_id(pid)
        if not isinstance(kind, Global) or kind.name not in STORAGE_DTYPES or not isinstance(location, str):
            raise UnsafePickleError("a persistent id does not describe a torch storage")
        if key not in self._storages:
            dtype = STORAGE_DTYPES[kind.name]
            find = partial(self._file.storage_extent, StorageRef(key, dtype, numel))
            self._storages[key] = Storage(kind, numel, dtype, location, find)
        return self._storages[key]


_BATCH = 1000
_MAX_NESTED = 250


def write_graph(root: object) -> tuple[bytes, list[Storage]]:
    """The pickle of a graph, and its storages: storage number i is record ``data/i`` of the archive.

    Of protocol 2, which torch.save writes, or 4 where a name has dots in it (a class within a class).

    Raises UnsupportedError for an object that is neither a Node nor plain, and for one that nests too deeply.
    """
    writer = _GraphWriter()
    writer.save(root)
    return bytes(writer.out + b"."), writer.storages


class _GraphWriter:
    """Pickles a graph; an object that occurs again is taken from the memo, text by value."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self._numbers: dict[int, int] = {}
        self._described: dict[int, tuple[object, ...]] = {}  # by number: what a pickle says of a storage
        self.out = bytearray(b"\x80\x02")
        self._memo: dict[object, int] = {}
        self._kept: list[object] = []  # whatever the memo knows by its id must live on
        self._depth = 0

    def save(self, value: object) -> None:
        kind = type(value)
        if kind is str:
            self._text(value)  # type: ignore[arg-type]
        elif kind is int:
            self._int(value)  # type: ignore[arg-type]
        elif id(value) in self._memo:
            self._get(self._memo[id(value)])
        elif value is None:
            self.out += b"N"
        elif kind is bool:
            self.out += b"\x88" if value else b"\x89"
        elif kind is float:
            self.out += b"G" + struct.pack(">d", value)
        elif kind is Global:
            self._global(value)  # type: ignore[arg-type]
        else:
            self._depth += 1
            if self._depth > _MAX_NESTED:
                raise UnsupportedError(f"objects nest more than {_MAX_NESTED} deep, which is not rewritten.")
            self._object(value)
            self._depth -= 1

    def _object(self, value: object) -> None:
        if isinstance(value, Node):
            self._node(value)
        elif type(value) is dict:
            self.out += b"}"
            self._put(value)
            self._pairs(value.items())
        elif type(value) is list:
            self.out += b"]"
            self._put(value)
            self._fill(value, b"e")
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
            self.save(node.function)
            self.save(node.args)
            if node.kwargs:
                self.save(node.kwargs)
                self.out += b"\x92"
            else:
                self.out += b"\x81"
            self._put(node)
        else:
            self._reduce(node, node.function, node.args)
        if node.items:
            self._fill(node.items, b"e")
        if node.pairs:
            self._pairs(node.pairs)
        if node.has_state:
            self.save(node.state)
            self.out += b"b"

    def _reduce(self, value: object, function: object, args: tuple[object, ...]) -> None:
        self.save(function)
        self.save(args)
        self.out += b"R"
        self._put(value)

    def _storage(self, storage: Storage) -> None:
        number = self._numbers.get(id(storage))
        if number is None:
            number = self._numbers[id(storage)] = len(self.storages)
            self.storages.append(storage)
            numel = storage.nbytes if storage.kind.name == _UNTYPED else storage.numel
            self._described[number] = ("storage", storage.kind, str(number), storage.location, numel)
        self.save(self._described[number])
        self.out += b"Q"

    def _tuple(self, value: tuple[object, ...]) -> None:
        if not value:
            self.out += b")"
            return
        marked, opcode = (b"(", b"t") if len(value) > 3 else (b"", bytes([0x84 + len(value)]))
        self.out += marked
        for item in value:
            self.save(item)
        known = self._memo.get(id(value))
        if known is not None:  # it holds itself, through a list: its first writing counts
            self.out += b"1" if marked else b"0" * len(value)
            self._get(known)
            return
        self.out += opcode
        if not all(type(item) is int for item in value):  # a shape or a stride is shorter than its memo
            self._put(value)

    def _fill(self, items: Sequence[object], opcode: bytes, batch: int = _BATCH) -> None:
        for at in range(0, len(items), batch):
            self.out += b"("
            for item in items[at : at + batch]:
                self.save(item)
            self.out += opcode

    def _pairs(self, pairs: Iterable[tuple[object, object]]) -> None:
        self._fill([part for pair in pairs for part in pair], b"u", 2 * _BATCH)

    def _int(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self.out += b"K" + bytes([value])
        elif 0 <= value < 1 << 16:
            self.out += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) > 255:
                raise UnsupportedError("an integer of more than 2000 bits cannot be written into a checkpoint.")
            self.out += b"\x8a" + bytes([len(data)]) + data

    def _text(self, value: str) -> None:
        if value in self._memo:
            self._get(self._memo[value])
            return
        data = value.encode("utf-8", "surrogatepass")
        self.out += b"X" + struct.pack("<I", len(data)) + data
        self._remember(value)

    def _global(self, value: Global) -> None:
        if value in self._memo:
            self._get(self._memo[value])
            return
        if value.owner is not None:
            self._reduce(value, global_named("builtins", "getattr"), (value.owner, value.attribute))
            return
        if "." in value.name:
            self.out[1] = 4
        self.out += f"c{value.module}\n{value.name}\n".encode()
        self._remember(value)

    def _put(self, value: object) -> None:
        self._kept.append(value)
        self._remember(id(value))

    def _remember(self, key: object) -> None:
        number = self._memo[key] = len(self._memo)
        self.out += b"q" + bytes([number]) if number < 1 << 8 else b"r" + struct.pack("<I", number)

    def _get(self, number: int) -> None:
        self.out += b"h" + bytes([number]) if number < 1 << 8 else b"j" + struct.pack("<I", number)


_ALIGNMENT = 64
_VERSION64 = 45


@dataclass(frozen=True, slots=True)
class _Record:
    """One record: where its header and its payload begin, and its bytes if they are known when it is placed."""

    name: bytes
    header: int
    payload: int
    nbytes: int
    data: bytes | None
    storage: Storage | None

    @property
    def is_wide(self) -> bool:
        return self.nbytes >= WIDE


class Archive:
    """A torch.save file that is being written; ``offsets[storage]`` is where the bytes of each storage belong.

    ``nbytes`` is the size of the finished file. Opening it truncates what was there and reserves the space. Raises
    OSError naming the file, for a full disk before anything is moved; UnsupportedError as ``write_graph``.

    Example::

        archive = Archive(path, {"weight": tensor(storage, 0, (3, 4))})
        ...                                          # move 48 bytes to archive.offsets[storage]
        archive.finish({storage: crc32})
    """

    def __init__(self, path: Path, root: object) -> None:
        pickled, self.storages = write_graph(root)
        self.path = path
        self._records: list[_Record] = []
        self._end = 0
        folder = path.name.removesuffix(".tmp").rpartition(".")[0] or path.name
        self._folder = folder.encode()
        self._add("data.pkl", data=pickled)
        self._add(".format_version", data=b"1")
        self._add(".storage_alignment", data=str(_ALIGNMENT).encode())
        self._add("byteorder", data=b"little")
        for number, storage in enumerate(self.storages):
            self._add(f"data/{number}", storage=storage)
        self._add("version", data=b"3\n")
        identity = hashlib.sha256(pickled + repr([storage.nbytes for storage in self.storages]).encode())
        self._add(".data/serialization_id", data=f"{int.from_bytes(identity.digest()[:16], 'big'):040d}".encode())
        self.offsets: Mapping[Storage, int] = {
            record.storage: record.payload for record in self._records if record.storage is not None
        }
        self._directory = self._end
        self.nbytes = self._end + len(self._directory_bytes({}))
        with name_in_errors(path), open(path, "wb", buffering=0) as file:
            file.truncate(self.nbytes)
            reserve_space(file.fileno(), self.nbytes)

    def finish(self, crc32: Mapping[Storage, int], *, sync: bool = False) -> None:
        """Write every header and the directory, given the checksum of each storage that has bytes.

        ``sync`` flushes the whole file to its device. Raises OSError naming the file.
        """
        checksums = {
            record.name: crc32[record.storage] if record.storage and record.nbytes else zlib.crc32(record.data or b"")
            for record in self._records
        }
        with name_in_errors(self.path), open(self.path, "r+b", buffering=0) as file:
            fd = file.fileno()
            for record in self._records:
                head = self._local_header(record, checksums[record.name])
                write_fully(fd, head + (record.data or b""), record.header)
            write_fully(fd, self._directory_bytes(checksums), self._directory)
            if sync:
                os.fsync(fd)

    def _add(self, name: str, *, data: bytes | None = None, storage: Storage | None = None) -> None:
        nbytes = len(data) if data is not None else storage.nbytes if storage is not None else 0
        full = self._folder + b"/" + name.encode()
        begin = self._end + LOCAL.size + len(full) + (20 if nbytes >= WIDE else 0)
        payload = -(-(begin + 4) // _ALIGNMENT) * _ALIGNMENT
        self._records.append(_Record(full, self._end, payload, nbytes, data, storage))
        self._end = payload + nbytes

    def _local_header(self, record: _Record, checksum: int) -> bytes:
        wide = FIELD.pack(ZIP64, 16) + struct.pack("<QQ", record.nbytes, record.nbytes) if record.is_wide else b""
        room = record.payload - record.header - LOCAL.size - len(record.name) - len(wide) - FIELD.size
        extra = wide + FIELD.pack(PADDING, room) + b"Z" * room
        sizes = (min(record.nbytes, WIDE),) * 2
        version, lengths = _VERSION64 if record.is_wide else 0, (len(record.name), len(extra))
        return LOCAL.pack(LOCAL_MARK, version, UTF8_NAMES, 0, 0, 0, checksum, *sizes, *lengths) + record.name + extra

    def _directory_bytes(self, checksums: Mapping[bytes, int]) -> bytes:
        out = bytearray()
        for record in self._records:
            wide: list[int] = [record.nbytes, record.nbytes] if record.is_wide else []
            wide += [record.header] if record.header >= WIDE else []
            extra = FIELD.pack(ZIP64, 8 * len(wide)) + struct.pack(f"<{len(wide)}Q", *wide) if wide else b""
            sizes = (min(record.nbytes, WIDE),) * 2
            version, lengths = _VERSION64 if wide else 0, (len(record.name), len(extra))
            head = (ENTRY_MARK, version, version, UTF8_NAMES, 0, 0, 0, checksums.get(record.name, 0))
            out += ENTRY.pack(*head, *sizes, *lengths, 0, 0, 0, 0, min(record.header, WIDE)) + record.name + extra
        size, count = len(out), len(self._records)
        if count >= MANY or self._end + size >= WIDE:
            end64 = self._end + size
            out += END64.pack(END64_MARK, 44, _VERSION64, _VERSION64, 0, 0, count, count, size, self._end)
            out += END64_LOCATOR.pack(LOCATOR_MARK, 0, end64, 1)
        few, at = min(count, MANY), min(self._end, WIDE)
        out += END.pack(END_MARK, 0, 0, few, few, min(size, WIDE), at, 0)
        return bytes(out)
