"""The zip format of torch.save: structures, the directory at the end of an archive by name, and how both are written.

The records of storages, which are numbered, are kept in columns; the others one by one.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

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
EXTRA_FIELD = np.dtype([("kind", "<u2"), ("nbytes", "<u2")])
"""``FIELD`` as a dtype."""
LOCAL_HEAD = np.dtype([
    ("mark", "S4"), ("needs", "<u2"), ("flags", "<u2"), ("method", "<u2"), ("when", "<u4"), ("crc32", "<u4"),
    ("stored_bytes", "<u4"), ("nbytes", "<u4"), ("name_bytes", "<u2"), ("extra_bytes", "<u2"),
])  # fmt: skip
"""``LOCAL`` as a dtype; ``when`` is time and date."""
LOCATED_BYTES = 512
"""A record's own header with its padding, and a scalar that follows it."""

_ENTRY = np.dtype([
    ("mark", "S4"), ("made_by", "<u2"), ("needs", "<u2"), ("flags", "<u2"), ("method", "<u2"), ("when", "<u4"),
    ("crc32", "<u4"), ("stored_bytes", "<u4"), ("nbytes", "<u4"), ("name_bytes", "<u2"), ("extra_bytes", "<u2"),
    ("comment_bytes", "<u2"), ("disk", "<u2"), ("internal", "<u2"), ("external", "<u4"), ("header", "<u4"),
])  # fmt: skip
_LENGTHS = struct.Struct("<HHH")  # of the name, the extra area and the comment
_LENGTHS_AT = 28
_SAME = 16  # entries of one length in turn, behind which more are likely
_VERSION64 = 45
_END64_VERSIONS = ((0x031E, 45), (45, 45))
_MAX_DIRECTORY = 1 << 31
_MAX_OFFSET = 1 << 61  # what int64 holds with as much again
_MAX_DIGITS = 18
_POWERS = 10 ** np.arange(1, _MAX_DIGITS + 1)
_DATA = "data/"
_HEADERS = 1 << 14  # headers of records that are read at one time

ReadAt = Callable[[int, int], bytes]
"""Up to so many bytes: ``read(offset, nbytes)``."""


class ZipError(ValueError):
    """The directory of an archive cannot be read; the text is a clause about the file."""


class Fault(NamedTuple):
    """Something in the structure of an archive that contradicts the rest, as a clause, and the bytes that hold it."""

    what: str
    offset: int
    nbytes: int


class ZipEntry(NamedTuple):
    """A record as the directory describes it; ``at`` is the place of the entry itself in the file.

    ``stored_bytes`` is what the record takes in the file: ``nbytes``, unless it is compressed. ``when`` is time and
    date.
    """

    name: bytes
    flags: int
    method: int
    when: int
    crc32: int
    stored_bytes: int
    nbytes: int
    header: int
    at: int

    @property
    def text(self) -> str:
        """The name as text."""
        return self.name.decode("utf-8", "replace")

    @property
    def short_name(self) -> str:
        """The name without the archive's folder, for messages."""
        return repr(without_folder(self.text))[1:-1]


