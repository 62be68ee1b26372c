"""A torch.save file without its payload: laid out by torch itself, and where in it the bytes of each storage belong.

``torch.serialization.skip_data`` lets torch write everything but the payload; its place is read from the archive's own
directory. Source: torch.save and PyTorchStreamWriter, torch 2.13; any other layout is refused.
"""

from __future__ import annotations

import errno
import os
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zeroelastic.core.digest import UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import UnsupportedError
from zeroelastic.executors.batches import DigestTotals
from zeroelastic.executors.dispatch import DigestRows, UInt32Array, join_crc32_groups
from zeroelastic.io.atomic import name_in_errors, reserve_space
from zeroelastic.torch_file.zip_format import DEFERRED, DESCRIPTOR_MARK, ENTRY_CRC32, LOCAL, LOCAL_MARK, read_directory

BoolArray = npt.NDArray[np.bool_]

_SHORT_OF_SPACE = 1 << 20
_MASK64 = (1 << 64) - 1
_PLAIN_TYPES = frozenset(
    {str, int, float, bool, type(None), tuple, list, dict, OrderedDict, torch.Tensor, torch.Size, type, FunctionType}
)
"""Of objects that are no storages."""


@dataclass(frozen=True, slots=True)
class DigestRange:
    """Elements whose partial digest is wanted while they are written: a 1-D contiguous view of a storage of the file.

    ``seed`` is that of the digest's stream, ``start`` the global position of the first element.
    """

    tensor: torch.Tensor
    seed: int
    start: int


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """A record of the archive: byte positions of its payload, and of its entry in the central directory."""

    name: str
    offset: int
    nbytes: int
    crc32: int
    entry: int


@dataclass(frozen=True, slots=True)
class PayloadSegments:
    """The payload in file order; the streams of ``digest`` are the digest ranges, -1 for bytes of none.

    Arrays of shape ``(num_rows,)``: ``storage`` is an index, ``src`` and ``dst`` are byte offsets in the storage and in
    the file.
    """

    storage: Int64Array
    src: Int64Array
    dst: Int64Array
    nbytes: Int64Array
    digest: DigestRows


class PayloadSums:
    """The checksum of each segment, and the partial digest of each digest range, as the payload is moved or read."""

    def __init__(self, segments: PayloadSegments) -> None:
        self.segments = segments
        self.checksums = np.zeros(len(segments.nbytes), dtype=np.uint32)
        self._totals = DigestTotals(segments.digest)
        self._digested: set[int] = set()

    @property
    def digests(self) -> list[int | None]:
        """By digest range; None for one of which nothing has been digested."""
        assert self._totals.totals is not None
        return [total if i in self._digested else None for i, total in enumerate(self._totals.totals.tolist())]

    def kinds(self, rows: Int64Array) -> list[Int64Array]:
        """The rows by whether they have a digest, those first: what one call of an engine takes."""
        digested = self.segments.digest.stream[rows] >= 0
        return [part for part in (rows[digested], rows[~digested]) if len(part)]

    def run(
        self, rows: Int64Array, engine: Callable[..., UInt64Array | None], within: Int64Array | None = None
    ) -> UInt32Array:
        """Call an engine for rows of one kind, or for pieces ``within`` bytes into them; returns their checksums.

        It is called with ``digest`` and ``crc32``, as of ``dispatch.write_segments``, and returns the digests.
        """
        checksums, numbers = np.zeros(len(rows), dtype=np.uint32), self.segments.digest.stream[rows]
        if numbers[0] < 0:
            engine(digest=None, crc32=checksums)
        else:
            self._totals.add(rows, engine(digest=self._totals.rows(rows, within), crc32=checksums))
            self._digested.update(numbers.tolist())
        return checksums


