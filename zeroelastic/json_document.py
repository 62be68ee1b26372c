"""Values of JSON documents."""

from __future__ import annotations

import math
from collections.abc import Mapping


def json_proper(value: object) -> object:
    """The value in strict JSON: NaN and infinities, which JSON does not have, become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): json_proper(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_proper(item) for item in value]
    return value
