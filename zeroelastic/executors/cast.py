"""The conversions on the way in numpy, bit for bit as torch's ``Tensor.copy_`` makes them on this processor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zeroelastic.digest import ByteArray
from zeroelastic.executors.table import Cast, cast_itemsizes

_CHUNK_NUMEL = 1 << 18
_INFINITY = 0x7F800000


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


@functools.cache
def bfloat16_nan() -> int:
    """The bits that torch makes of every NaN here: those of its vector unit, where the processor has one."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return 0xFFFF if {"avx2", "fma", "f16c"} <= set(flags) else 0x7FC0


def _to_bfloat16(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > _INFINITY
    return np.where(nan, np.uint64(bfloat16_nan()), rounded).astype(np.uint16)


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
