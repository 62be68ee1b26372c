"""The objects of a torch.save file's tree: tensors without their bytes, dtypes, and stand-ins for foreign objects.

Plain containers, numbers and text are themselves. ``allow_list`` says what takes the place of which global.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from zeroelastic.errors import UnsafePickleError, UnsupportedError, brief, shown

if TYPE_CHECKING:
    from zeroelastic.torch_file.header import Extent

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "bcomplex32": 4,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bits16": 2,
    "bits8": 1,
    "bits4x2": 1,
    "bits2x4": 1,
    "bits1x8": 1,
    "bool": 1,
}
"""Bytes per element of every dtype that is read, by torch's name without the ``torch.`` prefix.

These are all that torch.save writes, but for the quantized ones, whose tensors have scales too.
"""

STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}
"""The element type of each of torch's storage classes."""

TYPED_STORAGES = {dtype: ("torch", name) for name, dtype in STORAGE_DTYPES.items() if name != "UntypedStorage"}
"""The storage class of each dtype that has one."""

T = TypeVar("T")


def _refuse_state(self: object, state: object) -> None:
    raise UnsafePickleError(f"the pickle sets the state of a {type(self).__name__}")


def sealed(cls: type[T]) -> type[T]:
    """Close a class to pickle's BUILD, which would change an object behind the checks of what made it."""
    cls.__setstate__ = _refuse_state  # type: ignore[attr-defined]  # also over the one that dataclasses adds
    return cls


@sealed
@dataclass(eq=False, slots=True)
class Storage:
    """A storage of a torch.save file: its elements, and where their bytes are.

    ``key`` names its record in the file that it was read from; in a tree that is written, tensors that share a storage
    hold the same object. ``dtype`` is a key of ``DTYPE_BYTES``; a dtype without a storage class of torch is in an
    untyped storage, and the tensors name it. ``source`` are the bytes of a new storage where they are known, or finds
    them in a file.
    """

    key: str
    dtype: str
    numel: int
    location: str = "cpu"
    is_untyped: bool = False
    source: bytes | Callable[[Storage], Extent] | None = field(default=None, repr=False)

    @property
    def extent(self) -> Extent | None:
        """Where its bytes are in a file, looked up there; None for a new storage. Raises CheckpointError."""
        return self.source(self) if callable(self.source) else None

    @property
    def data(self) -> bytes | None:
        """The bytes of a new storage, where they are known."""
        return self.source if isinstance(self.source, bytes) else None

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.numel * DTYPE_BYTES[self.dtype]


@sealed
@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A tensor that was not read: which elements of which storage, in units of elements.

    Equal are tensors of the same elements of a storage; storages that were read are the same if their keys are.
    """

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False

    @property
    def _value(self) -> tuple[object, ...]:
        storage = self.storage
        place = storage.key or id(storage), storage.dtype, storage.numel
        return *place, self.dtype, self.offset, self.shape, self.stride

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorRef) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Return whether the elements are one run of the storage in row-major order; true where there are none."""
        if 0 in self.shape:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@sealed
@dataclass(frozen=True, slots=True)
class DType:
    """A torch dtype that a file names, as text such as "bfloat16"."""

    name: str


class Global(type):
    """A class or function that a pickle names, which is not loaded: calling it makes a ``Stub`` of the call.

    ``path`` is its module and name. A class within a class is an ``attribute``: the class that has it, and its name
    there; protocol 2 has no other way to name it.
    """

    path: tuple[str, str]
    attribute: tuple[Global, str] | None

    def __call__(cls, *args: Any) -> Any:  # pickle's REDUCE; NEWOBJ goes to __new__ itself
        node = Stub.__new__(cls, *args)  # type: ignore[arg-type]
        node.by_new = False
        return node


