"""The records of a torch.save archive: where each one's bytes lie, its CRC-32, and whether the rest of the file agrees.

Every byte that is not the payload of a record is looked at here: the header before each record, the padding that aligns
it, what follows it, and the directory at the end. All of these say the same things twice, so damage shows: any one bit.
What is expected: archives of torch.save (PyTorchStreamWriter and miniz, torch 1.6 to 2.13) and of ``archive.py``.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from zeroelastic.errors import CheckpointError
from zeroelastic.storage import FilePath, read_range

_END = struct.Struct("<4sHHHHIIH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_FIELD = struct.Struct("<HH")
_SUMS_MARK = b"PK\x07\x08"
_SUMS = struct.Struct("<4sIII")
_SUMS64 = struct.Struct("<4sIQQ")
_VERSIONS = (0, 10, 20, 45)  # of the zip specification that a record needs; no two differ in a single bit
_END64_VERSIONS = ((0x031E, 45), (45, 45))
_DEFERRED = 1 << 3
_MOST32 = 0xFFFFFFFF
_ZIP64, _PADDING = 1, 0x4246
_MOST_HEADER = _LOCAL.size + 2 * 0xFFFF
_WINDOW = 64 << 10
_MOST_DIRECTORY = 1 << 31


class ZipRecord(NamedTuple):
    """One record: its name in the archive, the place of its payload in the file, and the checksum it should have."""

    name: str
    offset: int
    nbytes: int
    crc32: int


class Fault(NamedTuple):
    """Something in the structure of an archive that contradicts the rest, as a clause, and the bytes that hold it."""

    what: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ZipRecords:
    """An archive's records in the order of their bytes.

    Invariant: the payloads lie inside the file and do not overlap. ``faults`` is empty where all bytes outside of them
    are as they must be. ``bytes_read`` is what that took.
    """

    records: tuple[ZipRecord, ...]
    faults: tuple[Fault, ...]
    bytes_read: int = 0

    @property
    def folder(self) -> str:
        """What the archive calls itself: the name of the file without its ending, or "archive"."""
        return self.records[0].name.partition("/")[0] if self.records else ""


class _Entry(NamedTuple):
    """One record as the directory at the end describes it; ``at`` is the entry's own place in the file."""

    name: bytes
    attributes: tuple[int, ...]  # what is the same for all records of an archive
    flags: int
    when: tuple[int, int]
    crc32: int
    nbytes: int
    header: int
    at: int
    length: int


def read_zip_records(path: FilePath, size: int, *, window_bytes: int = _WINDOW) -> ZipRecords:
    """Read the structure of an uncompressed archive of ``size`` bytes; payload is not read, except what shares a read
    of ``window_bytes`` with a header.

    Raises CheckpointError when the records cannot be told from it, MissingFileError.
    """
    faults: list[Fault] = []
    offset, nbytes, count = _directory_place(path, size, faults)
    entries = sorted(_entries(path, offset, nbytes, faults), key=lambda entry: entry.header)
    if len(entries) != count:
        faults.append(Fault(f"the directory has {len(entries)} entries and its end says {count}", offset, nbytes))
    window = _Window(path, size, window_bytes)
    records: list[ZipRecord] = []
    at = 0
    for entry, following in zip(entries, [*(entry.header for entry in entries[1:]), offset], strict=False):
        if following > offset:
            raise CheckpointError(f"{path}: a record begins at byte {following}, behind the last. The file is damaged.")
        begin, end, right = _payload(window, entry, following)
        if entry.header < at or begin < entry.header + _LOCAL.size + len(entry.name):
            raise CheckpointError(f"{path}: two records overlap at byte {entry.header}. The file is damaged.")
        if begin - entry.header > _MOST_HEADER:
            raise CheckpointError(f"{path}: bytes behind byte {entry.header} belong to no record. The file is damaged.")
        if entry.header > at:
            faults.append(Fault(f"{entry.header - at} bytes belong to no record", at, entry.header - at))
        _check_header(window, entry, begin, faults)
        if not right:
            faults.append(Fault(f"the sums behind {_shown(entry.name)} are wrong", end, following - end))
        records.append(ZipRecord(entry.name.decode("utf-8", "replace"), begin, entry.nbytes, entry.crc32))
        at = following
    return ZipRecords(tuple(records), tuple(faults), size - offset + window.bytes_read)


