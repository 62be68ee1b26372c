"""The allow-listed unpickler: what a pickle of torch.save becomes where nothing of it may run.

Every global that a pickle names resolves to one of our own inert objects, or is refused: tensors become ``TensorRef``
(where the bytes are), DeepSpeed's loss scalers and whatever else may stand in a file become ``Stub``. Neither torch nor
deepspeed is imported here, and no global of the file is ever called. What a pickle takes in memory and time is bounded
by what it has in bytes: see ``opcodes`` for what is refused before anything is built, ``check_tree`` for afterwards.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from zeroelastic.errors import CheckpointError, UnsafePickleError, UsageError, brief, shown
from zeroelastic.opcodes import MOST_NESTED
from zeroelastic.storage import FilePath

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of every dtype that is read, by torch's name without the ``torch.`` prefix."""

STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}
"""The element type of each of torch's storage classes."""

_NUMPY_CODE = re.compile(r"[<=|]?[biuf][1248]")
_MOST_DIMENSIONS = 64
_MOST_GLOBALS = 4096
_MOST_REPEATED = 64 << 10
_MOST_KEY = 40
_CONTAINERS = (dict, list, tuple, set, frozenset)
_FREE_VISITS = 1 << 20
_VISITS_PER_ITEM = 64

T = TypeVar("T")
Container: TypeAlias = "dict[object, object] | list[object] | tuple[object, ...] | set[object] | frozenset[object]"


def _refuse_state(self: object, state: object) -> None:
    raise UnsafePickleError(f"the pickle sets the state of a {type(self).__name__}")


def _sealed(cls: type[T]) -> type[T]:
    """Close a class to pickle's BUILD, which would change an object behind the checks of what made it."""
    cls.__setstate__ = _refuse_state  # type: ignore[attr-defined]  # also over the one that dataclasses adds
    return cls


@_sealed
@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage record of the archive: its key, element type and number of elements."""

    key: str
    dtype: str
    numel: int


@_sealed
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


@_sealed
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


def _new_stub(module: str, qualname: str) -> type[Stub]:
    return type("Stub", (Stub,), {"module": brief(module), "qualname": brief(qualname)})


@_sealed
class _StorageType:
    """The class that a persistent id names; only its dtype matters."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


