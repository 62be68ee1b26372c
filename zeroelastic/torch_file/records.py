"""The records of an archive by name: those of storages, which are numbered, in columns, the others one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import CheckpointError
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.zip_format import ENTRY, Entries, gather

_DATA = b"data/"
_MAX_DIGITS = 18
_ROWS = 1 << 16  # names that are looked at at one time


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
    numbers = np.full(len(entries), -1, dtype=np.int64)
    wanted = np.frombuffer(prefix, dtype=np.uint8)
    for begin in range(0, len(entries), _ROWS):
        rows = np.arange(begin, min(begin + _ROWS, len(entries)))
        for digits in range(1, _MAX_DIGITS + 1):
            chosen = rows[(entries.name_bytes[rows] == len(prefix) + digits) & entries.is_plain[rows]]
            if not len(chosen):
                continue
            names = gather(entries.data, entries.at[chosen] + ENTRY.size, len(prefix) + digits)
            characters = names.view(np.uint8).reshape(len(chosen), -1)
            values = characters[:, len(prefix) :].astype(np.int64) - ord("0")
            good = (characters[:, : len(prefix)] == wanted).all(axis=1) & ((values >= 0) & (values <= 9)).all(axis=1)
            good &= (values[:, 0] > 0) | (digits == 1)
            numbers[chosen[good]] = values[good] @ 10 ** np.arange(digits - 1, -1, -1)
    return numbers


def _first_twice(entries: Entries) -> str:
    seen: set[str] = set()
    for entry in entries:
        name = entry.text.partition("/")[2] or entry.text
        if name in seen:
            return entry.text
        seen.add(name)
    return ""
