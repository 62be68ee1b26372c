"""The allow-listed unpickler: it reads a pickle of torch.save, and no code of the pickle runs.

Every global that a pickle names resolves to one of our own objects (``rebuild_functions``), or is refused: tensors
become ``TensorRef`` (where the bytes are), DeepSpeed's loss scalers and other objects ``Stub``. Neither torch nor
deepspeed is imported here, and no global of the file is ever called. A pickle's memory and time are bounded by its
bytes: ``pickle_limits`` checks before anything is built, ``check_tree`` after.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, TypeAlias

from zeroelastic.errors import CheckpointError, UnsafePickleError, UsageError, brief, shown
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.columns import COLUMNS, IntColumn, NamedColumn, TensorColumn
from zeroelastic.torch_file.inert_objects import StorageRef, Stub, new_stub, storage_id
from zeroelastic.torch_file.pickle_limits import MOST_NESTED
from zeroelastic.torch_file.rebuild_functions import (
    ALLOWED,
    PYTHON2_MODULES,
    Enumeration,
    Function,
    StorageType,
    encode,
)

_MAX_GLOBALS = 4096
_MAX_REPEATED = 64 << 10
_READ_BYTES = 64 << 10
_CONTAINERS = (dict, list, tuple, set, frozenset, *COLUMNS)
_FREE_VISITS = 1 << 20
_VISITS_PER_ITEM = 64

Container: TypeAlias = (
    "dict[object, object] | list[object] | tuple[object, ...] | set[object] | frozenset[object] | "
    "IntColumn | TensorColumn | NamedColumn"
)


ForeignGlobals = Literal["refuse", "inert"]

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


class _Bytes(io.RawIOBase):
    """Bytes as a file, for a ``BufferedReader``; a BytesIO would copy them."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._left = memoryview(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        some = self._left[: len(buffer)]
        buffer[: len(some)] = some
        self._left = self._left[len(some) :]
        return len(some)


class PickleFile(io.BufferedReader):
    """A pickle as a file of which an unpickler reads thousands of bytes at a time; it reads a BytesIO by opcodes."""

    def __init__(self, data: bytes | memoryview) -> None:
        super().__init__(_Bytes(data), _READ_BYTES)
        self._nbytes = len(data)

    def read(self, size: int | None = -1, /) -> bytes:
        """Memory for what is there, not for what a damaged pickle asks for."""
        return super().read(self._nbytes if size is None or size < 0 else min(size, self._nbytes))


class HeaderUnpickler(pickle.Unpickler):
    """The allow-listed unpickler: every global resolves to one of our own objects, or is refused or inert.

    ``columns`` are the objects of persistent ids that are integers (``packed_pickle``).
    ``load`` raises UnsafePickleError, CheckpointError, and whatever a damaged pickle makes the standard one raise.
    """

    def __init__(
        self, data: bytes | memoryview, path: FilePath, foreign: ForeignGlobals, columns: Sequence[object] = ()
    ) -> None:
        super().__init__(PickleFile(data), encoding="utf-8")
        self._columns = columns
        self._path = path
        self._foreign = foreign
        self._stubs: dict[tuple[str, str], type[Stub]] = {}
        self._encodable = len(data) + _MAX_REPEATED

    def find_class(self, module: str, name: str) -> object:
        module = PYTHON2_MODULES.get(module, module)  # pickle protocol 2, which torch.save writes
        if (module, name) == ("_codecs", "encode"):
            return Function(self._encode)
        if (module, name) == ("builtins", "getattr"):
            return Function(self._attribute)
        allowed = ALLOWED.get((module, name))
        if allowed is not None:
            return allowed
        return self._foreign_global(module, name)

    def _foreign_global(self, module: str, name: str) -> type[Stub]:
        """An inert stand-in for a global that is not on the allow-list, or UnsafePickleError."""
        if self._foreign == "inert" or (module, name) in _allowed_by_user.get():
            return self._stub(module, name)
        named = brief(f"{module}.{name}")
        raise UnsafePickleError(
            f"{self._path}: the pickle names {named}, which is not on the allow-list. Nothing was run. To let it pass "
            f"as an inert stand-in, which is never imported, name it: zeroelastic --allow-global {named} VERB on the "
            f'command line, "allow_globals": ["{named}"] in the "zeroelastic" block of a training job.'
        )

    def _stub(self, module: str, name: str) -> type[Stub]:
        found = self._stubs.get((module, name))
        if found is None:
            if len(self._stubs) == _MAX_GLOBALS:
                raise UnsafePickleError(f"{self._path}: the pickle names more than {_MAX_GLOBALS} foreign globals.")
            found = self._stubs[module, name] = new_stub(module, name)
        return found

    def _attribute(self, *args: object) -> object:
        """``getattr``, for members of enumerations alone: Python 3.11.2 and its neighbours pickle them by name."""
        owner, name = args if len(args) == 2 else (None, None)
        if isinstance(name, str):
            if isinstance(owner, Enumeration):
                return owner.member(name)
            if isinstance(owner, type) and issubclass(owner, Stub):
                return owner()
        return self._foreign_global("builtins", "getattr")(*args)

    def _encode(self, text: object, encoding: object = "latin1") -> bytes:
        """``_codecs.encode``, so long as one text is not encoded again and again."""
        data = encode(text, encoding)
        self._encodable -= len(data)
        if self._encodable < 0:
            raise CheckpointError(f"{self._path}: the pickle makes more bytes than it has. The file is damaged.")
        return data

    def persistent_load(self, pid: object) -> object:
        if type(pid) is int and 0 <= pid < len(self._columns):
            return self._columns[pid]
        kind, key, _location, numel = storage_id(pid)
        if isinstance(kind, type) and issubclass(kind, Stub):  # a type of storage that only "inert" lets pass
            return kind()
        if not isinstance(kind, StorageType):
            raise UnsafePickleError(f"{self._path}: a storage is described by {shown(pid)}")
        return StorageRef(key, kind.dtype, numel)


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
        if isinstance(container, COLUMNS):
            items = ()
            size += container.num_held if isinstance(container, NamedColumn) else 0
        else:
            items = container.values() if isinstance(container, dict) else container
        if any(issubclass(kind, _CONTAINERS) for kind in {*map(type, items)}):
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