def _directory_place(path: FilePath, size: int, faults: list[Fault]) -> tuple[int, int, int]:
    """Offset, bytes and number of entries of the directory, from the end records, which must end the file."""
    most = _END64.size + _END64_LOCATOR.size + _END.size
    base = max(0, size - most)
    tail = read_range(path, base, most)
    damaged = CheckpointError(f"{path}: does not end as a torch.save file does. The file is truncated or damaged.")
    if len(tail) < _END.size:
        raise damaged
    end = _END.unpack(tail[-_END.size :])
    if end[0] != b"PK\x05\x06":
        raise damaged
    count, nbytes, offset, begin = end[4], end[5], end[6], size - _END.size
    if len(tail) == most and tail[_END64.size :][:4] == b"PK\x06\x07":
        begin = base
        end64, locator = _END64.unpack_from(tail), _END64_LOCATOR.unpack_from(tail, _END64.size)
        if end64[0] != b"PK\x06\x06":
            raise damaged
        count, nbytes, offset = end64[7], end64[8], end64[9]
        wrong = (
            end64[1] != _END64.size - 12 or end64[2:4] not in _END64_VERSIONS or any(end64[4:6]) or end64[6] != count
        )
        wrong |= locator[1:] != (0, base, 1)
        if wrong:
            faults.append(Fault("its end record is not what torch.save writes", base, most - _END.size))
    narrow = (min(count, 0xFFFF), min(count, 0xFFFF), min(nbytes, _MOST32), min(offset, _MOST32))
    if end[1:3] != (0, 0) or end[3:7] != narrow or end[7] != 0:
        faults.append(Fault("its end record contradicts itself", size - _END.size, _END.size))
    if offset + nbytes != begin or nbytes > _MOST_DIRECTORY:
        raise CheckpointError(f"{path}: its directory is not where its end says. The file is truncated or damaged.")
    return offset, nbytes, count


def _entries(path: FilePath, offset: int, nbytes: int, faults: list[Fault]) -> list[_Entry]:
    data = read_range(path, offset, nbytes)
    damaged = CheckpointError(f"{path}: its directory cannot be read. The file is truncated or damaged.")
    if len(data) != nbytes:
        raise damaged
    entries: list[_Entry] = []
    at = 0
    while at < nbytes:
        if at + _ENTRY.size > nbytes:
            raise damaged
        fields = _ENTRY.unpack_from(data, at)
        name_at, extra_at = at + _ENTRY.size, at + _ENTRY.size + fields[10]
        end = extra_at + fields[11] + fields[12]
        if fields[0] != b"PK\x01\x02" or end > nbytes:
            raise damaged
        name = data[name_at:extra_at]
        values = [fields[9], fields[8], fields[16]]  # uncompressed, compressed, header: their order in the 64-bit field
        wide = [i for i, value in enumerate(values) if value == _MOST32]
        extra = data[extra_at : extra_at + fields[11]]
        good = fields[4] == 0 and fields[12:14] == (0, 0) and fields[1] in _VERSIONS and fields[2] in _VERSIONS
        for kind, content in _extra_fields(extra):
            if kind == _ZIP64 and wide and len(content) == 8 * len(wide):
                for i, value in zip(wide, struct.unpack(f"<{len(wide)}Q", content), strict=True):
                    values[i] = value
                wide = []
            else:
                good = False
        if wide or values[0] != values[1] or not good:
            faults.append(Fault(f"its directory is wrong about {_shown(name)}", offset + at, end - at))
        place = (values[2], offset + at, end - at)
        entries.append(_Entry(name, fields[14:16], fields[3], fields[5:7], fields[7], values[0], *place))
        at = end
    usual = Counter(entry.attributes for entry in entries).most_common(1)
    faults += [
        Fault(f"its directory describes {_shown(entry.name)} unlike the others", entry.at, entry.length)
        for entry in entries
        if entry.attributes != usual[0][0]
    ]
    return entries


