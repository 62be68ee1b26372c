"""A torch.save file as an object tree with extents: the header is parsed, the payload is never touched.

``read_torch_file`` unpickles ``data.pkl`` of the zip archive through an allow-list: tensors become ``TensorRef``
(where the bytes are), DeepSpeed's loss scalers and unknown classes become inert ``Stub`` objects. No code from the
file runs: neither torch nor deepspeed is imported here, and no global that the file names is ever called.

Byte layout: PyTorch writes every storage as one uncompressed zip record ``<archive>/data/<key>`` (torch.save,
``_use_new_zipfile_serialization=True``, torch 1.6 and later).
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import reprlib
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from zeroelastic.errors import CheckpointError, MissingFileError, OldFormatError, UnsafePickleError
from zeroelastic.storage import BlockFile, FilePath, RemotePath, as_path

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
_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_MAX_PICKLE_BYTES = 1 << 31
_LOCATED_BYTES = 512  # a local header with its padding, and a scalar that follows it

T = TypeVar("T")


def _refuse_state(self: object, state: object) -> None:
    raise UnsafePickleError(f"the pickle sets the state of a {type(self).__name__}")


def _sealed(cls: type[T]) -> type[T]:
    """Close a class to pickle's BUILD, which would change an object behind the checks of what made it."""
    cls.__setstate__ = _refuse_state  # type: ignore[attr-defined]  # also over the one that dataclasses adds
    return cls


@dataclass(frozen=True, slots=True)
class Extent:
    """A byte range of a file that holds elements of one dtype."""

    path: FilePath
    offset: int
    nbytes: int
    dtype: str


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
        numel = 1
        for size in self.shape:
            numel *= size
        return numel

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
            self.attributes.update({str(key): value for key, value in state.items()})
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
    return type("Stub", (Stub,), {"module": module, "qualname": qualname})


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
        raise UnsafePickleError(f"a tensor names {reprlib.repr(dtype)} as its dtype")
    return _tensor_ref(storage, offset, size, stride, dtype.name)


def _tensor_ref(storage: object, offset: object, size: object, stride: object, dtype: str) -> TensorRef:
    if not isinstance(storage, StorageRef) or not isinstance(size, tuple) or not isinstance(stride, tuple):
        raise UnsafePickleError("a tensor is not made of a storage, a size and a stride")
    numbers = (offset, *size, *stride)
    if len(size) != len(stride) or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        shown = ", ".join(map(reprlib.repr, (offset, size, stride)))
        raise UnsafePickleError(f"a tensor has offset, size and stride {shown}")
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


def _plain_dict(*_: object) -> dict[object, object]:
    return {}


def _plain_tuple(items: object = ()) -> tuple[object, ...]:
    return tuple(items) if isinstance(items, (list, tuple)) else ()


def _plain_int(value: object = 0) -> int:
    if not isinstance(value, int):
        raise UnsafePickleError(f"an enumeration member has the value {reprlib.repr(value)}, not an integer")
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
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): _Function(_plain_dict),
    ("builtins", "set"): set,
    ("builtins", "complex"): complex,
    ("torch", "Size"): _Function(_plain_tuple),
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

_LENGTH_BYTES = {b"X": 4, b"\x8c": 1, b"\x8d": 8, b"B": 4, b"C": 1, b"\x8e": 8, b"\x8a": 1, b"\x8b": 4}
_ARGUMENT_BYTES = {b"J": 4, b"K": 1, b"M": 2, b"G": 8, b"h": 1, b"j": 4, b"q": 1, b"\x80": 1, b"\x95": 8}
_LONG_BINPUT, _GLOBAL, _STOP, _UNKNOWN = -10, -11, -12, -13


def _opcode_steps() -> list[int]:
    """For each opcode the bytes to the next one; minus the size of a length prefix; or one of the constants above."""
    steps = [_UNKNOWN] * 256
    for opcode in b"(01NR])}abetsuQ\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94":
        steps[opcode] = 1
    for code, size in _ARGUMENT_BYTES.items():
        steps[code[0]] = 1 + size
    for code, size in _LENGTH_BYTES.items():
        steps[code[0]] = -size
    steps[ord("r")], steps[ord("c")], steps[ord(".")] = _LONG_BINPUT, _GLOBAL, _STOP
    return steps


_STEPS = _opcode_steps()


