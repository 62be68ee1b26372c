"""How two runs of elements differ: how many, how far apart in value and in units in the last place.

Elements are compared by their bits first: equal bits are equal, NaN or not. numpy has neither bfloat16 nor 8-bit
floats; these are widened by their bits, which loses nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from zeroelastic.core.digest import ByteArray, UInt64Array
from zeroelastic.torch_file.header import DTYPE_BYTES

Float64Array = npt.NDArray[np.float64]
BitsArray = npt.NDArray[np.unsignedinteger]

CHUNK = 1 << 16
"""Elements that are looked at together: what is computed on the way stays in a core's cache."""

_MANTISSA_BITS = {
    "float64": 52,
    "float32": 23,
    "float16": 10,
    "bfloat16": 7,
    "float8_e4m3fn": 3,
    "float8_e4m3fnuz": 3,
    "float8_e5m2": 2,
    "float8_e5m2fnuz": 2,
    "float8_e8m0fnu": 0,
}
_PARTS = {
    "complex128": "float64",
    "complex64": "float32",
    "complex32": "float16",
    "bcomplex32": "bfloat16",
    "bits16": "uint16",
    **{name: "uint8" for name in ("bits8", "bits4x2", "bits2x4", "bits1x8", "float4_e2m1fn_x2")},
}
"""The dtype as which others are compared. A complex number is two elements; packed ones are their byte."""


@dataclass(frozen=True, slots=True)
class ElementStats:
    """What differs between ``num`` elements of two sides; sums over disjoint runs are made with ``+``.

    ``num_different`` counts elements of unequal bits (of unequal value, where the dtypes differ), ``num_nonfinite``
    those of them where a side is infinite or no number. The others are in ``max_abs``, in ``square``, the sum of their
    squared differences, and, but for the ``num_sign_changed`` on two sides of zero, in ``max_ulp`` (None where the
    dtype has none): all small numbers lie between those. ``left_square`` sums the squares of the finite
    elements of the left side; ``left_nan`` to ``right_inf`` count all elements that are so.
    """

    num: int = 0
    num_different: int = 0
    num_nonfinite: int = 0
    num_sign_changed: int = 0
    max_abs: float = 0.0
    max_ulp: int | None = 0
    square: float = 0.0
    left_square: float = 0.0
    left_nan: int = 0
    left_inf: int = 0
    right_nan: int = 0
    right_inf: int = 0

    def __add__(self, other: ElementStats) -> ElementStats:
        ulps = None if self.max_ulp is None or other.max_ulp is None else max(self.max_ulp, other.max_ulp)
        summed = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        return ElementStats(**summed, max_abs=max(self.max_abs, other.max_abs), max_ulp=ulps)


_SUMMED = [field.name for field in fields(ElementStats) if not field.name.startswith("max_")]


def is_float(dtype: str) -> bool:
    """Whether elements of this dtype are floating point numbers."""
    return _PARTS.get(dtype, dtype) in _MANTISSA_BITS


def compare_elements(left: ByteArray, right: ByteArray, left_dtype: str, right_dtype: str) -> ElementStats:
    """Compare as many elements of ``left`` and ``right``, given as raw bytes; at most ``CHUNK`` at a time."""
    left_bits, right_bits = bits_of(left, left_dtype), bits_of(right, right_dtype)
    if len(left_bits) != len(right_bits):  # a real tensor, and a complex one
        most = max(len(left_bits), len(right_bits))
        left_bits, right_bits = (_as_complex(bits) if len(bits) < most else bits for bits in (left_bits, right_bits))
    left_dtype, right_dtype = (_PARTS.get(dtype, dtype) for dtype in (left_dtype, right_dtype))
    assert len(left_bits) == len(right_bits), "the sides have different numbers of elements"
    total = ElementStats(max_ulp=0 if left_dtype == right_dtype and is_float(left_dtype) else None)
    for at in range(0, len(left_bits), CHUNK):
        here = slice(at, at + CHUNK)
        total += _compare(left_bits[here], right_bits[here], left_dtype, right_dtype)
    return total


def _compare(left: BitsArray, right: BitsArray, left_dtype: str, right_dtype: str) -> ElementStats:
    same_dtype = left_dtype == right_dtype
    ulps = 0 if same_dtype and is_float(left_dtype) else None
    with np.errstate(all="ignore"):
        if same_dtype and np.array_equal(left, right):
            values = values_of(left, left_dtype)
            square = float(np.dot(values, values))
            nans = infs = 0
            if not np.isfinite(square):
                finite, nans, infs = _kinds(values)
                square = float(np.dot(values[finite], values[finite]))
            return ElementStats(
                len(left), max_ulp=ulps, left_square=square,
                left_nan=nans, left_inf=infs, right_nan=nans, right_inf=infs,
            )  # fmt: skip
        x, y = values_of(left, left_dtype), values_of(right, right_dtype)
        left_finite, left_nan, left_inf = _kinds(x)
        right_finite, right_nan, right_inf = _kinds(y)
        unequal = left != right if same_dtype else (x != y) & ~(np.isnan(x) & np.isnan(y))
        finite = left_finite & right_finite
        chosen = np.flatnonzero(unequal & finite)
        max_abs, square, num_sign_changed = 0.0, 0.0, 0
        if len(chosen):
            distance = _distances(left[chosen], right[chosen], x[chosen], y[chosen], left_dtype, right_dtype)
            max_abs, square = float(distance.max()), float(np.dot(distance, distance))
            if ulps is not None:
                a, b = x[chosen], y[chosen]
                alike = chosen[(a >= 0) & (b >= 0) | (a <= 0) & (b <= 0)]
                num_sign_changed = len(chosen) - len(alike)
                ulps = int(_ulps(left[alike], right[alike], left_dtype).max(initial=0))
        own = x if left_finite.all() else x[left_finite]
        return ElementStats(
            num=len(left),
            num_different=int(np.count_nonzero(unequal)),
            num_nonfinite=int(np.count_nonzero(unequal & ~finite)),
            num_sign_changed=num_sign_changed,
            max_abs=max_abs,
            max_ulp=ulps,
            square=square,
            left_square=float(np.dot(own, own)),
            left_nan=left_nan,
            left_inf=left_inf,
            right_nan=right_nan,
            right_inf=right_inf,
        )


