"""The allow-listed unpickler: it reads a pickle of torch.save, and no code of the pickle runs.

Every global that a pickle names resolves to one of our own objects (``tree``), or is refused: tensors
become ``TensorRef`` (where the bytes are), DeepSpeed's loss scalers and other objects ``Stub``. Neither torch nor
deepspeed is imported here, and no global of the file is ever called. A pickle's memory and time are bounded by its
bytes: ``check_opcodes`` checks before anything is built, ``check_tree`` after.

A few bytes can ask an unpickler for gigabytes (a memo slot, a counted string, thousands of empty sets) or for hours
(the hash of a tuple that holds itself twice, thirty levels deep; integers that all have one hash). ``check_opcodes``
follows a pickle as the unpickler would, with sizes in place of objects, and refuses those; honest files pass.
Source: pickletools of Python 3.11, and Modules/_pickle.c for its allocations.
"""

from __future__ import annotations

import io
import pickle
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from zeroelastic.errors import CheckpointError, UnsafePickleError, UsageError, brief, shown
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.allow_list import ALLOWED, EXACT, Enumeration, Function, StorageType, encode
from zeroelastic.torch_file.tree import Global, Storage, new_global

if TYPE_CHECKING:
    from zeroelastic.torch_file.header import Extent

MOST_NESTED = 100
"""Containers within containers that a header may have."""

_MAX_INT_BYTES = 512
_MAX_LONG_INTS = 4096
_LONG_INT_BYTES = 9  # integers of fewer bytes cannot share a hash in great numbers: it is taken modulo 2^61 - 1
_MAX_WEIGHT = 1 << 62
_FREE_OBJECTS = 1 << 17
_BYTES_PER_OBJECT = 6  # of the pickle, for each object that takes some hundred bytes of memory
_FREE_HASHES = 1 << 20
_HASHES_PER_BYTE = 16

_COUNTED = {0x58: 4, 0x8C: 1, 0x8D: 8, 0x42: 4, 0x43: 1, 0x8E: 8}  # text and bytes behind their length
_PLAIN = {0x4A: 5, 0x4B: 2, 0x4D: 3, 0x47: 9, 0x4E: 1, 0x88: 1, 0x89: 1, 0x29: 1}  # numbers, None, booleans, ()

# What an opcode takes from the stack: some values, or all down to the last mark. What it leaves: nothing, the container
# below, or a value that is pushed or replaces the one on top: of weight 1, or 1 more than the sum of what was taken.
_TO_MARK = -1
_NOTHING, _BELOW, _PUSH, _TOP = range(4)
_ONE, _SUM = False, True
# What is hashed: nothing, the keys of pairs, or all that was taken.
_NO_HASH, _KEYS, _ALL = range(3)
_EFFECTS = {
    0x85: (1, _PUSH, _SUM, _NO_HASH, 0),  # TUPLE1 to 3, TUPLE
    0x86: (2, _PUSH, _SUM, _NO_HASH, 0),
    0x87: (3, _PUSH, _SUM, _NO_HASH, 0),
    0x74: (_TO_MARK, _PUSH, _SUM, _NO_HASH, 0),
    0x52: (1, _TOP, _SUM, _NO_HASH, 1),  # REDUCE, NEWOBJ, NEWOBJ_EX
    0x81: (1, _TOP, _SUM, _NO_HASH, 1),
    0x92: (2, _TOP, _SUM, _NO_HASH, 1),
    0x51: (0, _TOP, _ONE, _NO_HASH, 1),  # BINPERSID
    0x93: (1, _TOP, _ONE, _NO_HASH, 0),  # STACK_GLOBAL
    0x5D: (0, _PUSH, _ONE, _NO_HASH, 1),  # EMPTY_LIST, EMPTY_DICT, EMPTY_SET
    0x7D: (0, _PUSH, _ONE, _NO_HASH, 1),
    0x8F: (0, _PUSH, _ONE, _NO_HASH, 1),
    0x61: (1, _BELOW, _ONE, _NO_HASH, 0),  # APPEND, APPENDS, BUILD
    0x65: (_TO_MARK, _BELOW, _ONE, _NO_HASH, 0),
    0x62: (1, _BELOW, _ONE, _NO_HASH, 0),
    0x73: (2, _BELOW, _ONE, _KEYS, 0),  # SETITEM, SETITEMS
    0x75: (_TO_MARK, _BELOW, _ONE, _KEYS, 0),
    0x90: (_TO_MARK, _BELOW, _SUM, _ALL, 0),  # ADDITEMS, FROZENSET
    0x91: (_TO_MARK, _PUSH, _SUM, _ALL, 0),
    0x31: (_TO_MARK, _NOTHING, _ONE, _NO_HASH, 0),  # POP_MARK
}
"""By opcode: what it takes, what it leaves, the weight of that, what it hashes, and the objects that it makes."""

