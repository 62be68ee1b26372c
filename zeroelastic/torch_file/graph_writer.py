"""Writes a graph (``pickle_graph``) as the pickle of a torch.save file.

Source: the pickle protocols 2 to 4, and ``torch.serialization._save`` (2.13) for how storages are named.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

from zeroelastic.errors import UnsupportedError
from zeroelastic.torch_file.pickle_graph import Global, Node, Storage, global_named

_BATCH = 1000
_MAX_NESTED = 250


def walk_storages(root: object) -> Iterator[Storage]:
    """Every storage of a graph once, in the order in which a pickle of it names them."""
    return iter(write_graph(root)[1])


def write_graph(root: object) -> tuple[bytes, list[Storage]]:
    """The pickle of a graph, and its storages: storage number i is record ``data/i`` of the archive.

    Of protocol 2, which torch.save writes, or 4 where a name has dots in it (a class within a class).

    Raises UnsupportedError for an object that is neither a Node nor plain, and for one that nests too deeply.
    """
    writer = _GraphWriter()
    return writer.pickle(root), writer.storages


class _GraphWriter:
    """Pickles a graph; an object that occurs again is taken from the memo, text by value."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self._numbers: dict[int, int] = {}
        self._described: dict[int, tuple[object, ...]] = {}  # by number: what a pickle says of a storage
        self._out = bytearray(b"\x80\x02")
        self._memo: dict[object, int] = {}
        self._kept: list[object] = []  # whatever the memo knows by its id must live on
        self._depth = 0

    def pickle(self, root: object) -> bytes:
        self._save(root)
        self._out += b"."
        return bytes(self._out)

    def _save(self, value: object) -> None:
        kind = type(value)
        if kind is str:
            self._text(value)  # type: ignore[arg-type]
        elif kind is int:
            self._int(value)  # type: ignore[arg-type]
        elif id(value) in self._memo:
            self._get(self._memo[id(value)])
        elif value is None:
            self._out += b"N"
        elif kind is bool:
            self._out += b"\x88" if value else b"\x89"
        elif kind is float:
            self._out += b"G" + struct.pack(">d", value)
        elif kind is Global:
            self._global(value)  # type: ignore[arg-type]
        else:
            self._depth += 1
            if self._depth > _MAX_NESTED:
                raise UnsupportedError(f"objects nest more than {_MAX_NESTED} deep, which is not rewritten.")
            self._object(value)
            self._depth -= 1

    def _object(self, value: object) -> None:
        if isinstance(value, Node):
            self._node(value)
        elif type(value) is dict:
            self._out += b"}"
            self._put(value)
            self._pairs(value.items())
        elif type(value) is list:
            self._out += b"]"
            self._put(value)
            self._fill(value, b"e")
        elif type(value) is tuple:
            self._tuple(value)
        elif isinstance(value, Storage):
            self._storage(value)
        elif type(value) is bytes:
            self._reduce(value, global_named("_codecs", "encode"), (value.decode("latin1"), "latin1"))
        elif type(value) in (set, frozenset):
            assert isinstance(value, (set, frozenset))
            self._reduce(value, global_named("builtins", type(value).__name__), (list(value),))
        elif isinstance(value, bytearray):
            self._reduce(value, global_named("builtins", "bytearray"), (bytes(value),))
        else:
            raise UnsupportedError(f"a {type(value).__name__} cannot be written into a checkpoint.")

    def _node(self, node: Node) -> None:
        if node.by_new:
            self._save(node.function)
            self._save(node.args)
            if node.kwargs:
                self._save(node.kwargs)
                self._out += b"\x92"
            else:
                self._out += b"\x81"
            self._put(node)
        else:
            self._reduce(node, node.function, node.args)
        if node.items:
            self._fill(node.items, b"e")
        if node.pairs:
            self._pairs(node.pairs)
        if node.has_state:
            self._save(node.state)
            self._out += b"b"

    def _reduce(self, value: object, function: object, args: tuple[object, ...]) -> None:
        self._save(function)
        self._save(args)
        self._out += b"R"
        self._put(value)

    def _storage(self, storage: Storage) -> None:
        number = self._numbers.get(id(storage))
        if number is None:
            number = self._numbers[id(storage)] = len(self.storages)
            self.storages.append(storage)
            self._described[number] = ("storage", storage.kind, str(number), storage.location, storage.stated_numel)
        self._save(self._described[number])
        self._out += b"Q"

    def _tuple(self, value: tuple[object, ...]) -> None:
        if not value:
            self._out += b")"
            return
        marked, opcode = (b"(", b"t") if len(value) > 3 else (b"", bytes([0x84 + len(value)]))
        self._out += marked
        for item in value:
            self._save(item)
        known = self._memo.get(id(value))
        if known is not None:  # it holds itself, through a list: its first writing counts
            self._out += b"1" if marked else b"0" * len(value)
            self._get(known)
            return
        self._out += opcode
        if not all(type(item) is int for item in value):  # a shape or a stride is shorter than its memo
            self._put(value)

    def _fill(self, items: Sequence[object], opcode: bytes, batch: int = _BATCH) -> None:
        for at in range(0, len(items), batch):
            self._out += b"("
            for item in items[at : at + batch]:
                self._save(item)
            self._out += opcode

    def _pairs(self, pairs: Iterable[tuple[object, object]]) -> None:
        self._fill([part for pair in pairs for part in pair], b"u", 2 * _BATCH)

    def _int(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self._out += b"K" + bytes([value])
        elif 0 <= value < 1 << 16:
            self._out += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self._out += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) > 255:
                raise UnsupportedError("an integer of more than 2000 bits cannot be written into a checkpoint.")
            self._out += b"\x8a" + bytes([len(data)]) + data

    def _text(self, value: str) -> None:
        known = self._memo.get(value)
        if known is not None:
            self._get(known)
            return
        data = value.encode("utf-8", "surrogatepass")
        self._out += b"X" + struct.pack("<I", len(data)) + data
        self._remember(value)

    def _global(self, value: Global) -> None:
        known = self._memo.get(value)
        if known is not None:
            self._get(known)
            return
        if value.owner is not None:
            self._reduce(value, global_named("builtins", "getattr"), (value.owner, value.attribute))
            return
        if "." in value.name:
            self._out[1] = 4
        self._out += f"c{value.module}\n{value.name}\n".encode()
        self._remember(value)

    def _put(self, value: object) -> None:
        self._kept.append(value)
        self._remember(id(value))

    def _remember(self, key: object) -> None:
        number = self._memo[key] = len(self._memo)
        self._out += b"q" + bytes([number]) if number < 1 << 8 else b"r" + struct.pack("<I", number)

    def _get(self, number: int) -> None:
        self._out += b"h" + bytes([number]) if number < 1 << 8 else b"j" + struct.pack("<I", number)
