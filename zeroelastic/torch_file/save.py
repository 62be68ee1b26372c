"""torch.save's file, byte for byte, its payload written by the native engine: laid out first, then filled.

torch itself lays the file out: ``torch.serialization.skip_data`` lets it write everything but the payload, whose place
is read from the archive's own directory. The payload is written straight from the tensors, by several threads, with the
archive's CRC-32 and the content digests in the same pass. Nothing is copied, but for tensors on a GPU.

Source: torch.save and PyTorchStreamWriter, torch 2.13; any other layout is refused.
"""

from __future__ import annotations

import os
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zeroelastic.core.digest import UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import UnsupportedError
from zeroelastic.executors.batches import DigestTotals, join_crc32_groups
from zeroelastic.executors.dispatch import CopyTable, DigestRows, Executor, UInt32Array, host_executor, write_segments
from zeroelastic.io.atomic import errors_of_the_system, name_in_errors, reserve_space, write_fully
from zeroelastic.torch_file.zip_directory import (
    DEFERRED,
    DESCRIPTOR_MARK,
    ENTRY_CRC32,
    LOCATED_BYTES,
    ReadAt,
    ZipDirectory,
    ZipError,
    payload_offset,
    read_directory,
)

_EARLY_BYTES = 4 << 20  # fewer bytes are flushed with the rest, when the file is complete
_MASK64 = (1 << 64) - 1
_PLAIN_TYPES = frozenset(
    {str, int, float, bool, type(None), tuple, list, dict, OrderedDict, torch.Tensor, torch.Size, type, FunctionType}
)
"""The types of nearly all objects in a pickle that are no storages."""


@dataclass(frozen=True, slots=True)
class DigestRange:
    """Elements whose partial digest is wanted while they are written: a 1-D contiguous view of a storage of the file.

    ``seed`` is that of the digest's stream, ``start`` the global position of the first element.
    """

    tensor: torch.Tensor
    seed: int
    start: int


def write_torch_file(
    obj: object,
    path: Path,
    *,
    digest_ranges: Sequence[DigestRange] = (),
    last: Sequence[torch.Tensor] = (),
    before_last: Callable[[Sequence[int | None]], None] | None = None,
    sync: bool = False,
    executor: Executor = "auto",
) -> list[int | None]:
    """Write what ``torch.save(obj, path)`` writes, the same bytes; returns the partial digest of each digest_range.

    The digest of a range that is in no storage of the file, or overlaps another, is None. When all payload but the
    storages of ``last`` is written, ``before_last`` gets the digests and may still change these tensors; a file that
    holds none of them does without. ``sync`` flushes the file to its device, which begins while it is written. Memory:
    none to speak of, but 48 MiB of pinned memory that the process keeps where a tensor is on a GPU; with ``sync``, what
    is there goes past the page cache of ext4 and XFS.

    Raises OSError naming the file (for a full disk before anything is written), ConfigError for an executor that is not
    built, UnsupportedError when this torch lays its files out in another way.

    Example::

        write_torch_file({"weight": weight}, Path("weight.pt"))
    """
    skeleton = write_skeleton(obj, path)
    with name_in_errors(path):
        reserve(path)
        payload = skeleton.payload(digest_ranges, last)
        write = partial(_write_rows, skeleton, payload, sync=sync, executor=executor)
        write(np.flatnonzero(~payload.is_late))
        if before_last is not None and payload.is_late.any():
            before_last(payload.digests)
        write(np.flatnonzero(payload.is_late))
        _complete(skeleton, payload, sync=sync)
    return payload.digests


def _write_rows(
    skeleton: TorchSaveSkeleton, payload: Payload, chosen: Int64Array, *, sync: bool, executor: Executor
) -> None:
    """Write the chosen rows, device by device, each kind in one call: those with a digest, and those without."""
    contents = [as_bytes(storage) for storage in skeleton.storages]
    for device in dict.fromkeys(content.device for content in contents):
        is_there = np.array([content.device == device for content in contents], dtype=bool)
        there = chosen[is_there[payload.storage[chosen]]]
        for rows in payload.kinds(there) if len(there) else ():
            numbers, src = np.unique(payload.storage[rows], return_inverse=True)
            zeros = np.zeros(len(rows), dtype=np.int64)
            table = CopyTable(src.reshape(-1), payload.src[rows], zeros, payload.dst[rows], payload.nbytes[rows])
            write = partial(
                write_segments,
                table,
                [contents[number] for number in numbers.tolist()],
                [skeleton.path],
                sync=sync and int(table.nbytes.sum()) >= _EARLY_BYTES,
                executor=host_executor(executor) if device.type == "cpu" else executor,
            )
            payload.checksums[rows] = payload.run(rows, write)