_COUNT_BYTES, _PLAIN_BYTES = ([table.get(op, 0) for op in range(256)] for table in (_COUNTED, _PLAIN))

# A tensor as torch.save writes it is 25 opcodes, and a header may have millions of them: one match follows all 25.
_GET, _PUT, _INT = rb"(h.|j....)", rb"r(....)", rb"(?:K.|M..|J....)"
_KEY = b"X(?:" + b"|".join(b"%c\0\0\0" % digits + b"." * digits for digits in range(1, 8)) + b")" + _PUT
_STORAGE = b"\\(" + _GET + _GET + b"(?:" + _GET + b"|" + _KEY + b")" + _GET + _INT + b"t" + _PUT + b"Q"
_SIZES = (
    b"(?:\\)|(?:"
    + b"|".join(_INT * n + bytes([0x84 + n]) for n in (1, 2, 3))
    + rb"|\("
    + _INT
    + b"{4,8}t)"
    + _PUT
    + b")"
)
_TENSOR = re.compile(
    _GET + rb"\(" + _STORAGE + _INT + _SIZES * 2 + b"[\x88\x89]" + _GET + rb"\)R" + _PUT + b"t" + _PUT + b"R" + _PUT,
    re.DOTALL,
)
_GETS = (1, 2, 3, 4, 6, 10)
_KEY_PUT = 5
_PUTS = (_KEY_PUT, 7, 8, 9, 11, 12, 13)
_TENSOR_WEIGHT = 32  # at least the weight of each object that these opcodes make, if all that they get weigh 1
_TENSOR_WEIGHTS = [[_TENSOR_WEIGHT] * count for count in range(len(_PUTS) + 1)]
_TENSOR_OBJECTS = 3


def check_opcodes(data: bytes) -> None:
    """Refuse opcodes that Python 3 does not write at protocol 2 to 4, and pickles out of proportion to their bytes.

    Raises UnsafePickleError for such opcodes, CheckpointError for a truncated or damaged pickle and for one that would
    take memory or time out of proportion.
    """
    try:
        _check(data)
    except IndexError:  # of the stack, the memo's marks or the bytes
        raise CheckpointError("the pickle takes an object that it has not made. The file is damaged.") from None


