"""torch.save's file without its payload: laid out by torch itself, and where in it each storage's bytes belong.

``torch.serialization.skip_data`` lets torch write everything but the payload; where that belongs is read from the
archive's own directory. Source: torch.save and PyTorchStreamWriter, torch 2.13; a layout that differs is noticed and
refused.
"""

from __future__ import annotations

import errno
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zeroelastic.archive import reserve_space
from zeroelastic.errors import UnsupportedError
from zeroelastic.executors import DigestRows, UInt32Array, join_crc32
from zeroelastic.layout import Int64Array

BoolArray = npt.NDArray[np.bool_]

_SHORT_OF_SPACE = 1 << 20

_END = struct.Struct("<4sHHHHIIH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_ENTRY_CRC = 16
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR = b"PK\x07\x08"
_DEFERRED = 1 << 3
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Run:
    """Elements whose partial digest is wanted while they are written: a 1-D contiguous view of a storage of the file.

    ``seed`` is that of the digest's stream, ``start`` the global position of the first element.
    """

    tensor: torch.Tensor
    seed: int
    start: int


@dataclass(frozen=True, slots=True)
class Record:
    """A record of the archive: byte positions of its payload, and of its entry in the central directory."""

    name: str
    offset: int
    nbytes: int
    crc32: int
    entry: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Runs of the payload in file order; ``run`` is the number of the digest run, -1 for bytes of none.

    Arrays of shape ``(num_rows,)``: ``storage`` is an index, ``src`` and ``dst`` are byte offsets in the storage and in
    the file.
    """

    storage: Int64Array
    src: Int64Array
    dst: Int64Array
    nbytes: Int64Array
    run: Int64Array


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A file of torch.save's that lacks its payload and the checksums of it: all else is on the disk already.

    ``storages`` are what it holds, in file order, and ``places`` their records; ``nbytes`` is the size of the file.
    Nothing is asked of the object any more, so a file that is filled from copies of its storages is that of the moment
    when it was laid out.
    """

    path: Path
    nbytes: int
    storages: tuple[torch.UntypedStorage, ...]
    places: tuple[Record, ...]
    records: Mapping[str, Record]
    directory: bytes
    directory_offset: int

    def without_storages(self) -> LaidOut:
        """The same file, which keeps nothing of what it holds alive."""
        return replace(self, storages=())

    def rows(self, runs: Sequence[Run], last: Sequence[torch.Tensor]) -> tuple[Rows, BoolArray]:
        """Rows that cover the payload, cut at the digest runs, and which are of storages of ``last``.

        A run that lies in no storage of the file, or overlaps another one, is no row of its own.
        """
        index = {storage._cdata: i for i, storage in enumerate(self.storages)}
        late = {index.get(tensor.untyped_storage()._cdata, -1) for tensor in last} - {-1}
        rows = _cut(self.places, _place_runs(runs, index))
        return rows, np.isin(rows.storage, sorted(late))

    def patches(
        self, rows: Rows, checksums: UInt32Array, read: Callable[[int, int], bytes]
    ) -> Iterator[tuple[int, bytes]]:
        """What is still to be put into the file, and where, given the CRC-32 of each row of the payload.

        The checksums behind each record and in the directory, and torch's identity of the whole. ``read(n, at)`` gives
        what the file has. Raises UnsupportedError when no descriptor follows a record.
        """
        bounds = np.searchsorted(rows.storage, np.arange(len(self.places) + 1))
        sums = {
            place.name: join_crc32(checksums[begin:end], rows.nbytes[begin:end])
            for place, begin, end in zip(self.places, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        }
        directory = bytearray(self.directory)
        identity = self.records.get(".data/serialization_id")
        if identity is not None:
            text = _serialization_id(read(identity.nbytes, identity.offset), self.records, sums)
            yield identity.offset, text
            sums[identity.name] = zlib.crc32(text)
        for record in self.records.values():
            if record.name not in sums or record.nbytes == 0:
                continue
            crc32 = struct.pack("<I", sums[record.name])
            descriptor = record.offset + record.nbytes
            if read(4, descriptor) != _DESCRIPTOR:
                raise _other_layout(self.path, f"no descriptor follows record {record.name}")
            yield descriptor + 4, crc32
            directory[record.entry + _ENTRY_CRC : record.entry + _ENTRY_CRC + 4] = crc32
        yield self.directory_offset, bytes(directory)


def lay_out_torch_file(obj: object, path: Path) -> LaidOut:
    """Write what ``torch.save(obj, path)`` writes but the payload, to be filled later: see ``LaidOut``.

    Raises OSError naming the file, and UnsupportedError when this torch lays its files out in another way.
    """
    with naming(path):
        storages = _lay_out(obj, path)
        nbytes = os.stat(path).st_size
        names, directory, directory_offset = _read_directory(path)
    places = {key: _record_of(key, storages[key], names, path) for key in storages}
    order = sorted(storages, key=lambda key: places[key].offset)
    return LaidOut(
        path,
        nbytes,
        tuple(storages[key] for key in order),
        tuple(places[key] for key in order),
        names,
        bytes(directory),
        directory_offset,
    )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system, as torch's own writer tells them too, name the file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    except RuntimeError as error:
        if "unexpected pos" not in str(error):  # what torch's own writer says when the system takes less than it gave
            raise
        free = os.statvfs(path.parent)
        code = errno.ENOSPC if free.f_bavail * free.f_frsize < _SHORT_OF_SPACE else errno.EIO
        raise OSError(code, os.strerror(code), os.fspath(path)) from error


def _lay_out(obj: object, path: Path) -> dict[str, torch.UntypedStorage]:
    """Let torch write the file without payload; returns the storages by the names of their records."""
    storages: dict[str, torch.UntypedStorage] = {}

    class Pickler(pickle.Pickler):
        """torch derives its own pickler from this one and adds ``persistent_id``, which is listened to here."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            described = type(self).persistent_id

            def persistent_id(self: Pickler, item: Any) -> Any:
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


def _read_directory(path: Path) -> tuple[dict[str, Record], bytearray, int]:
    """The records of an archive by name without its folder, its central directory and where that begins."""
    with open(path, "rb", buffering=0) as file:
        try:
            return _parse_directory(file.fileno(), path)
        except (struct.error, ValueError) as error:
            raise _other_layout(path, str(error)) from None


def _parse_directory(fd: int, path: Path) -> tuple[dict[str, Record], bytearray, int]:
    size = os.fstat(fd).st_size
    most = _END64.size + _END64_LOCATOR.size + _END.size
    tail = os.pread(fd, most, max(0, size - most))
    end = _END.unpack(tail[-_END.size :])
    if end[0] != b"PK\x05\x06" or end[-1] != 0:
        raise _other_layout(path, "it has no end record where one was expected")
    count, directory_size, directory_offset = end[4], end[5], end[6]
    if tail[-_END.size - _END64_LOCATOR.size :][:4] == b"PK\x06\x07":
        end64 = _END64.unpack(tail[: _END64.size])
        if end64[0] != b"PK\x06\x06":
            raise _other_layout(path, "it has no 64-bit end record where one was expected")
        count, directory_size, directory_offset = end64[7], end64[8], end64[9]
    directory = bytearray(os.pread(fd, directory_size, directory_offset))
    records: dict[str, Record] = {}
    at = 0
    for _ in range(count):
        fields = _ENTRY.unpack_from(directory, at)
        name_at = at + _ENTRY.size
        extra_at = name_at + fields[10]
        name = directory[name_at:extra_at].decode()
        nbytes, header = _sizes(fields, directory[extra_at : extra_at + fields[11]])
        local = _LOCAL.unpack(os.pread(fd, _LOCAL.size, header))
        known = fields[0] == b"PK\x01\x02" and local[0] == b"PK\x03\x04" and fields[4] == 0
        if not known or (nbytes > 0 and not fields[3] & _DEFERRED):
            raise _other_layout(path, f"record {name} is not stored as expected")
        offset = header + _LOCAL.size + local[9] + local[10]
        records[name.partition("/")[2]] = Record(name, offset, nbytes, fields[7], at)
        at = extra_at + fields[11] + fields[12]
    return records, directory, directory_offset


def _sizes(fields: tuple[Any, ...], extra: bytearray) -> tuple[int, int]:
    """Payload size and header position of a directory entry, from its 64-bit extra field where they need one."""
    values = [fields[9], fields[8], fields[16]]  # uncompressed, compressed, header position: their order in the field
    wide = [i for i, value in enumerate(values) if value == 0xFFFFFFFF]
    at = 0
    while wide and at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            for i, value in zip(wide, struct.unpack_from(f"<{len(wide)}Q", extra, at + 4), strict=True):
                values[i] = value
            break
        at += 4 + length
    return values[0], values[2]


def _record_of(key: str, storage: torch.UntypedStorage, names: Mapping[str, Record], path: Path) -> Record:
    record = names.get(f"data/{key}")
    if record is None or record.nbytes != storage.nbytes():
        raise _other_layout(path, f"storage {key} has no record of its size")
    return record


def _other_layout(path: Path, problem: str) -> UnsupportedError:
    return UnsupportedError(
        f"{path}: torch {torch.__version__} lays files out in a way that is not known here: {problem}."
    )


def _place_runs(runs: Sequence[Run], index: Mapping[int, int]) -> list[tuple[int, int, int, int]]:
    """(storage, byte offset, bytes, number of the run), sorted, without overlaps and runs of other storages."""
    found: list[tuple[int, int, int, int]] = []
    for number, run in enumerate(runs):
        storage = index.get(run.tensor.untyped_storage()._cdata)
        if storage is not None and run.tensor.numel():
            size = run.tensor.element_size()
            found.append((storage, int(run.tensor.storage_offset()) * size, run.tensor.numel() * size, number))
    found.sort()
    kept: list[tuple[int, int, int, int]] = []
    for place in found:
        if not kept or kept[-1][0] != place[0] or kept[-1][1] + kept[-1][2] <= place[1]:
            kept.append(place)
    return kept


def _cut(records: Sequence[Record], placed: Sequence[tuple[int, int, int, int]]) -> Rows:
    """Rows that cover every storage: its digest runs and what lies between them, in file order."""
    rows: list[tuple[int, int, int, int]] = []  # storage, byte offset, bytes, run
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
    storage_of, src, nbytes_of, run = (np.ascontiguousarray(column) for column in table.T)
    return Rows(storage_of, src, base[storage_of] + src, nbytes_of, run)


def _serialization_id(before: bytes, records: Mapping[str, Record], sums: Mapping[str, int]) -> bytes:
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
    with open(path, "r+b", buffering=0) as file:
        try:
            reserve_space(file.fileno(), os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def digest_rows(runs: Sequence[Run], numbers: Int64Array, within: Int64Array) -> DigestRows:
    """What rows add to digests, each a stream of its own: row i is of run ``numbers[i]``, ``within[i]`` bytes into it.

    Both arrays have shape ``(num_rows,)``.
    """
    chosen = [runs[number] for number in numbers.tolist()]
    itemsize = np.array([run.tensor.element_size() for run in chosen], dtype=np.int64)
    return DigestRows(
        seeds=np.array([run.seed for run in chosen], dtype=np.uint64),
        stream=np.arange(len(chosen), dtype=np.int64),
        start=np.array([run.start for run in chosen], dtype=np.int64) + within // itemsize,
        itemsize=itemsize,
    )
