"""Writes a torch.save file from its tree, without torch and without its payload.

A tree that ``header.read_tree`` read is written as the same pickle again, up to memo numbers, so objects
of classes that are not installed here (or not to be trusted) survive in a file that is rewritten around them.

A file is laid out first: its records are named and placed, its space is reserved. Any engine then moves the payload to
``Archive.offsets``, and ``finish`` writes the headers, with the checksums of the payload. Until then the file has no
directory and is no archive, so it cannot be mistaken for a complete one.

Source: the pickle protocols 2 to 4; ``torch.serialization._save`` (2.13) for how storages are named, and
PyTorchStreamWriter (caffe2/serialize/inline_container.cc), which aligns payload to 64 bytes.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from zeroelastic.errors import UnsupportedError
from zeroelastic.io.atomic import name_in_errors, reserve_space, write_fully
from zeroelastic.torch_file.allow_list import ALLOWED, PATHS, Enumeration, Function, StorageType
from zeroelastic.torch_file.tree import (
    NO_STATE,
    TYPED_STORAGES,
    Dict,
    DType,
    ExactDict,
    Global,
    Size,
    Storage,
    Stub,
    TensorRef,
)
from zeroelastic.torch_file.zip_directory import LOCAL, WIDE, NewEntry, directory_bytes, local_header

_BATCH = 1000
_MAX_NESTED = 250


def write_tree(root: object) -> tuple[bytes, list[Storage]]:
    """The pickle of a tree, and its storages: storage number i is record ``data/i`` of the archive.

    Of protocol 2, which torch.save writes, or 4 where a name has dots in it (a class within a class).

    Raises UnsupportedError for an object that is none of ``tree`` and not plain, and for too deep nesting.
    """
    writer = _TreeWriter()
    writer.save(root)
    return bytes(writer.out + b"."), writer.storages


class _TreeWriter:
    """Pickles a tree; an object that occurs again is taken from the memo, text and globals by value."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self._described: dict[int, tuple[object, ...]] = {}  # by the id of a storage: what a pickle says of it
        self.out = bytearray(b"\x80\x02")
        self._memo: dict[object, int] = {}
        self._kept: list[object] = []  # whatever the memo knows by its id must live on
        self._depth = 0

    def save(self, value: object) -> None:
        kind = type(value)
        if kind is str:
            self._text(value)  # type: ignore[arg-type]
        elif kind is int:
            self._int(value)  # type: ignore[arg-type]
        elif id(value) in self._memo:
            self._get(self._memo[id(value)])
        elif value is None:
            self.out += b"N"
        elif kind is bool:
            self.out += b"\x88" if value else b"\x89"
        elif kind is float:
            self.out += b"G" + struct.pack(">d", value)
        elif kind is Global and cast(Global, value).attribute is None:
            self._global(cast(Global, value).path)
        else:
            self._depth += 1
            if self._depth > _MAX_NESTED:
                raise UnsupportedError(f"objects nest more than {_MAX_NESTED} deep, which is not rewritten.")
            self._object(value)
            self._depth -= 1

    def _object(self, value: object) -> None:
        if isinstance(value, TensorRef):
            self._tensor(value)
        elif type(value) is dict:
            self.out += b"}"
            self._put(value)
            self._pairs(value.items())
        elif isinstance(value, Dict):
            self._reduce(value, ("collections", "OrderedDict"), ())
            self._pairs(value.items())
            self._state(value.state if isinstance(value, ExactDict) else NO_STATE)
        elif type(value) is list:
            self.out += b"]"
            self._put(value)
            self._fill(value, b"e")
        elif type(value) is tuple:
            self._tuple(value)
        elif isinstance(value, Size):
            self._reduce(value, ("torch", "Size"), (tuple(value),))
        elif isinstance(value, Storage):
            self._storage(value)
        elif isinstance(value, Stub):
            self._stub(value)
        elif isinstance(value, Global):
            self._reduce(value, ("builtins", "getattr"), value.attribute or ())
        elif type(value) is bytes:
            self._reduce(value, ("_codecs", "encode"), (value.decode("latin1"), "latin1"))
        elif isinstance(value, (set, frozenset)):
            self._reduce(value, ("builtins", type(value).__name__), (list(value),))
        elif isinstance(value, (DType, StorageType, Function, Enumeration)) and value in PATHS:
            self._global(PATHS[value])
        else:
            raise UnsupportedError(f"a {type(value).__name__} cannot be written into a checkpoint.")

    def _tensor(self, ref: TensorRef) -> None:
        rest: tuple[object, ...] = (ref.requires_grad, Dict())
        if ref.storage.is_untyped or ref.storage.dtype != ref.dtype:
            rebuild, rest = "_rebuild_tensor_v3", (*rest, DType(ref.dtype))
        else:
            rebuild = "_rebuild_tensor_v2"
        self._reduce(ref, ("torch._utils", rebuild), (ref.storage, ref.offset, ref.shape, ref.stride, *rest))

    def _stub(self, node: Stub) -> None:
        if node.by_new:
            self.save(node.function)
            self.save(node.args)
            if node.kwargs:
                self.save(node.kwargs)
                self.out += b"\x92"
            else:
                self.out += b"\x81"
            self._put(node)
        else:
            self._reduce(node, node.function, node.args)
        self._fill(node.items, b"e")
        self._pairs(node.pairs)
        self._state(node.state)

    def _state(self, state: object) -> None:
        if state is not NO_STATE:
            self.save(state)
            self.out += b"b"

    def _reduce(self, value: object, function: object, args: tuple[object, ...]) -> None:
        """A call of a function, or of the global of a module and name."""
        if isinstance(function, tuple):
            self._global(function)
        else:
            self.save(function)
        self.save(args)
        self.out += b"R"
        self._put(value)

    def _storage(self, storage: Storage) -> None:
        found = self._described.get(id(storage))
        if found is None:
            numel = storage.nbytes if storage.is_untyped else storage.numel
            kind = ALLOWED[("torch.storage", "UntypedStorage") if storage.is_untyped else TYPED_STORAGES[storage.dtype]]
            found = ("storage", kind, str(len(self.storages)), storage.location, numel)
            self._described[id(storage)] = found
            self.storages.append(storage)
        self.save(found)
        self.out += b"Q"

    def _tuple(self, value: tuple[object, ...]) -> None:
        if not value:
            self.out += b")"
            return
        marked, opcode = (b"(", b"t") if len(value) > 3 else (b"", bytes([0x84 + len(value)]))
        self.out += marked
        for item in value:
            self.save(item)
        known = self._memo.get(id(value))
        if known is not None:  # it holds itself, through a list: its first writing counts
            self.out += b"1" if marked else b"0" * len(value)
            self._get(known)
            return
        self.out += opcode
        if not all(type(item) is int for item in value):  # a shape or a stride is shorter than its memo
            self._put(value)

    def _fill(self, items: Sequence[object], opcode: bytes, batch: int = _BATCH) -> None:
        for at in range(0, len(items), batch):
            self.out += b"("
            for item in items[at : at + batch]:
                self.save(item)
            self.out += opcode

    def _pairs(self, pairs: Iterable[tuple[object, object]]) -> None:
        self._fill([part for pair in pairs for part in pair], b"u", 2 * _BATCH)

    def _int(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self.out += b"K" + bytes([value])
        elif 0 <= value < 1 << 16:
            self.out += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) > 255:
                raise UnsupportedError("an integer of more than 2000 bits cannot be written into a checkpoint.")
            self.out += b"\x8a" + bytes([len(data)]) + data

    def _text(self, value: str) -> None:
        if value in self._memo:
            self._get(self._memo[value])
            return
        data = value.encode("utf-8", "surrogatepass")
        self.out += b"X" + struct.pack("<I", len(data)) + data
        self._remember(value)

    def _global(self, path: tuple[str, str]) -> None:
        if path in self._memo:
            self._get(self._memo[path])
            return
        module, name = path
        if "." in name:
            self.out[1] = 4
        self.out += f"c{module}\n{name}\n".encode()
        self._remember(path)

    def _put(self, value: object) -> None:
        self._kept.append(value)
        self._remember(id(value))

    def _remember(self, key: object) -> None:
        number = self._memo[key] = len(self._memo)
        self.out += b"q" + bytes([number]) if number < 1 << 8 else b"r" + struct.pack("<I", number)

    def _get(self, number: int) -> None:
        self.out += b"h" + bytes([number]) if number < 1 << 8 else b"j" + struct.pack("<I", number)


