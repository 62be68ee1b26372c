"""Sizes in bytes as text: ``256MiB``, ``4G``, ``1.5 GB``."""

from __future__ import annotations

import re

from zeroelastic.errors import UsageError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_size(text: str) -> int:
    """A size in bytes: ``K``, ``M``, ``G``, ``T`` and ``KiB``... are powers of 1024, ``KB``... of 1000.

    Raises ValueError, with an example of a size, for any other text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 256MiB or 4GiB.")
    return round(float(match[1]) * _UNITS[match[2]])


def size_option(value: int | str, option: str, *, minimum: int = 0) -> int:
    """The value of an option such as ``--max-memory``, in bytes. Raises UsageError naming the option."""
    try:
        nbytes = parse_size(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if nbytes < minimum:
        raise UsageError(f"{option}: at least {format_size(minimum)} are needed, got {format_size(nbytes)}.")
    return nbytes


def format_size(nbytes: float) -> str:
    """A number of bytes as text: ``256 MiB``, ``1.4 GiB``."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        del units[0]
    digits = 0 if nbytes >= 100 or nbytes == round(nbytes) else 1
    return f"{nbytes:.{digits}f} {units[0]}"
