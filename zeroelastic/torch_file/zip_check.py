"""The records of a torch.save archive: where each one's bytes lie, its CRC-32, and whether the rest of the file agrees.

Every byte that is not the payload of a record is looked at here: the header before each record, the padding that aligns
it, what follows it, and the directory at the end. All of these say the same things twice, so damage shows: any one bit.
What is expected: archives of torch.save (PyTorchStreamWriter and miniz, torch 1.6 to 2.13) and of ``archive.Archive``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import CheckpointError
from zeroelastic.executors.dispatch import Executor, Ranges, scan_segments
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import Blocks, open_blocks
from zeroelastic.torch_file.zip_directory import (
    DEFERRED,
    DESCRIPTOR_MARK,
    EXTRA_FIELD,
    FIELD,
    LOCAL,
    LOCAL_MARK,
    PADDING,
    VERSIONS,
    WIDE,
    ZIP64,
    Fault,
    ZipDirectory,
    ZipEntry,
    ZipError,
    gather,
    read_directory,
    without_folder,
)

_SUMS = struct.Struct("<4sIII")
_SUMS64 = struct.Struct("<4sIQQ")
_MAX_HEADER = LOCAL.size + 2 * 0xFFFF
_WINDOW = 64 << 10
_USUAL_HEADER = 232  # bytes of the header of nearly every record, its name and padding included
_ALIGNMENT = 64
_WIDE_SUMS = np.dtype([("mark", "S4"), ("crc32", "<u4"), ("stored_bytes", "<u8"), ("nbytes", "<u8")])
_NARROW_SUMS = np.dtype([("mark", "S4"), ("crc32", "<u4"), ("stored_bytes", "<u4"), ("nbytes", "<u4")])
_BATCH_BYTES = 16 << 20  # that are read at one time at most


class ZipRecord(NamedTuple):
    """One record: name, place and size of the payload in the file, in bytes, and checksum."""

    name: str
    offset: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True, eq=False)
class ZipRecords:
    """An archive's records in the order of their bytes, in columns; a ``ZipRecord`` is made when it is asked for.

    Invariant: the payloads lie inside the file and do not overlap. ``faults`` is empty where all bytes outside of them
    are as they must be. ``bytes_read`` is what that took. The arrays have shape ``(num_records,)``, ``row`` is that of
    the directory.
    """

    directory: ZipDirectory
    row: Int64Array
    offset: Int64Array
    nbytes: Int64Array
    crc32: npt.NDArray[np.uint32]
    faults: tuple[Fault, ...]
    bytes_read: int

    def __len__(self) -> int:
        return len(self.offset)

    def __getitem__(self, number: int) -> ZipRecord:
        name = self.directory[int(self.row[number])].text
        return ZipRecord(name, int(self.offset[number]), int(self.nbytes[number]), int(self.crc32[number]))

    def __iter__(self) -> Iterator[ZipRecord]:
        return map(self.__getitem__, range(len(self)))

    def contradiction(self, number: int, found: int, *, at: int = 0) -> str:
        """Say that the content of a record has another checksum; the archive begins at byte ``at``."""
        name, offset, nbytes, stated = self[number]
        begin = at + offset
        return (
            f"record {without_folder(name)}, bytes {begin} to {begin + nbytes}, has CRC-32 {found:08x} and should have "
            f"{stated:08x}. The file is damaged."
        )


def read_zip_records(
    path: FilePath, size: int, *, window_bytes: int = _WINDOW, through: Blocks | None = None
) -> ZipRecords:
    """Read the structure of an uncompressed archive of ``size`` bytes; payload is not read, except what shares a read
    of ``window_bytes`` with a header. ``through`` is an archive inside a file.

    Memory: 200 bytes for each record, its entry in the directory included, and 16 MiB. Raises CheckpointError where the
    records cannot be found by the directory, MissingFileError.
    """
    with nullcontext(through) if through is not None else open_blocks(path, size, ahead=False) as file:
        return _read_records(path, size, _Window(file, window_bytes))


def _read_records(path: FilePath, size: int, window: _Window) -> ZipRecords:
    try:
        directory = read_directory(window.file.read, size)
    except ZipError as error:
        raise CheckpointError(f"{path}: {error}. The file is truncated or damaged.") from None
    faults = directory.faults
    rows = np.argsort(directory.header, kind="stable")
    header = directory.header[rows]
    following = np.append(header[1:], directory.offset)[: len(header)]
    if (behind := following[following > directory.offset]).size:
        raise CheckpointError(f"{path}: a record begins at byte {behind[0]}, behind the last. The file is damaged.")
    if len(header) and header[0] > 0:
        faults.append(Fault(f"{header[0]} bytes belong to no record", 0, int(header[0])))
    offset = np.full(len(rows), -1, dtype=np.int64)
    for begin in range(0, len(rows), window.batch):
        some = slice(begin, begin + window.batch)
        offset[some] = _usual_payloads(window, directory, rows[some], following[some])
    for number in np.flatnonzero(offset < 0).tolist():
        entry, next_header = directory[int(rows[number])], int(following[number])
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
    nbytes, crc32, bytes_read = directory.nbytes[rows], directory.crc32[rows], window.file.bytes_read
    return ZipRecords(directory, rows, offset, nbytes, crc32, tuple(faults), bytes_read)


def _usual_payloads(window: _Window, directory: ZipDirectory, rows: Int64Array, following: Int64Array) -> Int64Array:
    """Where the payload of records begins whose headers and sums are what torch.save writes for their entries.

    -1 for the others, which ``_payload`` and ``_header_agrees`` look at. ``rows`` are in the order of their headers,
    ``following`` is where the next header begins.
    """
    if LOCAL.size + directory.most_name_bytes > _USUAL_HEADER:
        return np.full(len(rows), -1, dtype=np.int64)
    data, places = window.around(np.append(directory.header[rows], following[-1]))
    at, ends = places[:-1], places[1:]
    header, nbytes, crc32 = directory.header[rows], directory.nbytes[rows], directory.crc32[rows]
    # The sums behind a record, where the next header begins.
    wide = gather(data, ends - _SUMS64.size, _SUMS64.size).view(_WIDE_SUMS)
    narrow = gather(data, ends - _SUMS.size, _SUMS.size).view(_NARROW_SUMS)
    is_deferred = (directory.flags[rows] & DEFERRED) != 0
    is_wide, is_narrow = (
        is_deferred
        & (sums["mark"] == DESCRIPTOR_MARK)
        & (sums["crc32"] == crc32)
        & (sums["stored_bytes"] == nbytes)
        & (sums["nbytes"] == nbytes)
        for sums in (wide, narrow)
    )
    payload = following - np.where(is_wide, _SUMS64.size, np.where(is_narrow, _SUMS.size, 0)) - nbytes
    # The header before it.
    heads, name_end, good = directory.local_heads(rows, data, at)
    good &= (is_wide | is_narrow | ~is_deferred) & (header + name_end - at + heads["extra_bytes"] == payload)
    good &= np.isin(heads["needs"], VERSIONS) & (heads["when"] == directory.when[rows])
    stated, none = heads["crc32"] == crc32, heads["crc32"] == 0
    sizes = (heads["stored_bytes"] == nbytes) & (heads["nbytes"] == nbytes)
    zeros = (heads["stored_bytes"] == 0) & (heads["nbytes"] == 0)
    good &= (stated & sizes) | (is_deferred & none & (zeros | sizes))
    good &= _is_padding(data, name_end, heads["extra_bytes"].astype(np.int64))
    return np.where(good, payload, -1)


def _is_padding(data: bytes, at: Int64Array, nbytes: Int64Array) -> npt.NDArray[np.bool_]:
    """Return whether the extra area of so many bytes at each place has only the padding that aligns the payload."""
    fields = gather(data, at, FIELD.size).view(EXTRA_FIELD)
    content = nbytes - FIELD.size
    is_padding: npt.NDArray[np.bool_] = (fields["kind"] == PADDING) & (fields["nbytes"] == content)
    is_padding &= (content >= 0) & (content <= _ALIGNMENT)
    for length in set(content[is_padding].tolist()) - {0}:
        rows = np.flatnonzero(is_padding & (content == length))
        is_padding[rows] = gather(data, at[rows] + FIELD.size, length).view(f"S{length}") == b"Z" * length
    is_padding |= nbytes == 0
    return is_padding


def _payload(window: _Window, entry: ZipEntry, following: int) -> tuple[int, int, bool]:
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


def _header_agrees(window: _Window, entry: ZipEntry, begin: int) -> bool:
    """Return whether the header before a record agrees with the directory."""
    head = window.read(entry.header, begin - entry.header)
    fields = LOCAL.unpack_from(head)
    name, extra = head[LOCAL.size :][: fields[9]], head[LOCAL.size + fields[9] :]
    wide = min(entry.nbytes, WIDE)
    sizes = (entry.crc32, wide, wide)
    later = [(0, 0, 0), (0, wide, wide), (0, WIDE, WIDE)] if entry.flags & DEFERRED else []
    good = fields[0] == LOCAL_MARK and fields[1] in VERSIONS and fields[2:4] == (entry.flags, 0)
    good &= fields[4] | fields[5] << 16 == entry.when and fields[6:9] in (sizes, (entry.crc32, WIDE, WIDE), *later)
    good &= name == entry.name and len(extra) == fields[10]
    for kind, content in _extra_fields(extra):
        if kind == ZIP64 and len(content) % 8 == 0:
            values = struct.unpack(f"<{len(content) // 8}Q", content)
            good &= all(value in (0, entry.nbytes, entry.header) for value in values)
        else:
            good &= kind == PADDING and content.count(b"Z") == len(content)
    return good


def _extra_fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """(kind, content) of the fields of an extra area; the kind is -1 where they do not fill it."""
    at = 0
    while at < len(extra):
        kind, length = FIELD.unpack_from(extra, at) if at + FIELD.size <= len(extra) else (-1, 0)
        at += FIELD.size
        if kind < 0 or at + length > len(extra):
            yield -1, b""
            return
        yield kind, extra[at : at + length]
        at += length


class _Window:
    """Small reads of a file, each from what the last one brought if that has it.

    ``batch`` is for how many places ``around`` is asked at one time: as many as a remote file keeps blocks of.
    """

    def __init__(self, file: Blocks, nbytes: int) -> None:
        """Reads are of at least ``nbytes`` bytes: of a file that keeps its blocks, none but what is wanted."""
        self.file, self._nbytes, self._begin, self._data = file, 0 if file.has_cache else nbytes, 0, b""
        self._near = max(self._nbytes, _SUMS64.size + _USUAL_HEADER)
        self.batch = min(_BATCH_BYTES // self._near, file.capacity // 4)

    def around(self, places: Int64Array) -> tuple[bytes, Int64Array]:
        """The sums before each of some ascending places and the header behind it; where they are in these bytes.

        Places that are near each other are read together.
        """
        before, each = _SUMS64.size, _SUMS64.size + _USUAL_HEADER
        begins = places - before
        self.file.prefetch((max(0, begin), each) for begin in begins.tolist())
        far = np.flatnonzero(np.diff(begins) > self._near) + 1
        parts: list[bytes] = []
        at = np.empty(len(places), dtype=np.int64)
        done = 0
        for first, last in zip([0, *far.tolist()], [*far.tolist(), len(places)], strict=True):
            begin, nbytes = int(begins[first]), int(begins[last - 1] - begins[first]) + each
            lacking = max(0, -begin)  # before the first byte of the file
            data = bytes(lacking) + self.file.read(begin + lacking, nbytes - lacking)
            parts.append(data.ljust(nbytes, b"\0"))
            at[first:last] = begins[first:last] - begin + before + done
            done += nbytes
        parts.append(bytes(FIELD.size + _ALIGNMENT))  # a padding is looked at as if it were this long
        return b"".join(parts), at

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to ``nbytes`` bytes: fewer where the file ends."""
        if offset < self._begin or offset + nbytes > self._begin + len(self._data):
            self._begin, self._data = offset, self.file.read(offset, max(nbytes, self._nbytes))
        at = offset - self._begin
        return self._data[at : at + nbytes]


