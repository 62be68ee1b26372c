"""The CUDA engine: a table of byte runs between device buffers, with a conversion and a digest, in one launch.

A ``DevicePlan`` is made once, by checking the rows and uploading them; running it enqueues one kernel on the caller's
stream and returns. Buffers are addresses and sizes: torch is not needed, ``tensor.data_ptr()`` gives an address. Bits
are those of the native engine, but for the NaN that a conversion to 16 bits makes: 0x7FFF, as torch makes on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from zeroelastic.executors.build_info import load_library
from zeroelastic.executors.c_interface import Call, Error, exception_of
from zeroelastic.executors.table import CASTS, Cast, DeviceBuffer, DigestRows, SegmentTable


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
        if digest is not None:
            assert totals is not None and totals.nbytes >= 8 * len(digest.seeds), "digests need totals on the device"
        call = Call(table, digest, cast, totals_address=None if totals is None else totals.address)
        self._plan = ctypes.c_void_p()
        error = Error()
        code = _library().ze_cuda_plan_create(
            ctypes.byref(call.table),
            ctypes.byref(call.device_buffers(src)),
            None if dst is None else ctypes.byref(call.device_buffers(dst)),
            call.digest,
            CASTS.index(cast),
            device,
            ctypes.byref(self._plan),
            ctypes.byref(error),
        )
        if code:
            raise _exception(error)

    def run(self, stream: int = 0) -> None:
        """Enqueue the plan on a CUDA stream (``torch.cuda.Stream.cuda_stream``; 0 is the default one)."""
        error = Error()
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


def _exception(error: Error, src_paths: Sequence[Path] = ()) -> Exception:
    internal = _library().ze_cuda_error_text(error.errnum).decode()
    return exception_of(error, "CUDA", src_paths=src_paths, internal=internal)
