"""The records of a torch.save archive: where each one's bytes lie, its CRC-32, and whether the rest of the file agrees.

Every byte that is not the payload of a record is looked at here: the header before each record, the padding that aligns
it, what follows it, and the directory at the end. All of these say the same things twice, so damage shows: any one bit.
What is expected: archives of torch.save (PyTorchStreamWriter and miniz, torch 1.6 to 2.13) and of ``zip_writer``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zeroelastic.errors import CheckpointError
from zeroelastic.io.block_cache import BlockFile
from zeroelastic.io.local import LocalFile
from zeroelastic.io.paths import FilePath, RemotePath
from zeroelastic.torch_file.zip_format import (
    DEFERRED,
    DESCRIPTOR_MARK,
    LOCAL,
    LOCAL_MARK,
    PADDING,
    VERSIONS,
    WIDE,
    ZIP64,
    Entry,
    Fault,
    ZipError,
    extra_fields,
    read_directory,
)

_SUMS = struct.Struct("<4sIII")
_SUMS64 = struct.Struct("<4sIQQ")
_MAX_HEADER = LOCAL.size + 2 * 0xFFFF
_WINDOW = 64 << 10
_HEADER_BYTES = 256  # of nearly every record: what stands behind the one before it, and its header with padding

__all__ = ["Fault", "ZipRecord", "ZipRecords", "read_zip_records"]


class ZipRecord(NamedTuple):
    """One record: its name in the archive, the place of its payload in the file, and the checksum it should have."""

    name: str
    offset: int
    nbytes: int
    crc32: int


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


def read_zip_records(path: FilePath, size: int, *, window_bytes: int = _WINDOW) -> ZipRecords:
    """Read the structure of an uncompressed archive of ``size`` bytes; payload is not read, except what shares a read
    of ``window_bytes`` with a header.

    Raises CheckpointError where the records cannot be found by it, MissingFileError.
    """
    with closing(_Window(path, size, window_bytes)) as window:
        return _read_records(path, size, window)


def _read_records(path: FilePath, size: int, window: _Window) -> ZipRecords:
    try:
        directory = read_directory(window.read_once, size)
    except ZipError as error:
        raise CheckpointError(f"{path}: {error}. The file is truncated or damaged.") from None
    offset, faults = directory.offset, list(directory.faults)
    entries = sorted(directory.entries, key=lambda entry: entry.header)
    window.prefetch(entries)
    records: list[ZipRecord] = []
    at = 0
    for entry, following in zip(entries, [*(entry.header for entry in entries[1:]), offset], strict=False):
        if following > offset:
            raise CheckpointError(f"{path}: a record begins at byte {following}, behind the last. The file is damaged.")
        begin, end, right = _payload(window, entry, following)
        if entry.header < at or begin < entry.header + LOCAL.size + len(entry.name):
            raise CheckpointError(f"{path}: two records overlap at byte {entry.header}. The file is damaged.")
        if begin - entry.header > _MAX_HEADER:
            raise CheckpointError(f"{path}: bytes behind byte {entry.header} belong to no record. The file is damaged.")
        if entry.header > at:
            faults.append(Fault(f"{entry.header - at} bytes belong to no record", at, entry.header - at))
        if not _header_agrees(window, entry, begin):
            what = f"the header of {entry.short_name} contradicts the directory"
            faults.append(Fault(what, entry.header, begin - entry.header))
        if not right:
            faults.append(Fault(f"the sums behind {entry.short_name} are wrong", end, following - end))
        records.append(ZipRecord(entry.text, begin, entry.nbytes, entry.crc32))
        at = following
    return ZipRecords(tuple(records), tuple(faults), window.total_bytes(size - offset))


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

    def prefetch(self, entries: Sequence[Entry]) -> None:
        """Ask for the headers of a remote file's records at once, as many as are kept."""
        if self._blocks is not None:
            some = entries[: self._blocks.capacity // 2]
            self._blocks.prefetch((max(0, entry.header - _SUMS64.size), _HEADER_BYTES) for entry in some)

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
