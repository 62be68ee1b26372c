"""A torch.save file as an object tree with extents: the header is parsed, the payload is never touched.

``read_torch_file`` unpickles ``data.pkl`` of the zip archive through an allow-list: tensors become ``TensorRef``
(where the bytes are), DeepSpeed's loss scalers and unknown classes become inert ``Stub`` objects. ``read_tree`` keeps
all that makes an object, for a file that is written around it (``archive``). No code from the file runs: neither torch
nor deepspeed is imported here, and no global that the file names is ever called.

Byte layout: PyTorch writes every storage as one uncompressed zip record ``<archive>/data/<key>`` (torch.save,
``_use_new_zipfile_serialization=True``, torch 1.6 and later).
"""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import CheckpointError, OldFormatError
from zeroelastic.io.paths import FilePath, as_path
from zeroelastic.io.storage import Blocks, LocalFile, open_blocks
from zeroelastic.torch_file.safe_unpickler import ForeignGlobals, HeaderUnpickler, check_opcodes, check_tree
from zeroelastic.torch_file.tree import DTYPE_BYTES, DType, Storage, Stub, TensorRef
from zeroelastic.torch_file.zip_directory import (
    LOCAL,
    LOCAL_MARK,
    LOCATED_BYTES,
    ZipDirectory,
    ZipEntry,
    ZipError,
    payload_offset,
    read_directory,
)

__all__ = ["DTYPE_BYTES", "DType", "Extent", "Storage", "Stub", "TensorRef", "TorchFile", "read_torch_file"]

_MAX_PICKLE_BYTES = 1 << 31
_MAX_DIGITS = 19  # of a storage's key that int64 holds


@dataclass(frozen=True, slots=True)
class Extent:
    """A byte range of a file that holds elements of one dtype."""

    path: FilePath
    offset: int
    nbytes: int
    dtype: str


@dataclass(slots=True)
class TorchFile:
    """An opened torch.save archive: its object tree, and where each storage lies in the file.

    Invariant: every extent that it returns is inside the file and inside one uncompressed record. ``root`` is the
    unpickled tree with ``TensorRef`` in place of tensors. ``directory``
    is the digest of the archive's directory (``directory_digest``), ``folder`` the archive's own name: the name that
    the file had when it was saved, without its ending, or "archive".
    """

    path: FilePath
    size: int
    root: object
    directory: str
    folder: str
    _records: ZipDirectory = field(repr=False)
    _file: Blocks = field(repr=False)
    _offsets: dict[tuple[str, int], int] = field(default_factory=dict, repr=False)  # by key and bytes

    @property
    def header_bytes(self) -> int:
        """The bytes that were read so far."""
        return self._file.bytes_read

    def extent(self, ref: TensorRef) -> Extent:
        """The byte range of a contiguous tensor. Raises CheckpointError for one that is not, or a bad record."""
        if not ref.is_contiguous:
            raise self._not_contiguous(ref)
        itemsize = DTYPE_BYTES[ref.dtype]
        offset = self._payload(ref.storage) + ref.offset * itemsize
        return Extent(self.path, offset, ref.numel * itemsize, ref.dtype)

    def read(self, ref: TensorRef) -> npt.NDArray[np.uint8]:
        """The raw bytes of a small tensor, such as a 0-dim step: shape ``(nbytes,)``."""
        extent = self.extent(ref)
        data = self._file.read(extent.offset, extent.nbytes)
        if len(data) != extent.nbytes:
            raise CheckpointError(f"{self.path}: ends at byte {extent.offset + len(data)}. The file is truncated.")
        return np.frombuffer(data, dtype=np.uint8)

    def locate(self, keys: Iterable[str] | None = None) -> None:
        """Read where storages begin, by key or of all, in few round trips to a remote file; a local one is not read."""
        if not self._file.has_cache:
            return
        wanted = {*(self._records.storages() if keys is None else keys)} - {key for key, _ in self._offsets}
        found = ((entry.header, key, entry) for key in wanted if (entry := self._records.storage(key)) is not None)
        order = sorted(found)
        for at in range(0, len(order), self._file.capacity):
            some = order[at : at + self._file.capacity]
            self._file.prefetch((offset, LOCATED_BYTES) for offset, _, _ in some)
            for offset, key, entry in some:
                with suppress(ZipError):  # which is raised where the storage is needed
                    data = self._file.read(offset, LOCATED_BYTES)
                    self._offsets[key, entry.nbytes] = payload_offset(data, entry, self.size)

    def one_open(self) -> Blocks:
        """A context within which all reads of a local file open it once, and none if nothing is read."""
        return self._file

    def storage_extent(self, storage: Storage) -> Extent:
        """The byte range of a whole storage. Raises CheckpointError for a bad record."""
        return Extent(self.path, self._payload(storage), storage.numel * DTYPE_BYTES[storage.dtype], storage.dtype)

    def ranges(self, refs: Sequence[TensorRef]) -> Int64Array:
        """Return the (offset, nbytes) of contiguous tensors: int64, shape ``(num_refs, 2)``. Raises as ``extent``.

        The records of many storages are found together, in few reads.
        """
        storages = {ref.storage for ref in refs}
        self._find_payloads(storages)
        begins = {storage: self._payload(storage) for storage in storages}
        ranges = np.empty((len(refs), 2), dtype=np.int64)
        for row, ref in enumerate(refs):
            if not ref.is_contiguous:
                raise self._not_contiguous(ref)
            itemsize = DTYPE_BYTES[ref.dtype]
            ranges[row] = begins[ref.storage] + ref.offset * itemsize, ref.numel * itemsize
        return ranges

    def _not_contiguous(self, ref: TensorRef) -> CheckpointError:
        return CheckpointError(f"{self.path}: a tensor of shape {ref.shape} is not contiguous (strides {ref.stride})")

    def _find_payloads(self, storages: Iterable[Storage]) -> None:
        """Find where storages begin; one whose record is not as torch.save writes it is left to ``_payload``."""
        if self._file.has_cache:
            self.locate(storage.key for storage in storages)
            return
        numbered = [storage for storage in storages if storage.key.isdecimal() and len(storage.key) < _MAX_DIGITS]
        number = np.array([int(storage.key) for storage in numbered], dtype=np.int64)
        nbytes = np.array([storage.numel * DTYPE_BYTES[storage.dtype] for storage in numbered], dtype=np.int64)
        found = self._records.payload_offsets(number, nbytes, self._file.read, self.size)
        rows = zip(numbered, nbytes.tolist(), found.tolist(), strict=True)
        self._offsets.update(((storage.key, want), offset) for storage, want, offset in rows if offset >= 0)

    def _payload(self, storage: Storage) -> int:
        want = storage.numel * DTYPE_BYTES[storage.dtype]
        known = self._offsets.get((storage.key, want))
        if known is not None:
            return known
        entry = self._records.storage(storage.key)
        if entry is None:
            raise CheckpointError(f"{self.path}: storage {storage.key} has no record. The file is damaged.")
        if entry.method or entry.nbytes != want or entry.stored_bytes != want:
            raise CheckpointError(
                f"{self.path}: record data/{storage.key} has {entry.nbytes} bytes; "
                f"{storage.numel} elements of {storage.dtype} need {want}. The file is damaged."
            )
        data = self._file.read(entry.header, LOCATED_BYTES) if entry.header < self.size else b""
        offset = self._offsets[storage.key, want] = _payload_offset(data, entry, self.path, self.size)
        return offset


