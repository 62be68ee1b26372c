"""The CUDA engine: a table of byte runs between device buffers, with a conversion and a digest, in one launch.

A ``DevicePlan`` is made once, by checking the rows and uploading them; running it enqueues one kernel on the caller's
stream and returns. Buffers are addresses and sizes: torch is not needed, ``tensor.data_ptr()`` gives an address. Bits
are those of the native engine, but for the NaN that a conversion to 16 bits makes: 0x7FFF, as torch makes on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt

from zeroelastic.errors import UnsupportedError
from zeroelastic.executors.build_info import load_library
from zeroelastic.executors.native_executor import (
    _BAD_TABLE,
    _CASTS,
    _NO_MEMORY,
    Cast,
    SegmentTable,
    _Buffers,
    _Digest,
    _Error,
    _Table,
)
from zeroelastic.executors.table import DigestRows


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """A contiguous range of device memory: its address and its size in bytes."""

    address: int
    nbytes: int


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = load_library("cuda")
    pointer = ctypes.c_void_p
    library.ze_cuda_error_text.restype = ctypes.c_char_p
    library.ze_cuda_error_text.argtypes = [ctypes.c_int32]
    library.ze_cuda_plan_create.restype = ctypes.c_int32
    library.ze_cuda_plan_create.argtypes = [pointer] * 4 + [ctypes.c_int32] * 2 + [pointer] * 2
    library.ze_cuda_plan_run.restype = ctypes.c_int32
    library.ze_cuda_plan_run.argtypes = [pointer] * 3
    library.ze_cuda_plan_destroy.restype = None
    library.ze_cuda_plan_destroy.argtypes = [pointer]
    return library


class DevicePlan:
    """A table bound to device buffers; valid as long as they are, and to be closed, best by ``with``.

    Rows must not overlap in their destinations, nor a destination a source. Without ``dst`` the rows are only digested.
    ``totals`` is device memory of one uint64 per stream, to which digests are added. With a conversion, elements are
    aligned to their size and a digest's itemsize is the source's. Raises ConfigError when the CUDA engine is not built,
    UnsupportedError when CUDA refuses.
    """

    def __init__(
        self,
        table: SegmentTable,
        src: Sequence[DeviceBuffer],
        dst: Sequence[DeviceBuffer] | None,
        *,
        device: int,
        digest: DigestRows | None = None,
        totals: DeviceBuffer | None = None,
        cast: Cast = "none",
    ) -> None:
        alive: list[object] = []

        def column(values: npt.NDArray[np.generic], dtype: type[np.generic], length: int) -> int:
            assert values.shape == (length,), f"a column has shape {values.shape}, not {(length,)}"
            kept = np.ascontiguousarray(values, dtype=dtype)
            alive.append(kept)
            return kept.ctypes.data

        def buffers(ranges: Sequence[DeviceBuffer]) -> _Buffers:
            addresses = np.array([buffer.address for buffer in ranges], dtype=np.uint64)
            sizes = np.array([buffer.nbytes for buffer in ranges], dtype=np.int64)
            count = len(ranges)
            return _Buffers(count, column(addresses, np.uint64, count), column(sizes, np.int64, count))

        num_rows = len(table.nbytes)
        columns = (table.src, table.src_offset, table.dst, table.dst_offset, table.nbytes)
        rows = _Table(num_rows, *(column(values, np.int64, num_rows) for values in columns))
        digests: _Digest | None = None
        if digest is not None:
            num_streams = len(digest.seeds)
            assert totals is not None and totals.nbytes >= 8 * num_streams, "digests need totals on the device"
            digests = _Digest(
                num_streams,
                column(digest.seeds, np.uint64, num_streams),
                totals.address,
                column(digest.stream, np.int64, num_rows),
                column(digest.start, np.int64, num_rows),
                column(digest.itemsize, np.int64, num_rows),
            )
        self._plan = ctypes.c_void_p()
        error = _Error()
        code = _library().ze_cuda_plan_create(
            ctypes.byref(rows),
            ctypes.byref(buffers(src)),
            None if dst is None else ctypes.byref(buffers(dst)),
            None if digests is None else ctypes.byref(digests),
            _CASTS.index(cast),
            device,
            ctypes.byref(self._plan),
            ctypes.byref(error),
        )
        if code:
            raise _exception(error)

    def run(self, stream: int = 0) -> None:
        """Enqueue the plan on a CUDA stream (``torch.cuda.Stream.cuda_stream``; 0 is the default one)."""
        error = _Error()
        if _library().ze_cuda_plan_run(self._plan, ctypes.c_void_p(stream), ctypes.byref(error)):
            raise _exception(error)

    def close(self) -> None:
        """Wait for the device and free the plan; may be called again."""
        plan, self._plan = self._plan, ctypes.c_void_p()
        _library().ze_cuda_plan_destroy(plan)

    def __enter__(self) -> DevicePlan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _exception(error: _Error) -> Exception:
    if error.code == _BAD_TABLE:
        return AssertionError(f"row {error.offset} of a segment table leaves its buffer or is not aligned")
    if error.code == _NO_MEMORY:
        return MemoryError("the CUDA engine is out of host memory")
    return UnsupportedError(f"the CUDA engine failed: {_library().ze_cuda_error_text(error.errnum).decode()}.")
