"""The records of a torch.save archive: where each one's bytes lie, its CRC-32, and whether the rest of the file agrees.

Every byte that is not the payload of a record is looked at here: the header before each record, the padding that aligns
it, what follows it, and the directory at the end. All of these say the same things twice, so damage shows: any one bit.
What is expected: archives of torch.save (PyTorchStreamWriter and miniz, torch 1.6 to 2.13) and of ``graph_writer``.
"""

from __future__ import annotations

import struct
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import CheckpointError
from zeroelastic.executors.dispatch import Executor, FileRanges, scan_segments
from zeroelastic.io.paths import FilePath, RemotePath
from zeroelastic.io.storage import BlockFile, LocalFile
from zeroelastic.torch_file.zip_format import (
    DEFERRED,
    DESCRIPTOR_MARK,
    EXTRA_FIELD,
    FIELD,
    LOCAL,
    LOCAL_HEAD,
    LOCAL_MARK,
    PADDING,
    VERSIONS,
    WIDE,
    ZIP64,
    Entries,
    Entry,
    Fault,
    MadeOnDemand,
    ZipError,
    by_length,
    bytes_at,
    extra_fields,
    gather,
    read_directory,
)

_SUMS = struct.Struct("<4sIII")
_SUMS64 = struct.Struct("<4sIQQ")
_MAX_HEADER = LOCAL.size + 2 * 0xFFFF
_WINDOW = 64 << 10
_USUAL_HEADER = 232  # bytes of the header of nearly every record, its name and padding included
_WIDE_SUMS = np.dtype([("mark", "S4"), ("crc32", "<u4"), ("stored_bytes", "<u8"), ("nbytes", "<u8")])
_NARROW_SUMS = np.dtype([("mark", "S4"), ("crc32", "<u4"), ("stored_bytes", "<u4"), ("nbytes", "<u4")])
_BATCH_BYTES = 16 << 20  # that are read at one time at most

__all__ = ["Fault", "RecordTable", "ZipRecord", "ZipRecords", "read_zip_records"]


class ZipRecord(NamedTuple):
    """One record: its name in the archive, the place of its payload in the file, and the checksum it should have."""

    name: str
    offset: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True, eq=False)
class RecordTable(MadeOnDemand[ZipRecord]):
    """Records by columns, in the order of their bytes; a ``ZipRecord`` is made when it is asked for.

    ``offset``, ``nbytes`` and ``crc32`` have shape ``(num_records,)``. ``entries[row]`` is what the directory says.
    """

    entries: Entries
    row: Int64Array
    offset: Int64Array
    nbytes: Int64Array
    crc32: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.offset)

    def _made(self, number: int) -> ZipRecord:
        name = self.entries[int(self.row[number])].text
        return ZipRecord(name, int(self.offset[number]), int(self.nbytes[number]), int(self.crc32[number]))


@dataclass(frozen=True, slots=True)
class ZipRecords:
    """An archive's records in the order of their bytes.

    Invariant: the payloads lie inside the file and do not overlap. ``faults`` is empty where all bytes outside of them
    are as they must be. ``bytes_read`` is what that took.
    """

    records: RecordTable
    faults: tuple[Fault, ...]
    bytes_read: int = 0

    @property
    def folder(self) -> str:
        """What the archive calls itself: the name of the file without its ending, or "archive"."""
        return self.records[0].name.partition("/")[0] if self.records else ""


def read_zip_records(path: FilePath, size: int, *, window_bytes: int = _WINDOW) -> ZipRecords:
    """Read the structure of an uncompressed archive of ``size`` bytes; payload is not read, except what shares a read
    of ``window_bytes`` with a header.

    Memory: 200 bytes for each record, its entry in the directory included, and 16 MiB. Raises CheckpointError where the
    records cannot be found by the directory, MissingFileError.
    """
    with closing(_Window(path, size, window_bytes)) as window:
        return _read_records(path, size, window)


