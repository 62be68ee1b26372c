"""The table of a DCP directory, ``.metadata``: every tensor with its chunks, every other object, and where each is.

The file is a pickle of torch's own dataclasses. It is read by the allow-listed unpickler, in which these classes are
inert stand-ins: neither torch is imported, nor is anything called that the file names. What it says is checked here,
once: names, shapes, chunks that make up their tensor, and byte ranges that are inside files of the directory.

Source: torch.distributed.checkpoint.metadata and .filesystem (torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from zeroelastic.errors import CheckpointError, MissingFileError, UnsupportedError, brief, shown
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_size, read_whole
from zeroelastic.torch_file.header import DTYPE_BYTES, DType, Stub, pickle_errors
from zeroelastic.torch_file.safe_unpickler import HeaderUnpickler, allow_globals, check_opcodes

METADATA = ".metadata"
"""The name of the table in a DCP directory."""

_AT = "torch.distributed.checkpoint"
_CLASSES = (
    *(
        f"{_AT}.metadata.{name}"
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    f"{_AT}.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
)
"""The classes that a table names, of whose objects only the attributes are needed."""

_MAX_METADATA_BYTES = 1 << 31
_MAX_DIMENSIONS = 64
_MAX_NUMEL = 1 << 60
_MAX_NAME = 4096


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """A run of a file that holds one torch.save archive."""

    path: FilePath
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, in elements of each dimension, and the archive that holds it."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    place: StoredBytes


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """A tensor of the table. ``chunks`` are those with elements, in the order of where they begin.

    ``num_listed`` is the number of chunks, empty ones included: more than one for a DTensor of several ranks.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    num_listed: int

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """The entries of a DCP directory by key: ``tensors``, and ``objects``, which are everything else."""

    folder: FilePath
    tensors: Mapping[str, ChunkedTensor]
    objects: Mapping[str, StoredBytes]

    @property
    def parts(self) -> int:
        """The largest number of chunks of a tensor: the ranks that saved it, where each had a part of some tensor."""
        return max((tensor.num_listed for tensor in self.tensors.values()), default=1)

    @property
    def files(self) -> tuple[FilePath, ...]:
        """The files that hold the payload, each once."""
        places = [chunk.place for tensor in self.tensors.values() for chunk in tensor.chunks]
        return tuple(dict.fromkeys(place.path for place in (*places, *self.objects.values())))


def read_metadata(folder: FilePath) -> DcpMetadata:
    """Read and check the table of a DCP directory; no payload is touched.

    Raises MissingFileError, CheckpointError, UnsafePickleError, UnsupportedError.

    Example::

        read_metadata(Path("fsdp/step-100")).tensors["model.norm.weight"].chunks
    """
    path = folder / METADATA
    data = read_whole(path, limit=_MAX_METADATA_BYTES)
    with pickle_errors(path), allow_globals(_CLASSES):
        check_opcodes(data)
        root = HeaderUnpickler(data, path, "refuse").load()
    described = _attribute(root, "Metadata", "state_dict_metadata", path)
    stored = _attribute(root, "Metadata", "storage_data", path)
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise _damaged(path, "has no table of tensors and of where they are")
    places = _places(stored, folder, path)
    tensors: dict[str, ChunkedTensor] = {}
    objects: dict[str, StoredBytes] = {}
    for key, entry in described.items():
        if not isinstance(key, str) or not 0 < len(key) <= _MAX_NAME:
            raise _damaged(path, f"holds {shown(key)} as the name of a tensor")
        kind = entry.qualname if isinstance(entry, Stub) else ""
        if kind == "BytesStorageMetadata":
            place = places.get((key, ()))
            if place is None:
                raise _damaged(path, f"does not say where {brief(key)} is")
            objects[key] = place
        elif kind == "TensorStorageMetadata":
            tensors[key] = _tensor(key, entry, places, path)
        else:
            raise _damaged(path, f"describes {brief(key)} by {shown(entry)}")
    return DcpMetadata(folder, tensors, objects)


