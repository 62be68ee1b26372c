"""The zip format of torch.save: its structures, and the directory at the end of an archive as a list of entries."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from zeroelastic.core.collector import paused_collector

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


@dataclass(frozen=True, slots=True)
class Directory:
    """The directory of an archive: ``data`` is the file from byte ``offset``, where it begins, to the end.

    ``faults`` is empty where the directory and the end records are as torch.save writes them.
    """

    offset: int
    data: bytes
    entries: tuple[Entry, ...]
    faults: tuple[Fault, ...]


def read_directory(read: ReadAt, size: int) -> Directory:
    """The directory of an archive of ``size`` bytes. Raises ZipError where the records cannot be found by it."""
    faults: list[Fault] = []
    offset, nbytes, count = _directory_place(read, size, faults)
    data = read(offset, size - offset)
    if len(data) != size - offset:
        raise ZipError("its directory cannot be read")
    with paused_collector():
        entries = _entries(data[:nbytes], offset, faults)
    if len(entries) != count:
        faults.append(Fault(f"the directory has {len(entries)} entries and its end says {count}", offset, nbytes))
    return Directory(offset, data, tuple(entries), tuple(faults))


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


def _entries(data: bytes, offset: int, faults: list[Fault]) -> list[Entry]:
    entries: list[Entry] = []
    common: dict[tuple[int, int], tuple[int, int]] = {}  # tuples that are equal are one
    at = 0
    while at < len(data):
        fields = ENTRY.unpack_from(data, at) if at + ENTRY.size <= len(data) else (b"",)
        if fields[0] != ENTRY_MARK:
            raise ZipError("its directory cannot be read")
        name_at, extra_at = at + ENTRY.size, at + ENTRY.size + fields[10]
        end = extra_at + fields[11] + fields[12]
        if end > len(data):
            raise ZipError("its directory cannot be read")
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
        attributes: tuple[int, int] = fields[14:16]
        when: tuple[int, int] = fields[5:7]
        entry = Entry(
            data[name_at:extra_at], common.setdefault(attributes, attributes), fields[3], fields[4],
            common.setdefault(when, when), fields[7], stored_bytes, nbytes, header, offset + at, end - at,
        )  # fmt: skip
        if wide or nbytes != stored_bytes or not good:
            faults.append(Fault(f"its directory is wrong about {entry.short_name}", entry.at, entry.length))
        entries.append(entry)
        at = end
    usual = Counter(entry.attributes for entry in entries).most_common(1)
    faults += [
        Fault(f"its directory describes {entry.short_name} unlike the others", entry.at, entry.length)
        for entry in entries
        if entry.attributes != usual[0][0]
    ]
    return entries


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