def check_opcodes(data: bytes) -> None:
    """Refuse opcodes that Python 3 does not write at protocol 2 to 4, and memo slots beyond what a pickle can fill.

    The unpickler allocates up to the highest memo slot that is named, 16 bytes each: 12 bytes could ask for 32 GiB.
    """
    at, end = 0, len(data)
    while at < end:
        step = _STEPS[data[at]]
        if step > 0:
            at += step
        elif step >= -8:
            at += 1 - step + int.from_bytes(data[at + 1 : at + 1 - step], "little")
        elif step == _LONG_BINPUT:
            if int.from_bytes(data[at + 1 : at + 5], "little") > at:
                raise CheckpointError("the pickle names a memo slot that it cannot have filled. The file is damaged.")
            at += 5
        elif step == _GLOBAL:
            module_end = data.find(b"\n", at)
            name_end = data.find(b"\n", module_end + 1)
            if module_end < 0 or name_end < 0:
                return  # truncated, which the unpickler reports
            at = name_end + 1
        elif step == _STOP:
            return
        else:
            raise UnsafePickleError(f"the pickle uses opcode {data[at : at + 1]!r}, which torch.save does not write")


class _HeaderUnpickler(pickle.Unpickler):
    """The allow-listed unpickler: every global resolves to one of our own objects, or is refused or inert."""

    def __init__(self, data: bytes, path: FilePath, foreign: ForeignGlobals) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._path = path
        self._foreign = foreign

    def find_class(self, module: str, name: str) -> object:
        module = _PYTHON2_MODULES.get(module, module)  # pickle protocol 2, which torch.save writes
        allowed = _ALLOWED.get((module, name))
        if allowed is not None:
            return allowed
        if self._foreign == "inert":
            return _new_stub(module, name)
        raise UnsafePickleError(
            f"{self._path}: the pickle names {module}.{name}, which is not on the allow-list. Nothing was run. A "
            "ZeRO optimizer file of DeepSpeed has no need of it; load it only with tools that trust the file."
        )

    def persistent_load(self, pid: object) -> StorageRef | Stub:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise UnsafePickleError(f"{self._path}: a persistent id is not a torch storage")
        _, kind, key, _location, numel = pid
        if isinstance(kind, type) and issubclass(kind, Stub):  # a type of storage that only "inert" lets pass
            return kind()
        if not isinstance(kind, _StorageType) or not isinstance(key, str) or type(numel) is not int:
            raise UnsafePickleError(f"{self._path}: a storage is described by {reprlib.repr(pid)}")
        if numel < 0 or not key.isalnum():
            raise UnsafePickleError(f"{self._path}: a storage has key {key!r} and {numel} elements")
        return StorageRef(key, kind.dtype, numel)


class Blocks(Protocol):
    """A file of which a header is read otherwise than by opening its path: ``storage.BlockFile``, ``relayed``."""

    size: int
    bytes_read: int

    def read(self, offset: int, nbytes: int) -> bytes: ...

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None: ...

    @property
    def capacity(self) -> int: ...


