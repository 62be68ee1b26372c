"""The files in a commit record: their names by pattern, and for each a row of text that has its size and digest.

Rows have one width and stand at the end of the record, so that a rank reads those of the files that concern it by
range, whatever the number of ranks that saved. A row carries a check of its own: one is trusted without the others.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from zeroelastic.errors import CheckpointError, MissingFileError, shown
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import read_range

ROWS_BEGIN = b',\n "file_rows": ['
ROWS_END = b"\n ]\n}\n"
MAX_RANKS = 1 << 24

_RANK_NAME = re.compile(r"((?:bf16_)?zero_pp_rank_)(0|[1-9][0-9]{0,7})(_mp_rank_[0-9]+_?(?:optim|model)_states\.pt)")
_ROW = re.compile(r"( {0,18}[0-9]{1,19}) ([0-9a-f]{64}|-{64}) ([0-9a-f]{16})")
_SIZE_WIDTH, _NO_DIGEST, _CHECK_WIDTH = 19, "-" * 64, 16
_FIRST, _NEXT = b' \n  "', b',\n  "'
_ROW_WIDTH = _SIZE_WIDTH + 1 + 64 + 1 + _CHECK_WIDTH
ROW_BYTES = len(_NEXT) + _ROW_WIDTH + 1
_WINDOW = 32  # rows that are read together where one is asked for


class FileRow(NamedTuple):
    """What a record states of one file: its size in bytes, and its zip directory's digest, 64 hexadecimal digits."""

    size: int
    directory: str | None


class FileNames(Collection[str]):
    """Names of files, in the order of their rows: those of ranks 0, 1, 2, ... as a pattern and a count.

    So they are small in memory and on their way to other ranks. ``patterns`` are sorted, with ``*`` for the rank;
    ``others`` are all other names, sorted, and come first. Then follow the files of rank 0, of rank 1 and so on.
    """

    __slots__ = ("_places", "others", "patterns")

    def __init__(self, patterns: Mapping[str, int], others: Iterable[str]) -> None:
        self.patterns = tuple(sorted(patterns.items()))
        self.others = tuple(sorted(others))
        self._places: dict[str, int] = {name: i for i, name in enumerate(self.others)}

    @classmethod
    def of(cls, names: Iterable[str]) -> FileNames:
        """The names, each once."""
        ranks: dict[str, set[int]] = {}
        others: set[str] = set()
        for name in names:
            pattern, rank = _split(name)
            if rank is None:
                others.add(name)
            else:
                ranks.setdefault(pattern, set()).add(rank)
        counts = {}
        for pattern, found in ranks.items():
            count = next(i for i in range(len(found) + 1) if i not in found)
            if count:
                counts[pattern] = count
            others.update(pattern.replace("*", str(rank)) for rank in found if rank >= count)
        return cls(counts, others)

    def __len__(self) -> int:
        return self._start(MAX_RANKS)

    def __iter__(self) -> Iterator[str]:
        ranks = range(max((count for _, count in self.patterns), default=0))
        return chain(self.others, (name for rank in ranks for name in self._of_rank(rank)))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.place(name) is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileNames) and (self.patterns, self.others) == (other.patterns, other.others)

    def __hash__(self) -> int:
        return hash((self.patterns, self.others))

    def __le__(self, other: FileNames) -> bool:
        """Whether the other has all of these."""
        counts = dict(other.patterns)
        return all(count <= counts.get(pattern, 0) for pattern, count in self.patterns) and all(
            name in other for name in self.others
        )

    def place(self, name: str) -> int | None:
        """The number of a name's row, None for a name that is not among these."""
        pattern, rank = _split(name)
        before = 0
        if rank is not None:
            for known, count in self.patterns:
                if known == pattern and rank < count:
                    return self._start(rank) + before
                before += count > rank
        return self._places.get(name)

    def at(self, place: int) -> str:
        """The name of a row."""
        if place < len(self.others):
            return self.others[place]
        rank = bisect_right(range(MAX_RANKS), place, key=self._start) - 1
        return self._of_rank(rank)[place - self._start(rank)]

    def _start(self, rank: int) -> int:
        """The number of the first row of a rank."""
        return len(self.others) + sum(min(count, rank) for _, count in self.patterns)

    def _of_rank(self, rank: int) -> list[str]:
        return [pattern.replace("*", str(rank)) for pattern, count in self.patterns if rank < count]


def _split(name: str) -> tuple[str, int | None]:
    """The pattern of a rank's file and the rank; the name itself where it is of no rank."""
    match = _RANK_NAME.fullmatch(name)
    return (name, None) if match is None else (f"{match[1]}*{match[3]}", int(match[2]))


def names_json(names: FileNames) -> list[dict[str, object]]:
    """The names as a record has them."""
    others: list[dict[str, object]] = [{"name": name} for name in names.others]
    return [*others, *({"name": pattern, "ranks": count} for pattern, count in names.patterns)]


def names_of_json(entries: Sequence[tuple[str, int | None]]) -> FileNames:
    """The names of ``name`` and ``ranks`` of each entry. Raises CheckpointError where an entry is none."""
    counts: dict[str, int] = {}
    others: set[str] = set()
    for i, (name, ranks) in enumerate(entries):
        if ranks is not None and _split(name.replace("*", "0")) != (name, 0):
            raise CheckpointError(f"files.{i}.ranks: {shown(name)} is not the pattern of files of ranks")
        if name in others or name in counts:
            raise CheckpointError(f"files.{i}: {shown(name)} is there twice")
        if ranks is None:
            others.add(name)
        else:
            counts[name] = ranks
    names = FileNames(counts, ())
    twice = sorted(name for name in others if name in names)
    if twice:
        raise CheckpointError(f"files: {shown(twice[0])} is there twice")
    return FileNames(counts, others)


