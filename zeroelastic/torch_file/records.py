"""The records of an archive by name: in columns for storages, which are numbered, and one by one for others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import CheckpointError
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.zip_format import (
    ENTRY,
    EXTRA_FIELD,
    FIELD,
    LOCAL,
    LOCAL_HEAD,
    LOCAL_MARK,
    Entries,
    ReadAt,
    gather,
)

_DATA = b"data/"
_MAX_DIGITS = 18
_POWERS = 10 ** np.arange(1, _MAX_DIGITS + 1)
_ROWS = 1 << 16  # names that are looked at at one time
_HEADERS = 1 << 14  # headers of records that are read at one time
LOCATED_BYTES = 512
"""A record's own header with its padding, and a scalar that follows it."""


class Record(NamedTuple):
    """What the directory says about a record: its name, how it is stored, its bytes, and where its header is."""

    name: bytes
    flags: int
    method: int
    crc32: int
    stored_bytes: int
    nbytes: int
    header: int

    @property
    def text(self) -> str:
        """The name as text."""
        return self.name.decode("utf-8", "replace")


class Records:
    """The records of an archive, by their names without the archive's folder.

    Memory: 30 bytes for each record of a storage.
    """

    def __init__(self, entries: Entries, path: FilePath) -> None:
        """Raises CheckpointError where two records have one name."""
        self._folder = entries[0].name.partition(b"/")[0] + b"/" if len(entries) else b""
        numbers = _numbers(entries, self._folder + _DATA)
        rows = np.flatnonzero(numbers >= 0)
        rows = rows[np.argsort(numbers[rows], kind="stable")]
        self._number = numbers[rows]
        self._flags, self._crc32 = entries.flags[rows], entries.crc32[rows]
        self._nbytes, self._header = entries.nbytes[rows], entries.header[rows]
        self._offset: Int64Array | None = None
        self._others: dict[str, Record] = {}
        is_twice = (self._number[1:] == self._number[:-1]).any()
        for row in np.flatnonzero(numbers < 0).tolist():
            entry = entries[row]
            name = entry.text.partition("/")[2] or entry.text
            is_twice |= name in self._others or self.named(name) is not None
            self._others[name] = Record(*(getattr(entry, field) for field in Record._fields))
        if is_twice:
            raise CheckpointError(f"{path}: two records are named {_first_twice(entries)}. The file is damaged.")

    def __len__(self) -> int:
        return len(self._number) + len(self._others)

    def named(self, name: str) -> Record | None:
        """The record of this name."""
        row = self._row(name.removeprefix(_DATA.decode())) if name.startswith(_DATA.decode()) else None
        if row is None:
            return self._others.get(name)
        flags, crc32, nbytes, header = (
            int(column[row]) for column in (self._flags, self._crc32, self._nbytes, self._header)
        )
        return Record(self._folder + name.encode(), flags, 0, crc32, nbytes, nbytes, header)

    def storage(self, key: str) -> Record | None:
        """The record of a storage."""
        return self.named(_DATA.decode() + key)

    def payload_offsets(self, number: Int64Array, nbytes: Int64Array, read: ReadAt, size: int) -> Int64Array:
        """Where the payload of storages begins in a file of ``size`` bytes, of which each must have ``nbytes`` bytes.

        -1 for a storage whose record is not as torch.save writes it, or that is none of these. What was found is kept.
        Memory: 16 MiB.
        """
        row = np.searchsorted(self._number, number)
        row[row == len(self._number)] = 0
        is_known = np.zeros(len(number), dtype=bool)
        if len(self._number):
            is_known = (self._number[row] == number) & (self._nbytes[row] == nbytes)
        if self._offset is None:
            self._offset = np.full(len(self._number), -1, dtype=np.int64)
        is_wanted = np.zeros(len(self._number), dtype=bool)
        is_wanted[row[is_known]] = True
        rows = np.flatnonzero(is_wanted & (self._offset < 0))
        rows = rows[np.argsort(self._header[rows], kind="stable")]
        for begin in range(0, len(rows), _HEADERS):
            self._locate(rows[begin : begin + _HEADERS], self._offset, read, size)
        return np.where(is_known, self._offset[row] if len(self._offset) else -1, -1)

    def _locate(self, rows: Int64Array, offsets: Int64Array, read: ReadAt, size: int) -> None:
        """Fill in the offsets of some rows, whose headers ascend."""
        header, number, prefix = self._header[rows], self._number[rows], self._folder + _DATA
        begin, end = int(header[0]), int(header[-1]) + LOCATED_BYTES
        if end > size + LOCATED_BYTES or len(prefix) > LOCATED_BYTES // 2:
            return
        if end - begin <= 2 * LOCATED_BYTES * len(rows):
            data, at = read(begin, end - begin).ljust(end - begin, b"\0"), header - begin
        else:
            data = b"".join(read(offset, LOCATED_BYTES).ljust(LOCATED_BYTES, b"\0") for offset in header.tolist())
            at = np.arange(len(rows)) * LOCATED_BYTES
        heads = gather(data, at, LOCAL.size).view(LOCAL_HEAD)
        digits = np.searchsorted(_POWERS, number, side="right") + 1
        name_bytes, extra_bytes = len(prefix) + digits, heads["extra_bytes"].astype(np.int64)
        names = at + LOCAL.size
        fields = gather(data, names + name_bytes, FIELD.size).view(EXTRA_FIELD)
        good = (heads["mark"] == LOCAL_MARK) & (heads["flags"] == self._flags[rows]) & (heads["method"] == 0)
        good &= (heads["name_bytes"] == name_bytes) & (_numbers_at(data, names, prefix, digits) == number)
        good &= (extra_bytes == 0) | (extra_bytes == FIELD.size + fields["nbytes"])
        payload = header + LOCAL.size + name_bytes + extra_bytes
        good &= payload + self._nbytes[rows] <= size
        offsets[rows[good]] = payload[good]

    def storages(self) -> Iterator[str]:
        """The keys of all storages."""
        yield from map(str, self._number.tolist())
        yield from (name.removeprefix("data/") for name in self._others if name.startswith("data/"))

    def _row(self, key: str) -> int | None:
        if not key.isdecimal() or not key.isascii() or len(key) > _MAX_DIGITS or str(number := int(key)) != key:
            return None
        row = number if number < len(self._number) and self._number[number] == number else None
        if row is None:
            row = int(np.searchsorted(self._number, number))
        return row if row < len(self._number) and self._number[row] == number else None


