"""The CUDA engine: a table of byte runs between device buffers in one launch, or between files and device buffers.

Buffers are addresses and sizes: torch is not needed. Calls wait for what they did; a ``DevicePlan``, which is a table
that is uploaded once and run many times, does not: running it enqueues one kernel on the caller's stream. Results agree
with the native engine bit for bit.
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
from zeroelastic.executors.batches import DigestTotals
from zeroelastic.executors.build_info import load_library
from zeroelastic.executors.native_executor import Buffers, Error, Files, NativeCall, checksums, exception_of
from zeroelastic.executors.tables import (
    CASTS,
    Cast,
    DeviceBuffer,
    DigestRows,
    Endpoints,
    Moved,
    MoveOptions,
    Ranges,
    Table,
)
from zeroelastic.io.paths import local_paths

_MAX_SUMMED_ROWS = 1 << 18
"""Rows of one launch that sums: 15 MiB of tables on the device, and as much on the host while it is made."""


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = load_library("cuda")
    pointer = ctypes.c_void_p
    library.ze_cuda_error_text.restype = ctypes.c_char_p
    library.ze_cuda_error_text.argtypes = [ctypes.c_int32]
    for name, arguments in (
        ("plan_create", [pointer] * 4 + [ctypes.c_int32] * 2 + [pointer] * 2),
        ("plan_run", [pointer] * 3),
        ("read_segments", [pointer] * 5 + [ctypes.c_int32] + [pointer] * 4),
        ("plan_finish", [pointer] * 4),
        ("write_segments", [pointer] * 5 + [ctypes.c_int32] + [pointer] * 3),
    ):
        function = getattr(library, f"ze_cuda_{name}")
        function.restype, function.argtypes = ctypes.c_int32, arguments
    library.ze_cuda_plan_destroy.restype = None
    library.ze_cuda_plan_destroy.argtypes = [pointer]
    return library


def run(table: Table, options: MoveOptions, *, sides: Endpoints[DeviceBuffer], stream: int = 0) -> Moved:
    """Run a table as a ``tables.HostEngine``, in the memory of one device; it neither moves nor scans files.

    It runs on ``stream`` (``torch.cuda.Stream.cuda_stream``), after the work that is enqueued there, and returns when
    all is done. Files are read and written through at most 48 MiB of pinned host memory that the process keeps; their
    digests, checksums and conversions are made on the host, in the same pass. A progress function must not use this
    engine itself. Raises UnsupportedError when CUDA refuses.
    """
    device = _device(sides.buffers)
    if sides.src_paths is None and sides.dst_paths is None:
        if isinstance(table, Ranges):
            return _sum(table, sides.src, options, device, stream), 0
        with DevicePlan(table, sides.src, sides.dst, device=device, digest=options.digest, cast=options.cast) as plan:
            plan.run(stream)
            return plan.finish(stream), 0
    call, error, bytes_read = NativeCall(table, options), Error(), ctypes.c_int64()
    files = local_paths(sides.src_paths or ())
    arguments: tuple[Files | Buffers, ...]
    out: list[object] = [checksums(table, options)]
    if sides.src_paths is not None:
        function = _library().ze_cuda_read_segments
        out.append(ctypes.byref(bytes_read))
        arguments = call.files(files), call.device_buffers(sides.dst or ())
    else:
        function = _library().ze_cuda_write_segments
        arguments = call.device_buffers(sides.src), call.files(sides.dst_paths or ())
    references = [ctypes.byref(argument) for argument in (call.table, *arguments)]
    code = function(*references, call.digest, call.options, device, ctypes.c_void_p(stream), *out, ctypes.byref(error))
    call.end()
    if code:
        raise _exception(error, files, sides.dst_paths or ())
    return call.totals, bytes_read.value


def _sum(
    table: Ranges, src: Sequence[DeviceBuffer], options: MoveOptions, device: int, stream: int
) -> UInt64Array | None:
    """The digests of device memory, by kernels on ``stream`` that are waited for; nothing is copied to the host.

    The plan of the last call is kept for the next one of the same rows, so that a save that follows another uploads
    nothing. Memory, on the device and on the host: 56 bytes for each row, 4 for every block of a digest, and 8 for
    each digest.
    """
    digest = options.digest
    assert digest is not None and options.crc32 is None, "a GPU makes digests, not checksums"
    if len(table.nbytes) <= _MAX_SUMMED_ROWS:
        return _kept_sums.run(table, src, digest, device, stream)
    totals = DigestTotals(digest)
    for begin in range(0, len(table.nbytes), _MAX_SUMMED_ROWS):
        rows = np.arange(begin, min(begin + _MAX_SUMMED_ROWS, len(table.nbytes)))
        with DevicePlan(table.rows(rows), src, None, device=device, digest=totals.rows(rows)) as plan:
            plan.run(stream)
            totals.add(rows, plan.finish(stream))
    return totals.totals


class _KeptSums:
    """The plan of the last digests, with what it was made of; one call at a time has it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plan: DevicePlan | None = None
        self._made_of: tuple[object, ...] = ()

    def run(
        self, table: Ranges, src: Sequence[DeviceBuffer], digest: DigestRows, device: int, stream: int
    ) -> UInt64Array | None:
        rows = (table.src, table.src_offset, table.nbytes, digest.seeds, digest.stream, digest.start, digest.itemsize)
        made_of = (_library(), tuple(src), *(column.tobytes() for column in rows))
        with self._lock:
            if self._plan is None or self._made_of != made_of:
                self.close()
                self._plan = DevicePlan(table, src, None, device=device, digest=digest)
                self._made_of = made_of
            self._plan.run(stream)
            return self._plan.finish(stream)

    def close(self) -> None:
        """Free the plan's memory."""
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.close()


_kept_sums = _KeptSums()


class DevicePlan:
    """A table bound to device buffers; valid as long as they are, and to be closed, best by ``with``.

    Rows must not overlap in their destinations, nor a destination a source. Without ``dst`` the rows are only digested.
    ``totals`` is device memory of one uint64 per stream, to which digests are added; without it the plan has totals of
    its own, which ``finish`` returns. With a conversion, elements are aligned to their size and a digest's itemsize is
    the source's. Raises ConfigError when the CUDA engine is not built, UnsupportedError when CUDA refuses.
    """

    def __init__(
        self,
        table: Table,
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
        call = NativeCall(table, MoveOptions(digest, cast=cast), totals_address=address)
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
        """Wait for all work on a stream; returns the plan's own totals of the last run, if it has any.

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
