"""The CUDA engine: a table of byte runs between device buffers in one launch, or between files and device buffers.

Buffers are addresses and sizes: torch is not needed. Calls wait for what they did; a ``DevicePlan``, which is a table
that is uploaded once and run many times, does not: running it enqueues one kernel on the caller's stream. Bits are
those of the native engine.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zeroelastic.core.digest import UInt64Array
from zeroelastic.errors import ConfigError
from zeroelastic.executors.abi import Buffers, Call, Error, Files, checksums, exception_of
from zeroelastic.executors.build_info import load_library
from zeroelastic.executors.engine import PLAIN, Options
from zeroelastic.executors.tables import (
    CASTS,
    Cast,
    CopyTable,
    DeviceBuffer,
    DigestRows,
    MemoryRanges,
    ReadResult,
    ReadTable,
)

_MAX_SUMMED_ROWS = 1 << 18
"""Rows of one launch of ``sum_segments``: 15 MiB of tables on the device, and as much on the host while it is made."""


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = load_library("cuda")
    pointer = ctypes.c_void_p
    library.ze_cuda_error_text.restype = ctypes.c_char_p
    library.ze_cuda_error_text.argtypes = [ctypes.c_int32]
    for name, arguments in (
        ("plan_create", [pointer] * 4 + [ctypes.c_int32] * 2 + [pointer] * 2),
        ("plan_run", [pointer] * 3),
        ("read_segments", [pointer] * 5 + [ctypes.c_int32] + [pointer] * 3),
        ("plan_finish", [pointer] * 4),
        ("write_segments", [pointer] * 5 + [ctypes.c_int32] + [pointer] * 3),
    ):
        function = getattr(library, f"ze_cuda_{name}")
        function.restype, function.argtypes = ctypes.c_int32, arguments
    library.ze_cuda_plan_destroy.restype = None
    library.ze_cuda_plan_destroy.argtypes = [pointer]
    return library


def read_segments(
    table: ReadTable, buffers: Sequence[DeviceBuffer], options: Options = PLAIN, *, stream: int = 0
) -> ReadResult:
    """Fill device memory from files, through at most 48 MiB of pinned host memory that the process keeps.

    It runs on ``stream`` (``torch.cuda.Stream.cuda_stream``), after what is enqueued there, and returns when the memory
    is filled. Digests and conversions are made on the host, in the pass that reads. Raises MissingFileError or
    CheckpointError with the file and the offset at which it failed, UnsupportedError when CUDA refuses. A progress
    function must not read by this engine itself.
    """
    call = Call(table.segments, options)
    bytes_read = ctypes.c_int64()
    sides = call.files(table.local_paths), call.device_buffers(buffers)
    on = (_device(buffers), ctypes.c_void_p(stream), ctypes.byref(bytes_read))
    _run("read_segments", call, sides, call.options, *on, src_paths=table.local_paths)
    return ReadResult(bytes_read.value, table.files, call.totals)


def write_segments(
    table: CopyTable, src: Sequence[DeviceBuffer], paths: Sequence[Path], options: Options = PLAIN, *, stream: int = 0
) -> UInt64Array | None:
    """Write device memory into files that exist, through the pinned memory of ``read_segments``.

    It writes what the memory holds after what is enqueued on ``stream``, and returns when all is written. Digests,
    checksums and conversions are made on the host, in the pass that writes. Raises OSError naming the file and the byte
    at which writing failed, UnsupportedError when CUDA refuses.
    """
    call = Call(table, options)
    sides = call.device_buffers(src), call.files(paths)
    on = (_device(src), ctypes.c_void_p(stream), checksums(table, options))
    _run("write_segments", call, sides, call.options, *on, dst_paths=paths)
    return call.totals


def sum_segments(
    table: MemoryRanges, src: Sequence[DeviceBuffer], options: Options, *, stream: int = 0
) -> UInt64Array | None:
    """The digests of device memory, by kernels on ``stream`` that are waited for; nothing is copied to the host.

    The plan of the last call is kept for the next one of the same rows, so that a save that follows another uploads
    nothing. Memory, on the device and on the host: 56 bytes for each row, 4 for every 16 blocks of a digest, and 8 for
    each digest. Errors as of ``copy_segments``.
    """
    digest = options.digest
    assert digest is not None and options.crc32 is None, "a GPU makes digests, not checksums"
    if len(table.nbytes) <= _MAX_SUMMED_ROWS:
        return _kept_sums.run(table, src, digest, stream)
    totals = np.zeros(len(digest.seeds), dtype=np.uint64)
    for begin in range(0, len(table.nbytes), _MAX_SUMMED_ROWS):
        rows = slice(begin, begin + _MAX_SUMMED_ROWS)
        part = MemoryRanges(table.buffer[rows], table.offset[rows], table.nbytes[rows])
        streams, stream_of = np.unique(digest.stream[rows], return_inverse=True)
        some = DigestRows(digest.seeds[streams], stream_of.reshape(-1), digest.start[rows], digest.itemsize[rows])
        with DevicePlan(part, src, None, device=_device(src), digest=some) as plan:
            plan.run(stream)
            found = plan.finish(stream)
        assert found is not None
        totals[streams] += found  # modulo 2**64
    return totals


class _KeptSums:
    """The plan of the last digests, with what it was made of; one call at a time has it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plan: DevicePlan | None = None
        self._made_of: tuple[object, ...] = ()

    def run(
        self, table: MemoryRanges, src: Sequence[DeviceBuffer], digest: DigestRows, stream: int
    ) -> UInt64Array | None:
        rows = (table.buffer, table.offset, table.nbytes, digest.seeds, digest.stream, digest.start, digest.itemsize)
        made_of = (_library(), tuple(src), *(column.tobytes() for column in rows))
        with self._lock:
            if self._plan is None or self._made_of != made_of:
                self.close()
                self._plan = DevicePlan(table, src, None, device=_device(src), digest=digest)
                self._made_of = made_of
            self._plan.run(stream)
            return self._plan.finish(stream)

    def close(self) -> None:
        """Free the plan's memory."""
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.close()