def _numbers(entries: Entries, prefix: bytes) -> Int64Array:
    """The number behind ``prefix`` in the name of each plain entry; -1 where there is none as torch writes it."""
    numbers = np.empty(len(entries), dtype=np.int64)
    for begin in range(0, len(entries), _ROWS):
        rows = slice(begin, begin + _ROWS)
        digits = np.where(entries.is_plain[rows], entries.name_bytes[rows] - len(prefix), 0)
        numbers[rows] = _numbers_at(entries.data, entries.at[rows] + ENTRY.size, prefix, digits)
    return numbers


def _numbers_at(data: bytes, at: Int64Array, prefix: bytes, digits: Int64Array) -> Int64Array:
    """The number of so many digits that stands behind ``prefix`` at each place of ``data``; -1 where there is none."""
    numbers = np.full(len(at), -1, dtype=np.int64)
    wanted = np.frombuffer(prefix, dtype=np.uint8)
    for count in range(1, _MAX_DIGITS + 1):
        chosen = np.flatnonzero(digits == count)
        if not len(chosen):
            continue
        characters = gather(data, at[chosen], len(prefix) + count).view(np.uint8).reshape(len(chosen), -1)
        values = characters[:, len(prefix) :].astype(np.int64) - ord("0")
        good = (characters[:, : len(prefix)] == wanted).all(axis=1) & ((values >= 0) & (values <= 9)).all(axis=1)
        good &= (values[:, 0] > 0) | (count == 1)
        numbers[chosen[good]] = values[good] @ 10 ** np.arange(count - 1, -1, -1)
    return numbers


def _first_twice(entries: Entries) -> str:
    seen: set[str] = set()
    for entry in entries:
        name = entry.text.partition("/")[2] or entry.text
        if name in seen:
            return entry.text
        seen.add(name)
    return ""