def row_text(save_id: str, name: str, row: FileRow) -> str:
    """The row of a file: its size, its digest or dashes, and a check that covers both, the name and the save."""
    fields = f"{row.size:{_SIZE_WIDTH}} {row.directory or _NO_DIGEST}"
    check = hashlib.sha256(f"{save_id} {name} {fields}".encode()).hexdigest()
    return f"{fields} {check[:_CHECK_WIDTH]}"


def read_row(save_id: str, names: FileNames, place: int, text: object) -> FileRow:
    """What a row says. Raises CheckpointError for one that is not the row of that file in that save."""
    name = names.at(place)
    match = _ROW.fullmatch(text) if isinstance(text, str) and len(text) == _ROW_WIDTH else None
    row = None if match is None else FileRow(int(match[1]), None if match[2] == _NO_DIGEST else match[2])
    if row is None or row_text(save_id, name, row) != text:
        got = shown(text) if isinstance(text, str) else type(text).__name__
        raise CheckpointError(f"file_rows.{place}: {got} is not the size, the digest and the check of {name}")
    return row


def rows_text(save_id: str, names: FileNames, rows: Mapping[str, FileRow]) -> Iterator[bytes]:
    """The end of a record's JSON, from its rows on."""
    yield ROWS_BEGIN
    for i, name in enumerate(names):
        yield (_NEXT if i else _FIRST) + row_text(save_id, name, rows[name]).encode() + b'"'
    yield ROWS_END


class FileRows:
    """The rows of a record, read by range as they are asked for and kept.

    ``path`` is the record, ``offset`` where its rows begin, in bytes; ``bytes_read`` counts. Raises CheckpointError for
    rows that are not of this record.
    """

    def __init__(self, path: FilePath | None, names: FileNames, save_id: str, offset: int) -> None:
        self.names = names
        self.bytes_read = 0
        self._path, self._save_id, self._offset = path, save_id, offset
        self._rows: dict[int, FileRow] = {}

    def at(self, path: FilePath | None) -> FileRows:
        """The same rows, of the record at another path; None where only their place in it is to be sent."""
        return FileRows(path, self.names, self._save_id, self._offset)

    def row(self, name: str) -> FileRow:
        """The row of a file. Raises KeyError for a file that the record does not name."""
        place = self.names.place(name)
        if place is None:
            raise KeyError(name)
        if place not in self._rows:
            begin = place - place % _WINDOW
            self._read(begin, min(begin + _WINDOW, len(self.names)))
        return self._rows[place]

    def share(self, part: int, num_parts: int) -> dict[str, FileRow]:
        """The rows of one of ``num_parts`` parts that together are all rows."""
        begin, end = (len(self.names) * (part + i) // num_parts for i in (0, 1))
        self._read(begin, end)
        return {self.names.at(place): self._rows[place] for place in range(begin, end)}

    def _read(self, begin: int, end: int) -> None:
        """Read some rows, with the end of the record where they are the last ones."""
        assert self._path is not None, "rows are read where the record is"
        if begin >= end:
            return
        rest = ROWS_END if end == len(self.names) else b""
        nbytes = (end - begin) * ROW_BYTES + len(rest)
        try:
            text = read_range(self._path, self._offset + begin * ROW_BYTES, nbytes)
        except MissingFileError:
            raise CheckpointError(f"{self._path}: was there and is gone.") from None
        self.bytes_read += len(text)
        if len(text) != nbytes or not text.endswith(rest):
            raise CheckpointError(f"{self._path}: does not end behind {len(self.names)} rows of files. It is damaged.")
        for i, place in enumerate(range(begin, end)):
            row = text[i * ROW_BYTES : (i + 1) * ROW_BYTES]
            around = row[: len(_NEXT)], row[-1:]
            found = (
                row[len(_NEXT) : -1].decode("ascii", "replace") if around == (_NEXT if place else _FIRST, b'"') else ""
            )
            try:
                self._rows[place] = read_row(self._save_id, self.names, place, found)
            except CheckpointError as error:
                raise CheckpointError(f"{self._path}: {error}. The commit record is damaged.") from None


class FileSizes(Mapping[str, int]):
    """The sizes of files in bytes by name, out of rows that are read as they are asked for."""

    def __init__(self, rows: FileRows) -> None:
        self.rows = rows

    def __getitem__(self, name: str) -> int:
        return self.rows.row(name).size

    def __contains__(self, name: object) -> bool:
        return name in self.rows.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows.names)

    def __len__(self) -> int:
        return len(self.rows.names)


class FileDirectories(Mapping[str, str]):
    """The digests of files' zip directories by name, out of rows that are read as they are asked for."""

    def __init__(self, rows: FileRows) -> None:
        self._rows = rows

    def __getitem__(self, name: str) -> str:
        directory = self._rows.row(name).directory
        if directory is None:
            raise KeyError(name)
        return directory

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._rows.names if self._rows.row(name).directory is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)