@dataclass(slots=True)
class TorchFile:
    """An opened torch.save archive: its object tree, and where each storage lies in the file.

    Invariant: every extent that it hands out lies inside the file and inside one uncompressed record. ``root`` is the
    unpickled tree with ``TensorRef`` in place of tensors. ``header_bytes`` is what was read so far to get here.
    """

    path: FilePath
    size: int
    root: object
    header_bytes: int
    _records: dict[str, zipfile.ZipInfo] = field(repr=False)
    _offsets: dict[str, int] = field(default_factory=dict, repr=False)
    _blocks: Blocks | None = field(default=None, repr=False)
    _headers: dict[str, bytes] = field(default_factory=dict, repr=False)

    def extent(self, ref: TensorRef) -> Extent:
        """The byte range of a contiguous tensor. Raises CheckpointError for one that is not, or a bad record."""
        if not ref.is_contiguous:
            raise CheckpointError(
                f"{self.path}: a tensor of shape {ref.shape} is not contiguous (strides {ref.stride})"
            )
        itemsize = DTYPE_BYTES[ref.dtype]
        offset = self._payload(ref.storage) + ref.offset * itemsize
        return Extent(self.path, offset, ref.numel * itemsize, ref.dtype)

    def read(self, ref: TensorRef) -> npt.NDArray[np.uint8]:
        """The raw bytes of a small tensor, such as a 0-dim step: shape ``(nbytes,)``."""
        extent = self.extent(ref)
        data = self._read(extent.offset, extent.nbytes)
        if len(data) != extent.nbytes:
            raise CheckpointError(f"{self.path}: ends at byte {extent.offset + len(data)}. The file is truncated.")
        return np.frombuffer(data, dtype=np.uint8)

    def locate(self, keys: Iterable[str] | None = None) -> None:
        """Fetch where storages lie, by key or all of them: few round trips to a remote file; a local one needs none."""
        if self._blocks is None:
            return
        wanted = self._records.keys() if keys is None else {key for key in keys if key in self._records}
        order = sorted(wanted - self._headers.keys(), key=lambda key: self._records[key].header_offset)
        for at in range(0, len(order), self._blocks.capacity):
            offsets = {key: self._records[key].header_offset for key in order[at : at + self._blocks.capacity]}
            self._blocks.prefetch((offset, _LOCATED_BYTES) for offset in offsets.values())
            self._headers |= {key: self._blocks.read(offset, _LOCAL_HEADER.size) for key, offset in offsets.items()}
        self.header_bytes = self._blocks.bytes_read

    def _read(self, offset: int, nbytes: int) -> bytes:
        if self._blocks is not None:
            data = self._blocks.read(offset, nbytes)
            self.header_bytes = self._blocks.bytes_read
            return data
        assert isinstance(self.path, Path)
        with open(self.path, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), nbytes, offset)
        self.header_bytes += len(data)
        return data

    def storage_extent(self, storage: StorageRef) -> Extent:
        """The byte range of a whole storage. Raises CheckpointError for a bad record."""
        return Extent(self.path, self._payload(storage), storage.numel * DTYPE_BYTES[storage.dtype], storage.dtype)

    def _payload(self, storage: StorageRef) -> int:
        known = self._offsets.get(storage.key)
        if known is not None:
            return known
        info = self._records.get(storage.key)
        want = storage.numel * DTYPE_BYTES[storage.dtype]
        if info is None:
            raise CheckpointError(f"{self.path}: storage {storage.key} has no record. The file is damaged.")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != want or info.compress_size != want:
            raise CheckpointError(
                f"{self.path}: record data/{storage.key} has {info.file_size} bytes; "
                f"{storage.numel} elements of {storage.dtype} need {want}. The file is damaged."
            )
        data = self._headers.get(storage.key)
        if data is None:
            inside = 0 <= info.header_offset < self.size
            data = self._read(info.header_offset, _LOCAL_HEADER.size) if inside else b""
        offset = _payload_offset(data, info, self.path, self.size)
        self._offsets[storage.key] = offset
        return offset


def _payload_offset(data: bytes, info: zipfile.ZipInfo, path: FilePath, size: int) -> int:
    """Where a record's payload begins, from the first bytes of its local header."""
    if len(data) != _LOCAL_HEADER.size or data[:4] != b"PK\x03\x04":
        raise CheckpointError(f"{path}: no zip record at byte {info.header_offset}. The file is damaged.")
    fields = _LOCAL_HEADER.unpack(data)
    offset = info.header_offset + _LOCAL_HEADER.size + int(fields[9]) + int(fields[10])
    if offset + info.compress_size > size:
        raise CheckpointError(f"{path}: record {info.filename} ends behind the file. The file is truncated.")
    return offset


class _CountingFile(io.RawIOBase):
    """A read-only file that counts the bytes read through it."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  closed in close()
        self.size = os.fstat(self._file.fileno()).st_size
        self.count = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.count += len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


class _BlockStream(io.RawIOBase):
    """A file that is not opened by its path as a stream, for zipfile."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._at, self._blocks.size)[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        data = self._blocks.read(self._at, self._blocks.size if size is None or size < 0 else size)
        self._at += len(data)
        return data

    @property
    def size(self) -> int:
        return self._blocks.size

    @property
    def count(self) -> int:
        """Bytes requested so far."""
        return self._blocks.bytes_read


