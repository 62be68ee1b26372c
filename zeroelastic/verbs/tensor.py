"""A tensor of a checkpoint: shape, dtype and places at once, elements when they are asked for, and only those.

Elements are raw bytes, arrays, or numbers (``values_of``): numpy has neither bfloat16 nor 8-bit floats, which are
widened by their bits.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from zeroelastic.core.digest import ByteArray
from zeroelastic.errors import UnsupportedError, UsageError, require_torch
from zeroelastic.executors.numpy_executor import cast_bytes
from zeroelastic.torch_file.header import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

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


_IN_NUMPY = re.compile(r"bool|u?int\d+|float(16|32|64)|complex(64|128)")


@dataclass(frozen=True, slots=True, eq=False)
class TensorHandle:
    """One tensor of a checkpoint, or some rows. Holds no elements: each call reads those that it returns.

    ``shape`` and ``dtype`` (torch's name, such as ``"bfloat16"``) are those in the files. ``kind`` is "trained" (the
    fp32 master weights), "frozen", "buffer", "state" (of the optimizer) or "client" (in the client state). An index or
    a slice of the first dimension gives the handle of these rows, and reads nothing.

    Example::

        import zeroelastic
        with zeroelastic.open("ckpt") as ck:
            weight = ck["model.norm.weight"]
            print(weight.shape, weight.dtype)     # (24,) float32
            weight[3:7].numpy()                   # reads 16 bytes
            weight.torch()
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    # first element, number of elements, whether to compare a whole tensor with its digest -> their bytes
    _read: Callable[[int, int, bool], ByteArray] = field(repr=False)
    _start: int = field(default=0, repr=False)

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements in the files."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numpy(self) -> npt.NDArray[Any]:
        """The elements as a new array. numpy has no bfloat16: such a tensor becomes float32, which is exact.

        Raises CheckpointError when a file ended early, DigestMismatchError when a whole tensor is not what was saved,
        SavedAgainError when the checkpoint was saved again meanwhile, UnsupportedError for a dtype such as float8,
        which numpy does not have either: use ``torch``.
        """
        if self.dtype != "bfloat16" and _IN_NUMPY.fullmatch(self.dtype) is None:
            raise UnsupportedError(f"{self.name}: numpy has no {self.dtype}. Use .torch().")
        raw = self._read(self._start, self.numel, True)
        if self.dtype == "bfloat16":
            wide = np.empty(2 * len(raw), dtype=np.uint8)
            cast_bytes("bfloat16->float32", raw, wide)
            return wide.view(np.float32).reshape(self.shape)
        return raw.view(np.dtype(self.dtype)).reshape(self.shape)

    def torch(self) -> torch.Tensor:
        """The elements as a new CPU tensor, of the same dtype as in the files. Raises as ``numpy``, and
        MissingPackageError where torch is not installed.
        """
        require_torch("torch()")
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        if not self.numel:
            return torch.empty(self.shape, dtype=dtype, device="cpu")
        return torch.from_numpy(self._read(self._start, self.numel, True)).view(dtype).reshape(self.shape)

    def windows(self, nbytes: int = 16 << 20) -> Iterator[ByteArray]:
        """The elements as raw bytes in row-major order, at most ``nbytes`` at a time. Raises as ``numpy``.

        They are not compared with a digest.
        """
        size = DTYPE_BYTES[self.dtype]
        step = max(1, nbytes // size)
        for at in range(0, self.numel, step):
            yield self._read(self._start + at, min(step, self.numel - at), False)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return the elements, for ``np.asarray``."""
        if copy is False:
            raise UsageError(
                f"{self.name}: its elements are in files; an array of them is always a copy. Leave copy=False out."
            )
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name} is a 0-dim tensor, which has no length")
        return self.shape[0]

    def __getitem__(self, index: int | slice) -> TensorHandle:
        """The handle of one row, or of some that follow each other. Raises IndexError, UsageError."""
        num_rows = len(self)
        row_numel = math.prod(self.shape[1:])
        if isinstance(index, slice):
            start, stop, step = index.indices(num_rows)
            if step != 1:
                raise UsageError(
                    f"{self.name}: a step of {step}; only rows that follow each other are read. Use a step of 1, "
                    "and numpy's slicing afterwards."
                )
            shape: tuple[int, ...] = (max(0, stop - start), *self.shape[1:])
        else:
            start = operator.index(index)
            if not -num_rows <= start < num_rows:
                raise IndexError(f"{self.name}: there is no row {start}; its shape is {self.shape}")
            start, shape = start % num_rows, self.shape[1:]
        return replace(self, shape=shape, _start=self._start + start * row_numel)

    def __iter__(self) -> Iterator[TensorHandle]:
        return (self[row] for row in range(len(self)))