def _payload_offset(data: bytes, entry: ZipEntry, path: FilePath, size: int) -> int:
    """Call ``payload_offset``; raises CheckpointError in place of ZipError."""
    try:
        return payload_offset(data, entry, size)
    except ZipError as error:
        raise CheckpointError(f"{path}: {error}.") from None


def read_torch_file(
    path: str | os.PathLike[str] | FilePath,
    *,
    foreign: ForeignGlobals = "refuse",
    through: Blocks | None = None,
) -> TorchFile:
    """Parse the header of a torch.save file; payload is not read, except what shares a 16 KiB block of a remote file.

    ``foreign`` decides about globals outside the allow-list: "refuse" raises UnsafePickleError with the name, "inert"
    puts a ``Stub`` in its place (for files that have user objects, too). ``through`` reads the file in place of its
    path.

    Raises MissingFileError, CheckpointError (damaged, truncated), OldFormatError (before 1.6, without a zip archive),
    UnsafePickleError.

    Example::

        file = read_torch_file("global_step10/zero_pp_rank_0_mp_rank_00_optim_states.pt")
        file.extent(file.root["optimizer_state_dict"]["fp32_flat_groups"][0])
    """
    path = as_path(path)
    with nullcontext(through) if through is not None else open_blocks(path) as blocks:
        data, file = _read_pickle(path, blocks)
    with pickle_errors(path), paused_collector():
        check_opcodes(data)
        file.root = HeaderUnpickler(data, path, foreign, file.storage_extent if foreign == "exact" else None).load()
        if foreign == "refuse":  # user objects beside it may hold themselves
            check_tree(file.root)
    return file


def read_tree(path: FilePath) -> object:
    """The tree of a torch.save file, to be written again: its storages know where their bytes are, which are not read.

    Raises as ``read_torch_file``, and UnsafePickleError for tensors of kinds that are not read.
    """
    file = read_torch_file(path, foreign="exact")
    root, file.root = file.root, None
    return root