def _read_records(path: FilePath, size: int, window: _Window) -> ZipRecords:
    try:
        directory = read_directory(window.read_once, size)
    except ZipError as error:
        raise CheckpointError(f"{path}: {error}. The file is truncated or damaged.") from None
    entries, faults = directory.entries, list(directory.faults)
    rows = np.argsort(entries.header, kind="stable")
    header = entries.header[rows]
    following = np.append(header[1:], directory.offset)[: len(header)]
    if (behind := following[following > directory.offset]).size:
        raise CheckpointError(f"{path}: a record begins at byte {behind[0]}, behind the last. The file is damaged.")
    if len(header) and header[0] > 0:
        faults.append(Fault(f"{header[0]} bytes belong to no record", 0, int(header[0])))
    offset = np.full(len(rows), -1, dtype=np.int64)
    for begin in range(0, len(rows), window.batch):
        some = slice(begin, begin + window.batch)
        offset[some] = _usual_payloads(window, entries, rows[some], following[some])
    for number in np.flatnonzero(offset < 0).tolist():
        entry, next_header = entries[int(rows[number])], int(following[number])
        payload, end, right = _payload(window, entry, next_header)
        if payload < entry.header + LOCAL.size + len(entry.name):
            raise CheckpointError(f"{path}: two records overlap at byte {entry.header}. The file is damaged.")
        if payload - entry.header > _MAX_HEADER:
            raise CheckpointError(f"{path}: bytes behind byte {entry.header} belong to no record. The file is damaged.")
        if not _header_agrees(window, entry, payload):
            what = f"the header of {entry.short_name} contradicts the directory"
            faults.append(Fault(what, entry.header, payload - entry.header))
        if not right:
            faults.append(Fault(f"the sums behind {entry.short_name} are wrong", end, next_header - end))
        offset[number] = payload
    table = RecordTable(entries, rows, offset, entries.nbytes[rows], entries.crc32[rows])
    return ZipRecords(table, tuple(faults), window.total_bytes(size - directory.offset))


def _usual_payloads(window: _Window, entries: Entries, rows: Int64Array, following: Int64Array) -> Int64Array:
    """Where the payload of records begins whose headers and sums are what torch.save writes for their entries.

    -1 for the others, which ``_payload`` and ``_header_agrees`` look at. ``rows`` are entries in the order of their
    headers, ``following`` is where the next header begins.
    """
    header, nbytes, crc32 = entries.header[rows], entries.nbytes[rows], entries.crc32[rows]
    flags, name_bytes = entries.flags[rows], entries.name_bytes[rows]
    places = np.append(header, following[-1])
    data, at = window.around(places)
    # The sums behind a record, where the next header begins.
    wide = gather(data, at[1:] - _SUMS64.size, _SUMS64.size).view(_WIDE_SUMS)
    narrow = gather(data, at[1:] - _SUMS.size, _SUMS.size).view(_NARROW_SUMS)
    is_deferred = (flags & DEFERRED) != 0
    is_wide = is_deferred & (wide["mark"] == DESCRIPTOR_MARK) & (wide["crc32"] == crc32)
    is_wide &= (wide["stored_bytes"] == nbytes) & (wide["nbytes"] == nbytes)
    is_narrow = is_deferred & ~is_wide & (narrow["mark"] == DESCRIPTOR_MARK) & (narrow["crc32"] == crc32)
    is_narrow &= (narrow["stored_bytes"] == nbytes) & (narrow["nbytes"] == nbytes)
    good = entries.is_plain[rows] & (is_wide | is_narrow | ~is_deferred)
    payload = following - np.where(is_wide, _SUMS64.size, np.where(is_narrow, _SUMS.size, 0)) - nbytes
    # The header before it.
    at, extra_bytes = at[:-1], payload - header - LOCAL.size - name_bytes
    heads = gather(data, at, LOCAL.size).view(LOCAL_HEAD)
    good &= (heads["mark"] == LOCAL_MARK) & np.isin(heads["needs"], VERSIONS) & (heads["method"] == 0)
    good &= (heads["flags"] == flags) & (heads["when"] == entries.when(rows))
    good &= (heads["name_bytes"] == name_bytes) & (heads["extra_bytes"] == extra_bytes)
    stated, none = heads["crc32"] == crc32, heads["crc32"] == 0
    sizes = (heads["stored_bytes"] == nbytes) & (heads["nbytes"] == nbytes)
    zeros = (heads["stored_bytes"] == 0) & (heads["nbytes"] == 0)
    good &= (stated & sizes) | (is_deferred & none & (zeros | sizes))
    good &= name_bytes + extra_bytes + LOCAL.size <= _USUAL_HEADER
    so_far = np.flatnonzero(good)  # from here on what is looked at is within ``data``
    names = at[so_far] + LOCAL.size
    named = entries.names_are(rows[so_far], data, names)
    good[so_far] = named & _is_padding(data, names + name_bytes[so_far], extra_bytes[so_far])
    return np.where(good, payload, -1)