@_sealed
class _Function:
    """One of our functions as a pickle gets it: it can be called, and nothing about it can be changed."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., object]) -> None:
        self.call = call

    def __call__(self, *args: object) -> object:
        return self.call(*args)


def _rebuild_tensor_v2(storage: object, offset: object, size: object, stride: object, *_: object) -> TensorRef | Stub:
    if isinstance(storage, Stub):
        return storage
    return _tensor_ref(storage, offset, size, stride, storage.dtype if isinstance(storage, StorageRef) else "")


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
    return _tensor_ref(storage, offset, size, stride, dtype.name)


def _tensor_ref(storage: object, offset: object, size: object, stride: object, dtype: str) -> TensorRef:
    if not isinstance(storage, StorageRef) or not isinstance(size, tuple) or not isinstance(stride, tuple):
        raise UnsafePickleError("a tensor is not made of a storage, a size and a stride")
    if len(size) > _MOST_DIMENSIONS or len(stride) > _MOST_DIMENSIONS:
        raise UnsafePickleError(f"a tensor has {len(size)} dimensions")
    numbers = (offset, *size, *stride)
    if len(size) != len(stride) or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        what = ", ".join(map(shown, (offset, size, stride)))
        raise UnsafePickleError(f"a tensor has offset, size and stride {what}")
    if dtype not in DTYPE_BYTES:
        raise UnsafePickleError(f"a tensor has the dtype {dtype}, which is not read")
    assert isinstance(offset, int)
    ref = TensorRef(storage, dtype, offset, tuple(size), tuple(stride))
    last = sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if ref.numel else -1
    if (offset + last + 1) * DTYPE_BYTES[dtype] > storage.numel * DTYPE_BYTES[storage.dtype]:
        raise CheckpointError(f"a tensor of shape {size} reaches behind its storage of {storage.numel} elements")
    return ref


def _rebuild_from_type_v2(rebuild: object, _type: object, arguments: object, _state: object) -> object:
    """A tensor with Python attributes, which are left out."""
    if not isinstance(rebuild, _Function) or not isinstance(arguments, tuple):
        raise UnsafePickleError("a tensor with attributes is not rebuilt from a storage")
    if rebuild.call not in (_rebuild_tensor_v2, _rebuild_tensor_v3, _rebuild_parameter):
        raise UnsafePickleError("a tensor with attributes is not rebuilt from a storage")
    return rebuild(*arguments)


def _rebuild_parameter(data: object, *_: object) -> object:
    return data


class _Dict(OrderedDict[object, object]):
    """A dictionary of a pickle. Attributes that are set on one, as torch does for module states, are left out."""

    def __setstate__(self, state: object) -> None:
        pass


def _plain_dict(*_: object) -> dict[object, object]:
    return {}


def _ordered_dict(*items: object) -> _Dict:
    if items not in ((), ([],)):  # what Python 2 gave it, and where keys are hashed behind the back of check_opcodes
        raise UnsafePickleError("an OrderedDict is made of what is not added to it afterwards")
    return _Dict()


def _size(items: object = ()) -> tuple[object, ...]:
    if not isinstance(items, (list, tuple)) or len(items) > _MOST_DIMENSIONS:
        raise UnsafePickleError(f"a torch.Size is made of {shown(items)}")
    if not all(type(size) is int for size in items):
        raise UnsafePickleError(f"a torch.Size is made of {shown(items)}")
    return tuple(items)


def _set(items: object = ()) -> set[object]:
    if not isinstance(items, (list, tuple)) or not all(_is_plain(item) for item in items):
        raise UnsafePickleError("a set is made of other things than numbers, text and tuples of them")
    return set(items)


def _is_plain(item: object) -> bool:
    if isinstance(item, tuple):  # one level: the hash of tuples in tuples may take forever
        return len(item) <= _MOST_DIMENSIONS and all(_is_plain(part) and type(part) is not tuple for part in item)
    return item is None or isinstance(item, (bool, int, float, complex, str, bytes))


def _complex(real: object = None, imaginary: object = None) -> complex:
    if not isinstance(real, (int, float)) or not isinstance(imaginary, (int, float)):
        raise UnsafePickleError("a complex number is not made of two numbers")
    return complex(real, imaginary)


def _plain_int(value: object = 0) -> int:
    if not isinstance(value, int):
        raise UnsafePickleError(f"an enumeration member has the value {shown(value)}, not an integer")
    return int(value)


def _encode(text: object, encoding: object = "latin1") -> bytes:
    if not isinstance(text, str) or not isinstance(encoding, str) or encoding not in ("latin1", "latin-1"):
        raise UnsafePickleError("bytes are encoded in an unexpected way")
    return text.encode("latin1")


def _numpy_dtype(code: object, *_: object) -> _NumpyDType:
    if not isinstance(code, str) or _NUMPY_CODE.fullmatch(code) is None:
        raise UnsafePickleError("a numpy dtype is not a plain number")
    return _NumpyDType(code.lstrip("<=|"))


class _NumpyDType:
    def __init__(self, code: str) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] == ">":
            raise UnsafePickleError("a numpy scalar is big-endian")


def _numpy_scalar(dtype: object, data: object = b"") -> int | float | bool:
    if not isinstance(dtype, _NumpyDType) or not isinstance(data, bytes):
        raise UnsafePickleError("a numpy scalar is not made of a dtype and bytes")
    parsed = np.dtype(dtype.code)
    if len(data) != parsed.itemsize:
        raise UnsafePickleError(f"a numpy scalar has {len(data)} bytes; {dtype.code} has {parsed.itemsize}")
    value = np.frombuffer(data, dtype=parsed)[0].item()
    assert isinstance(value, (int, float, bool))
    return value


_PYTHON2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_SCALERS = ("LossScaler", "DynamicLossScaler", "LossScalerBase")
_INERT = (
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch", "device"),
    ("deepspeed.runtime.zero.partition_parameters", "PartitionedParamStatus"),
    ("deepspeed.runtime.zero.offload_config", "OffloadDeviceEnum"),
)
_ALLOWED: dict[tuple[str, str], object] = {
    ("collections", "OrderedDict"): _Function(_ordered_dict),
    ("collections", "defaultdict"): _Function(_plain_dict),
    ("builtins", "set"): _Function(_set),
    ("builtins", "complex"): _Function(_complex),
    ("torch", "Size"): _Function(_size),
    ("torch._utils", "_rebuild_tensor_v2"): _Function(_rebuild_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): _Function(_rebuild_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): _Function(_rebuild_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): _Function(_rebuild_from_type_v2),
    ("_codecs", "encode"): _Function(_encode),
    ("numpy", "dtype"): _Function(_numpy_dtype),
    ("numpy.core.multiarray", "scalar"): _Function(_numpy_scalar),
    ("numpy._core.multiarray", "scalar"): _Function(_numpy_scalar),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): _Function(_plain_int),
    **{(module, name): _new_stub(module, name) for module, name in _INERT},
    **{
        ("deepspeed.runtime.fp16.loss_scaler", name): _new_stub("deepspeed.runtime.fp16.loss_scaler", name)
        for name in _SCALERS
    },
    **{("torch", name): _StorageType(dtype) for name, dtype in STORAGE_DTYPES.items()},
    **{("torch.storage", name): _StorageType(dtype) for name, dtype in STORAGE_DTYPES.items()},
    **{("torch", name): DType(name) for name in DTYPE_BYTES},
}

ForeignGlobals = Literal["refuse", "inert"]

_allowed_by_user: frozenset[tuple[str, str]] = frozenset()


@contextmanager
def allow_globals(names: Iterable[str]) -> Iterator[None]:
    """While it lasts, these globals ("package.module.Class") are inert stand-ins where a header names them.

    They are neither imported nor called. For the whole process, its threads included. Raises UsageError for a text that
    is no such name.
    """
    global _allowed_by_user
    before = _allowed_by_user
    _allowed_by_user = before | {split_global(name) for name in names}
    try:
        yield
    finally:
        _allowed_by_user = before


def split_global(name: str) -> tuple[str, str]:
    """("package.module", "Class") of "package.module.Class", or of "package.module:Outer.Inner". Raises UsageError."""
    module, colon, qualname = name.partition(":")
    if not colon:
        module, _, qualname = name.rpartition(".")
    if not all(part.isidentifier() for part in (*module.split("."), *qualname.split("."))):
        raise UsageError(f"{shown(name)} does not name a class: give package.module.Class.")
    return module, qualname


class HeaderUnpickler(pickle.Unpickler):
    """The allow-listed unpickler: every global resolves to one of our own objects, or is refused or inert.

    ``load`` raises UnsafePickleError, CheckpointError, and whatever a damaged pickle makes the standard one raise.
    """

    def __init__(self, data: bytes, path: FilePath, foreign: ForeignGlobals) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._path = path
        self._foreign = foreign
        self._stubs: dict[tuple[str, str], type[Stub]] = {}
        self._encodable = len(data) + _MOST_REPEATED

    def find_class(self, module: str, name: str) -> object:
        module = _PYTHON2_MODULES.get(module, module)  # pickle protocol 2, which torch.save writes
        if (module, name) == ("_codecs", "encode"):
            return _Function(self._encode)
        allowed = _ALLOWED.get((module, name))
        if allowed is not None:
            return allowed
        if self._foreign == "inert" or (module, name) in _allowed_by_user:
            return self._stub(module, name)
        named = brief(f"{module}.{name}")
        raise UnsafePickleError(
            f"{self._path}: the pickle names {named}, which is not on the allow-list. Nothing was run. To let it pass "
            f"as an inert stand-in, which is never imported, name it: zeroelastic --allow-global {named} VERB on the "
            f'command line, "allow_globals": ["{named}"] in the "zeroelastic" block of a training job.'
        )

    def _stub(self, module: str, name: str) -> type[Stub]:
        found = self._stubs.get((module, name))
        if found is None:
            if len(self._stubs) == _MOST_GLOBALS:
                raise UnsafePickleError(f"{self._path}: the pickle names more than {_MOST_GLOBALS} foreign globals.")
            found = self._stubs[module, name] = _new_stub(module, name)
        return found

    def _encode(self, text: object, encoding: object = "latin1") -> bytes:
        """``_codecs.encode``, so long as one text is not encoded again and again."""
        data = _encode(text, encoding)
        self._encodable -= len(data)
        if self._encodable < 0:
            raise CheckpointError(f"{self._path}: the pickle makes more bytes than it has. The file is damaged.")
        return data

    def persistent_load(self, pid: object) -> StorageRef | Stub:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise UnsafePickleError(f"{self._path}: a persistent id is not a torch storage")
        _, kind, key, _location, numel = pid
        if isinstance(kind, type) and issubclass(kind, Stub):  # a type of storage that only "inert" lets pass
            return kind()
        if not isinstance(kind, _StorageType) or not isinstance(key, str) or type(numel) is not int:
            raise UnsafePickleError(f"{self._path}: a storage is described by {shown(pid)}")
        if not 0 <= numel < 1 << 62 or not key.isalnum() or len(key) > _MOST_KEY:
            raise UnsafePickleError(f"{self._path}: a storage has key {shown(key)} and {shown(numel)} elements")
        return StorageRef(key, kind.dtype, numel)


def check_tree(root: object) -> None:
    """Refuse a tree of containers that nests too deeply, holds itself, or is far larger when it is walked than it is.

    Whoever walks a tree that passed needs neither a limit of depth nor a memory of where it has been. What stand-ins
    hold is not looked at: nobody walks it but who keeps such limits. Raises CheckpointError.
    """
    walked: dict[int, tuple[int, int]] = {}  # by identity: all that a container holds, and its levels
    open_ids: set[int] = set()
    stack: list[_Walk] = []
    real = 0
    if isinstance(root, _CONTAINERS):
        stack.append(_Walk(root))
    while stack:
        walk = stack[-1]
        for item in walk.inside:
            if not isinstance(item, _CONTAINERS):
                walk.size += 1
                continue
            known = walked.get(id(item))
            if known is None:
                if id(item) in open_ids or len(stack) > MOST_NESTED:
                    raise CheckpointError("its containers hold themselves, or nest too deeply. The file is damaged.")
                open_ids.add(id(item))
                stack.append(_Walk(item))
                break
            walk.add(*known)
        else:
            stack.pop()
            real += len(walk.container) + 1
            open_ids.discard(id(walk.container))
            walked[id(walk.container)] = walk.size, walk.levels
            if walk.levels > MOST_NESTED:
                raise CheckpointError("its containers nest too deeply. The file is damaged.")
            if stack:
                stack[-1].add(walk.size, walk.levels)
            elif walk.size > _FREE_VISITS + _VISITS_PER_ITEM * real:
                raise CheckpointError("its containers hold one another too often to be walked. The file is damaged.")


class _Walk:
    """A container that is being walked: what of it is still to come, and what was found so far."""

    __slots__ = ("container", "inside", "levels", "size")

    def __init__(self, container: Container) -> None:
        self.container = container
        self.inside: Iterator[object] = iter(container.values() if isinstance(container, dict) else container)
        self.size = self.levels = 1

    def add(self, size: int, levels: int) -> None:
        self.size += size
        self.levels = max(self.levels, levels + 1)
