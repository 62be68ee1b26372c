"""The allow-list of the unpickler, and the inert objects that stand for tensors, dtypes and foreign objects.

``ALLOWED`` has the object that takes the place of each global that a pickle may name.
"""

from __future__ import annotations

import math
import operator
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np

from zeroelastic.errors import CheckpointError, UnsafePickleError, brief, shown

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

_MAX_KEY = 40

T = TypeVar("T")


def _refuse_state(self: object, state: object) -> None:
    raise UnsafePickleError(f"the pickle sets the state of a {type(self).__name__}")


def sealed(cls: type[T]) -> type[T]:
    """Close a class to pickle's BUILD, which would change an object behind the checks of what made it."""
    cls.__setstate__ = _refuse_state  # type: ignore[attr-defined]  # also over the one that dataclasses adds
    return cls


@sealed
@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage record of the archive: its key, element type and number of elements."""

    key: str
    dtype: str
    numel: int


@sealed
@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that was not read: which elements of which storage, in units of elements."""

    storage: StorageRef
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in the storage as one run in row-major order; true where there are none."""
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


class Stub:
    """An inert stand-in for an object of a class that is not loaded: its class path, arguments and attributes."""

    module: str = ""
    qualname: str = ""

    args: tuple[object, ...]
    items: list[object]
    attributes: dict[str, object]

    def __new__(cls, *args: object) -> Stub:  # pickle's NEWOBJ skips __init__
        self = super().__new__(cls)
        self.args, self.items, self.attributes = args, [], {}
        return self

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.attributes.update({key if type(key) is str else shown(key): value for key, value in state.items()})
        else:
            self.attributes["__state__"] = state

    def append(self, item: object) -> None:
        """Take what a list-like class would take."""
        self.items.append(item)

    def extend(self, items: list[object]) -> None:
        """Take what a list-like class would take."""
        self.items.extend(items)

    def __setitem__(self, key: object, value: object) -> None:
        self.items.append((key, value))

    def __repr__(self) -> str:
        return f"<{self.module}.{self.qualname} (not loaded)>"


def new_stub(module: str, qualname: str) -> type[Stub]:
    return type("Stub", (Stub,), {"module": brief(module), "qualname": brief(qualname)})


def storage_id(pid: object) -> tuple[object, str, object, int]:
    """Class, key, location and number of elements of a storage, from its persistent id. Raises UnsafePickleError."""
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
        raise UnsafePickleError("a persistent id is not a torch storage")
    _, kind, key, location, numel = pid
    if not isinstance(key, str) or type(numel) is not int:
        raise UnsafePickleError(f"a storage is described by {shown(pid)}")
    if not 0 <= numel < 1 << 62 or not key.isalnum() or len(key) > _MAX_KEY:
        raise UnsafePickleError(f"a storage has key {shown(key)} and {shown(numel)} elements")
    return kind, key, location, numel


_NUMPY_CODE = re.compile(r"[<=|]?[biuf][1248]")
_SET, _NUMPY_DTYPE = new_stub("builtins", "set"), new_stub("numpy", "dtype")
_NUMPY_SCALAR = new_stub("numpy", "generic")
_MAX_DIMENSIONS = 64


@sealed
class StorageType:
    """The class that a persistent id names; only its dtype matters."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


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
    dtype = storage.dtype if isinstance(storage, StorageRef) else ""
    return _of_bits(_tensor_ref(storage, offset, size, stride, dtype), *rest[2:3])


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
    return _of_bits(_tensor_ref(storage, offset, size, stride, dtype.name), *rest[3:4])


def _of_bits(tensor: TensorRef, marks: object = None) -> TensorRef | Stub:
    """The tensor, if its elements are what its storage holds; those of a conjugate or negative view are not."""
    if not marks:
        return tensor
    name = " ".join(mark for mark in ("conj", "neg") if isinstance(marks, dict) and marks.get(mark)) or shown(marks)
    return new_stub("torch.Tensor", f"{name} view")(tensor)


def _tensor_ref(storage: object, offset: object, size: object, stride: object, dtype: str) -> TensorRef:
    if not isinstance(storage, StorageRef) or not isinstance(size, tuple) or not isinstance(stride, tuple):
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
    ref = TensorRef(storage, dtype, offset, size, stride)
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


class Dict(OrderedDict[object, object]):
    """A dictionary of a pickle. Attributes that are set on one, as torch does for module states, are left out."""

    def __setstate__(self, state: object) -> None:
        pass


def _plain_dict(*_: object) -> dict[object, object]:
    return {}


def _ordered_dict(*items: object) -> Dict:
    if items not in ((), ([],)):  # as Python 2 did; check_opcodes does not see such keys
        raise UnsafePickleError("an OrderedDict gets its items when it is made, not afterwards")
    return Dict()


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
    return set(items) if all(isinstance(part, _HASHED) for part in parts) else _SET(items)


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
        return _NUMPY_DTYPE(code, *rest)  # of text, dates, records, ...
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
        return _NUMPY_SCALAR(dtype, data)
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
    **{(module, name): new_stub(module, name) for module, name in _INERT},
    **{(m, name): StorageType(dtype) for m in ("torch", "torch.storage") for name, dtype in STORAGE_DTYPES.items()},
    **{("torch", name): DType(name) for name in DTYPE_BYTES},
}
