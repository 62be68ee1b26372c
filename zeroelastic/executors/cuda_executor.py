"""The CUDA engine: a table of byte runs between device buffers in one launch, or from files into device buffers.

Buffers are addresses and sizes: torch is not needed. Calls wait for what they did; a ``DevicePlan``, which is a copy
that is prepared once and run many times, does not: running it enqueues one kernel on the caller's stream. Bits are
those of the native engine, but for the NaN that a conversion to 16 bits makes on the device: 0x7FFF, as torch's there.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from zeroelastic.digest import UInt64Array
from zeroelastic.errors import ConfigError
from zeroelastic.executors.build_info import load_library
from zeroelastic.executors.c_interface import Call, Error, exception_of
from zeroelastic.executors.native_executor import default_threads
from zeroelastic.executors.progress import ProgressFunction
from zeroelastic.executors.table import (
    CASTS,
    Cast,
    DeviceBuffer,
    DigestRows,
    ReadResult,
    ReadTable,
    SegmentTable,
)


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
    library.ze_cuda_read_segments.restype = ctypes.c_int32
    library.ze_cuda_read_segments.argtypes = [pointer] * 5 + [ctypes.c_int32] + [pointer] * 3
    library.ze_cuda_copy_segments.restype = ctypes.c_int32
    library.ze_cuda_copy_segments.argtypes = [pointer] * 5 + [ctypes.c_int32] + [pointer] * 2
    library.ze_cuda_plan_destroy.restype = None
    library.ze_cuda_plan_destroy.argtypes = [pointer]
    return library


def read_segments(
    table: ReadTable,
    buffers: Sequence[DeviceBuffer],
    digest: DigestRows | None = None,
    *,
    cast: Cast = "none",
    threads: int | None = None,
    stream: int = 0,
    progress: ProgressFunction | None = None,
) -> ReadResult:
    """Fill device memory from files, through at most 48 MiB of pinned host memory that the process keeps.

    It runs on ``stream`` (``torch.cuda.Stream.cuda_stream``), after what is enqueued there, and returns when the memory
    is filled. Digests and conversions are made on the host, in the pass that reads. Raises MissingFileError or
    CheckpointError with the file and the offset at which it failed, UnsupportedError when CUDA refuses. ``progress``
    must not read by this engine itself.
    """
    threads = default_threads() if threads is None else threads
    call = Call(table.segments, digest, cast, threads=threads, progress=progress)
    bytes_read = ctypes.c_int64()
    error = Error()
    code = _library().ze_cuda_read_segments(
        ctypes.byref(call.table),
        ctypes.byref(call.files(table.local_paths)),
        ctypes.byref(call.device_buffers(buffers)),
        call.digest,
        ctypes.byref(call.options),
        _device(buffers),
        ctypes.c_void_p(stream),
        ctypes.byref(bytes_read),
        ctypes.byref(error),
    )
    call.end()
    if code:
        raise _exception(error, table.local_paths)
    return ReadResult(bytes_read.value, table.files, call.totals)


def copy_segments(
    table: SegmentTable,
    src: Sequence[DeviceBuffer],
    dst: Sequence[DeviceBuffer],
    *,
    digest: DigestRows | None = None,
    cast: Cast = "none",
    stream: int = 0,
) -> UInt64Array | None:
    """Copy between buffers of one device in one launch on ``stream``, and wait for it. Returns the digests, when asked.

    A ``DevicePlan`` that is run once: the same holds of rows, conversions and errors.
    """
    call = Call(table, digest, cast)
    error = Error()
    code = _library().ze_cuda_copy_segments(
        ctypes.byref(call.table),
        ctypes.byref(call.device_buffers(src)),
        ctypes.byref(call.device_buffers(dst)),
        call.digest,
        ctypes.byref(call.options),
        _device([*src, *dst]),
        ctypes.c_void_p(stream),
        ctypes.byref(error),
    )
    if code:
        raise _exception(error)
    return call.totals


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


def _device(buffers: Sequence[DeviceBuffer]) -> int:
    devices = sorted({buffer.device for buffer in buffers})
    if len(devices) > 1:
        raise ConfigError(f"one call of the CUDA engine is for one device; these buffers are on {devices}.")
    return devices[0] if devices else 0


def _exception(error: Error, src_paths: Sequence[Path] = ()) -> Exception:
    internal = _library().ze_cuda_error_text(error.errnum).decode()
    return exception_of(error, "CUDA", src_paths=src_paths, internal=internal)