_HEADER_WINDOW = 512


def check_archive(path: FilePath, size: int, *, digested: Int64Array | None = None, executor: Executor = "auto") -> int:
    """Compare every header of an archive with its directory, and records with their CRC-32; returns the bytes read.

    ``digested`` are byte positions in the file whose content is compared by digest: the records that hold them are not
    read. ``size`` is the size of the file. Raises CheckpointError with the file and the damaged part, MissingFileError.
    """
    records = read_zip_records(path, size, window_bytes=_HEADER_WINDOW)
    begins, ends = records.offset, records.offset + records.nbytes
    end = int(ends.max(initial=0))
    for fault in records.faults:
        if fault.offset < end:  # another writer may make the directory behind it in its own way
            raise CheckpointError(f"{path}: {fault.what} (byte {fault.offset}). The file is damaged.")
    places = np.sort(digested) if digested is not None else np.empty(0, dtype=np.int64)
    read = np.flatnonzero(np.searchsorted(places, begins) == np.searchsorted(places, ends))
    return records.bytes_read + check_records(path, records, read, executor=executor)


def check_records(
    path: FilePath, records: ZipRecords, chosen: Int64Array, *, at: int = 0, executor: Executor = "auto"
) -> int:
    """Compare records of an archive, which begins at byte ``at`` of a file, with their CRC-32; returns the bytes read.

    ``chosen`` are their numbers. Nothing is compared where the archive states no checksums. Raises CheckpointError with
    the file and the first damaged record, MissingFileError.
    """
    chosen = chosen[(records.nbytes[chosen] > 0) & records.directory.states_checksums]
    found = np.zeros(len(chosen), dtype=np.uint32)
    table = Ranges(np.zeros(len(chosen), dtype=np.int64), records.offset[chosen] + at, records.nbytes[chosen])
    scan_segments(table, [path], crc32=found, executor=executor)
    for number in np.flatnonzero(found != records.crc32[chosen])[:1].tolist():
        raise CheckpointError(f"{path}: {records.contradiction(int(chosen[number]), int(found[number]), at=at)}")
    return int(table.nbytes.sum())