def read_torch_file(
    path: str | os.PathLike[str] | RemotePath, *, foreign: ForeignGlobals = "refuse", through: Blocks | None = None
) -> TorchFile:
    """Parse the header of a torch.save file; payload is not read, except what shares a 16 KiB block of a remote file.

    ``foreign`` says what becomes of globals outside the allow-list: "refuse" raises UnsafePickleError naming it,
    "inert" puts a ``Stub`` in its place (for files whose interesting part lies beside user objects). ``through`` is
    what the file is read by, where that is not its path.

    Raises MissingFileError, CheckpointError (damaged, truncated), OldFormatError (before 1.6, without a zip archive),
    UnsafePickleError.

    Example::

        file = read_torch_file("global_step10/zero_pp_rank_0_mp_rank_00_optim_states.pt")
        file.extent(file.root["optimizer_state_dict"]["fp32_flat_groups"][0])
    """
    data, file = read_pickle(path, through=through)
    try:
        check_opcodes(data)
        file.root = _HeaderUnpickler(data, file.path, foreign).load()
    except CheckpointError as error:
        if str(file.path) in str(error):
            raise
        raise type(error)(f"{file.path}: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{file.path}: the pickle nests too deeply. The file is damaged.") from None
    except Exception as error:  # a damaged pickle may fail in any way; nothing of it has run
        raise CheckpointError(f"{file.path}: the pickle cannot be read ({error}). The file is damaged.") from None
    return file


def read_pickle(path: str | os.PathLike[str] | RemotePath, *, through: Blocks | None = None) -> tuple[bytes, TorchFile]:
    """The pickle of a torch.save file, not unpickled, and the file it belongs to, whose ``root`` is None.

    Raises as ``read_torch_file``.
    """
    path = as_path(path)
    blocks = through if through is not None else BlockFile(path) if isinstance(path, RemotePath) else None
    with _BlockStream(blocks) if blocks is not None else _open_local(path) as raw:
        size = raw.size
        start = raw.read(4)
        if start[:4] != b"PK\x03\x04":
            raise _not_zip(path, start, size)
        try:
            archive = zipfile.ZipFile(raw)
            records, pickled = _records(archive, path, size)
            data = archive.read(pickled)
        except CheckpointError:
            raise
        except Exception as error:  # zipfile raises eight kinds of error for damaged archives, RuntimeError among them
            raise CheckpointError(f"{path}: {error}. The file is truncated or damaged.") from None
        header_bytes = raw.count
    return data, TorchFile(path, size, None, header_bytes, records, _blocks=blocks)


def _open_local(path: FilePath) -> _CountingFile:
    assert isinstance(path, Path)
    try:
        return _CountingFile(path)
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file. The checkpoint is incomplete.") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from None


def _records(archive: zipfile.ZipFile, path: FilePath, size: int) -> tuple[dict[str, zipfile.ZipInfo], zipfile.ZipInfo]:
    records: dict[str, zipfile.ZipInfo] = {}
    pickled: zipfile.ZipInfo | None = None
    seen: set[str] = set()
    for info in archive.infolist():
        _, _, inner = info.filename.partition("/")
        if (inner or info.filename) in seen:
            raise CheckpointError(f"{path}: two records are named {info.filename}. The file is damaged.")
        seen.add(inner or info.filename)
        if inner == "data.pkl":
            pickled = info
        elif inner.startswith("data/"):
            records[inner[len("data/") :]] = info
        elif inner == "byteorder":
            _check_stored(info, path, min(size, 16))
            if archive.read(info) != b"little":
                raise CheckpointError(f"{path}: was written on a big-endian machine, which is not supported.")
    if pickled is None:
        raise CheckpointError(f"{path}: is a zip archive without data.pkl, so not a torch.save file.")
    _check_stored(pickled, path, min(size, _MAX_PICKLE_BYTES))
    return records, pickled


def _check_stored(info: zipfile.ZipInfo, path: FilePath, limit: int) -> None:
    """Refuse a record that would take more memory than its bytes in the file, or more than ``limit``."""
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.file_size > limit:
        raise CheckpointError(
            f"{path}: record {info.filename} is compressed or larger than {limit} bytes. The file is damaged."
        )


def _not_zip(path: FilePath, start: bytes, size: int) -> CheckpointError:
    if size == 0:
        return CheckpointError(f"{path}: is empty. The save did not finish.")
    if start[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04"):
        return OldFormatError(
            f"{path}: is in torch.save's old format without a zip archive, whose payload cannot be addressed. Save "
            'with "checkpoint": {"checkpoint_serialization": true} (DeepSpeed\'s default), or rewrite the file once: '
            "torch.save(torch.load(path, weights_only=False), path)."
        )
    return CheckpointError(f"{path}: is not a torch.save file. The file is damaged.")


def walk_refs(tree: object) -> Iterator[TensorRef]:
    """Every TensorRef in an unpickled tree of containers, in order of appearance."""
    if isinstance(tree, TensorRef):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from walk_refs(value)
    elif isinstance(tree, (list, tuple, set)):
        for value in tree:
            yield from walk_refs(value)