@dataclass(frozen=True, slots=True)
class TorchSaveSkeleton:
    """A torch.save file that lacks its payload and the checksums of it; all else is on the disk already.

    ``storages`` are its storages in file order, ``places`` their records; ``nbytes`` is the size of the file. The saved
    object is not used any more: a file filled from copies of its storages has the state of the moment it was laid out.
    """

    path: Path
    nbytes: int
    storages: tuple[torch.UntypedStorage, ...]
    places: tuple[RecordPlace, ...]
    records: Mapping[str, RecordPlace]
    directory: bytes
    directory_offset: int

    @property
    def on_gpu(self) -> bool:
        """Whether any of the storages is on a GPU."""
        return any(storage.device.type == "cuda" for storage in self.storages)

    def without_storages(self) -> TorchSaveSkeleton:
        """The same file, without references to its storages."""
        return replace(self, storages=())

    def segments(
        self, digest_ranges: Sequence[DigestRange], last: Sequence[torch.Tensor]
    ) -> tuple[PayloadSegments, BoolArray]:
        """Segments that cover the payload, cut at the digest ranges, and which are of storages of ``last``.

        A digest range that is in no storage of the file, or overlaps another one, is no segment of its own.
        """
        index = {storage._cdata: i for i, storage in enumerate(self.storages)}
        late = {index.get(tensor.untyped_storage()._cdata, -1) for tensor in last} - {-1}
        segments = _cut(self.places, _place_ranges(digest_ranges, index), digest_ranges)
        return segments, np.isin(segments.storage, sorted(late))

    def patches(self, sums: PayloadSums, read: Callable[[int, int], bytes]) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) that are still to be written, when all of the payload has been moved or read.

        The checksums behind each record and in the directory, and torch's identity of the file. ``read(n, at)`` returns
        bytes of the file. Raises UnsupportedError when no descriptor follows a record.
        """
        storage, nbytes = sums.segments.storage, sums.segments.nbytes
        joined = join_crc32_groups(storage, sums.checksums, nbytes, len(self.places)).tolist()
        crc32 = {place.name: checksum for place, checksum in zip(self.places, joined, strict=True)}
        directory = bytearray(self.directory)
        identity = self.records.get(".data/serialization_id")
        if identity is not None:
            text = _serialization_id(read(identity.nbytes, identity.offset), self.records, crc32)
            yield identity.offset, text
            crc32[identity.name] = zlib.crc32(text)
        for record in self.records.values():
            if record.name not in crc32 or record.nbytes == 0:
                continue
            packed = struct.pack("<I", crc32[record.name])
            descriptor = record.offset + record.nbytes
            if read(4, descriptor) != DESCRIPTOR_MARK:
                raise _other_layout(self.path, f"no descriptor follows record {record.name}")
            yield descriptor + 4, packed
            directory[record.entry + ENTRY_CRC32 : record.entry + ENTRY_CRC32 + 4] = packed
        yield self.directory_offset, bytes(directory)


def write_skeleton(obj: object, path: Path) -> TorchSaveSkeleton:
    """Write what ``torch.save(obj, path)`` writes but the payload, to be filled later: see ``TorchSaveSkeleton``.

    Raises OSError naming the file, and UnsupportedError when this torch lays its files out in another way.
    """
    with name_in_errors(path):
        try:
            storages = _lay_out(obj, path)
        except RuntimeError as error:
            if "unexpected pos" not in str(error):  # torch's own writer says this when the system takes too few bytes
                raise
            free = os.statvfs(path.parent)
            code = errno.ENOSPC if free.f_bavail * free.f_frsize < _SHORT_OF_SPACE else errno.EIO
            raise OSError(code, os.strerror(code)) from error
        nbytes = os.stat(path).st_size
        names, directory, directory_offset = _read_directory(path)
    places = {key: _record_of(key, storages[key], names, path) for key in storages}
    order = sorted(storages, key=lambda key: places[key].offset)
    return TorchSaveSkeleton(
        path,
        nbytes,
        tuple(storages[key] for key in order),
        tuple(places[key] for key in order),
        names,
        directory,
        directory_offset,
    )


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
    with torch.serialization.skip_data():
        torch.save(obj, path, pickle_module=listening)
    found = dict(storages)
    storages.clear()  # the class above is in a cycle with itself and may live on for a while
    return found


def _read_directory(path: Path) -> tuple[dict[str, RecordPlace], bytes, int]:
    """The records of an archive by name without its folder, its central directory and where that begins."""
    records: dict[str, RecordPlace] = {}
    with open(path, "rb", buffering=0) as file:

        def read(offset: int, nbytes: int) -> bytes:
            return os.pread(file.fileno(), nbytes, offset)

        try:
            found = read_directory(read, os.fstat(file.fileno()).st_size)
            entries = [*found.entries]
            for entry in entries:
                local = LOCAL.unpack(read(entry.header, LOCAL.size))
                if local[0] != LOCAL_MARK or entry.method or (entry.nbytes > 0 and not entry.flags & DEFERRED):
                    raise ValueError(f"record {entry.text} is not stored as expected")
                offset = entry.header + LOCAL.size + local[9] + local[10]
                place = RecordPlace(entry.text, offset, entry.nbytes, entry.crc32, entry.at - found.offset)
                records[entry.text.partition("/")[2]] = place
        except (struct.error, ValueError) as error:
            raise _other_layout(path, str(error)) from None
    return records, found.data[: sum(entry.length for entry in entries)], found.offset


def _record_of(key: str, storage: torch.UntypedStorage, names: Mapping[str, RecordPlace], path: Path) -> RecordPlace:
    record = names.get(f"data/{key}")
    if record is None or record.nbytes != storage.nbytes():
        raise _other_layout(path, f"storage {key} has no record of its size")
    return record


def _other_layout(path: Path, problem: str) -> UnsupportedError:
    return UnsupportedError(
        f"{path}: torch {torch.__version__} lays files out in a way that is not known here: {problem}."
    )


def _place_ranges(digest_ranges: Sequence[DigestRange], index: Mapping[int, int]) -> list[tuple[int, int, int, int]]:
    """(storage, byte offset, bytes, number of the digest range) of those in the file, sorted, without overlaps."""
    found: list[tuple[int, int, int, int]] = []
    for number, digest_range in enumerate(digest_ranges):
        storage = index.get(digest_range.tensor.untyped_storage()._cdata)
        if storage is not None and digest_range.tensor.numel():
            size = digest_range.tensor.element_size()
            found.append(
                (storage, int(digest_range.tensor.storage_offset()) * size, digest_range.tensor.numel() * size, number)
            )
    found.sort()
    kept: list[tuple[int, int, int, int]] = []
    for place in found:
        if not kept or kept[-1][0] != place[0] or kept[-1][1] + kept[-1][2] <= place[1]:
            kept.append(place)
    return kept


def _cut(
    records: Sequence[RecordPlace],
    placed: Sequence[tuple[int, int, int, int]],
    digest_ranges: Sequence[DigestRange],
) -> PayloadSegments:
    """Segments that cover every storage: its digest ranges and what is between them, in file order."""
    rows: list[tuple[int, int, int, int]] = []  # storage, byte offset, bytes, digest range
    at = 0
    for storage, record in enumerate(records):
        done = 0
        while at < len(placed) and placed[at][0] == storage:
            _, offset, nbytes, number = placed[at]
            if offset > done:
                rows.append((storage, done, offset - done, -1))
            rows.append((storage, offset, nbytes, number))
            done = offset + nbytes
            at += 1
        if record.nbytes > done:
            rows.append((storage, done, record.nbytes - done, -1))
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 4)
    base = np.array([record.offset for record in records], dtype=np.int64)
    storage_of, src, nbytes_of, digest_range = (np.ascontiguousarray(column) for column in table.T)
    digest = DigestRows(
        seeds=np.array([of.seed for of in digest_ranges], dtype=np.uint64),
        stream=digest_range,
        start=np.array([*(of.start for of in digest_ranges), 0], dtype=np.int64)[digest_range],
        itemsize=np.array([*(of.tensor.element_size() for of in digest_ranges), 1], dtype=np.int64)[digest_range],
    )
    return PayloadSegments(storage_of, src, base[storage_of] + src, nbytes_of, digest)


def _serialization_id(before: bytes, records: Mapping[str, RecordPlace], sums: Mapping[str, int]) -> bytes:
    """torch's identity of a file: 20 digits made of the records' names, which stay, and 20 of their checksums.

    Source: PyTorchStreamWriter::writeSerializationId and c10's hash_combine.
    """
    if len(before) != 40 or not before.isdigit():
        return before
    combined = 0
    for record in sorted(records.values(), key=lambda record: record.offset):
        if record.name.endswith("/.data/serialization_id"):
            break
        if record.nbytes == 0:
            continue
        crc32 = sums.get(record.name, record.crc32)
        combined ^= (crc32 + 0x9E3779B9 + (combined << 6) + (combined >> 2)) & _MASK64
        combined &= _MASK64
    return before[:20] + b"%020d" % combined


def reserve(path: Path) -> None:
    """Set space aside for all of a file that is laid out. Raises OSError naming it when the disk is full."""
    with name_in_errors(path), open(path, "r+b", buffering=0) as file:
        reserve_space(file.fileno(), os.fstat(file.fileno()).st_size)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage as a tensor, on its device."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