_kept_sums = _KeptSums()


def copy_segments(
    table: CopyTable,
    src: Sequence[DeviceBuffer],
    dst: Sequence[DeviceBuffer],
    options: Options = PLAIN,
    *,
    stream: int = 0,
) -> UInt64Array | None:
    """Copy between buffers of one device in one launch on ``stream``, and wait for it. Returns the digests, when asked.

    A ``DevicePlan`` that is run once: the same holds of rows, conversions and errors.
    """
    device = _device([*src, *dst])
    with DevicePlan(table, src, dst, device=device, digest=options.digest, cast=options.cast) as plan:
        plan.run(stream)
        return plan.finish(stream)


def _run(
    name: str,
    call: Call,
    sides: Sequence[Files | Buffers],
    *more: object,
    src_paths: Sequence[Path] = (),
    dst_paths: Sequence[Path] = (),
) -> None:
    error = Error()
    function = getattr(_library(), f"ze_cuda_{name}")
    code = function(ctypes.byref(call.table), *map(ctypes.byref, sides), call.digest, *more, ctypes.byref(error))
    call.end()
    if code:
        raise _exception(error, src_paths, dst_paths)


class DevicePlan:
    """A table bound to device buffers; valid as long as they are, and to be closed, best by ``with``.

    Rows must not overlap in their destinations, nor a destination a source. Without ``dst`` the rows are only digested.
    ``totals`` is device memory of one uint64 per stream, to which digests are added; without it the plan has totals of
    its own, which ``finish`` returns. With a conversion, elements are aligned to their size and a digest's itemsize is
    the source's. Raises ConfigError when the CUDA engine is not built, UnsupportedError when CUDA refuses.
    """

    def __init__(
        self,
        table: CopyTable | MemoryRanges,
        src: Sequence[DeviceBuffer],
        dst: Sequence[DeviceBuffer] | None,
        *,
        device: int,
        digest: DigestRows | None = None,
        totals: DeviceBuffer | None = None,
        cast: Cast = "none",
    ) -> None:
        assert totals is None or (digest is not None and totals.nbytes >= 8 * len(digest.seeds)), "one total per stream"
        address = 0 if totals is None else totals.address
        call = Call(table, Options(digest, cast=cast), totals_address=address)
        self._own_totals = None if digest is None or totals is not None else len(digest.seeds)
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

    def finish(self, stream: int = 0) -> UInt64Array | None:
        """Wait for what is enqueued on a stream; returns the plan's own totals of the last run, if it has any.

        Shape ``(num_streams,)``. One run has to be finished before the next begins.
        """
        totals = np.zeros(self._own_totals or 0, dtype=np.uint64)
        error = Error()
        address = ctypes.c_void_p(totals.ctypes.data)
        if _library().ze_cuda_plan_finish(self._plan, ctypes.c_void_p(stream), address, ctypes.byref(error)):
            raise _exception(error)
        return None if self._own_totals is None else totals

    def close(self) -> None:
        """Wait for the device and free the plan; may be called again."""
        plan, self._plan = self._plan, ctypes.c_void_p()
        _library().ze_cuda_plan_destroy(plan)

    def __enter__(self) -> DevicePlan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _device(buffers: Sequence[DeviceBuffer]) -> int:
    devices = sorted({buffer.device for buffer in buffers})
    if len(devices) > 1:
        raise ConfigError(
            f"one call of the CUDA engine is for one device; these buffers are on {devices}. Make one call for each "
            "device."
        )
    return devices[0] if devices else 0


def _exception(error: Error, src_paths: Sequence[Path] = (), dst_paths: Sequence[Path] = ()) -> Exception:
    internal = _library().ze_cuda_error_text(error.errnum).decode()
    return exception_of(error, "CUDA", src_paths=src_paths, dst_paths=dst_paths, internal=internal)
