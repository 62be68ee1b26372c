"""Rows of bytes as one stream between two ranks: which parts of which rows a piece of the stream consists of. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zeroelastic.core.layout import Int64Array
from zeroelastic.deepspeed.node_local.all_to_all import ALIGNMENT, Piece


class Arrived(NamedTuple):
    """Bytes of wanted rows in a buffer: ``nbytes[i]`` of row ``row[i]`` from its byte ``skip[i]`` on, at ``at[i]``."""

    row: Int64Array
    skip: Int64Array
    nbytes: Int64Array
    at: Int64Array


@dataclass(frozen=True, slots=True)
class RowStream:
    """Rows ``[file, offset, nbytes]`` one after the other, each from a multiple of ``ALIGNMENT`` on."""

    rows: Int64Array
    start: Int64Array

    @staticmethod
    def of(rows: Int64Array) -> RowStream:
        padded = -(-rows[:, 2] // ALIGNMENT) * ALIGNMENT
        return RowStream(rows, np.concatenate(([0], np.cumsum(padded))))

    @property
    def nbytes(self) -> int:
        return int(self.start[-1])

    def cut(self, piece: Piece) -> Arrived:
        """The parts of rows that a piece of the stream consists of."""
        end = piece.begin + piece.nbytes
        first = int(np.searchsorted(self.start, piece.begin, side="right")) - 1
        row = np.arange(first, int(np.searchsorted(self.start[:-1], end, side="left")), dtype=np.int64)
        low = np.maximum(self.start[row], piece.begin)
        high = np.minimum(self.start[row] + self.rows[row, 2], end)
        some = high > low
        row, low, high = row[some], low[some], high[some]
        return Arrived(row, low - self.start[row], high - low, low - piece.begin + piece.at)