def _is_padding(data: bytes, at: Int64Array, nbytes: Int64Array) -> npt.NDArray[np.bool_]:
    """Whether an extra area of so many bytes at each place has nothing in it but what aligns the payload."""
    has_field = nbytes >= FIELD.size
    fields = gather(data, np.where(has_field, at, 0), FIELD.size).view(EXTRA_FIELD)  # data has more than that
    is_padding: npt.NDArray[np.bool_] = (
        has_field & (fields["kind"] == PADDING) & (fields["nbytes"] == nbytes - FIELD.size)
    )
    content = np.where(is_padding, nbytes - FIELD.size, 0)
    for length, chosen in by_length(content):
        is_padding[chosen] = (bytes_at(data, at[chosen] + FIELD.size, length) == ord("Z")).all(axis=1)
    is_padding |= nbytes == 0
    return is_padding


def _payload(window: _Window, entry: Entry, following: int) -> tuple[int, int, bool]:
    """Where a record's payload begins and ends, given where the next header does; whether the sums between are right.

    Computed from the end of the record, so that a damaged header hides no payload.
    """
    if not entry.flags & DEFERRED:
        return following - entry.nbytes, following, True
    wide = _SUMS64.pack(DESCRIPTOR_MARK, entry.crc32, entry.nbytes, entry.nbytes)
    narrow = _SUMS.pack(DESCRIPTOR_MARK, entry.crc32, *[min(entry.nbytes, WIDE)] * 2)
    found = window.read(max(0, following - len(wide)), len(wide))
    is_wide = found == wide
    right = is_wide or found[-len(narrow) :] == narrow
    if not right:
        is_wide = max(entry.nbytes, entry.header) >= WIDE
    end = following - len(wide if is_wide else narrow)
    return end - entry.nbytes, end, right


def _header_agrees(window: _Window, entry: Entry, begin: int) -> bool:
    """Whether the header before a record says what the directory says."""
    head = window.read(entry.header, begin - entry.header)
    fields = LOCAL.unpack_from(head)
    name, extra = head[LOCAL.size :][: fields[9]], head[LOCAL.size + fields[9] :]
    wide = min(entry.nbytes, WIDE)
    sizes = (entry.crc32, wide, wide)
    later = [(0, 0, 0), (0, wide, wide), (0, WIDE, WIDE)] if entry.flags & DEFERRED else []
    good = fields[0] == LOCAL_MARK and fields[1] in VERSIONS and fields[2:6] == (entry.flags, 0, *entry.when)
    good &= fields[6:9] in (sizes, (entry.crc32, WIDE, WIDE), *later)
    good &= name == entry.name and len(extra) == fields[10]
    for kind, content in extra_fields(extra):
        if kind == ZIP64 and len(content) % 8 == 0:
            values = struct.unpack(f"<{len(content) // 8}Q", content)
            good &= all(value in (0, entry.nbytes, entry.header) for value in values)
        else:
            good &= kind == PADDING and content.count(b"Z") == len(content)
    return good


