"""torch.save's zip archive around a pickle graph, written without torch and without the payload in memory.

A file is laid out first: its records are named and placed, its space is reserved. The payload is then moved to where
``offsets`` says, by whatever engine, and ``finish`` writes the headers, with the checksums of what was moved. Until
then the file has no directory and is no archive, so nobody can mistake it for a whole one.

Source: PyTorchStreamWriter (caffe2/serialize/inline_container.cc, torch 2.13), which aligns payload to 64 bytes.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zeroelastic.picklegraph import Storage, write_graph

_ALIGNMENT = 64
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_UTF8_NAMES = 1 << 11
_PADDING_ID = b"FB"
_WIDE = 0xFFFFFFFF
_MANY = 0xFFFF
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
        return self.nbytes >= _WIDE


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
        self._reserve()

    def finish(self, crc32: Mapping[Storage, int], *, sync: bool = False) -> None:
        """Write every header and the directory, given the checksum of each storage that has bytes.

        ``sync`` flushes the whole file to its device. Raises OSError naming the file.
        """
        checksums = {
            record.name: zlib.crc32(record.data) if record.data is not None else _checksum(record, crc32)
            for record in self._records
        }
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for record in self._records:
                    write_fully(
                        fd, self._local_header(record, checksums[record.name]) + (record.data or b""), record.header
                    )
                write_fully(fd, self._directory_bytes(checksums), self._directory)
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(self.path)) from None

    def _add(self, name: str, *, data: bytes | None = None, storage: Storage | None = None) -> None:
        nbytes = len(data) if data is not None else storage.nbytes if storage is not None else 0
        full = self._folder + b"/" + name.encode()
        begin = self._end + _LOCAL.size + len(full) + (20 if nbytes >= _WIDE else 0)
        payload = -(-(begin + 4) // _ALIGNMENT) * _ALIGNMENT
        self._records.append(_Record(full, self._end, payload, nbytes, data, storage))
        self._end = payload + nbytes

    def _reserve(self) -> None:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                os.truncate(fd, self.nbytes)
                reserve_space(fd, self.nbytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(self.path)) from None

    def _local_header(self, record: _Record, checksum: int) -> bytes:
        wide = struct.pack("<HHQQ", 1, 16, record.nbytes, record.nbytes) if record.is_wide else b""
        room = record.payload - record.header - _LOCAL.size - len(record.name) - len(wide)
        extra = wide + _PADDING_ID + struct.pack("<H", room - 4) + b"Z" * (room - 4)
        short = min(record.nbytes, _WIDE)
        return (
            _LOCAL.pack(
                b"PK\x03\x04",
                _VERSION64 if record.is_wide else 0,
                _UTF8_NAMES,
                0,
                0,
                0,
                checksum,
                short,
                short,
                len(record.name),
                len(extra),
            )
            + record.name
            + extra
        )

    def _directory_bytes(self, checksums: Mapping[bytes, int]) -> bytes:
        out = bytearray()
        for record in self._records:
            wide: list[int] = [record.nbytes, record.nbytes] if record.is_wide else []
            wide += [record.header] if record.header >= _WIDE else []
            extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
            short = min(record.nbytes, _WIDE)
            version = _VERSION64 if wide else 0
            out += _ENTRY.pack(
                b"PK\x01\x02",
                version,
                version,
                _UTF8_NAMES,
                0,
                0,
                0,
                checksums.get(record.name, 0),
                short,
                short,
                len(record.name),
                len(extra),
                0,
                0,
                0,
                0,
                min(record.header, _WIDE),
            )
            out += record.name + extra
        size, count = len(out), len(self._records)
        if count >= _MANY or self._end + size >= _WIDE:
            end64 = self._end + size
            out += _END64.pack(b"PK\x06\x06", 44, _VERSION64, _VERSION64, 0, 0, count, count, size, self._end)
            out += _END64_LOCATOR.pack(b"PK\x06\x07", 0, end64, 1)
        few, at = min(count, _MANY), min(self._end, _WIDE)
        out += _END.pack(b"PK\x05\x06", 0, 0, few, few, min(size, _WIDE), at, 0)
        return bytes(out)


def _checksum(record: _Record, crc32: Mapping[Storage, int]) -> int:
    assert record.storage is not None
    if record.nbytes == 0:
        return 0
    return crc32[record.storage]


def write_at(path: Path, data: bytes, offset: int) -> None:
    """Write bytes into a file that is there. Raises OSError naming it."""
    try:
        with open(path, "r+b", buffering=0) as file:
            write_fully(file.fileno(), data, offset)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def write_fully(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``, whatever the system does in pieces. Raises OSError."""
    view = memoryview(data).cast("B")
    while len(view):
        put = os.pwrite(fd, view, offset)
        view, offset = view[put:], offset + put


_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = _libc.fallocate64 if hasattr(_libc, "fallocate64") else _libc.fallocate  # musl has one name for both


def reserve_space(fd: int, nbytes: int) -> None:
    """Let the file system set space aside, where it can: it writes faster, and a full disk is noticed early.

    What cannot fit is not tried: a file system gives such a request all that it has before it refuses, and nobody else
    can write then. Not ``os.posix_fallocate``, which writes to every block where the file system cannot set it aside.
    Raises OSError.
    """
    if not _fallocates(fd, min(nbytes, 1)):
        return
    system, held = os.fstatvfs(fd), os.fstat(fd).st_blocks * 512
    if system.f_blocks and nbytes > held + system.f_bfree * system.f_frsize:  # some say nothing of their size
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    _fallocates(fd, nbytes)


def _fallocates(fd: int, nbytes: int) -> bool:
    """Whether the file system knows how to set space aside, which it has done then."""
    if _fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) == 0:
        return True
    error = ctypes.get_errno()
    if error not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR, errno.EINVAL, errno.EPERM):
        raise OSError(error, os.strerror(error))
    return False