@contextmanager
def paused_collector() -> Iterator[None]:
    """Inside the block, Python looks for no cycles of objects, which takes a quarter of the time of making millions.

    It goes on afterwards, unless it was off before. Memory that is not in cycles is freed as ever.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def pickle_errors(path: FilePath) -> Iterator[None]:
    """Any error of unpickling becomes a CheckpointError that names the file, except a lack of memory."""
    try:
        yield
    except CheckpointError as error:
        raise error if str(path) in str(error) else type(error)(f"{path}: {error}") from None
    except MemoryError:  # of this machine, not of the file
        raise
    except RecursionError:
        raise CheckpointError(f"{path}: the pickle nests too deeply. The file is damaged.") from None
    except Exception as error:  # a damaged pickle may fail in any way; nothing of it has run
        raise CheckpointError(f"{path}: the pickle cannot be read ({error}). The file is damaged.") from None


def _read_pickle(path: FilePath, file: Blocks) -> tuple[bytes, TorchFile]:
    start = file.read(0, 4)
    if start != LOCAL_MARK:
        raise _not_zip(path, start, file.size)
    try:
        records = read_directory(file.read, file.size)
    except ZipError as error:
        raise CheckpointError(f"{path}: {error}. The file is truncated or damaged.") from None
    if records.twice is not None:
        raise CheckpointError(f"{path}: two records are named {records.twice}. The file is damaged.")
    _check_apart(records, path)
    order = records.find("byteorder")
    if order is not None and _content(file, records, order, path, min(file.size, 16)) != b"little":
        raise CheckpointError(f"{path}: was written on a big-endian machine, which is not supported.")
    pickled = records.find("data.pkl")
    if pickled is None or pickled.text == "data.pkl":
        raise CheckpointError(f"{path}: is a zip archive without data.pkl, so not a torch.save file.")
    data = _content(file, records, pickled, path, min(file.size, _MAX_PICKLE_BYTES))
    folder = pickled.text.partition("/")[0]
    return data, TorchFile(path, file.size, None, records.digest, folder, records, file)


def directory_digest(path: Path) -> str | None:
    """SHA-256 of a file from its zip directory to its end, 64 hexadecimal digits; None for one that is no zip archive.

    The directory states the name, place, size and CRC-32 of every record, so this tells apart any two files that are
    not the same, as far as CRC-32 does, at the price of a few KB. Raises MissingFileError, CheckpointError.
    """
    with LocalFile(path) as file:
        try:
            return read_directory(file.read, file.size).digest
        except ZipError:
            return None


def _check_apart(records: ZipDirectory, path: FilePath) -> None:
    """Refuse records that share bytes of the file, so that a small one cannot pass for a large one."""
    order = np.argsort(records.header, kind="stable")
    begins = records.header[order]
    ends = begins + LOCAL.size + records.stored_bytes[order]
    overlaps = np.flatnonzero(begins[1:] < ends[:-1])
    if len(overlaps):
        raise CheckpointError(f"{path}: two records overlap at byte {begins[overlaps[0] + 1]}. The file is damaged.")
    if len(ends) and ends[-1] > records.offset:
        raise CheckpointError(f"{path}: a record ends behind the directory. The file is truncated or damaged.")


def _content(file: Blocks, records: ZipDirectory, entry: ZipEntry, path: FilePath, limit: int) -> bytes:
    """The content of one of the records, of at most ``limit`` bytes and as many as it takes in the file."""
    if entry.method or entry.stored_bytes != entry.nbytes or entry.nbytes > limit:
        raise CheckpointError(
            f"{path}: record {entry.text} is compressed or larger than {limit} bytes. The file is damaged."
        )
    header = file.read(entry.header, LOCATED_BYTES)
    data = file.read(_payload_offset(header, entry, path, file.size), entry.nbytes)
    if records.states_checksums and zlib.crc32(data) != entry.crc32:
        raise CheckpointError(f"{path}: Bad CRC-32 for file {entry.text!r}. The file is truncated or damaged.")
    return data


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


_WALKED = (dict, list, tuple, set, frozenset, Stub)


def walk_refs(tree: object, *, but: Iterable[object] = ()) -> Iterator[TensorRef]:
    """Every TensorRef in an unpickled tree, in order of appearance; what stand-ins of unknown objects hold, too.

    The containers ``but`` are left out.

    Each container is walked once: user objects may hold themselves, and nest as deeply as they like.
    """
    walked = {id(container) for container in but}
    pending: list[Iterator[object]] = [iter((tree,))]
    while pending:
        for value in pending[-1]:
            if isinstance(value, TensorRef):
                yield value
            elif isinstance(value, _WALKED) and id(value) not in walked:
                walked.add(id(value))
                pending.append(_inside(value))
                break
        else:
            pending.pop()


def _inside(container: object) -> Iterator[object]:
    if isinstance(container, Stub):
        return iter((container.args, container.kwargs, container.items, container.pairs, container.state))
    if isinstance(container, dict):
        return chain.from_iterable(container.items())
    assert isinstance(container, Iterable)
    return iter(container)