def _complete(skeleton: TorchSaveSkeleton, payload: Payload, *, sync: bool) -> None:
    """Put the payload's checksums where they belong."""
    with open(skeleton.path, "r+b", buffering=0) as file:
        fd = file.fileno()
        for offset, data in skeleton.patches(payload, lambda at, nbytes: os.pread(fd, nbytes, at)):
            write_fully(fd, data, offset)
        if sync:
            os.fsync(fd)


class Payload:
    """The payload of a file in segments, in file order; their checksums, and the partial digest of each digest range.

    The streams of ``digest`` are the digest ranges, -1 for bytes of none. Arrays of shape ``(num_rows,)``: ``storage``
    is an index, ``src`` and ``dst`` are byte offsets in the storage and in the file, ``is_late`` are the segments of
    the storages that are written last.
    """

    def __init__(
        self, segments: Int64Array, offsets: Int64Array, late: Sequence[int], digest_ranges: Sequence[DigestRange]
    ) -> None:
        """``segments`` has storage, byte offset in it, bytes and digest range of each, ``offsets`` is of storages."""
        self.storage, self.src, self.nbytes, stream = (np.ascontiguousarray(column) for column in segments.T)
        self.dst = offsets[self.storage] + self.src
        self.is_late: npt.NDArray[np.bool_] = np.isin(self.storage, late)
        self.digest = DigestRows(
            seeds=np.array([of.seed for of in digest_ranges], dtype=np.uint64),
            stream=stream,
            start=np.array([*(of.start for of in digest_ranges), 0], dtype=np.int64)[stream],
            itemsize=np.array([*(of.tensor.element_size() for of in digest_ranges), 1], dtype=np.int64)[stream],
        )
        self.checksums = np.zeros(len(segments), dtype=np.uint32)
        self._totals = DigestTotals(self.digest)
        self._digested: set[int] = set()

    @property
    def digests(self) -> list[int | None]:
        """By digest range; None for one of which nothing has been digested."""
        assert self._totals.totals is not None
        return [total if i in self._digested else None for i, total in enumerate(self._totals.totals.tolist())]

    def kinds(self, rows: Int64Array) -> list[Int64Array]:
        """The rows by whether they have a digest, those first: what one call of an engine takes."""
        digested = self.digest.stream[rows] >= 0
        return [part for part in (rows[digested], rows[~digested]) if len(part)]

    def run(
        self, rows: Int64Array, engine: Callable[..., UInt64Array | None], within: Int64Array | None = None
    ) -> UInt32Array:
        """Call an engine for rows of one kind, or for pieces ``within`` bytes into them; returns their checksums.

        It is called with ``digest`` and ``crc32``, as of ``dispatch.write_segments``, and returns the digests.
        """
        checksums, numbers = np.zeros(len(rows), dtype=np.uint32), self.digest.stream[rows]
        if numbers[0] < 0:
            engine(digest=None, crc32=checksums)
        else:
            self._totals.add(rows, engine(digest=self._totals.rows(rows, within), crc32=checksums))
            self._digested.update(numbers.tolist())
        return checksums


