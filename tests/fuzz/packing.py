"""Whether a pickle that the native engine packs says what it said before."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from zeroelastic.torch_file.columns import pack_pickle, with_lists
from zeroelastic.torch_file.inert_objects import Stub
from zeroelastic.torch_file.safe_unpickler import HeaderUnpickler, check_opcodes, check_tree

LONG = 4
"""Items from which a list is a column: few, so that small pickles have such lists."""


class OtherContent(Exception):
    """A pickle was packed that is refused without the engine, or that says something else."""


def load(data: bytes, columns: Sequence[object] = ()) -> object:
    """The tree of a pickle that was checked."""
    root = HeaderUnpickler(data, Path("f.pt"), "refuse", columns).load()
    check_tree(root)
    return root


def check_same(data: bytes) -> str:
    """Hold what is read of a pickle with the engine against what is read without; says how far it got.

    Raises OtherContent.
    """
    packed = pack_pickle(data, long_list=LONG)
    if packed is None:
        return "left to Python"
    try:
        check_opcodes(data)
    except Exception as error:
        raise OtherContent("check_opcodes refuses a pickle that was packed") from error
    try:
        root = load(*packed)
    except Exception:
        return "read again"
    try:
        plain = load(data)
    except Exception as error:
        raise OtherContent("a pickle is refused that was packed and read") from error
    if len(packed[0]) > len(data) or content(with_lists(root)) != content(plain):
        raise OtherContent("a pickle says something else than it did before it was packed")
    return "packed"


def content(tree: object) -> str:
    """A digest of all that is in a tree, whether it is in it once or more than once."""
    made: dict[int, str] = {}

    def digest(value: object, depth: int) -> str:
        if id(value) in made:
            return made[id(value)]
        if depth > 60:
            return "deep"
        parts = ["dict" if isinstance(value, dict) else type(value).__name__]
        if isinstance(value, dict):
            parts += [digest(x, depth + 1) for pair in value.items() for x in pair]
        elif isinstance(value, (list, tuple)):
            parts += [digest(x, depth + 1) for x in value]
        elif isinstance(value, (set, frozenset)):
            parts += sorted(digest(x, depth + 1) for x in value)
        elif isinstance(value, Stub):
            made[id(value)] = "stub"
            parts += [value.module, value.qualname]
            parts += [digest(x, depth + 1) for x in (value.args, value.items, value.attributes)]
        elif not callable(value):
            parts.append(repr(value))
        made[id(value)] = hashlib.sha256(" ".join(parts).encode()).hexdigest()
        return made[id(value)]

    return digest(tree, 0)
