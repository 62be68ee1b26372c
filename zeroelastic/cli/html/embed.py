"""The data in a page: the document of ``--json``, with long lists shortened where it is large."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

LARGEST = 2 << 20
"""The most bytes of data in a page."""

_LENGTHS = tuple(1 << power for power in range(14, 3, -1))


def embedded(document: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
    """The document as JSON that can stand in a page, and the lengths of the lists that were cut, by their keys.

    All lists are cut to one length, the largest of 16,384, 8,192 ... 16 with which it is small enough.
    """
    text = _text(document)
    kept: Any = document
    cut: dict[str, int] = {}
    longest = _longest(document) if len(text) > LARGEST else 0
    for length in _LENGTHS:
        if len(text) <= LARGEST:
            break
        if length < longest:
            kept = _shortened(kept, length, "", cut)
            text = _text(kept)
    return text, cut


def _text(document: object) -> str:
    """Compact JSON without any sign that HTML or XML knows."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _longest(value: Any) -> int:
    """The length of the longest list."""
    if isinstance(value, dict):
        return max(map(_longest, value.values()), default=0)
    if isinstance(value, list):
        return max(len(value), max(map(_longest, value), default=0))
    return 0


def _shortened(value: Any, length: int, key: str, cut: dict[str, int]) -> Any:
    """The value with no list longer than ``length``; notes in ``cut`` how long each was at first."""
    if isinstance(value, dict):
        return {name: _shortened(item, length, f"{key}.{name}" if key else name, cut) for name, item in value.items()}
    if isinstance(value, list):
        if len(value) > length:
            cut[key] = max(cut.get(key, 0), len(value))
        return [_shortened(item, length, f"{key}[]", cut) for item in value[:length]]
    return value