def _damaged(path: FilePath, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: {problem}. The file is damaged, or not written by torch.distributed.checkpoint.")


def _attribute(value: object, kind: str, name: str, path: FilePath) -> object:
    """An attribute of a stand-in of one of torch's classes. Raises CheckpointError for another object."""
    if not isinstance(value, Stub) or value.qualname != kind:
        raise _damaged(path, f"holds {shown(value)} where a {kind} is expected")
    return value.attributes.get(name)


def _numbers(value: object, what: str, path: FilePath) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > _MAX_DIMENSIONS:
        raise _damaged(path, f"{what} is {shown(value)}")
    if not all(type(number) is int and 0 <= number < _MAX_NUMEL for number in value):
        raise _damaged(path, f"{what} is {shown(value)}")
    return value


def _places(stored: Mapping[object, object], folder: FilePath, path: FilePath) -> dict[tuple[str, object], StoredBytes]:
    """Where each chunk and each object is, by key and the place where the chunk begins; () for an object."""
    sizes: dict[str, int] = {}
    found: dict[tuple[str, object], StoredBytes] = {}
    for index, info in stored.items():
        key = _attribute(index, "MetadataIndex", "fqn", path)
        begin = _attribute(index, "MetadataIndex", "offset", path)
        name = _attribute(info, "_StorageInfo", "relative_path", path)
        offset = _attribute(info, "_StorageInfo", "offset", path)
        nbytes = _attribute(info, "_StorageInfo", "length", path)
        if not isinstance(key, str) or not isinstance(name, str):
            raise _damaged(path, f"says of {shown(key)} that it is in {shown(name)}")
        if _attribute(info, "_StorageInfo", "transform_descriptors", path):
            raise UnsupportedError(
                f"{path}: {brief(key)} was transformed when it was written, such as compressed. Save without stream "
                "transforms."
            )
        where = () if begin is None else _numbers(begin, f"the beginning of a chunk of {brief(key)}", path)
        if type(offset) is not int or type(nbytes) is not int or offset < 0 or nbytes <= 0:
            raise _damaged(path, f"says of {brief(key)} that it is {shown(nbytes)} bytes from {shown(offset)} on")
        if name not in sizes:
            sizes[name] = _size_of(name, folder, path)
        if offset + nbytes > sizes[name]:
            raise CheckpointError(
                f"{folder / name}: has {sizes[name]} bytes; {path.name} says that {brief(key)} ends at byte "
                f"{offset + nbytes}. The file is truncated, or of another save."
            )
        found[key, where] = StoredBytes(folder / name, offset, nbytes)
    return found


def _size_of(name: str, folder: FilePath, path: FilePath) -> int:
    """The size of a file that the table names, which must be inside its folder."""
    parts = name.split("/")
    if len(name) > _MAX_NAME or "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise _damaged(path, f"names the file {shown(name)}, which is not one of its folder")
    size = file_size(folder / name)
    if size is None:
        raise MissingFileError(f"{folder / name}: no such file; {path.name} names it. The checkpoint is incomplete.")
    return size


def _tensor(key: str, entry: object, places: Mapping[tuple[str, object], StoredBytes], path: FilePath) -> ChunkedTensor:
    """A tensor of the table, whose chunks are inside of it and have as many elements as it has."""
    shape = _numbers(_attribute(entry, "TensorStorageMetadata", "size", path), f"the shape of {brief(key)}", path)
    listed = _attribute(entry, "TensorStorageMetadata", "chunks", path)
    dtype = _dtype(_attribute(entry, "TensorStorageMetadata", "properties", path), key, path)
    if not isinstance(listed, list) or math.prod(shape) >= _MAX_NUMEL:
        raise _damaged(path, f"describes {brief(key)} by {shown(listed)} chunks of shape {shown(shape)}")
    chunks: list[Chunk] = []
    for item in listed:
        begin = _numbers(_attribute(item, "ChunkStorageMetadata", "offsets", path), f"a chunk of {brief(key)}", path)
        sizes = _numbers(_attribute(item, "ChunkStorageMetadata", "sizes", path), f"a chunk of {brief(key)}", path)
        if len(begin) != len(shape) or len(sizes) != len(shape):
            raise _damaged(path, f"{brief(key)} has {len(shape)} dimensions, a chunk of it has others")
        if 0 in sizes:  # of a rank that has no part of the tensor
            continue
        if any(first + size > most for first, size, most in zip(begin, sizes, shape, strict=True)):
            raise _damaged(path, f"a chunk of {brief(key)} leaves the tensor of shape {shape}")
        place = places.get((key, begin))
        if place is None:
            raise _damaged(path, f"does not say where {brief(key)} from {begin} on is")
        chunks.append(Chunk(begin, sizes, place))
    chunks.sort(key=lambda chunk: chunk.begin)
    if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
        raise CheckpointError(
            f"{path}: the chunks of {brief(key)} do not make up the tensor of shape {shape}. The save did not finish, "
            "or two are mixed."
        )
    return ChunkedTensor(dtype, shape, tuple(chunks), len(listed))


def _dtype(properties: object, key: str, path: FilePath) -> str:
    """The dtype of ``TensorProperties``, whose state is a tuple that begins with it."""
    state = _attribute(properties, "TensorProperties", "__state__", path)
    first = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(first, DType) or first.name not in DTYPE_BYTES:
        raise _damaged(path, f"says of {brief(key)} that it has the dtype {shown(first)}")
    return first.name
