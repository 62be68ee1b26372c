"""The zip format of torch.save: its structures, and the directory at the end of an archive in columns."""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

from zeroelastic.core.layout import Int64Array

END = struct.Struct("<4sHHHHIIH")
END64_LOCATOR = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQHHIIQQQQ")
ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
ENTRY_CRC32 = 16
"""Where the CRC-32 is in an ``ENTRY``."""
LOCAL = struct.Struct("<4sHHHHHIIIHH")
FIELD = struct.Struct("<HH")
END_MARK, END64_MARK, LOCATOR_MARK = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
ENTRY_MARK, LOCAL_MARK, DESCRIPTOR_MARK = b"PK\x01\x02", b"PK\x03\x04", b"PK\x07\x08"
DEFERRED = 1 << 3
"""The flag of a record whose checksum and sizes follow it, in a descriptor."""
UTF8_NAMES = 1 << 11
WIDE = 0xFFFFFFFF
"""Stands in a 32-bit field for a number that the 64-bit field of the extra area has."""
MANY = 0xFFFF
ZIP64, PADDING = 1, 0x4246
"""Kinds of fields in an extra area."""
VERSIONS = (0, 10, 20, 45)
"""Versions of the zip specification that a record may need; no two differ in a single bit."""

_END64_VERSIONS = ((0x031E, 45), (45, 45))
_MAX_DIRECTORY = 1 << 31
_MAX_OFFSET = 1 << 61  # what int64 holds with as much again
_ENTRY = np.dtype(
    "<u4,<u2,<u2,<u2,<u2,<u2,<u2,<u4,<u4,<u4,<u2,<u2,<u2,<u2,<u2,<u4,<u4",
)
_ENTRY.names = (
    "mark", "made_by", "needs", "flags", "method", "time", "date", "crc32", "stored_bytes", "nbytes", "name_bytes",
    "extra_bytes", "comment_bytes", "disk", "internal", "external", "header",
)  # fmt: skip
_WIDE_HEADER = np.dtype([("kind", "<u2"), ("nbytes", "<u2"), ("header", "<u8")])
EXTRA_FIELD = np.dtype([("kind", "<u2"), ("nbytes", "<u2")])
"""``FIELD`` as a dtype."""
LOCAL_HEAD = np.dtype([
    ("mark", "S4"), ("needs", "<u2"), ("flags", "<u2"), ("method", "<u2"), ("when", "<u4"), ("crc32", "<u4"),
    ("stored_bytes", "<u4"), ("nbytes", "<u4"), ("name_bytes", "<u2"), ("extra_bytes", "<u2"),
])  # fmt: skip
"""``LOCAL`` as a dtype; ``when`` is time and date."""
_WHEN_AT = 12  # of time and date, in an ``ENTRY``
_LENGTHS = struct.Struct("<HHH")  # of the name, the extra area and the comment
_LENGTHS_AT = 28
_SAME = 16  # entries of one length in turn, behind which more are likely
_ROWS = 1 << 16  # entries whose columns are made at one time

T = TypeVar("T")

ReadAt = Callable[[int, int], bytes]
"""Up to so many bytes: ``read(offset, nbytes)``."""


class ZipError(ValueError):
    """The directory of an archive cannot be read; the text is a clause about the file."""


class Fault(NamedTuple):
    """Something in the structure of an archive that contradicts the rest, as a clause, and the bytes that hold it."""

    what: str
    offset: int
    nbytes: int


class Entry(NamedTuple):
    """A record as the directory describes it; ``at`` is the place of the entry itself in the file.

    ``stored_bytes`` is what the record takes in the file: ``nbytes``, unless it is compressed.
    """

    name: bytes
    attributes: tuple[int, ...]  # the same for all records of an archive
    flags: int
    method: int
    when: tuple[int, int]
    crc32: int
    stored_bytes: int
    nbytes: int
    header: int
    at: int
    length: int

    @property
    def text(self) -> str:
        """The name as text."""
        return self.name.decode("utf-8", "replace")

    @property
    def short_name(self) -> str:
        """The name without the archive's folder, for messages."""
        return repr(self.text.partition("/")[2] or self.text)[1:-1]