def _extra_fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """(kind, content) of the fields of an extra area; kind -1 where they do not fill it."""
    at = 0
    while at < len(extra):
        if at + _FIELD.size > len(extra):
            yield -1, b""
            return
        kind, length = _FIELD.unpack_from(extra, at)
        at += _FIELD.size
        if at + length > len(extra):
            yield -1, b""
            return
        yield kind, extra[at : at + length]
        at += length


def _payload(window: _Window, entry: _Entry, following: int) -> tuple[int, int, bool]:
    """Where a record's payload begins and ends, given where the next header does; whether the sums between are right.

    Told from behind, so that a damaged header hides no payload.
    """
    if not entry.flags & _DEFERRED:
        return following - entry.nbytes, following, True
    wide = _SUMS64.pack(_SUMS_MARK, entry.crc32, entry.nbytes, entry.nbytes)
    narrow = _SUMS.pack(_SUMS_MARK, entry.crc32, *[min(entry.nbytes, _MOST32)] * 2)
    found = window.read(max(0, following - len(wide)), len(wide))
    is_wide = found == wide
    right = is_wide or found[-len(narrow) :] == narrow
    if not right:
        is_wide = max(entry.nbytes, entry.header) >= _MOST32
    end = following - len(wide if is_wide else narrow)
    return end - entry.nbytes, end, right


def _check_header(window: _Window, entry: _Entry, begin: int, faults: list[Fault]) -> None:
    """Compare the header before a record with the directory."""
    head = window.read(entry.header, begin - entry.header)
    fields = _LOCAL.unpack_from(head)
    name, extra = head[_LOCAL.size :][: fields[9]], head[_LOCAL.size + fields[9] :]
    wide = min(entry.nbytes, _MOST32)
    sizes = (entry.crc32, wide, wide)
    later = [(0, 0, 0), (0, wide, wide), (0, _MOST32, _MOST32)] if entry.flags & _DEFERRED else []
    good = fields[0] == b"PK\x03\x04" and fields[1] in _VERSIONS and fields[2:6] == (entry.flags, 0, *entry.when)
    good &= fields[6:9] in (sizes, (entry.crc32, _MOST32, _MOST32), *later)
    good &= name == entry.name and len(extra) == fields[10]
    for kind, content in _extra_fields(extra):
        if kind == _ZIP64 and len(content) % 8 == 0:
            values = struct.unpack(f"<{len(content) // 8}Q", content)
            good &= all(value in (0, entry.nbytes, entry.header) for value in values)
        else:
            good &= kind == _PADDING and content.count(b"Z") == len(content)
    if not good:
        what = f"the header of {_shown(entry.name)} contradicts the directory"
        faults.append(Fault(what, entry.header, begin - entry.header))


def _shown(name: bytes) -> str:
    """A record's name without the archive's folder."""
    text = name.decode("utf-8", "replace")
    return repr(text.partition("/")[2] or text)[1:-1]


class _Window:
    """Small reads of a file, each from what the last one brought if that has it."""

    def __init__(self, path: FilePath, size: int, nbytes: int) -> None:
        self._path, self._size, self._nbytes, self._begin, self._data = path, size, nbytes, 0, b""
        self.bytes_read = 0

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to ``nbytes`` bytes: fewer where the file ends."""
        if offset < self._begin or offset + nbytes > self._begin + len(self._data):
            self._begin = offset
            self._data = read_range(self._path, offset, max(0, min(max(nbytes, self._nbytes), self._size - offset)))
            self.bytes_read += len(self._data)
        at = offset - self._begin
        return self._data[at : at + nbytes]
