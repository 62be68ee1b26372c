"""Some of many, evenly chosen."""

from __future__ import annotations


def spread(count: int, most: int) -> list[int]:
    """At most ``most``, which is 2 or more, of ``range(count)``, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [i * (count - 1) // (most - 1) for i in range(most)]
