"""The objects of a torch.save file's tree: tensors without their bytes, dtypes, and stand-ins for foreign objects.

``ALLOWED`` has the object that takes the place of each global that a pickle may name, ``EXACT`` those of a tree that is
written again: what has no inert form that keeps all of it is a ``Stub`` there. Plain containers, numbers and text are
themselves.
"""

from __future__ import annotations

import math
import operator
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from zeroelastic.errors import CheckpointError, UnsafePickleError, UnsupportedError, brief, shown

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
        """The module of its class, shortened."""
        return brief(type(self).path[0])

    @property
    def qualname(self) -> str:
        """The name of its class, shortened."""
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


_NUMPY_CODE = re.compile(r"[<=|]?[biuf][1248]")
_SET, _NUMPY_DTYPE = new_global("builtins", "set"), new_global("numpy", "dtype")
_NUMPY_SCALAR = new_global("numpy", "generic")
_MAX_DIMENSIONS = 64


@sealed
class StorageType:
    """The class of storages that a persistent id names."""

    __slots__ = ("dtype", "is_untyped")

    def __init__(self, name: str) -> None:
        self.dtype, self.is_untyped = STORAGE_DTYPES[name], name == "UntypedStorage"


@sealed
class Function:
    """One of our functions as a pickle gets it: it can be called, and nothing about it can be changed."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., object]) -> None:
        self.call = call

    def __call__(self, *args: object) -> object:
        return self.call(*args)


@sealed
class Enumeration:
    """An enumeration of integers: a member is made by its value, or taken by its name."""

    __slots__ = ("members",)

    def __init__(self, **members: int) -> None:
        self.members = members

    def __call__(self, value: object = 0) -> int:
        if not isinstance(value, int):
            raise UnsafePickleError(f"an enumeration member has the value {shown(value)}, not an integer")
        return int(value)

    def member(self, name: str) -> int:
        if name not in self.members:
            raise UnsafePickleError(f"attribute {shown(name)} of an enumeration is not on the allow-list")
        return self.members[name]


def _rebuild_tensor_v2(
    storage: object, offset: object, size: object, stride: object, *rest: object
) -> TensorRef | Stub:
    if isinstance(storage, Stub):
        return storage
    dtype = storage.dtype if isinstance(storage, Storage) else ""
    return _of_bits(_tensor_ref(storage, offset, size, stride, dtype, rest), *rest[2:3])


def _rebuild_tensor_v3(
    storage: object, offset: object, size: object, stride: object, *rest: object
) -> TensorRef | Stub:
    dtype = rest[2] if len(rest) > 2 else None
    if isinstance(storage, Stub):
        return storage
    if isinstance(dtype, type) and issubclass(dtype, Stub):
        return dtype()
    if not isinstance(dtype, DType):
        raise UnsafePickleError(f"a tensor names {shown(dtype)} as its dtype")
    return _of_bits(_tensor_ref(storage, offset, size, stride, dtype.name, rest), *rest[3:4])


def _of_bits(tensor: TensorRef, marks: object = None) -> TensorRef | Stub:
    """The tensor, if its elements are what its storage holds; those of a conjugate or negative view are not."""
    if not marks:
        return tensor
    name = " ".join(mark for mark in ("conj", "neg") if isinstance(marks, dict) and marks.get(mark)) or shown(marks)
    stub: Stub = new_global("torch.Tensor", f"{name} view")(tensor)
    return stub


def _tensor_ref(
    storage: object, offset: object, size: object, stride: object, dtype: str, rest: tuple[object, ...]
) -> TensorRef:
    if not isinstance(storage, Storage) or not isinstance(size, tuple) or not isinstance(stride, tuple):
        raise UnsafePickleError("a tensor is not made of a storage, a size and a stride")
    if len(size) > _MAX_DIMENSIONS or len(stride) > _MAX_DIMENSIONS:
        raise UnsafePickleError(f"a tensor has {len(size)} dimensions")
    numbers = (offset, *size, *stride)
    plain = len(size) == len(stride) and all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
    if not plain:
        what = ", ".join(map(shown, (offset, size, stride)))
        raise UnsafePickleError(f"a tensor has offset, size and stride {what}")
    if dtype not in DTYPE_BYTES:
        raise UnsafePickleError(f"a tensor has the dtype {dtype}, which is not read")
    assert isinstance(offset, int)
    ref = TensorRef(storage, dtype, offset, size, stride, bool(rest and rest[0]))
    last = sum(map(operator.mul, size, stride)) - sum(stride) if math.prod(size) else -1
    if (offset + last + 1) * DTYPE_BYTES[dtype] > storage.numel * DTYPE_BYTES[storage.dtype]:
        raise CheckpointError(f"a tensor of shape {size} reaches behind its storage of {storage.numel} elements")
    return ref


def _rebuild_from_type_v2(rebuild: object, _type: object, arguments: object, _state: object) -> object:
    """A tensor with Python attributes, which are left out."""
    known = (_rebuild_tensor_v2, _rebuild_tensor_v3, _rebuild_parameter)
    if not isinstance(rebuild, Function) or rebuild.call not in known or not isinstance(arguments, tuple):
        raise UnsafePickleError("a tensor with attributes is not rebuilt from a storage")
    return rebuild(*arguments)


def _rebuild_parameter(data: object, *_: object) -> object:
    return data


def _plain_dict(*_: object) -> dict[object, object]:
    return {}


def _ordered_dict(*items: object, kind: type[Dict] = Dict) -> Dict:
    if items not in ((), ([],)):  # as Python 2 did; check_opcodes does not see such keys
        raise UnsafePickleError("an OrderedDict gets its items when it is made, not afterwards")
    return kind()


def _size(items: object = ()) -> tuple[object, ...]:
    if isinstance(items, (list, tuple)) and len(items) <= _MAX_DIMENSIONS and all(type(n) is int for n in items):
        return tuple(items)
    raise UnsafePickleError(f"a torch.Size is made of {shown(items)}")


def _set(items: object = ()) -> set[object] | Stub:
    """A set, or a stand-in for one of other things than numbers, text and tuples of them, which are not hashed here."""
    if not isinstance(items, (list, tuple)):
        raise UnsafePickleError(f"a set is made of {shown(items)}")
    tuples = [item for item in items if isinstance(item, tuple)]
    if any(len(item) > _MAX_DIMENSIONS or any(type(part) is tuple for part in item) for item in tuples):
        raise UnsafePickleError("a set is made of tuples of tuples, or of long ones")  # their hash may take forever
    parts = chain(items, *tuples)
    made: set[object] | Stub = set(items) if all(isinstance(part, _HASHED) for part in parts) else _SET(items)
    return made


_HASHED = (tuple, type(None), bool, int, float, complex, str, bytes)


def _complex(real: object = None, imaginary: object = None) -> complex:
    if not isinstance(real, (int, float)) or not isinstance(imaginary, (int, float)):
        raise UnsafePickleError("a complex number is not made of two numbers")
    return complex(real, imaginary)


def encode(text: object, encoding: object = "latin1") -> bytes:
    if not isinstance(text, str) or not isinstance(encoding, str) or encoding not in ("latin1", "latin-1"):
        raise UnsafePickleError("bytes are encoded in an unexpected way")
    return text.encode("latin1")


def _numpy_dtype(code: object, *rest: object) -> _NumpyDType | Stub:
    if not isinstance(code, str) or _NUMPY_CODE.fullmatch(code) is None:
        stub: Stub = _NUMPY_DTYPE(code, *rest)  # of text, dates, records, ...
        return stub
    return _NumpyDType(code.lstrip("<=|"))


class _NumpyDType:
    def __init__(self, code: str) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] == ">":
            self.code = f">{self.code.lstrip('>')}"

    def __repr__(self) -> str:
        return f"numpy dtype {self.code}"


def _numpy_scalar(dtype: object, data: object = b"") -> int | float | bool | Stub:
    if isinstance(dtype, Stub):
        stub: Stub = _NUMPY_SCALAR(dtype, data)
        return stub
    if not isinstance(dtype, _NumpyDType) or not isinstance(data, bytes):
        raise UnsafePickleError("a numpy scalar is not made of a dtype and bytes")
    parsed = np.dtype(dtype.code)
    if len(data) != parsed.itemsize:
        raise UnsafePickleError(f"a numpy scalar has {len(data)} bytes; {dtype.code} has {parsed.itemsize}")
    value = np.frombuffer(data, dtype=parsed)[0].item()
    assert isinstance(value, (int, float, bool))
    return value


_INERT = (
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch", "device"),
    ("deepspeed.runtime.zero.partition_parameters", "PartitionedParamStatus"),
    ("deepspeed.runtime.zero.offload_config", "OffloadDeviceEnum"),
    *(("deepspeed.runtime.fp16.loss_scaler", name) for name in ("LossScaler", "DynamicLossScaler", "LossScalerBase")),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
)
ALLOWED: dict[tuple[str, str], object] = {
    ("collections", "OrderedDict"): Function(_ordered_dict),
    ("collections", "defaultdict"): Function(_plain_dict),
    ("builtins", "set"): Function(_set),
    ("builtins", "complex"): Function(_complex),
    ("torch", "Size"): Function(_size),
    ("torch._utils", "_rebuild_tensor_v2"): Function(_rebuild_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): Function(_rebuild_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): Function(_rebuild_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): Function(_rebuild_from_type_v2),
    ("_codecs", "encode"): Function(encode),
    ("numpy", "dtype"): Function(_numpy_dtype),
    ("numpy.core.multiarray", "scalar"): Function(_numpy_scalar),
    ("numpy._core.multiarray", "scalar"): Function(_numpy_scalar),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): Enumeration(
        disabled=0, optimizer_states=1, gradients=2, weights=3, max_stage=3
    ),
    **{path: new_global(*path) for path in _INERT},
    **{(module, name): StorageType(name) for module in ("torch", "torch.storage") for name in STORAGE_DTYPES},
    **{("torch", name): DType(name) for name in DTYPE_BYTES},
}
"""The object that takes the place of each global of a tree that is read."""


def _exactly(path: tuple[str, str], rebuild: Callable[..., object], num_args: int) -> Function:
    """A rebuild function that leaves a tensor as a stub of its call unless a ``TensorRef`` is all that it is."""
    call = new_global(*path)

    def made(*args: object) -> object:
        requires_grad, hooks = args[4:6] if len(args) == num_args else (None, None)
        has_no_hooks = isinstance(hooks, ExactDict) and not hooks and hooks.state is NO_STATE
        ref = rebuild(*args) if has_no_hooks and isinstance(requires_grad, bool) else None
        return ref if isinstance(ref, TensorRef) else call(*args)

    return Function(made)


_V2, _V3 = ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")
EXACT: dict[tuple[str, str], object] = {
    _V2: _exactly(_V2, _rebuild_tensor_v2, 6),
    _V3: _exactly(_V3, _rebuild_tensor_v3, 7),
    **{path: made for path, made in ALLOWED.items() if isinstance(made, (StorageType, DType))},
    ("collections", "OrderedDict"): Function(partial(_ordered_dict, kind=ExactDict)),
    ("torch", "Size"): Function(lambda *items: Size(cast(tuple[int, ...], _size(*items)))),
}
"""The object that takes the place of each global of a tree that is written again; a ``Stub`` that of every other."""

PATHS = {made: path for path, made in (*ALLOWED.items(), *EXACT.items())}
"""The module and name of each of these objects."""