def _kinds(values: Float64Array) -> tuple[npt.NDArray[np.bool_], int, int]:
    """Which are finite, and how many are no number and infinite."""
    finite = np.isfinite(values)
    others = len(values) - int(np.count_nonzero(finite))
    nans = int(np.count_nonzero(np.isnan(values))) if others else 0
    return finite, nans, others - nans


def _as_complex(bits: BitsArray) -> BitsArray:
    return np.stack([bits, np.zeros_like(bits)], axis=1).ravel()


def bits_of(data: ByteArray, dtype: str) -> BitsArray:
    """The elements as unsigned integers of their size."""
    bits: BitsArray = data.view(np.dtype(f"<u{DTYPE_BYTES[_PARTS.get(dtype, dtype)]}"))
    return bits


@np.errstate(invalid="ignore")  # of NaNs that signal
def values_of(bits: BitsArray, dtype: str) -> Float64Array:
    """The elements as float64, which all dtypes but 64-bit integers fit in exactly."""
    values: Float64Array
    dtype = _PARTS.get(dtype, dtype)
    if dtype == "bfloat16":
        values = (bits.astype("<u4") << np.uint32(16)).view("<f4").astype(np.float64)
    elif dtype == "float8_e5m2":
        values = (bits.astype("<u2") << np.uint16(8)).view("<f2").astype(np.float64)
    elif dtype == "float8_e4m3fn":
        values = _e4m3fn()[bits]
    elif dtype == "float8_e4m3fnuz":
        values = _fnuz(3)[bits]
    elif dtype == "float8_e5m2fnuz":
        values = _fnuz(2)[bits]
    elif dtype == "float8_e8m0fnu":
        values = np.where(bits == 255, np.nan, 2.0 ** (bits.astype(np.float64) - 127))
    elif dtype == "bool":
        values = bits.astype(np.float64)
    else:
        values = bits.view(np.dtype(f"<{dtype[0]}{DTYPE_BYTES[dtype]}")).astype(np.float64)
    return values


def _distances(
    left: BitsArray, right: BitsArray, x: Float64Array, y: Float64Array, left_dtype: str, right_dtype: str
) -> Float64Array:
    if left_dtype == right_dtype == "uint64":
        return np.where(left > right, left - right, right - left).astype(np.float64)
    if left_dtype == right_dtype == "int64":  # the difference of two is exact modulo 2**64
        a, b = left.view("<i8"), right.view("<i8")
        return np.where(a > b, left - right, right - left).astype(np.float64)
    distance: Float64Array = np.abs(x - y)
    return distance


def _ulps(left: BitsArray, right: BitsArray, dtype: str) -> UInt64Array:
    """How many representable numbers apart two finite ones are; 0 and -0 are the same number."""
    sign = np.uint64(1 << (8 * DTYPE_BYTES[dtype] - 1))
    a, b = left.astype(np.uint64), right.astype(np.uint64)
    low, high = a & ~sign, b & ~sign
    apart = np.maximum(low, high) - np.minimum(low, high)
    ulps: UInt64Array = np.where((a ^ b) & sign != 0, low + high, apart)
    return ulps


@functools.lru_cache(maxsize=1)
def _e4m3fn() -> Float64Array:
    """The 256 values of 4 bits of exponent, 3 of mantissa, no infinity; NaN where all seven bits are set."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[bits & 127 == 127] = np.nan
    signed: Float64Array = np.where(bits & 128 != 0, -values, values)
    return signed


@functools.cache
def _fnuz(mantissa_bits: int) -> Float64Array:
    """The 256 values of 7 bits of exponent and mantissa, without infinity and -0, in whose place is the only NaN."""
    bits = np.arange(256)
    steps, bias = 1 << mantissa_bits, 1 << (6 - mantissa_bits)
    exponent, mantissa = bits >> mantissa_bits & (127 >> mantissa_bits), bits & (steps - 1)
    small, large = mantissa / steps * 2.0 ** (1 - bias), (1 + mantissa / steps) * 2.0 ** (exponent - float(bias))
    values = np.where(exponent == 0, small, large)
    signed: Float64Array = np.where(bits & 128 != 0, -values, values)
    signed[128] = np.nan
    return signed
