"""The conversions in numpy, bit for bit those of torch's ``Tensor.copy_`` except for the NaN of bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from zeroelastic.core.digest import ByteArray
from zeroelastic.executors.tables import Cast, cast_itemsizes

_CHUNK_NUMEL = 1 << 18
_INFINITY = 0x7F800000

BFLOAT16_NAN = 0x7FC0
"""What every NaN becomes in bfloat16, on any machine: torch's rule for one element. Its vector units make others."""


def cast_bytes(cast: Cast, src: ByteArray, dst: ByteArray) -> None:
    """Convert the elements in ``src`` into ``dst``, both contiguous bytes, at any alignment; a few MiB besides."""
    if cast == "none":
        dst[:] = src
        return
    src_itemsize, dst_itemsize = cast_itemsizes(cast)
    convert = _CONVERSIONS[cast]
    numel = len(src) // src_itemsize
    for begin in range(0, numel, _CHUNK_NUMEL):
        end = min(numel, begin + _CHUNK_NUMEL)
        bits = src[begin * src_itemsize : end * src_itemsize].view(np.dtype(f"<u{src_itemsize}"))
        made = convert(bits).astype(np.dtype(f"<u{dst_itemsize}"), copy=False)
        dst[begin * dst_itemsize : end * dst_itemsize] = made.view(np.uint8)


def _to_bfloat16(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > _INFINITY
    return np.where(nan, np.uint64(BFLOAT16_NAN), rounded).astype(np.uint16)


def _to_float16(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    # numpy rounds like torch, but makes an infinity of a NaN whose upper bits of payload are zero.
    nan = (bits & 0x7FFFFFFF) > _INFINITY
    with np.errstate(over="ignore", under="ignore"):
        finite = np.where(nan, np.uint32(0), bits).view(np.float32).astype(np.float16).view(np.uint16)
    quiet = ((bits >> 16) & 0x8000) | 0x7E00 | ((bits >> 13) & 0x3FF)
    return np.where(nan, quiet, finite).astype(np.uint16)


def _from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    wide: npt.NDArray[np.uint32] = bits.astype(np.uint32) << np.uint32(16)
    return wide


def _from_float16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    nan = (bits & 0x7FFF) > 0x7C00
    finite = np.where(nan, np.uint16(0), bits).view(np.float16).astype(np.float32).view(np.uint32)
    wide = bits.astype(np.uint32)
    quiet = ((wide & 0x8000) << 16) | _INFINITY | 0x400000 | ((wide & 0x3FF) << 13)
    return np.where(nan, quiet, finite).astype(np.uint32)


_CONVERSIONS: dict[Cast, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {
    "float32->bfloat16": _to_bfloat16,
    "float32->float16": _to_float16,
    "bfloat16->float32": _from_bfloat16,
    "float16->float32": _from_float16,
}
