"""A torch.save file as an object tree with extents: the header is parsed, the payload is never touched.

``read_torch_file`` unpickles ``data.pkl`` of the zip archive through an allow-list: tensors become ``TensorRef``
(where the bytes are), DeepSpeed's loss scalers and unknown classes become inert ``Stub`` objects. No code from the
file runs: neither torch nor deepspeed is imported here, and no global that the file names is ever called.

Byte layout: PyTorch writes every storage as one uncompressed zip record ``<archive>/data/<key>`` (torch.save,
``_use_new_zipfile_serialization=True``, torch 1.6 and later).
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from zeroelastic.errors import CheckpointError, MissingFileError, OldFormatError, UnreadableError, ZeroElasticError
from zeroelastic.opcodes import check_opcodes
from zeroelastic.safepickle import (
    DTYPE_BYTES,
    STORAGE_DTYPES,
    DType,
    ForeignGlobals,
    HeaderUnpickler,
    StorageRef,
    Stub,
    TensorRef,
    allow_globals,
    check_tree,
)
from zeroelastic.storage import BlockFile, FilePath, RemotePath, as_path, open_regular, read_range

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_MAX_PICKLE_BYTES = 1 << 31
_UTF8_NAMES = 1 << 11
_LOCATED_BYTES = 512  # a local header with its padding, and a scalar that follows it


@dataclass(frozen=True, slots=True)
class Extent:
    """A byte range of a file that holds elements of one dtype."""

    path: FilePath
    offset: int
    nbytes: int
    dtype: str


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
    ``directory`` is the digest of the archive's directory (``directory_digest``), ``folder`` what the archive calls
    itself: the name of the file without its ending, as torch.save has it, or "archive".
    """

    path: FilePath
    size: int
    root: object
    header_bytes: int
    directory: str
    folder: str
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
            self._headers |= {key: self._blocks.read(offset, _LOCATED_BYTES) for key, offset in offsets.items()}
        self.header_bytes = self._blocks.bytes_read

    def _read(self, offset: int, nbytes: int) -> bytes:
        if self._blocks is not None:
            data = self._blocks.read(offset, nbytes)
            self.header_bytes = self._blocks.bytes_read
            return data
        data = read_range(self.path, offset, nbytes)
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
            data = self._read(info.header_offset, _LOCATED_BYTES) if inside else b""
        offset = _payload_offset(data, info, self.path, self.size)
        self._offsets[storage.key] = offset
        return offset


def _payload_offset(data: bytes, info: zipfile.ZipInfo, path: FilePath, size: int) -> int:
    """Where a record's payload begins, from the first bytes of its local header.

    The two lengths that the place follows from are checked: against the directory's name, and against what fills them.
    """
    if len(data) < _LOCAL_HEADER.size or data[:4] != b"PK\x03\x04":
        raise CheckpointError(f"{path}: no zip record at byte {info.header_offset}. The file is damaged.")
    fields = _LOCAL_HEADER.unpack_from(data)
    name = len(info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8_NAMES else "cp437"))
    at = _LOCAL_HEADER.size + name
    end = at + int(fields[10])
    while at + 4 <= min(end, len(data)):
        at += 4 + int.from_bytes(data[at + 2 : at + 4], "little")
    if fields[9] != name or at != end:
        raise CheckpointError(
            f"{path}: the header of record {info.filename} contradicts the directory. The file is damaged."
        )
    offset = info.header_offset + end
    if offset + info.compress_size > size:
        raise CheckpointError(f"{path}: record {info.filename} ends behind the file. The file is truncated.")
    return offset


class _CountingFile(io.RawIOBase):
    """A read-only file that counts the bytes read through it."""

    def __init__(self, path: Path) -> None:
        self._file = open_regular(path)
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
        file.root = HeaderUnpickler(data, file.path, foreign).load()
        if foreign == "refuse":  # what users keep beside the interesting part may well hold itself
            check_tree(file.root)
    except CheckpointError as error:
        if str(file.path) in str(error):
            raise
        raise type(error)(f"{file.path}: {error}") from None
    except MemoryError:  # of this machine, not of the file
        raise
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
            directory = _digest_of_directory(archive, raw, size)
        except (ZeroElasticError, MemoryError):
            raise
        except OSError as error:
            if error.errno in (None, errno.EINVAL):  # zipfile's own, or a place before the first byte: damage
                raise CheckpointError(f"{path}: {error}. The file is truncated or damaged.") from None
            raise UnreadableError(f"{path}: cannot be read: {error.strerror}.") from None
        except Exception as error:  # zipfile raises eight kinds of error for damaged archives, RuntimeError among them
            raise CheckpointError(f"{path}: {error}. The file is truncated or damaged.") from None
        header_bytes = raw.count
    folder = pickled.filename.partition("/")[0]
    return data, TorchFile(path, size, None, header_bytes, directory, folder, records, _blocks=blocks)


def directory_digest(path: Path) -> str | None:
    """SHA-256 of a file from its zip directory to its end, 64 hexadecimal digits; None for one that is no zip archive.

    The directory states the name, place, size and CRC-32 of every record, so this tells apart any two files that are
    not the same, as far as CRC-32 does, at the price of a few KB. Raises MissingFileError, CheckpointError.
    """
    with _open_local(path) as raw:
        try:
            return _digest_of_directory(zipfile.ZipFile(raw), raw, raw.size)
        except zipfile.BadZipFile:
            return None


def _digest_of_directory(archive: zipfile.ZipFile, raw: _CountingFile | _BlockStream, size: int) -> str:
    raw.seek(archive.start_dir)
    return hashlib.sha256(raw.read(size - archive.start_dir)).hexdigest()


def _open_local(path: FilePath) -> _CountingFile:
    assert isinstance(path, Path)
    try:
        return _CountingFile(path)
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file. The checkpoint is incomplete.") from None
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read: {error.strerror}.") from None


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
    _check_apart(archive, path)
    if pickled is None:
        raise CheckpointError(f"{path}: is a zip archive without data.pkl, so not a torch.save file.")
    _check_stored(pickled, path, min(size, _MAX_PICKLE_BYTES))
    return records, pickled


def _check_apart(archive: zipfile.ZipFile, path: FilePath) -> None:
    """Refuse records that share bytes of the file, so that a small one cannot pass for a large one."""
    end = -1
    for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
        if info.header_offset < end:
            raise CheckpointError(f"{path}: two records overlap at byte {info.header_offset}. The file is damaged.")
        end = info.header_offset + _LOCAL_HEADER.size + info.compress_size
    if end > archive.start_dir:
        raise CheckpointError(f"{path}: a record ends behind the directory. The file is truncated or damaged.")


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


__all__ = [
    "DTYPE_BYTES",
    "STORAGE_DTYPES",
    "DType",
    "Extent",
    "ForeignGlobals",
    "StorageRef",
    "Stub",
    "TensorRef",
    "TorchFile",
    "allow_globals",
    "check_opcodes",
    "read_pickle",
    "read_torch_file",
    "walk_refs",
]