class MadeOnDemand(Sequence[T]):
    """A sequence kept in columns, of which a row becomes an object when it is asked for."""

    __slots__ = ()

    @abstractmethod
    def _made(self, row: int) -> T: ...

    @overload
    def __getitem__(self, row: int) -> T: ...
    @overload
    def __getitem__(self, row: slice) -> list[T]: ...
    def __getitem__(self, row: int | slice) -> T | list[T]:
        return [self._made(i) for i in range(*row.indices(len(self)))] if isinstance(row, slice) else self._made(row)


@dataclass(frozen=True, slots=True, eq=False)
class Entries(MadeOnDemand[Entry]):
    """The entries of a directory by columns; an ``Entry`` is made when it is asked for.

    ``at`` is where each one begins in ``data``, which is at ``offset`` in the file. The arrays have shape
    ``(num_entries,)``; numbers beyond 2^61 are that. ``is_plain`` are the entries that say nothing else, of records
    that are not compressed.
    """

    data: bytes
    offset: int
    at: Int64Array
    name_bytes: Int64Array
    flags: npt.NDArray[np.uint16]
    nbytes: Int64Array
    header: Int64Array
    stored_bytes: Int64Array
    crc32: npt.NDArray[np.uint32]
    is_plain: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.at)

    def _made(self, row: int) -> Entry:
        return _entry(self.data, int(self.at[row]), self.offset)[0]

    def when(self, rows: Int64Array) -> npt.NDArray[np.uint32]:
        """Time and date of some entries, as two 16-bit numbers in one."""
        when: npt.NDArray[np.uint32] = gather(self.data, self.at[rows] + _WHEN_AT, 4).view("<u4")
        return when

    def names_are(self, rows: Int64Array, data: bytes, at: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether ``data`` has the name of each of some entries at the place that goes with it."""
        same = np.ones(len(rows), dtype=bool)
        names = self.at[rows] + ENTRY.size
        for nbytes, chosen in by_length(self.name_bytes[rows]):
            same[chosen] = (bytes_at(self.data, names[chosen], nbytes) == bytes_at(data, at[chosen], nbytes)).all(
                axis=1
            )
        return same


@dataclass(frozen=True, slots=True)
class Directory:
    """The directory of an archive: ``data`` is the file from byte ``offset``, where it begins, to the end.

    ``faults`` is empty where the directory and the end records are as torch.save writes them.
    """

    offset: int
    data: bytes
    entries: Entries
    faults: tuple[Fault, ...]


def read_directory(read: ReadAt, size: int) -> Directory:
    """The directory of an archive of ``size`` bytes. Raises ZipError where the records cannot be found by it."""
    faults: list[Fault] = []
    offset, nbytes, count = _directory_place(read, size, faults)
    data = read(offset, size - offset)
    if len(data) != size - offset:
        raise ZipError("its directory cannot be read")
    entries = _entries(data, nbytes, offset, faults)
    if len(entries) != count:
        faults.append(Fault(f"the directory has {len(entries)} entries and its end says {count}", offset, nbytes))
    return Directory(offset, data, entries, tuple(faults))


def _directory_place(read: ReadAt, size: int, faults: list[Fault]) -> tuple[int, int, int]:
    """Offset, bytes and number of entries of the directory, from the end records, which must end the file."""
    most = END64.size + END64_LOCATOR.size + END.size
    base = max(0, size - most)
    tail = read(base, most)
    end = END.unpack(tail[-END.size :]) if len(tail) >= END.size else (b"",)
    if end[0] != END_MARK:
        raise ZipError("it does not end as a torch.save file does")
    count, nbytes, offset, begin = end[4], end[5], end[6], size - END.size
    if len(tail) == most and tail[END64.size :][:4] == LOCATOR_MARK:
        begin = base
        end64, locator = END64.unpack_from(tail), END64_LOCATOR.unpack_from(tail, END64.size)
        if end64[0] != END64_MARK:
            raise ZipError("it does not end as a torch.save file does")
        count, nbytes, offset = end64[7], end64[8], end64[9]
        good = end64[1] == END64.size - 12 and end64[2:4] in _END64_VERSIONS and end64[4:7] == (0, 0, count)
        if not good or locator[1:] != (0, base, 1):
            faults.append(Fault("its end record is not what torch.save writes", base, most - END.size))
    narrow = (0, 0, min(count, MANY), min(count, MANY), min(nbytes, WIDE), min(offset, WIDE), 0)
    if end[1:] != narrow:
        faults.append(Fault("its end record contradicts itself", size - END.size, END.size))
    if offset + nbytes != begin or nbytes > _MAX_DIRECTORY:
        raise ZipError("its directory is not where its end says")
    return offset, nbytes, count


def _starts(data: bytes, end: int) -> Int64Array:
    """Where each entry begins. Entries of one length, of which torch.save writes thousands, are found at once."""
    runs: list[Int64Array] = []
    singles: list[int] = []
    at, last, same = 0, (0, 0, 0), 0
    while at < end:
        if at + ENTRY.size > end or data[at : at + 4] != ENTRY_MARK:
            raise ZipError("its directory cannot be read")
        lengths = _LENGTHS.unpack_from(data, at + _LENGTHS_AT)
        same, last = same + 1 if lengths == last else 0, lengths
        nbytes = ENTRY.size + sum(lengths)
        if at + nbytes > end:
            raise ZipError("its directory cannot be read")
        count = 1
        if same == _SAME:
            same = 0
            heads = np.ndarray(((end - at) // nbytes,), _ENTRY, data, at, (nbytes,))
            differs = heads["mark"] != heads["mark"][0]
            for field, length in zip(("name_bytes", "extra_bytes", "comment_bytes"), lengths, strict=True):
                differs |= heads[field] != length
            count = int(differs.argmax()) if differs.any() else len(heads)
            runs += [np.array(singles, dtype=np.int64), at + nbytes * np.arange(count)]
            singles = []
        else:
            singles.append(at)
        at += nbytes * count
    return np.concatenate([*runs, np.array(singles, dtype=np.int64)])


def _entries(data: bytes, nbytes: int, offset: int, faults: list[Fault]) -> Entries:
    """The entries of a directory of ``nbytes`` bytes, at ``offset`` in the file; adds what is wrong to ``faults``."""
    at = _starts(data, nbytes)
    entries = Entries(
        data,
        offset,
        at,
        name_bytes=np.empty(len(at), dtype=np.int64),
        flags=np.empty(len(at), dtype=np.uint16),
        nbytes=np.empty(len(at), dtype=np.int64),
        header=np.empty(len(at), dtype=np.int64),
        stored_bytes=np.empty(len(at), dtype=np.int64),
        crc32=np.empty(len(at), dtype=np.uint32),
        is_plain=np.empty(len(at), dtype=np.bool_),
    )
    attributes = np.empty(len(at), dtype=np.uint64)
    for begin in range(0, len(at), _ROWS):
        rows = slice(begin, begin + _ROWS)
        heads = gather(data, at[rows], ENTRY.size).view(_ENTRY)
        header = heads["header"].astype(np.int64)
        name_bytes, extra_bytes = heads["name_bytes"].astype(np.int64), heads["extra_bytes"]
        wide = np.flatnonzero((header == WIDE) & (extra_bytes == _WIDE_HEADER.itemsize))
        extra = gather(data, at[rows][wide] + ENTRY.size + name_bytes[wide], _WIDE_HEADER.itemsize).view(_WIDE_HEADER)
        header[wide] = extra["header"]
        known = np.zeros(len(header), dtype=bool)
        known[wide] = (extra["kind"] == ZIP64) & (extra["nbytes"] == 8) & (extra["header"] < _MAX_OFFSET)
        good = np.where(header == WIDE, False, extra_bytes == 0) | known
        for field in ("made_by", "needs"):
            good &= np.isin(heads[field], VERSIONS)
        for field in ("method", "comment_bytes", "disk"):
            good &= heads[field] == 0
        good &= (heads["nbytes"] == heads["stored_bytes"]) & (heads["nbytes"] != WIDE)
        entries.is_plain[rows] = good
        attributes[rows] = heads["internal"].astype(np.uint64) << np.uint64(32) | heads["external"]
        entries.header[rows], entries.name_bytes[rows] = header, name_bytes
        entries.nbytes[rows], entries.stored_bytes[rows] = heads["nbytes"], heads["stored_bytes"]
        entries.flags[rows], entries.crc32[rows] = heads["flags"], heads["crc32"]
    for row in np.flatnonzero(~entries.is_plain).tolist():
        entry, is_right = _entry(data, int(at[row]), offset)
        for column, value in (
            (entries.header, entry.header), (entries.nbytes, entry.nbytes), (entries.stored_bytes, entry.stored_bytes)
        ):  # fmt: skip
            column[row] = min(value, _MAX_OFFSET)
        if not is_right:
            faults.append(Fault(f"its directory is wrong about {entry.short_name}", entry.at, entry.length))
    kinds, first, count = np.unique(attributes, return_index=True, return_counts=True)
    if len(kinds) > 1:
        usual = kinds[min(np.flatnonzero(count == count.max()).tolist(), key=lambda kind: first[kind])]
        for entry in map(entries.__getitem__, np.flatnonzero(attributes != usual).tolist()):
            what = f"its directory describes {entry.short_name} unlike the others"
            faults.append(Fault(what, entry.at, entry.length))
    return entries


def gather(data: bytes, at: Int64Array, nbytes: int) -> npt.NDArray[np.void]:
    """``nbytes`` bytes from each of some places on, which lie inside of ``data``: shape ``(num_places,)``."""
    if not len(at):
        return np.empty(0, dtype=f"V{nbytes}")
    windows: npt.NDArray[np.void] = np.ndarray((len(data) - nbytes + 1,), f"V{nbytes}", data, strides=(1,))
    return windows[at]


def bytes_at(data: bytes, at: Int64Array, nbytes: int) -> npt.NDArray[np.uint8]:
    """As ``gather``, of at least one byte each: shape ``(num_places, nbytes)``."""
    return gather(data, at, nbytes).view(np.uint8).reshape(len(at), nbytes)


def by_length(nbytes: Int64Array) -> Iterator[tuple[int, Int64Array]]:
    """Each length that is not zero, and the positions that have it."""
    for length in sorted(set(nbytes[nbytes > 0].tolist())):  # np.unique would import numpy.ma, 50 ms
        yield length, np.flatnonzero(nbytes == length)


def _entry(data: bytes, at: int, offset: int) -> tuple[Entry, bool]:
    """The entry at a place of a directory, and whether it is as torch.save writes it."""
    fields = ENTRY.unpack_from(data, at)
    name_at, extra_at = at + ENTRY.size, at + ENTRY.size + fields[10]
    end = extra_at + fields[11] + fields[12]
    values = [fields[9], fields[8], fields[16]]  # uncompressed, compressed, header: their order in the 64-bit field
    wide = [i for i, value in enumerate(values) if value == WIDE] if WIDE in values else []
    good = fields[4] == 0 and fields[12:14] == (0, 0) and fields[1] in VERSIONS and fields[2] in VERSIONS
    for kind, content in extra_fields(data[extra_at : extra_at + fields[11]]) if fields[11] else ():
        if kind == ZIP64 and wide and len(content) == 8 * len(wide):
            for i, value in zip(wide, struct.unpack(f"<{len(wide)}Q", content), strict=True):
                values[i] = value
            wide = []
        else:
            good = False
    nbytes, stored_bytes, header = values
    entry = Entry(
        data[name_at:extra_at], fields[14:16], fields[3], fields[4], fields[5:7], fields[7], stored_bytes, nbytes,
        header, offset + at, end - at,
    )  # fmt: skip
    return entry, good and not wide and nbytes == stored_bytes


def extra_fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
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
