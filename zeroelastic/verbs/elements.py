"""The elements of a tensor as numbers: numpy has neither bfloat16 nor 8-bit floats, which are widened by their bits."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from zeroelastic.core.digest import ByteArray
from zeroelastic.torch_file.header import DTYPE_BYTES

Float64Array = npt.NDArray[np.float64]
BitsArray = npt.NDArray[np.unsignedinteger]

_PARTS = {
    "complex128": "float64",
    "complex64": "float32",
    "complex32": "float16",
    "bcomplex32": "bfloat16",
    "bits16": "uint16",
    **{name: "uint8" for name in ("bits8", "bits4x2", "bits2x4", "bits1x8", "float4_e2m1fn_x2")},
}
"""The dtype whose numbers others are made of. A complex number is two; packed ones are their byte."""

_FLOAT8 = {
    "float8_e4m3fn": (3, 7, [127, 255]),
    "float8_e4m3fnuz": (3, 8, [128]),
    "float8_e5m2fnuz": (2, 16, [128]),
}
"""The bits of the mantissa, the bias of the exponent, and the bits that are no number."""


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
    elif dtype in _FLOAT8:
        values = _float8(dtype)[bits]
    elif dtype == "float8_e8m0fnu":
        values = np.where(bits == 255, np.nan, 2.0 ** (bits.astype(np.float64) - 127))
    elif dtype == "bool":
        values = bits.astype(np.float64)
    else:
        values = bits.view(np.dtype(f"<{dtype[0]}{DTYPE_BYTES[dtype]}")).astype(np.float64)
    return values


@functools.cache
def _float8(dtype: str) -> Float64Array:
    """The 256 values of a dtype without infinity."""
    mantissa_bits, bias, nan = _FLOAT8[dtype]
    bits = np.arange(256)
    steps = 1 << mantissa_bits
    exponent, mantissa = bits >> mantissa_bits & (127 >> mantissa_bits), bits & (steps - 1)
    small, large = mantissa / steps * 2.0 ** (1 - bias), (1 + mantissa / steps) * 2.0 ** (exponent - float(bias))
    values = np.where(exponent == 0, small, large)
    signed: Float64Array = np.where(bits & 128 != 0, -values, values)
    signed[nan] = np.nan
    return signed