class ZipDirectory:
    """The directory of an archive: its records by row, first the storages by number, then the others.

    It is what the file has from byte ``offset`` to ``end``; ``digest`` is the SHA-256 of the file from there on.
    ``faults`` is empty where the directory and the end records are as torch.save writes them. ``folder`` is the
    archive's own name, ``twice`` a record that is there twice. The arrays have shape ``(num_records,)``, that of
    ``number`` is of the storages alone; bytes beyond 2^61 are that.

    Memory: 60 bytes for each storage.
    """

    def __init__(self, data: bytes, offset: int, nbytes: int, faults: list[Fault]) -> None:
        """``data`` is the file from byte ``offset`` on; adds to ``faults``. Raises ZipError."""
        self.offset, self.end, self.faults = offset, offset + nbytes, faults
        self.digest = hashlib.sha256(data).hexdigest()
        at = _starts(data, nbytes)
        heads = gather(data, at, ENTRY.size).view(_ENTRY)
        names, name_bytes = at + ENTRY.size, heads["name_bytes"].astype(np.int64)
        ends = names + name_bytes
        sizes, is_right = _sizes(data, heads, ends)
        folder = data[ENTRY.size : ENTRY.size + name_bytes[0]].partition(b"/")[0] if len(at) else b""
        self.folder = folder.decode("utf-8", "replace")
        self._prefix = folder + b"/" + _DATA.encode()
        number = _numbers_at(data, names, self._prefix, np.where(is_right, name_bytes - len(self._prefix), 0))
        rows = np.argsort(np.where(number < 0, _MAX_OFFSET, number), kind="stable")
        self.number = number[rows[: np.count_nonzero(number >= 0)]]
        self.nbytes, self.stored_bytes, self.header = (column[rows] for column in sizes)
        self.flags, self.when, self.crc32 = (heads[field][rows] for field in ("flags", "when", "crc32"))
        self.at = at[rows] + offset
        others = rows[len(self.number) :].tolist()
        self._others = [(data[names[row] : ends[row]], int(heads["method"][row])) for row in others]
        self._payload = np.full(len(self.number), -1, dtype=np.int64)
        self.twice: str | None = None
        for row in np.flatnonzero(self.number[1:] == self.number[:-1]).tolist():
            self.twice = self[row].text
        self._named: dict[str, int] = {}
        for row in range(len(self.number), len(self)):
            name = without_folder(self[row].text)
            if self.row(name) is not None:
                self.twice = self[row].text
            self._named[name] = row
        self._add_faults(heads, rows, is_right)

    def __len__(self) -> int:
        return len(self.at)

    @property
    def states_checksums(self) -> bool:
        """False where all are 0, as ``torch.serialization.set_crc32_options(False)`` leaves them."""
        return bool(self.crc32.any()) or not self.nbytes.any()

    def __getitem__(self, row: int) -> ZipEntry:
        if row < len(self.number):
            name, method = self._prefix + str(self.number[row]).encode(), 0
        else:
            name, method = self._others[row - len(self.number)]
        columns = (self.when, self.crc32, self.stored_bytes, self.nbytes, self.header, self.at)
        return ZipEntry(name, int(self.flags[row]), method, *(int(column[row]) for column in columns))

    def _add_faults(self, heads: npt.NDArray[np.void], rows: Int64Array, is_right: npt.NDArray[np.bool_]) -> None:
        """Add the faults of entries, which are in the order of the file."""
        attributes = heads["internal"].astype(np.int64) << 32 | heads["external"]
        odd = ~is_right
        if len(heads) and (attributes != attributes[0]).any():
            odd |= attributes != Counter(attributes.tolist()).most_common(1)[0][0]
        for row in np.flatnonzero(odd[rows]).tolist():
            entry, head = self[row], heads[rows[row]]
            what = "describes {} unlike the others" if is_right[rows[row]] else "is wrong about {}"
            nbytes = ENTRY.size + sum(int(head[field]) for field in ("name_bytes", "extra_bytes", "comment_bytes"))
            self.faults.append(Fault("its directory " + what.format(entry.short_name), entry.at, nbytes))

    def row(self, name: str) -> int | None:
        """Return the row of the record of this name, which is without the archive's folder."""
        row = self._named.get(name)
        key = name.removeprefix(_DATA)
        if row is None and key != name and key.isdecimal() and key.isascii() and len(key) <= _MAX_DIGITS:
            row = int(np.searchsorted(self.number, int(key)))
            if row == len(self.number) or str(self.number[row]) != key:
                return None
        return row

    def find(self, name: str) -> ZipEntry | None:
        """The record of this name, which is without the archive's folder."""
        row = self.row(name)
        return None if row is None else self[row]

    def storage(self, key: str) -> ZipEntry | None:
        """The record of a storage."""
        return self.find(_DATA + key)

    def storages(self) -> Iterator[str]:
        """The keys of all storages."""
        yield from map(str, self.number.tolist())
        yield from (name.removeprefix(_DATA) for name in self._named if name.startswith(_DATA))

    def payload_offsets(self, number: Int64Array, nbytes: Int64Array, read: ReadAt, size: int) -> Int64Array:
        """Where the payload of storages begins in a file of ``size`` bytes, of which each must have ``nbytes`` bytes.

        -1 for a storage whose record is not as torch.save writes it, or that is none of these. What was found is kept.
        Memory: 16 MiB.
        """
        if not len(self.number):
            return np.full(len(number), -1, dtype=np.int64)
        row = np.minimum(np.searchsorted(self.number, number), len(self.number) - 1)
        is_known = (self.number[row] == number) & (self.nbytes[row] == nbytes)
        is_wanted = np.zeros(len(self.number), dtype=bool)
        is_wanted[row[is_known]] = True
        rows = np.flatnonzero(is_wanted & (self._payload < 0))
        rows = rows[np.argsort(self.header[rows], kind="stable")]
        for begin in range(0, len(rows), _HEADERS):
            self._locate(rows[begin : begin + _HEADERS], read, size)
        return np.where(is_known, self._payload[row], -1)

    def _locate(self, rows: Int64Array, read: ReadAt, size: int) -> None:
        """Learn where the payload of some storages begins, whose headers ascend."""
        header = self.header[rows]
        begin, end = int(header[0]), int(header[-1]) + LOCATED_BYTES
        if end > size + LOCATED_BYTES or self.most_name_bytes > LOCATED_BYTES // 2:
            return
        if end - begin <= 2 * LOCATED_BYTES * len(rows):
            data, at = read(begin, end - begin).ljust(end - begin, b"\0"), header - begin
        else:
            data = b"".join(read(offset, LOCATED_BYTES).ljust(LOCATED_BYTES, b"\0") for offset in header.tolist())
            at = np.arange(len(rows)) * LOCATED_BYTES
        heads, name_end, good = self.local_heads(rows, data, at)
        extra_bytes = heads["extra_bytes"].astype(np.int64)
        fields = gather(data, name_end, FIELD.size).view(EXTRA_FIELD)
        good &= (extra_bytes == 0) | (extra_bytes == FIELD.size + fields["nbytes"])
        payload = header + name_end + extra_bytes - at
        good &= payload + self.nbytes[rows] <= size
        self._payload[rows[good]] = payload[good]

    @property
    def most_name_bytes(self) -> int:
        """The most bytes that the name of a storage's record can have."""
        return len(self._prefix) + _MAX_DIGITS

    def local_heads(
        self, rows: Int64Array, data: bytes, at: Int64Array
    ) -> tuple[npt.NDArray[np.void], Int64Array, npt.NDArray[np.bool_]]:
        """The headers of records at some places of ``data``, where their names end, and whether they agree.

        Compared are mark, flags, method and name. A name that is longer than ``most_name_bytes`` does not agree.
        """
        heads = gather(data, at, LOCAL.size).view(LOCAL_HEAD)
        names = at + LOCAL.size
        is_storage = rows < len(self.number)
        number, digits = np.full(len(rows), -1, dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
        number[is_storage] = self.number[rows[is_storage]]
        digits[is_storage] = np.searchsorted(_POWERS, number[is_storage], side="right") + 1
        name_bytes = len(self._prefix) + digits
        good = _numbers_at(data, names, self._prefix, digits) == number
        for i in np.flatnonzero(~is_storage).tolist():
            name, method = self._others[rows[i] - len(self.number)]
            name_bytes[i] = min(len(name), self.most_name_bytes)
            good[i] = method == 0 and data[names[i] : names[i] + name_bytes[i]] == name
        good &= (heads["mark"] == LOCAL_MARK) & (heads["flags"] == self.flags[rows]) & (heads["method"] == 0)
        good &= heads["name_bytes"] == name_bytes
        return heads, names + name_bytes, good


def payload_offset(data: bytes, entry: ZipEntry, size: int) -> int:
    """Where a record's payload begins in a file of ``size`` bytes, from the first bytes of the record's header.

    The header's name is compared with the directory's, and its length with the fields inside. Raises ZipError.
    """
    if len(data) < LOCAL.size or data[:4] != LOCAL_MARK:
        raise ZipError(f"no zip record at byte {entry.header}. The file is damaged")
    fields = LOCAL.unpack_from(data)
    at = LOCAL.size + len(entry.name)
    end = at + int(fields[10])
    while at + FIELD.size <= min(end, len(data)):
        at += FIELD.size + FIELD.unpack_from(data, at)[1]
    name = data[LOCAL.size : LOCAL.size + fields[9]]
    if fields[2:4] != (entry.flags, entry.method) or name != entry.name or at != end:
        raise ZipError(f"the header of record {entry.text} contradicts the directory. The file is damaged")
    offset = entry.header + end
    if offset + entry.stored_bytes > size:
        raise ZipError(f"record {entry.text} ends behind the file. The file is truncated")
    return offset


def without_folder(name: str) -> str:
    """The name of a record without the archive's folder."""
    return name.partition("/")[2] or name


def read_directory(read: ReadAt, size: int) -> ZipDirectory:
    """The directory of an archive of ``size`` bytes. Raises ZipError where the records cannot be found by it."""
    faults: list[Fault] = []
    offset, nbytes, count = _directory_place(read, size, faults)
    data = read(offset, size - offset)
    if len(data) != size - offset:
        raise ZipError("its directory cannot be read")
    directory = ZipDirectory(data, offset, nbytes, faults)
    if len(directory) != count:
        faults.append(Fault(f"the directory has {len(directory)} entries and its end says {count}", offset, nbytes))
    return directory


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


def _sizes(
    data: bytes, heads: npt.NDArray[np.void], extra_at: Int64Array
) -> tuple[list[Int64Array], npt.NDArray[np.bool_]]:
    """Bytes, stored bytes and header of the entries; and which say them as torch.save does, and nothing else."""
    columns = [heads[field].astype(np.int64) for field in ("nbytes", "stored_bytes", "header")]
    num_wide = np.sum([column == WIDE for column in columns], axis=0)
    wanted = np.where(num_wide, FIELD.size + 8 * num_wide, 0)
    field = gather(data, extra_at, FIELD.size).view(EXTRA_FIELD)  # the end record follows the last entry
    is_wide = (num_wide > 0) & (field["kind"] == ZIP64) & (field["nbytes"] == 8 * num_wide)
    is_wide &= heads["extra_bytes"] >= wanted
    place = extra_at + FIELD.size
    for column in columns:
        rows = np.flatnonzero(is_wide & (column == WIDE))
        column[rows] = np.minimum(gather(data, place[rows], 8).view("<u8"), np.uint64(_MAX_OFFSET))
        place[rows] += 8
    is_right = (heads["extra_bytes"] == wanted) & (is_wide | (num_wide == 0)) & (columns[0] == columns[1])
    for name in ("made_by", "needs"):
        is_right &= np.isin(heads[name], VERSIONS)
    for name in ("method", "comment_bytes", "disk"):
        is_right &= heads[name] == 0
    return columns, is_right


def gather(data: bytes, at: Int64Array, nbytes: int) -> npt.NDArray[np.void]:
    """``nbytes`` bytes from each of some places on, which lie inside of ``data``: shape ``(num_places,)``."""
    if not len(at):
        return np.empty(0, dtype=f"V{nbytes}")
    windows: npt.NDArray[np.void] = np.ndarray((len(data) - nbytes + 1,), f"V{nbytes}", data, strides=(1,))
    return windows[at]


def _numbers_at(data: bytes, at: Int64Array, prefix: bytes, digits: Int64Array) -> Int64Array:
    """The number of so many digits that stands behind ``prefix`` at each place of ``data``; -1 where there is none."""
    numbers = np.full(len(at), -1, dtype=np.int64)
    chosen = np.flatnonzero((digits > 0) & (digits <= _MAX_DIGITS))
    chosen = chosen[gather(data, at[chosen], len(prefix)).view(f"S{len(prefix)}") == prefix]
    for count in set(digits[chosen].tolist()):
        rows = chosen[digits[chosen] == count]
        characters = gather(data, at[rows] + len(prefix), count).view(np.uint8).reshape(len(rows), count)
        good = (characters[:, 0] != ord("0")) | (count == 1)
        values = np.zeros(len(rows), dtype=np.int64)
        for column in characters.T:
            digit = column - np.uint8(ord("0"))  # larger where it is none
            good &= digit <= 9
            values = values * 10 + digit
        numbers[rows[good]] = values[good]
    return numbers


class NewEntry(NamedTuple):
    """A record that is written: name, bytes of payload, checksum, and where its header begins."""

    name: bytes
    nbytes: int
    crc32: int
    header: int


def local_header(entry: NewEntry, payload: int) -> bytes:
    """The header of a record whose payload begins at ``payload``, padded up to there."""
    is_wide = entry.nbytes >= WIDE
    wide = FIELD.pack(ZIP64, 16) + struct.pack("<QQ", entry.nbytes, entry.nbytes) if is_wide else b""
    room = payload - entry.header - LOCAL.size - len(entry.name) - len(wide) - FIELD.size
    extra = wide + FIELD.pack(PADDING, room) + b"Z" * room
    sizes, lengths = (min(entry.nbytes, WIDE),) * 2, (len(entry.name), len(extra))
    head = (LOCAL_MARK, _VERSION64 if is_wide else 0, UTF8_NAMES, 0, 0, 0, entry.crc32)
    return LOCAL.pack(*head, *sizes, *lengths) + entry.name + extra


def directory_bytes(entries: Sequence[NewEntry], offset: int) -> bytes:
    """The directory of these records, which begins at ``offset``, and the end of the file."""
    out = bytearray()
    for entry in entries:
        wide: list[int] = [entry.nbytes, entry.nbytes] if entry.nbytes >= WIDE else []
        wide += [entry.header] if entry.header >= WIDE else []
        extra = FIELD.pack(ZIP64, 8 * len(wide)) + struct.pack(f"<{len(wide)}Q", *wide) if wide else b""
        sizes, lengths = (min(entry.nbytes, WIDE),) * 2, (len(entry.name), len(extra))
        version = _VERSION64 if wide else 0
        head = (ENTRY_MARK, version, version, UTF8_NAMES, 0, 0, 0, entry.crc32)
        out += ENTRY.pack(*head, *sizes, *lengths, 0, 0, 0, 0, min(entry.header, WIDE)) + entry.name + extra
    size, count = len(out), len(entries)
    if count >= MANY or offset + size >= WIDE:
        out += END64.pack(END64_MARK, 44, _VERSION64, _VERSION64, 0, 0, count, count, size, offset)
        out += END64_LOCATOR.pack(LOCATOR_MARK, 0, offset + size, 1)
    few = min(count, MANY)
    out += END.pack(END_MARK, 0, 0, few, few, min(size, WIDE), min(offset, WIDE), 0)
    return bytes(out)
