"""Statistics of a tensor's elements, window by window: a tensor of any size takes the memory of one window."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from zeroelastic.core.digest import ByteArray
from zeroelastic.verbs.diff.element_stats import CHUNK, bits_of, values_of


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of ``num`` elements; those of disjoint runs are joined with ``+``.

    ``min`` to ``squares`` are of the ``num_finite`` finite elements: 0 where there is none (``min`` and ``max``: None).
    ``deviations`` is the sum of the squared differences to ``mean``.
    """

    num: int = 0
    num_finite: int = 0
    min: float | None = None
    max: float | None = None
    mean: float = 0.0
    deviations: float = 0.0
    squares: float = 0.0
    num_zero: int = 0
    num_nan: int = 0
    num_inf: int = 0

    @property
    def std(self) -> float | None:
        """The standard deviation: of the finite elements, divided by their number (not by one less)."""
        return math.sqrt(self.deviations / self.num_finite) if self.num_finite else None

    @property
    def norm(self) -> float:
        """The 2-norm of the finite elements."""
        return math.sqrt(self.squares)

    def __add__(self, other: TensorStats) -> TensorStats:
        finite = self.num_finite + other.num_finite
        share = other.num_finite / finite if finite else 0.0
        apart = other.mean - self.mean
        # The pairwise update of Chan, Golub and LeVeque: sums of squares minus squares of sums would lose everything
        # where the mean is large.
        return TensorStats(
            num=self.num + other.num,
            num_finite=finite,
            min=min((x for x in (self.min, other.min) if x is not None), default=None),
            max=max((x for x in (self.max, other.max) if x is not None), default=None),
            mean=self.mean + apart * share,
            deviations=self.deviations + other.deviations + apart * apart * share * self.num_finite,
            squares=self.squares + other.squares,
            num_zero=self.num_zero + other.num_zero,
            num_nan=self.num_nan + other.num_nan,
            num_inf=self.num_inf + other.num_inf,
        )


def tensor_stats(data: ByteArray, dtype: str) -> TensorStats:
    """The statistics of elements that are given as raw bytes; ``dtype`` is torch's name."""
    bits = bits_of(data, dtype)
    total = TensorStats()
    for at in range(0, len(bits), CHUNK):
        values = values_of(bits[at : at + CHUNK], dtype)
        finite = values[np.isfinite(values)]
        nan = int(np.count_nonzero(np.isnan(values)))
        mean = float(finite.mean()) if len(finite) else 0.0
        centred = finite - mean
        total += TensorStats(
            num=len(values),
            num_finite=len(finite),
            min=float(finite.min()) if len(finite) else None,
            max=float(finite.max()) if len(finite) else None,
            mean=mean,
            deviations=float(np.dot(centred, centred)),
            squares=float(np.dot(finite, finite)),
            num_zero=len(values) - int(np.count_nonzero(values)),
            num_nan=nan,
            num_inf=len(values) - len(finite) - nan,
        )
    return total