class Stub(metaclass=Global):
    """A stand-in for an object whose class is not loaded: how a pickle makes it, so that it can be written again.

    ``function`` is the object that was called: its own class, unless another object was called to make it. ``items``
    were appended, ``pairs`` were set by key, ``state`` was given to ``__setstate__`` (``NO_STATE``: nothing was);
    ``by_new`` tells ``cls.__new__(cls, *args)`` from ``function(*args)``.
    """

    __slots__ = ("args", "by_new", "function", "items", "kwargs", "pairs", "state")

    path = ("", "")
    attribute = None

    function: object
    args: tuple[object, ...]
    kwargs: dict[str, object]
    items: list[object]
    pairs: list[tuple[object, object]]
    state: object
    by_new: bool

    def __new__(cls, *args: Any, **kwargs: Any) -> Stub:
        node = object.__new__(cls)
        node.function, node.by_new = cls, True
        node.args, node.kwargs, node.items, node.pairs, node.state = args, kwargs, [], [], NO_STATE
        return node

    def __call__(self, *args: Any) -> Stub:
        """Pickle calls an object that was made by a call."""
        node = Stub.__new__(Stub, *args)
        node.function, node.by_new = self, False
        return node

    def append(self, item: object) -> None:
        """Pickle appends to a list-like object."""
        self.items.append(item)

    def extend(self, items: Iterable[object]) -> None:
        """Pickle extends a list-like object."""
        self.items.extend(items)

    def add(self, item: object) -> None:
        """Pickle adds to a set-like object; torch.save writes none."""
        raise UnsafePickleError(f"the pickle adds to a {self.module}.{self.qualname}")

    def __setitem__(self, key: object, value: object) -> None:
        self.pairs.append((key, value))

    def __setstate__(self, state: object) -> None:
        self.state = state

    @property
    def module(self) -> str:
        """The module of the class, shortened."""
        return brief(type(self).path[0])

    @property
    def qualname(self) -> str:
        """The name of the class, shortened."""
        return brief(type(self).path[1])

    @property
    def attributes(self) -> dict[str, object]:
        """Its attributes; a state that is no dictionary is one, ``__state__``."""
        if isinstance(self.state, dict):
            return {key if type(key) is str else shown(key): value for key, value in self.state.items()}
        return {} if self.state is NO_STATE else {"__state__": self.state}

    def __repr__(self) -> str:
        return f"<{self.module}.{self.qualname} (not loaded)>"


NO_STATE = object()


def new_global(module: str, name: str, attribute: tuple[Global, str] | None = None) -> Global:
    return Global("Stub", (Stub,), {"__slots__": (), "path": (module, name), "attribute": attribute})


class Dict(OrderedDict[object, object]):
    """An OrderedDict. Attributes that are set on one, as torch does for module states, are left out."""

    def __setstate__(self, state: object) -> None:
        pass


class ExactDict(Dict):
    """An OrderedDict with its attributes, in ``state``."""

    state: object = NO_STATE

    def __setstate__(self, state: object) -> None:
        self.state = state


class Size(tuple[int, ...]):
    """A ``torch.Size``."""

    __slots__ = ()


def new_storage(dtype: str, numel: int, data: bytes | None = None) -> Storage:
    """A storage of these bytes, or whose bytes are yet to come.

    Raises UnsupportedError for a dtype that torch.save does not write.
    """
    if dtype not in DTYPE_BYTES:
        raise UnsupportedError(f"a storage of {dtype} cannot be written.")
    return Storage("", dtype, numel, is_untyped=dtype not in TYPED_STORAGES, source=data)


def tensor(storage: Storage, offset: int, shape: Sequence[int], *, requires_grad: bool = False) -> TensorRef:
    """A contiguous tensor of ``shape`` that begins ``offset`` elements into its storage."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return TensorRef(storage, storage.dtype, offset, tuple(shape), tuple(strides), requires_grad)


def instance(kind: Global, attributes: Mapping[str, object]) -> Stub:
    """An object of a class without ``__init__`` arguments, with these attributes."""
    node = Stub.__new__(kind)  # type: ignore[arg-type]
    node.state = dict(attributes)
    return node


def entry(tree: object, *keys: object) -> object:
    """Return the value under these keys of nested dictionaries; None where one is missing."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def pairs_of(tree: object) -> Mapping[object, object]:
    """A dictionary; an empty one for anything else."""
    return tree if isinstance(tree, dict) else {}


def storage_of(value: object) -> Storage | None:
    """The storage of a tensor; None for another object."""
    return value.storage if isinstance(value, TensorRef) else None