_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _NewRecord:
    """One record: where its header and its payload begin, and its bytes if they are known when it is placed."""

    name: bytes
    header: int
    payload: int
    nbytes: int
    data: bytes | None
    storage: Storage | None


class Archive:
    """A torch.save file that is being written; ``offsets[storage]`` is where the bytes of each storage belong.

    ``nbytes`` is the size of the finished file. Opening it truncates what was there and reserves the space. Raises
    OSError naming the file, for a full disk before anything is moved; UnsupportedError as ``write_tree``.

    Example::

        archive = Archive(path, {"weight": tensor(storage, 0, (3, 4))})
        ...                                          # move 48 bytes to archive.offsets[storage]
        archive.finish({storage: crc32})
    """

    def __init__(self, path: Path, root: object) -> None:
        pickled, self.storages = write_tree(root)
        self.path = path
        self._records: list[_NewRecord] = []
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
                entry = NewEntry(record.name, record.nbytes, checksums[record.name], record.header)
                write_fully(fd, local_header(entry, record.payload) + (record.data or b""), record.header)
            write_fully(fd, self._directory_bytes(checksums), self._directory)
            if sync:
                os.fsync(fd)

    def _add(self, name: str, *, data: bytes | None = None, storage: Storage | None = None) -> None:
        nbytes = len(data) if data is not None else storage.nbytes if storage is not None else 0
        full = self._folder + b"/" + name.encode()
        begin = self._end + LOCAL.size + len(full) + (20 if nbytes >= WIDE else 0)
        payload = -(-(begin + 4) // _ALIGNMENT) * _ALIGNMENT
        self._records.append(_NewRecord(full, self._end, payload, nbytes, data, storage))
        self._end = payload + nbytes

    def _directory_bytes(self, checksums: Mapping[bytes, int]) -> bytes:
        entries = [NewEntry(r.name, r.nbytes, checksums.get(r.name, 0), r.header) for r in self._records]
        return directory_bytes(entries, self._end)