class _Memo:
    """The weight of the object in each slot; 0 for a slot that is not filled."""

    __slots__ = ("_light", "_slots", "num_filled", "weights")

    def __init__(self, nbytes: int) -> None:
        """``nbytes`` is the size of the pickle, which fills at most one slot for every two bytes."""
        self.weights: list[int] = []
        self.num_filled = 0
        self._light: set[tuple[bytes, ...]] = set()  # opcodes whose slots hold objects of weight 1
        self._slots = np.arange(nbytes // 5 + 1, dtype="<u4").tobytes()  # the arguments of LONG_BINPUT, in order

    def put(self, slot: int, weight: int) -> None:
        """Fill a slot."""
        weights = self.weights
        if slot < len(weights):
            self.num_filled += not weights[slot]
            weights[slot] = weight
            self._light.clear()
        else:
            self.num_filled += 1
            weights += [0] * (slot - len(weights))
            weights.append(weight)

    def follow(self, tensor: re.Match[bytes]) -> bool:
        """Fill the slots that the opcodes of a tensor fill.

        Returns False, with none filled, for a tensor whose opcodes have to be followed one by one: one of them gets
        something other than a name or a class, or does not fill the next slot.
        """
        weights, gets = self.weights, tensor.group(*_GETS)
        if gets not in self._light:
            slots = [int.from_bytes(get[1:], "little") for get in gets if get]
            if any(slot >= len(weights) or weights[slot] != 1 for slot in slots):
                return False
            self._light.add(gets)
        puts = b"".join(filter(None, tensor.group(*_PUTS)))
        first = 4 * len(weights)
        if puts != self._slots[first : first + len(puts)]:
            return False
        own = _TENSOR_WEIGHTS[len(puts) // 4]
        self.num_filled += len(own)
        weights += own if tensor.group(_KEY_PUT) is None else [1, *own[1:]]
        return True


def _check(data: bytes) -> None:
    """Follow a pickle; an object is represented by the number of values that its hash would visit."""
    stack: list[int] = []
    marks: list[int] = []
    memo = _Memo(len(data))
    weights = memo.weights
    end = len(data)
    at = hashed = objects = long_ints = 0
    push, pop = stack.append, stack.pop
    while at < end:
        op = data[at]
        size = _COUNT_BYTES[op]
        if size:
            at += 1 + size + int.from_bytes(data[at + 1 : at + 1 + size], "little")
            push(1)
        elif _PLAIN_BYTES[op]:
            at += _PLAIN_BYTES[op]
            push(1)
        elif op == 0x71:  # q: BINPUT
            memo.put(data[at + 1], stack[-1])
            at += 2
        elif op == 0x68 or op == 0x6A:  # h, j: BINGET, LONG_BINGET
            tensor = _TENSOR.match(data, at)
            if tensor is not None and memo.follow(tensor):
                push(_TENSOR_WEIGHT)
                objects += _TENSOR_OBJECTS
                at = tensor.end()
                continue
            width = 1 if op == 0x68 else 4
            slot = int.from_bytes(data[at + 1 : at + 1 + width], "little")
            weight = weights[slot] if slot < len(weights) else 0
            if not weight:
                raise CheckpointError("the pickle takes a memo slot that it has not filled. The file is damaged.")
            push(weight)
            at += 1 + width
        elif op == 0x28:  # (
            marks.append(len(stack))
            at += 1
        elif op == 0x72:  # r: LONG_BINPUT; the unpickler allocates up to the highest slot, 16 bytes each
            slot = int.from_bytes(data[at + 1 : at + 5], "little")
            if slot > at:
                raise CheckpointError("the pickle names a memo slot that it cannot have filled. The file is damaged.")
            memo.put(slot, stack[-1])
            at += 5
        elif op == 0x94:  # MEMOIZE
            memo.put(memo.num_filled, stack[-1])
            at += 1
        elif op in _EFFECTS:
            taken, leaves, sums, hashes, made = _EFFECTS[op]
            begin = marks.pop() if taken == _TO_MARK else len(stack) - taken
            if begin < 0:
                raise IndexError
            weight = 1 + sum(stack[begin:]) if sums else 1
            if hashes:
                hashed += weight if hashes == _ALL else sum(stack[begin::2])
            if taken:
                del stack[begin:]
            if leaves == _PUSH:
                push(weight if weight < _MAX_WEIGHT else _MAX_WEIGHT)
            elif leaves == _TOP:
                stack[-1] = weight if weight < _MAX_WEIGHT else _MAX_WEIGHT
            elif leaves == _BELOW:
                stack[-1]
            objects += made
            at += 1
        elif op == 0x63:  # c: GLOBAL
            module_end = data.find(b"\n", at)
            name_end = data.find(b"\n", module_end + 1)
            if module_end < 0 or name_end < 0:
                raise CheckpointError("the pickle ends inside a name. The file is damaged.")
            push(1)
            at = name_end + 1
        elif op == 0x8A or op == 0x8B:  # LONG1, LONG4
            width = 1 if op == 0x8A else 4
            size = int.from_bytes(data[at + 1 : at + 1 + width], "little")
            long_ints += size > _LONG_INT_BYTES
            if size > _MAX_INT_BYTES or long_ints > _MAX_LONG_INTS:
                raise CheckpointError("the pickle has longer integers than a checkpoint. The file is damaged.")
            push(1)
            at += 1 + width + size
        elif op == 0x80:  # PROTO
            at += 2
        elif op == 0x95:  # FRAME, of which the unpickler reads all at once
            if int.from_bytes(data[at + 1 : at + 9], "little") > end:
                raise CheckpointError("the pickle has no end. The file is truncated.")
            at += 9
        elif op == 0x30:  # 0: POP, of an object or of a mark
            if marks and marks[-1] == len(stack):
                marks.pop()
            else:
                pop()
            at += 1
        elif op == 0x2E:  # .: STOP
            break
        else:
            raise UnsafePickleError(f"the pickle uses opcode {data[at : at + 1]!r}, which torch.save does not write")
    else:
        raise CheckpointError("the pickle has no end. The file is truncated.")
    if hashed > _FREE_HASHES + _HASHES_PER_BYTE * end:
        raise CheckpointError("the pickle's keys hold one another too often to be looked up. The file is damaged.")
    if objects > _FREE_OBJECTS + end // _BYTES_PER_OBJECT:
        raise CheckpointError("the pickle has more objects than a checkpoint of its size. The file is damaged.")


_MAX_GLOBALS = 4096
_MAX_KEY = 40
_MAX_REPEATED = 64 << 10
_READ_BYTES = 64 << 10
_CONTAINERS = (dict, list, tuple, set, frozenset)
_FREE_VISITS = 1 << 20
_VISITS_PER_ITEM = 64

Container: TypeAlias = "dict[object, object] | list[object] | tuple[object, ...] | set[object] | frozenset[object]"


ForeignGlobals = Literal["refuse", "inert", "exact"]
"""Globals outside the allow-list are refused or become stand-ins. With "exact" so does every object whose inert form
does not keep all of it."""

_allowed_by_user: ContextVar[frozenset[tuple[str, str]]] = ContextVar("allowed_by_user", default=frozenset())


@contextmanager
def allow_globals(names: Iterable[str]) -> Iterator[None]:
    """Inside the block, these globals ("package.module.Class") are inert stand-ins where a header names them.

    They are neither imported nor called. Other contexts (``contextvars``), such as other threads, are not affected.
    Raises UsageError for a text that is no such name.
    """
    token = _allowed_by_user.set(_allowed_by_user.get() | {split_global(name) for name in names})
    try:
        yield
    finally:
        _allowed_by_user.reset(token)


def split_global(name: str) -> tuple[str, str]:
    """("package.module", "Class") of "package.module.Class", or of "package.module:Outer.Inner". Raises UsageError."""
    module, colon, qualname = name.partition(":")
    if not colon:
        module, _, qualname = name.rpartition(".")
    if not all(part.isidentifier() for part in (*module.split("."), *qualname.split("."))):
        raise UsageError(f"{shown(name)} does not name a class: give package.module.Class.")
    return module, qualname


class HeaderUnpickler(pickle.Unpickler):
    """The allow-listed unpickler: every global resolves to one of our own objects, or is refused or inert.

    ``find`` tells where the storages are. ``load`` raises UnsafePickleError, CheckpointError, and whatever a damaged
    pickle makes the standard one raise.
    """

    def __init__(
        self,
        data: bytes,
        path: FilePath,
        foreign: ForeignGlobals,
        find: Callable[[Storage], Extent] | None = None,
    ) -> None:
        # A buffer is read thousands of bytes at a time, a BytesIO opcode by opcode.
        super().__init__(io.BufferedReader(io.BytesIO(data), _READ_BYTES), encoding="utf-8")
        self._path = path
        self._foreign = foreign
        self._find = find
        self._allowed = EXACT if foreign == "exact" else ALLOWED
        self._globals: dict[tuple[str | Global, str], Global] = {}
        self._storages: dict[str, Storage] = {}
        self._encodable = len(data) + _MAX_REPEATED
        self._has_old_names = data[:1] != b"\x80" or data[1] <= 2  # torch.save's protocol 2 names some as Python 2 did

    def find_class(self, module: str, name: str) -> object:
        path = module, name
        if self._has_old_names:
            path = NAME_MAPPING.get(path, (IMPORT_MAPPING.get(module, module), name))
        if path == ("_codecs", "encode"):
            return Function(self._encode)
        if path == ("builtins", "getattr"):
            return Function(self._attribute)
        allowed = self._allowed.get(path)
        return self._foreign_global(*path) if allowed is None else allowed

    def _foreign_global(self, module: str, name: str) -> Global:
        """An inert stand-in for a global that is not on the allow-list, or UnsafePickleError."""
        if self._foreign != "refuse" or (module, name) in _allowed_by_user.get():
            return self._global(module, name)
        named = brief(f"{module}.{name}")
        raise UnsafePickleError(
            f"{self._path}: the pickle names {named}, which is not on the allow-list. Nothing was run. To let it pass "
            f"as an inert stand-in, which is never imported, name it: zeroelastic --allow-global {named} VERB on the "
            f'command line, "allow_globals": ["{named}"] in the "zeroelastic" block of a training job.'
        )

    def _global(self, module: str, name: str, attribute: tuple[Global, str] | None = None) -> Global:
        key = attribute or (module, name)
        found = self._globals.get(key)
        if found is None:
            if len(self._globals) == _MAX_GLOBALS:
                raise UnsafePickleError(f"{self._path}: the pickle names more than {_MAX_GLOBALS} foreign globals.")
            if "\n" in module or "\n" in name:
                raise UnsafePickleError("the pickle has a global whose name has two lines")
            found = self._globals[key] = new_global(module, name, attribute)
        return found

    def _attribute(self, *args: object) -> object:
        """``getattr``, for classes within classes, and members of enumerations: Python 3.11.2 names these."""
        owner, name = args if len(args) == 2 else (None, None)
        if isinstance(name, str):
            if isinstance(owner, Enumeration):
                return owner.member(name)
            if isinstance(owner, Global):
                return self._global(owner.path[0], brief(f"{owner.path[1]}.{name}"), (owner, name))
        return self._foreign_global("builtins", "getattr")(*args)

    def _encode(self, text: object, encoding: object = "latin1") -> bytes:
        """``_codecs.encode``, so long as one text is not encoded again and again."""
        data = encode(text, encoding)
        self._encodable -= len(data)
        if self._encodable < 0:
            raise CheckpointError(f"{self._path}: the pickle makes more bytes than it has. The file is damaged.")
        return data

    def persistent_load(self, pid: object) -> object:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise UnsafePickleError("a persistent id is not a torch storage")
        _, kind, key, location, numel = pid
        if isinstance(kind, Global) and self._foreign != "exact":  # a type of storage that only "inert" lets pass
            return kind()
        if not isinstance(kind, StorageType) or not all(type(text) is str for text in (key, location)):
            raise UnsafePickleError(f"{self._path}: a storage is described by {shown(pid)}")
        if type(numel) is not int or not 0 <= numel < 1 << 62 or not key.isalnum() or len(key) > _MAX_KEY:
            raise UnsafePickleError(f"a storage has key {shown(key)} and {shown(numel)} elements")
        made = Storage(key, kind.dtype, numel, location, kind.is_untyped, self._find)
        if self._foreign != "exact":
            return made
        found = self._storages.setdefault(key, made)
        return found if (found.dtype, found.numel) == (made.dtype, made.numel) else made


def check_tree(root: object) -> None:
    """Refuse a tree of containers that nests too deeply, holds itself, or is far larger when it is walked than it is.

    Code that walks a tree that passed needs neither a limit of depth nor a memory of where it has been. The contents of
    stand-ins are not checked: code that walks them keeps such limits. Raises CheckpointError.
    """
    walked: dict[int, tuple[int, int]] = {}  # by identity: all that a container holds, and its levels
    open_ids: set[int] = set()
    real = 0

    def walk(container: Container, depth: int) -> tuple[int, int]:
        nonlocal real
        if id(container) in walked:
            return walked[id(container)]
        if id(container) in open_ids or depth > MOST_NESTED:
            raise CheckpointError("its containers hold themselves, or nest too deeply. The file is damaged.")
        open_ids.add(id(container))
        size, levels = 1 + len(container), 1
        items: Collection[object]
        items = container.values() if isinstance(container, dict) else container
        kinds = {*map(type, items)}
        if any(issubclass(kind, _CONTAINERS) for kind in kinds):
            times = Counter(map(id, items))
            for item in {id(item): item for item in items}.values():
                if isinstance(item, _CONTAINERS):
                    inner_size, inner_levels = walk(item, depth + 1)
                    size, levels = size + times[id(item)] * (inner_size - 1), max(levels, inner_levels + 1)
        if levels > MOST_NESTED:
            raise CheckpointError("its containers nest too deeply. The file is damaged.")
        open_ids.discard(id(container))
        real += len(container) + 1
        walked[id(container)] = size, levels
        return size, levels

    if isinstance(root, _CONTAINERS) and walk(root, 0)[0] > _FREE_VISITS + _VISITS_PER_ITEM * real:
        raise CheckpointError("its containers hold one another too often to be walked. The file is damaged.")
