"""CRC-32 of runs that lie one behind the other, from the checksum and the length of each (as zlib's crc32_combine)."""

from __future__ import annotations

import functools
from itertools import pairwise

import numpy as np

from zeroelastic.core.layout import Int64Array
from zeroelastic.executors import native_executor
from zeroelastic.executors.build_info import is_usable
from zeroelastic.executors.tables import UInt32Array

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # polynomials over GF(2) are reflected: bit 31 is the coefficient of x^0


def join_crc32(crc32: UInt32Array, nbytes: Int64Array) -> int:
    """The checksum of all runs in their order; both arrays have shape ``(num_runs,)``. 0 where there are none."""
    assert crc32.dtype == np.uint32 and nbytes.dtype == np.int64 and len(crc32) == len(nbytes)
    if is_usable("native"):
        return native_executor.join_crc32(np.ascontiguousarray(crc32), np.ascontiguousarray(nbytes))
    return join_crc32_reference(crc32, nbytes)


def join_crc32_groups(group: Int64Array, crc32: UInt32Array, nbytes: Int64Array, num_groups: int) -> UInt32Array:
    """The checksum of each group's runs, joined in the order of the rows; 0 for a group without runs.

    Row i is a run of ``nbytes[i]`` bytes of group ``group[i]``; a negative group is left out. Returns an array of shape
    ``(num_groups,)``.
    """
    order = np.argsort(group, kind="stable")
    bounds = np.searchsorted(group[order], np.arange(num_groups + 1, dtype=np.int64)).tolist()
    joined = np.zeros(num_groups, dtype=np.uint32)
    for number, (begin, end) in enumerate(pairwise(bounds)):
        some = order[begin:end]
        joined[number] = crc32[some[0]] if end - begin == 1 else join_crc32(crc32[some], nbytes[some])
    return joined


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
