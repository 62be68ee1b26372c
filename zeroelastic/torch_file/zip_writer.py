"""torch.save's zip archive around a pickle graph, written without torch and without the payload in memory.

A file is laid out first: its records are named and placed, its space is reserved. Any engine then moves the payload to
``offsets``, and ``finish`` writes the headers, with the checksums of the payload. Until then the file has no directory
and is no archive, so it cannot be mistaken for a complete one.

Source: PyTorchStreamWriter (caffe2/serialize/inline_container.cc, torch 2.13), which aligns payload to 64 bytes.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zeroelastic.io.atomic import name_in_errors, reserve_space, write_fully
from zeroelastic.torch_file.graph_writer import write_graph
from zeroelastic.torch_file.pickle_graph import Storage
from zeroelastic.torch_file.zip_format import (
    END,
    END64,
    END64_LOCATOR,
    END64_MARK,
    END_MARK,
    ENTRY,
    ENTRY_MARK,
    FIELD,
    LOCAL,
    LOCAL_MARK,
    LOCATOR_MARK,
    MANY,
    PADDING,
    UTF8_NAMES,
    WIDE,
    ZIP64,
)

_ALIGNMENT = 64
_VERSION64 = 45


@dataclass(frozen=True, slots=True)
class _Record:
    """One record: where its header and its payload begin, and its bytes if they are known when it is placed."""

    name: bytes
    header: int
    payload: int
    nbytes: int
    data: bytes | None
    storage: Storage | None

    @property
    def is_wide(self) -> bool:
        return self.nbytes >= WIDE


class Archive:
    """A torch.save file that is being written; ``offsets[storage]`` is where the bytes of each storage belong.

    ``nbytes`` is the size of the finished file. Opening it truncates what was there and reserves the space. Raises
    OSError naming the file, for a full disk before anything is moved; UnsupportedError as ``write_graph``.

    Example::

        archive = Archive(path, {"weight": tensor(storage, 0, (3, 4))})
        ...                                          # move 48 bytes to archive.offsets[storage]
        archive.finish({storage: crc32})
    """

    def __init__(self, path: Path, root: object) -> None:
        pickled, self.storages = write_graph(root)
        self.path = path
        self._records: list[_Record] = []
        self._end = 0
        folder = path.name.removesuffix(".tmp").rpartition(".")[0] or path.name
        self._folder = folder.encode()
        self._add("data.pkl", data=pickled)
        self._add(".format_version", data=b"1")
        self._add(".storage_alignment", data=str(_ALIGNMENT).encode())
        self._add("byteorder", data=b"little")
        for number, storage in enumerate(self.storages):
            self._add(f"data/{number}", storage=storage)
        self._add("version", data=b"3\n")
        identity = hashlib.sha256(pickled + repr([storage.nbytes for storage in self.storages]).encode())
        self._add(".data/serialization_id", data=f"{int.from_bytes(identity.digest()[:16], 'big'):040d}".encode())
        self.offsets: Mapping[Storage, int] = {
            record.storage: record.payload for record in self._records if record.storage is not None
        }
        self._directory = self._end
        self.nbytes = self._end + len(self._directory_bytes({}))
        with name_in_errors(path), open(path, "wb", buffering=0) as file:
            file.truncate(self.nbytes)
            reserve_space(file.fileno(), self.nbytes)

    def finish(self, crc32: Mapping[Storage, int], *, sync: bool = False) -> None:
        """Write every header and the directory, given the checksum of each storage that has bytes.

        ``sync`` flushes the whole file to its device. Raises OSError naming the file.
        """
        checksums = {
            record.name: crc32[record.storage] if record.storage and record.nbytes else zlib.crc32(record.data or b"")
            for record in self._records
        }
        with name_in_errors(self.path), open(self.path, "r+b", buffering=0) as file:
            fd = file.fileno()
            for record in self._records:
                head = self._local_header(record, checksums[record.name])
                write_fully(fd, head + (record.data or b""), record.header)
            write_fully(fd, self._directory_bytes(checksums), self._directory)
            if sync:
                os.fsync(fd)

    def _add(self, name: str, *, data: bytes | None = None, storage: Storage | None = None) -> None:
        nbytes = len(data) if data is not None else storage.nbytes if storage is not None else 0
        full = self._folder + b"/" + name.encode()
        begin = self._end + LOCAL.size + len(full) + (20 if nbytes >= WIDE else 0)
        payload = -(-(begin + 4) // _ALIGNMENT) * _ALIGNMENT
        self._records.append(_Record(full, self._end, payload, nbytes, data, storage))
        self._end = payload + nbytes

    def _local_header(self, record: _Record, checksum: int) -> bytes:
        wide = FIELD.pack(ZIP64, 16) + struct.pack("<QQ", record.nbytes, record.nbytes) if record.is_wide else b""
        room = record.payload - record.header - LOCAL.size - len(record.name) - len(wide) - FIELD.size
        extra = wide + FIELD.pack(PADDING, room) + b"Z" * room
        sizes = (min(record.nbytes, WIDE),) * 2
        version, lengths = _VERSION64 if record.is_wide else 0, (len(record.name), len(extra))
        return LOCAL.pack(LOCAL_MARK, version, UTF8_NAMES, 0, 0, 0, checksum, *sizes, *lengths) + record.name + extra

    def _directory_bytes(self, checksums: Mapping[bytes, int]) -> bytes:
        out = bytearray()
        for record in self._records:
            wide: list[int] = [record.nbytes, record.nbytes] if record.is_wide else []
            wide += [record.header] if record.header >= WIDE else []
            extra = FIELD.pack(ZIP64, 8 * len(wide)) + struct.pack(f"<{len(wide)}Q", *wide) if wide else b""
            sizes = (min(record.nbytes, WIDE),) * 2
            version, lengths = _VERSION64 if wide else 0, (len(record.name), len(extra))
            head = (ENTRY_MARK, version, version, UTF8_NAMES, 0, 0, 0, checksums.get(record.name, 0))
            out += ENTRY.pack(*head, *sizes, *lengths, 0, 0, 0, 0, min(record.header, WIDE)) + record.name + extra
        size, count = len(out), len(self._records)
        if count >= MANY or self._end + size >= WIDE:
            end64 = self._end + size
            out += END64.pack(END64_MARK, 44, _VERSION64, _VERSION64, 0, 0, count, count, size, self._end)
            out += END64_LOCATOR.pack(LOCATOR_MARK, 0, end64, 1)
        few, at = min(count, MANY), min(self._end, WIDE)
        out += END.pack(END_MARK, 0, 0, few, few, min(size, WIDE), at, 0)
        return bytes(out)
