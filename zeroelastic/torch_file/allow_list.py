"""The allow-list of a torch.save file's tree: the object that takes the place of each global that a pickle names.

``ALLOWED`` is for trees that are read, ``EXACT`` for trees that are written again: an object without an inert form that
keeps all of it is a ``Stub`` there.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import cast

import numpy as np

from zeroelastic.errors import CheckpointError, UnsafePickleError, shown
from zeroelastic.torch_file.tree import (
    DTYPE_BYTES,
    NO_STATE,
    STORAGE_DTYPES,
    Dict,
    DType,
    ExactDict,
    Size,
    Storage,
    Stub,
    TensorRef,
    new_global,
    sealed,
)

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
    """The tensor, if the storage holds its elements; a conjugate or negative view has others, and is a stub."""
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
    """A rebuild function that makes a stub of the call where a ``TensorRef`` does not keep all of a tensor."""
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