class _Window:
    """Small reads of a file, each from what the last one brought if that has it; of a remote one by blocks.

    A local file is opened once, at the first read.
    """

    def __init__(self, path: FilePath, size: int, nbytes: int) -> None:
        self._path, self._size, self._nbytes, self._begin, self._data = path, size, nbytes, 0, b""
        self._blocks = BlockFile(path, size, ahead=False) if isinstance(path, RemotePath) else None
        self._file: LocalFile | None = None
        self.bytes_read = 0

    def close(self) -> None:
        """Close the file; it is not read any more."""
        if self._file is not None:
            self._file.close()

    def total_bytes(self, of_directory: int) -> int:
        """What was read of the file, of which ``of_directory`` bytes are its directory."""
        return of_directory + self.bytes_read if self._blocks is None else self._blocks.bytes_read

    @property
    def batch(self) -> int:
        """For how many places ``around`` is asked at one time: of a remote file, as many as are kept of it."""
        return _BATCH_BYTES // self._near if self._blocks is None else self._blocks.capacity // 4

    @property
    def _near(self) -> int:
        """From place to place within one read: of a remote file no more than what is wanted."""
        wanted = _SUMS64.size + _USUAL_HEADER
        return max(self._nbytes, wanted) if self._blocks is None else wanted

    def around(self, places: Int64Array) -> tuple[bytes, Int64Array]:
        """The sums before each of some ascending places and the header behind it; where they are in these bytes.

        Places that are near each other are read together.
        """
        before, each = _SUMS64.size, _SUMS64.size + _USUAL_HEADER
        begins = places - before
        if self._blocks is not None:
            self._blocks.prefetch((max(0, begin), each) for begin in begins.tolist())
        far = np.flatnonzero(np.diff(begins) > self._near) + 1
        parts: list[bytes] = []
        at = np.empty(len(places), dtype=np.int64)
        done = 0
        for first, last in zip([0, *far.tolist()], [*far.tolist(), len(places)], strict=True):
            begin, nbytes = int(begins[first]), int(begins[last - 1] - begins[first]) + each
            lacking = max(0, -begin)  # before the first byte of the file
            data = bytes(lacking) + self._once(begin + lacking, nbytes - lacking)
            parts.append(data.ljust(nbytes, b"\0"))
            at[first:last] = begins[first:last] - begin + before + done
            done += nbytes
        return b"".join(parts), at

    def _once(self, offset: int, nbytes: int) -> bytes:
        if self._blocks is not None:
            return self._blocks.read(offset, nbytes)
        data = self._local(offset, max(0, min(nbytes, self._size - offset)))
        self.bytes_read += len(data)
        return data

    def read_once(self, offset: int, nbytes: int) -> bytes:
        """Up to ``nbytes`` bytes, of which nothing is kept where the file is on a disk."""
        return self._local(offset, nbytes) if self._blocks is None else self._blocks.read(offset, nbytes)

    def _local(self, offset: int, nbytes: int) -> bytes:
        if self._file is None:
            assert isinstance(self._path, Path)
            self._file = LocalFile(self._path)
        return self._file.read(offset, nbytes)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to ``nbytes`` bytes: fewer where the file ends."""
        if self._blocks is not None:
            return self._blocks.read(offset, nbytes)
        if offset < self._begin or offset + nbytes > self._begin + len(self._data):
            self._begin = offset
            self._data = self._local(offset, max(0, min(max(nbytes, self._nbytes), self._size - offset)))
            self.bytes_read += len(self._data)
        at = offset - self._begin
        return self._data[at : at + nbytes]


_HEADER_WINDOW = 512


def check_archive(path: FilePath, size: int, *, digested: Int64Array | None = None, executor: Executor = "auto") -> int:
    """Compare every header of an archive with its directory, and records with their CRC-32; returns the bytes read.

    ``digested`` are byte positions in the file whose content is compared by digest: the records that hold them are not
    read. ``size`` is the size of the file. Raises CheckpointError with the file and the damaged part, MissingFileError.
    """
    archive = read_zip_records(path, size, window_bytes=_HEADER_WINDOW)
    records = archive.records
    begins, ends = records.offset, records.offset + records.nbytes
    end = int(ends.max(initial=0))
    for fault in archive.faults:
        if fault.offset < end:  # another writer may make the directory behind it in its own way
            raise CheckpointError(f"{path}: {fault.what} (byte {fault.offset}). The file is damaged.")
    places = np.sort(digested) if digested is not None else np.empty(0, dtype=np.int64)
    read = np.flatnonzero((np.searchsorted(places, begins) == np.searchsorted(places, ends)) & (ends > begins))
    found = np.zeros(len(read), dtype=np.uint32)
    table = FileRanges((path,), np.zeros(len(read), dtype=np.int64), begins[read], records.nbytes[read])
    scan_segments(table, crc32=found, executor=executor)
    for number in np.flatnonzero(found != records.crc32[read])[:1].tolist():
        record = records[int(read[number])]
        raise CheckpointError(
            f"{path}: record {_short(record)}, bytes {record.offset} to {record.offset + record.nbytes}, has CRC-32 "
            f"{int(found[number]):08x} and should have {record.crc32:08x}. The file is damaged."
        )
    return archive.bytes_read + int(table.nbytes.sum())


def _short(record: ZipRecord) -> str:
    return record.name.partition("/")[2] or record.name
