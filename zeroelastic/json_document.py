"""The documents of ``--json``: their version, and values that JSON does not have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

SCHEMA_VERSION: Literal[1] = 1
"""Of all documents: it changes when a key of any of them changes its name or its meaning."""


def json_proper(value: object) -> object:
    """The value in strict JSON: NaN and infinities, which JSON does not have, become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): json_proper(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_proper(item) for item in value]
    return value
