"""Round numbers for axes, and how ranks are put together where there are more of them than places."""

from __future__ import annotations

import math
from dataclasses import dataclass

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


@dataclass(frozen=True, slots=True)
class Tick:
    """A label at a place of an axis: 0 is its beginning and 1 its end."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Bins:
    """``count`` things in at most ``most`` bins of ``step`` each, of which the last may have fewer."""

    count: int
    step: int

    @classmethod
    def at_most(cls, count: int, most: int) -> Bins:
        """Bins of equal size, as small as they can be."""
        return cls(count, max(1, -(-count // most)))

    @property
    def num(self) -> int:
        """How many bins there are."""
        return -(-self.count // self.step)

    def label(self, number: int) -> str:
        """The first and the last thing of a bin: "7", or "0" to "31" with a dash."""
        first = number * self.step
        last = min(first + self.step, self.count) - 1
        return f"{first:,}" if first == last else f"{first:,}\N{EN DASH}{last:,}"

    def ticks(self, most: int) -> list[Tick]:
        """The first thing of at most ``most`` bins, at the middle of each."""
        every = max(1, -(-self.num // most))
        return [Tick((number + 0.5) / self.num, f"{number * self.step:,}") for number in range(0, self.num, every)]


def round_step(most: float, count: int) -> float:
    """The smallest of 1, 2 or 5 times a power of ten of which ``count`` reach ``most``."""
    if most <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(most / count))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor * count >= most * (1 - 1e-9))


def number_ticks(most: float, count: int = 5, unit: str = "") -> list[Tick]:
    """Round numbers from 0 to at most ``most``, which is the end of the axis."""
    step = round_step(most, count)
    numbers = [step * i for i in range(int(most / step * (1 + 1e-9)) + 1)] if most > 0 else [0.0]
    return [Tick(number / most if most > 0 else 0.0, f"{number:,.10g}{unit}") for number in numbers]


def byte_ticks(most: int, count: int = 4) -> list[Tick]:
    """Round numbers of bytes from 0 to at most ``most``."""
    name, size = next(((name, size) for name, size in _UNITS if size <= most), _UNITS[-1])
    return [
        Tick(tick.at, tick.text if tick.text == "0" else f"{tick.text} {name}")
        for tick in number_ticks(most / size, count)
    ]
