"""CRC-32 of runs that lie one behind the other, from the checksum and the length of each (as zlib's crc32_combine)."""

from __future__ import annotations

import functools

import numpy as np

from zeroelastic.executors import native_executor
from zeroelastic.executors.build_info import describe_build
from zeroelastic.executors.table import UInt32Array
from zeroelastic.layout import Int64Array

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # polynomials over GF(2) are reflected: bit 31 is the coefficient of x^0


def join_crc32(crc32: UInt32Array, nbytes: Int64Array) -> int:
    """The checksum of all runs in their order; both arrays have shape ``(num_runs,)``. 0 where there are none."""
    assert crc32.dtype == np.uint32 and nbytes.dtype == np.int64 and len(crc32) == len(nbytes)
    if describe_build("native").usable:
        return native_executor.join_crc32(np.ascontiguousarray(crc32), np.ascontiguousarray(nbytes))
    return join_crc32_reference(crc32, nbytes)


def join_crc32_reference(crc32: UInt32Array, nbytes: Int64Array) -> int:
    """``join_crc32`` in Python: what the native engine matches."""
    joined = 0
    for second, length in zip(crc32.tolist(), nbytes.tolist(), strict=True):
        joined = _multiply(_power_of_x(8 * length), joined) ^ second
    return joined


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@functools.lru_cache(maxsize=4096)
def _power_of_x(exponent: int) -> int:
    result, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        exponent >>= 1
    return result