@dataclass(frozen=True, slots=True)
class TorchSaveSkeleton:
    """A torch.save file that lacks its payload and the checksums of it; all else is on the disk already.

    ``storages`` are its storages in file order, ``rows`` their records in the directory, ``offsets`` and ``sizes`` the
    places of their bytes; ``nbytes`` is the size of the file. The saved object is not used any more: a file filled from
    storage copies has the state of the moment it was laid out.
    """

    path: Path
    nbytes: int
    directory: ZipDirectory
    storages: tuple[torch.UntypedStorage, ...]
    rows: Int64Array
    offsets: Int64Array
    sizes: Int64Array

    @property
    def on_gpu(self) -> bool:
        """Return whether any storage is on a GPU."""
        return any(storage.device.type == "cuda" for storage in self.storages)

    def payload(self, digest_ranges: Sequence[DigestRange], last: Sequence[torch.Tensor]) -> Payload:
        """The payload, cut at the digest ranges; late are the storages of ``last``.

        A digest range that is in no storage of the file, or overlaps another one, is no segment.
        """
        index = {storage._cdata: i for i, storage in enumerate(self.storages)}
        late = {index.get(tensor.untyped_storage()._cdata, -1) for tensor in last} - {-1}
        wanted: list[tuple[int, int, int, int]] = []  # storage, byte offset, bytes, digest range
        for number, tensor in enumerate(of.tensor for of in digest_ranges):
            storage = index.get(tensor.untyped_storage()._cdata)
            if storage is not None and tensor.numel():
                size = tensor.element_size()
                wanted.append((storage, int(tensor.storage_offset()) * size, tensor.numel() * size, number))
        rows: list[tuple[int, int, int, int]] = []
        done = [0] * len(self.sizes)
        for storage, offset, nbytes, number in sorted(wanted):
            if offset >= done[storage]:
                rows += [(storage, done[storage], offset - done[storage], -1), (storage, offset, nbytes, number)]
                done[storage] = offset + nbytes
        rows += (
            (storage, at, size - at, -1)
            for storage, (at, size) in enumerate(zip(done, self.sizes.tolist(), strict=True))
        )
        table = np.array(sorted(row for row in rows if row[2]), dtype=np.int64).reshape(-1, 4)
        return Payload(table, self.offsets, sorted(late), digest_ranges)

    def patches(self, payload: Payload, read: ReadAt) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) that are still to be written, when all of the payload has been moved or read.

        The checksums behind each record and in the directory, and torch's identity of the file. ``read`` returns bytes
        of the file. Raises UnsupportedError when no descriptor follows a record.
        """
        found = self.directory
        entries = bytearray(read(found.offset, found.end - found.offset))
        crc32 = found.crc32.copy()
        crc32[self.rows] = join_crc32_groups(payload.storage, payload.checksums, payload.nbytes, len(self.rows))

        def checksum(offset: int, row: int) -> tuple[int, bytes]:
            """That of a record, and where it stands behind the record; it is put into the directory, too."""
            behind, packed = offset + int(found.nbytes[row]), struct.pack("<I", crc32[row])
            if read(behind, 4) != DESCRIPTOR_MARK:
                raise _other_layout(self.path, f"no descriptor follows record {found[row].text}")
            at = int(found.at[row]) - found.offset + ENTRY_CRC32
            entries[at : at + 4] = packed
            return behind + 4, packed

        for offset, row in zip(self.offsets.tolist(), self.rows.tolist(), strict=True):
            if found.nbytes[row]:
                yield checksum(offset, row)
        identity = found.row(".data/serialization_id")
        if identity is not None:
            try:
                offset = _payload_offset(found, identity, read, self.nbytes)
            except ZipError as error:
                raise _other_layout(self.path, str(error)) from None
            text = _serialization_id(read(offset, int(found.nbytes[identity])), found, identity, crc32)
            yield offset, text
            crc32[identity] = zlib.crc32(text)
            yield checksum(offset, identity)
        yield found.offset, bytes(entries)


def write_skeleton(obj: object, path: Path) -> TorchSaveSkeleton:
    """Write what ``torch.save(obj, path)`` writes but the payload, to be filled later: see ``TorchSaveSkeleton``.

    Raises OSError naming the file, and UnsupportedError when this torch lays its files out in another way.
    """
    with name_in_errors(path):
        with errors_of_the_system(path.parent):
            storages = _lay_out(obj, path)
        with open(path, "rb", buffering=0) as file:
            fd, size = file.fileno(), os.fstat(file.fileno()).st_size
            try:
                return _find_storages(storages, path, lambda at, nbytes: os.pread(fd, nbytes, at), size)
            except ZipError as error:
                raise _other_layout(path, str(error)) from None


def _find_storages(
    storages: Mapping[str, torch.UntypedStorage], path: Path, read: ReadAt, size: int
) -> TorchSaveSkeleton:
    """Where the storages belong in a file of ``size`` bytes that torch has laid out. Raises ZipError."""
    directory = read_directory(read, size)
    sizes = np.array([storage.nbytes() for storage in storages.values()], dtype=np.int64)
    rows = np.array([directory.row(f"data/{key}") or 0 for key in storages], dtype=np.int64)
    offsets = np.empty(0, dtype=np.int64)
    if len(rows):
        is_stored = (rows < len(directory.number)) & (directory.nbytes[rows] == sizes)
        is_stored &= (sizes == 0) | (directory.flags[rows] & DEFERRED != 0)
        if not is_stored.all():
            raise ZipError(f"storage {[*storages][int(is_stored.argmin())]} has no record of its size")
        offsets = directory.payload_offsets(directory.number[rows], sizes, read, size)
        for i in np.flatnonzero(offsets < 0).tolist():
            offsets[i] = _payload_offset(directory, int(rows[i]), read, size)
    order = np.argsort(offsets, kind="stable")
    sorted_storages = [*storages.values()]
    in_order = tuple(sorted_storages[i] for i in order.tolist())
    return TorchSaveSkeleton(path, size, directory, in_order, rows[order], offsets[order], sizes[order])


def _payload_offset(directory: ZipDirectory, row: int, read: ReadAt, size: int) -> int:
    entry = directory[row]
    return payload_offset(read(entry.header, LOCATED_BYTES), entry, size)


def _lay_out(obj: object, path: Path) -> dict[str, torch.UntypedStorage]:
    """Let torch write the file without payload; returns the storages by the names of their records."""
    storages: dict[str, torch.UntypedStorage] = {}

    class Pickler(pickle.Pickler):
        """torch derives its own pickler from this one and adds ``persistent_id``, whose calls are recorded here."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            described = type(self).persistent_id

            def persistent_id(self: Pickler, item: Any) -> Any:
                if type(item) in _PLAIN_TYPES:  # nearly all calls: there is one for every object in the pickle
                    return None
                found = described(self, item)
                if found is not None:
                    storages[found[2]] = item._untyped_storage if isinstance(item, torch.TypedStorage) else item
                return found

            type(self).persistent_id = persistent_id  # type: ignore[method-assign, assignment]
            super().__init__(*args, **kwargs)

    if not hasattr(torch.serialization, "skip_data"):
        raise _other_layout(path, "it cannot leave payload out")
    listening = ModuleType("pickle")
    vars(listening).update(vars(pickle))
    listening.Pickler = Pickler  # type: ignore[attr-defined]
    states_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)  # where a job has turned them off, half of them would be there
    try:
        with torch.serialization.skip_data():
            torch.save(obj, path, pickle_module=listening)
    finally:
        torch.serialization.set_crc32_options(states_checksums)
    found = dict(storages)
    storages.clear()  # the class above is in a cycle with itself and may live on for a while
    return found


