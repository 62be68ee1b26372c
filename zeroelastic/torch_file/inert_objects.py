"""Inert objects that stand for the tensors, dtypes and foreign objects of a pickle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from zeroelastic.errors import UnsafePickleError, brief, shown

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
