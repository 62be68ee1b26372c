"""Parity over a set of ranks: what each sends, keeps, and gives back when one of them is lost. Pure.

The files of a rank, one after the other, are its *data*. It is cut into as many chunks as the set has other ranks, and
chunk ``s`` of every rank but ``s`` is part of *stripe* s, whose XOR rank ``s`` keeps (RAID 5: Patterson, Gibson, Katz,
1988). So each rank keeps 1/(n-1) of the data of one rank, and any one rank of the set can be made again from the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Stripes:
    """The stripes of a set of ``size`` ranks, the largest data of which has ``nbytes`` bytes.

    Members are numbered by their place in the set. Data that is shorter than ``chunk * (size - 1)`` ends in zeros.
    """

    size: int
    nbytes: int

    @property
    def chunk(self) -> int:
        """Bytes of a chunk, and of the parity that each member keeps."""
        each = -(-self.nbytes // (self.size - 1))
        return -(-each // ALIGNMENT) * ALIGNMENT

    def begin(self, member: int, stripe: int) -> int:
        """Where in its data a member's chunk of a stripe begins."""
        assert member != stripe
        return self.chunk * (stripe - (stripe > member))

    def others(self, stripe: int) -> tuple[int, ...]:
        """The members whose chunks the stripe consists of."""
        return tuple(member for member in range(self.size) if member != stripe)


def pieces(sizes: Mapping[str, int], offset: int, nbytes: int) -> Iterator[tuple[str, int, int, int]]:
    """(file, offset in it, bytes, place in the range) of a range of a rank's data, without what lies behind its end.

    ``sizes`` are those of the rank's files, in the order of the data.
    """
    begin = 0
    for name, size in sizes.items():
        first, last = max(offset, begin), min(offset + nbytes, begin + size)
        if first < last:
            yield name, first - begin, last - first, first - offset
        begin += size


def total(sizes: Mapping[str, int]) -> int:
    """The bytes of a rank's data."""
    return sum(sizes.values())


def largest(data: Sequence[Mapping[str, int]]) -> int:
    """The bytes of the largest data of a set."""
    return max(map(total, data))
