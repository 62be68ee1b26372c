"""torch.save's file, byte for byte, its payload written by the native engine: laid out first, then filled.

``torch.serialization.skip_data`` lets torch write everything but the payload; where each storage's bytes belong is read
from the archive's own directory. They are then written straight from the tensors, by several threads, with the
archive's CRC-32 and the content digests in the same pass. Nothing is copied, but for tensors on a device, which go
through ``STAGING_BYTES`` of host memory. Source: torch.save and PyTorchStreamWriter, torch 2.13; a layout that differs
is noticed and refused.
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
from typing import Any, NamedTuple

import numpy as np
import torch

from zeroelastic.archive import reserve_space
from zeroelastic.digest import ByteArray, combine
from zeroelastic.errors import UnsupportedError
from zeroelastic.executors import DigestRows, Executor, SegmentTable, UInt32Array, join_crc32, write_segments
from zeroelastic.layout import Int64Array

STAGING_BYTES = 16 << 20
"""Host memory through which tensors on a device are written."""

_EARLY_BYTES = 4 << 20  # what is less is flushed with the rest, when the file is complete

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
class _Record:
    """A record of the archive: byte positions of its payload, and of its entry in the central directory."""

    name: str
    offset: int
    nbytes: int
    crc32: int
    entry: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """Runs of the payload in file order; ``run`` is the number of the digest run, -1 for bytes of none.

    Arrays of shape ``(num_rows,)``: ``storage`` is an index, ``src`` and ``dst`` are byte offsets in the storage and in
    the file.
    """

    storage: Int64Array
    src: Int64Array
    dst: Int64Array
    nbytes: Int64Array
    run: Int64Array


def write_torch_file(
    obj: object,
    path: Path,
    *,
    runs: Sequence[Run] = (),
    last: Sequence[torch.Tensor] = (),
    before_last: Callable[[Sequence[int | None]], None] | None = None,
    sync: bool = False,
    executor: Executor = "auto",
) -> list[int | None]:
    """Write what ``torch.save(obj, path)`` writes, the same bytes; returns the partial digest of each run.

    The digest of a run that lies in no storage of the file, or overlaps another run, is None. When all payload but the
    storages of ``last`` is written, ``before_last`` gets the digests and may still change these tensors; a file that
    holds none of them does without. ``sync`` flushes the file to its device, which begins while it is written. Memory:
    ``STAGING_BYTES`` if a tensor is on a device, else none to speak of.

    Raises OSError naming the file (for a full disk before anything is written), ConfigError for an executor that is not
    built, UnsupportedError when this torch lays its files out in another way.

    Example::

        write_torch_file({"weight": weight}, Path("weight.pt"))
    """
    return lay_out_torch_file(obj, path).fill(
        runs=runs, last=last, before_last=before_last, sync=sync, executor=executor
    )


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A file of torch.save's that lacks its payload and the checksums of it: all else is on the disk already.

    ``storages`` are what it holds, in file order, and ``places`` their records. Nothing is asked of the object any
    more, so a file that is filled from copies of its storages (``of``) is that of the moment when it was laid out.
    """

    path: Path
    storages: tuple[torch.UntypedStorage, ...]
    places: tuple[_Record, ...]
    records: Mapping[str, _Record]
    directory: bytes
    directory_offset: int

    def of(self, storages: Sequence[torch.UntypedStorage]) -> LaidOut:
        """The same file, filled from other storages of the same sizes."""
        assert [storage.nbytes() for storage in storages] == [place.nbytes for place in self.places]
        return replace(self, storages=tuple(storages))

    def fill(
        self,
        *,
        runs: Sequence[Run] = (),
        last: Sequence[torch.Tensor] = (),
        before_last: Callable[[Sequence[int | None]], None] | None = None,
        sync: bool = False,
        threads: int | None = None,
        executor: Executor = "auto",
    ) -> list[int | None]:
        """Write the payload and its checksums: arguments, result and errors of ``write_torch_file``.

        ``threads``: how many write, as of ``executors.write_segments``.
        """
        with _naming(self.path):
            _reserve(self.path)
            index = {storage._cdata: i for i, storage in enumerate(self.storages)}
            late = {index.get(tensor.untyped_storage()._cdata, -1) for tensor in last} - {-1}
            rows = _cut(self.places, _place_runs(runs, index))
            digests: list[int | None] = [None] * len(runs)
            checksums = np.zeros(len(rows.nbytes), dtype=np.uint32)
            is_late = np.isin(rows.storage, sorted(late))
            payload = _Payload(self.path, self.storages, rows, runs, digests, checksums, sync, threads, executor)
            payload.write(np.flatnonzero(~is_late))
            if before_last is not None and late:
                before_last(digests)
            payload.write(np.flatnonzero(is_late))
            bounds = np.searchsorted(rows.storage, np.arange(len(self.places) + 1))
            sums = {
                place.name: join_crc32(checksums[begin:end], rows.nbytes[begin:end])
                for place, begin, end in zip(self.places, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
            }
            directory = bytearray(self.directory)
            _write_checksums(self.path, self.records, sums, directory, self.directory_offset, sync=sync)
            return digests


def lay_out_torch_file(obj: object, path: Path) -> LaidOut:
    """Write what ``torch.save(obj, path)`` writes but the payload, to be filled later: see ``LaidOut``.

    Raises OSError naming the file, and UnsupportedError when this torch lays its files out in another way.
    """
    with _naming(path):
        storages = _lay_out(obj, path)
        names, directory, directory_offset = _read_directory(path)
    places = {key: _record_of(key, storages[key], names, path) for key in storages}
    order = sorted(storages, key=lambda key: places[key].offset)
    return LaidOut(
        path,
        tuple(storages[key] for key in order),
        tuple(places[key] for key in order),
        names,
        bytes(directory),
        directory_offset,
    )


@contextmanager
def _naming(path: Path) -> Iterator[None]:
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


def _reserve(path: Path) -> None:
    with open(path, "r+b", buffering=0) as file:
        try:
            reserve_space(file.fileno(), os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def _read_directory(path: Path) -> tuple[dict[str, _Record], bytearray, int]:
    """The records of an archive by name without its folder, its central directory and where that begins."""
    with open(path, "rb", buffering=0) as file:
        try:
            return _parse_directory(file.fileno(), path)
        except (struct.error, ValueError) as error:
            raise _other_layout(path, str(error)) from None


def _parse_directory(fd: int, path: Path) -> tuple[dict[str, _Record], bytearray, int]:
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
    records: dict[str, _Record] = {}
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
        records[name.partition("/")[2]] = _Record(name, offset, nbytes, fields[7], at)
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


def _record_of(key: str, storage: torch.UntypedStorage, names: Mapping[str, _Record], path: Path) -> _Record:
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


def _cut(records: Sequence[_Record], placed: Sequence[tuple[int, int, int, int]]) -> _Rows:
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
    return _Rows(storage_of, src, base[storage_of] + src, nbytes_of, run)


@dataclass(frozen=True, slots=True)
class _Payload:
    """The rows of a file, the storages they come from, and what is found out about each while it is written.

    ``digests`` has one entry per run, ``checksums`` one per row.
    """

    path: Path
    storages: Sequence[torch.UntypedStorage]
    rows: _Rows
    runs: Sequence[Run]
    digests: list[int | None]
    checksums: UInt32Array
    sync: bool
    threads: int | None
    executor: Executor

    def write(self, chosen: Int64Array) -> None:
        """Write the chosen rows: those with a digest first, which are nearly all of it, and each kind in one call."""
        on_host = np.array([_is_on_host(storage) for storage in self.storages], dtype=bool)[self.rows.storage[chosen]]
        digested = self.rows.run[chosen] >= 0
        for kind in (on_host & digested, on_host & ~digested):
            if kind.any():
                self._write_from_host(chosen[kind])
        for kind in (~on_host & digested, ~on_host & ~digested):
            if kind.any():
                self._write_staged(chosen[kind])

    def _write_from_host(self, chosen: Int64Array) -> None:
        rows = self.rows
        table = SegmentTable(
            src=rows.storage[chosen],
            src_offset=rows.src[chosen],
            dst=np.zeros(len(chosen), dtype=np.int64),
            dst_offset=rows.dst[chosen],
            nbytes=rows.nbytes[chosen],
        )
        buffers = [_bytes_of(storage) for storage in self.storages]
        self.checksums[chosen] = self._move(table, buffers, rows.run[chosen], np.zeros(len(chosen), dtype=np.int64))

    def _write_staged(self, chosen: Int64Array) -> None:
        """From tensors that the engine cannot address: piece by piece through a buffer on the host."""
        rows = self.rows
        staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        for batch in _batches(rows, chosen):
            for piece in batch:
                source = _as_bytes(self.storages[int(rows.storage[piece.row])])
                begin = int(rows.src[piece.row]) + piece.within
                staging[piece.staged : piece.staged + piece.nbytes].copy_(source[begin : begin + piece.nbytes])
            columns = np.array(batch, dtype=np.int64).T
            row, within, staged, nbytes = (np.ascontiguousarray(column) for column in columns)
            zeros = np.zeros(len(batch), dtype=np.int64)
            table = SegmentTable(zeros, staged, zeros, rows.dst[row] + within, nbytes)
            sums = self._move(table, [staging.numpy()], rows.run[row], within)
            for i, piece in enumerate(batch):
                both = np.array([self.checksums[piece.row], sums[i]], dtype=np.uint32)
                self.checksums[piece.row] = join_crc32(both, np.array([piece.within, piece.nbytes], dtype=np.int64))

    def _move(
        self, table: SegmentTable, buffers: Sequence[ByteArray], numbers: Int64Array, within: Int64Array
    ) -> UInt32Array:
        """Write rows that all belong to a digest run, ``within`` bytes into it, or all to none; returns checksums."""
        sums = np.zeros(len(table.nbytes), dtype=np.uint32)
        digest = None if numbers[0] < 0 else self._digest_rows(numbers, within)
        sync = self.sync and int(table.nbytes.sum()) >= _EARLY_BYTES
        totals = write_segments(
            table,
            buffers,
            [self.path],
            digest=digest,
            crc32=sums,
            sync=sync,
            threads=self.threads,
            executor=self.executor,
        )
        if totals is not None:
            for number, total in zip(numbers.tolist(), totals.tolist(), strict=True):
                self.digests[number] = combine(self.digests[number] or 0, total)
        return sums

    def _digest_rows(self, numbers: Int64Array, within: Int64Array) -> DigestRows:
        """Every row a stream of its own."""
        chosen = [self.runs[number] for number in numbers.tolist()]
        itemsize = np.array([run.tensor.element_size() for run in chosen], dtype=np.int64)
        return DigestRows(
            seeds=np.array([run.seed for run in chosen], dtype=np.uint64),
            stream=np.arange(len(chosen), dtype=np.int64),
            start=np.array([run.start for run in chosen], dtype=np.int64) + within // itemsize,
            itemsize=itemsize,
        )


class _Piece(NamedTuple):
    row: int
    within: int
    staged: int
    nbytes: int


def _batches(rows: _Rows, chosen: Int64Array) -> Iterator[list[_Piece]]:
    """The chosen rows in pieces that fill the staging buffer, each on a boundary of 8 bytes of its row and of it."""
    batch: list[_Piece] = []
    room = STAGING_BYTES
    for row in chosen.tolist():
        done, nbytes = 0, int(rows.nbytes[row])
        while done < nbytes:
            if room == 0:
                yield batch
                batch, room = [], STAGING_BYTES
            count = min(nbytes - done, room)
            batch.append(_Piece(row, done, STAGING_BYTES - room, count))
            done += count
            room -= min(-(-count // 8) * 8, room)
    if batch:
        yield batch


def _is_on_host(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cpu"


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _bytes_of(storage: torch.UntypedStorage) -> ByteArray:
    if not _is_on_host(storage) or storage.nbytes() == 0:
        return np.empty(0, dtype=np.uint8)
    return _as_bytes(storage).numpy()


def _write_checksums(
    path: Path,
    records: Mapping[str, _Record],
    sums: Mapping[str, int],
    directory: bytearray,
    directory_offset: int,
    *,
    sync: bool,
) -> None:
    """Put the payload's checksums behind each record and into the directory, and torch's identity of the whole."""
    by_name = dict(sums)
    with open(path, "r+b", buffering=0) as file:
        fd = file.fileno()
        identity = records.get(".data/serialization_id")
        if identity is not None:
            text = _serialization_id(os.pread(fd, identity.nbytes, identity.offset), records, by_name)
            _write_fully(fd, text, identity.offset)
            by_name[identity.name] = zlib.crc32(text)
        for record in records.values():
            if record.name not in by_name or record.nbytes == 0:
                continue
            crc32 = struct.pack("<I", by_name[record.name])
            descriptor = record.offset + record.nbytes
            if os.pread(fd, 4, descriptor) != _DESCRIPTOR:
                raise _other_layout(path, f"no descriptor follows record {record.name}")
            _write_fully(fd, crc32, descriptor + 4)
            directory[record.entry + _ENTRY_CRC : record.entry + _ENTRY_CRC + 4] = crc32
        _write_fully(fd, directory, directory_offset)
        if sync:
            os.fsync(fd)


def _serialization_id(before: bytes, records: Mapping[str, _Record], sums: Mapping[str, int]) -> bytes:
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


def _write_fully(fd: int, data: bytes | bytearray, offset: int) -> None:
    """Write all of ``data`` at ``offset``, whatever the system does in pieces."""
    view = memoryview(data)
    while view:
        put = os.pwrite(fd, view, offset)
        view, offset = view[put:], offset + put