def _other_layout(path: Path, problem: str) -> UnsupportedError:
    return UnsupportedError(
        f"{path}: torch {torch.__version__} lays files out in a way that is not known here: {problem}."
    )


def _serialization_id(before: bytes, directory: ZipDirectory, identity: int, crc32: UInt32Array) -> bytes:
    """torch's identity of a file: 20 digits made of the records' names, which stay, and 20 of their checksums.

    ``identity`` is the row of the record: the records before it count. Source:
    PyTorchStreamWriter::writeSerializationId and c10's hash_combine.
    """
    if len(before) != 40 or not before.isdigit():
        return before
    combined = 0
    order = np.argsort(directory.header, kind="stable")
    order = order[: int(np.flatnonzero(order == identity)[0])]
    for checksum in crc32[order[directory.nbytes[order] > 0]].tolist():
        combined ^= (checksum + 0x9E3779B9 + (combined << 6) + (combined >> 2)) & _MASK64
    return before[:20] + b"%020d" % combined


def reserve(path: Path) -> None:
    """Set space aside for all of a file that is laid out. Raises OSError naming it when the disk is full."""
    with name_in_errors(path), open(path, "r+b", buffering=0) as file:
        reserve_space(file.fileno(), os.fstat(file.fileno()).st_size)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage as a tensor, on its device."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
