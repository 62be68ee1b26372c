"""csrc/zeroelastic.h in ctypes: its structures, the arguments of a call, and the exceptions its errors stand for."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zeroelastic.digest import ByteArray, UInt64Array
from zeroelastic.errors import CheckpointError, MissingFileError, UnreadableError, UnsupportedError
from zeroelastic.executors.progress import ProgressFunction
from zeroelastic.executors.table import CASTS, Cast, DeviceBuffer, DigestRows, FileRows, MemoryRows, SegmentTable

_OPEN_FAILED, _READ_FAILED, _END_OF_FILE, _WRITE_FAILED, _SYNC_FAILED, _BAD_TABLE, _NO_MEMORY = range(1, 8)
_SOURCE = 0


class Error(ctypes.Structure):
    """What went wrong: a code, errno or a CUDA error, and where."""

    _fields_ = (
        ("code", ctypes.c_int32),
        ("errnum", ctypes.c_int32),
        ("side", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("file", ctypes.c_int64),
        ("offset", ctypes.c_int64),
    )


class Table(ctypes.Structure):
    """``ze_table``."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("src", ctypes.c_void_p),
        ("src_offset", ctypes.c_void_p),
        ("dst", ctypes.c_void_p),
        ("dst_offset", ctypes.c_void_p),
        ("nbytes", ctypes.c_void_p),
    )


class Files(ctypes.Structure):
    """``ze_files``."""

    _fields_ = (("count", ctypes.c_int64), ("paths", ctypes.POINTER(ctypes.c_char_p)))


class Buffers(ctypes.Structure):
    """``ze_buffers``: addresses in host or device memory."""

    _fields_ = (("count", ctypes.c_int64), ("data", ctypes.c_void_p), ("nbytes", ctypes.c_void_p))


class Digest(ctypes.Structure):
    """``ze_digest``."""

    _fields_ = (
        ("num_streams", ctypes.c_int64),
        ("seeds", ctypes.c_void_p),
        ("totals", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("start", ctypes.c_void_p),
        ("itemsize", ctypes.c_void_p),
    )


_TELL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Progress(ctypes.Structure):
    """``ze_progress``."""

    _fields_ = (
        ("tell", _TELL),
        ("nbytes", ctypes.c_int64),
        ("go_on", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class Options(ctypes.Structure):
    """``ze_options``."""

    _fields_ = (
        ("threads", ctypes.c_int32),
        ("cast", ctypes.c_int32),
        ("sync", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("progress", ctypes.POINTER(Progress)),
    )


class Call:
    """The arguments of one call, kept alive until it returns.

    ``totals`` are the digests, where they are asked for; ``totals_address`` puts them in device memory instead.
    ``progress`` is called on the way; what it raises ends the call, and is raised by ``end``.
    """

    def __init__(
        self,
        table: SegmentTable | FileRows | MemoryRows,
        digest: DigestRows | None,
        cast: Cast,
        *,
        threads: int = 1,
        sync: bool = False,
        totals_address: int | None = None,
        progress: ProgressFunction | None = None,
    ) -> None:
        self._alive: list[object] = []
        num_rows = len(table.nbytes)
        if isinstance(table, FileRows):
            columns = [table.file, table.file_offset, None, None, table.nbytes]
        elif isinstance(table, MemoryRows):
            columns = [table.buffer, table.offset, None, None, table.nbytes]
        else:
            columns = [table.src, table.src_offset, table.dst, table.dst_offset, table.nbytes]
        addresses = (None if column is None else self._column(column, np.int64, num_rows) for column in columns)
        self.table = Table(num_rows, *addresses)
        assert threads >= 1, "at least one thread is needed"
        self._server: Generator[None, object, None] | None = None
        self._raised: list[BaseException] = []
        told = None if progress is None else self._progress(progress)
        self.options = Options(threads, CASTS.index(cast), sync, 0, told)
        self.totals: UInt64Array | None = None
        self._digest: Digest | None = None
        if digest is not None:
            num_streams = len(digest.seeds)
            if totals_address is None:
                self.totals = np.zeros(num_streams, dtype=np.uint64)
                totals_address = self._column(self.totals, np.uint64, num_streams)
            self._digest = Digest(
                num_streams,
                self._column(digest.seeds, np.uint64, num_streams),
                totals_address,
                self._column(digest.stream, np.int64, num_rows),
                self._column(digest.start, np.int64, num_rows),
                self._column(digest.itemsize, np.int64, num_rows),
            )

    @property
    def digest(self) -> object:
        """A reference to the digest, or None."""
        return None if self._digest is None else ctypes.byref(self._digest)

    def buffers(self, buffers: Sequence[ByteArray]) -> Buffers:
        """Host memory as a side of the call."""
        assert all(b.dtype == np.uint8 and b.ndim == 1 and b.flags.c_contiguous for b in buffers), "not plain bytes"
        self._alive.append(tuple(buffers))
        return self._ranges([buffer.ctypes.data for buffer in buffers], [len(buffer) for buffer in buffers])

    def device_buffers(self, buffers: Sequence[DeviceBuffer]) -> Buffers:
        """Device memory as a side of the call."""
        return self._ranges([buffer.address for buffer in buffers], [buffer.nbytes for buffer in buffers])

    def files(self, paths: Sequence[Path]) -> Files:
        """Files as a side of the call."""
        names = (ctypes.c_char_p * len(paths))(*(os.fsencode(path) for path in paths))
        self._alive.append(names)
        return Files(len(paths), names)

    def end(self) -> None:
        """Let go of the progress function, and raise what it raised, if it did."""
        if self._server is not None:
            self._server.close()
        if self._raised:
            raise self._raised.pop()

    def _progress(self, function: ProgressFunction) -> ctypes._Pointer[Progress]:
        told = Progress()
        self._server = _serve(told, function, self._raised)
        next(self._server)
        told.tell = _TELL(self._server.send)
        return ctypes.pointer(told)

    def _ranges(self, addresses: list[int], sizes: list[int]) -> Buffers:
        at, nbytes = np.array(addresses, dtype=np.uint64), np.array(sizes, dtype=np.int64)
        count = len(addresses)
        return Buffers(count, self._column(at, np.uint64, count), self._column(nbytes, np.int64, count))

    def _column(self, values: npt.NDArray[np.generic], dtype: type[np.generic], length: int) -> int:
        assert values.shape == (length,), f"a column has shape {values.shape}, not {(length,)}"
        column = np.ascontiguousarray(values, dtype=dtype)
        self._alive.append(column)
        return column.ctypes.data


def _serve(told: Progress, function: ProgressFunction, raised: list[BaseException]) -> Generator[None, object, None]:
    """Calls the function whenever the engine tells, and keeps what it raises.

    A generator, because a signal's handler runs as soon as Python does: what it raises (KeyboardInterrupt) is raised
    where a generator waits, inside the ``try``; a function would be left before it had entered its own.
    """
    try:
        while True:
            yield
            function(told.nbytes)
            told.go_on = 1
    except GeneratorExit:
        return
    except BaseException as error:
        raised.append(error)
        told.go_on = 0
    yield


def exception_of(
    error: Error,
    engine: str,
    *,
    src_paths: Sequence[Path] = (),
    dst_paths: Sequence[Path] = (),
    internal: str = "",
) -> Exception:
    """The exception that an error stands for; ``internal`` is the text of a failure inside the engine."""
    paths = src_paths if error.side == _SOURCE else dst_paths
    path = paths[error.file] if 0 <= error.file < len(paths) else Path()
    reason = os.strerror(error.errnum)
    if error.code == _BAD_TABLE:
        return AssertionError(f"row {error.offset} of a segment table leaves its file or buffer")
    if error.code == _NO_MEMORY:
        return MemoryError(f"the {engine} engine is out of memory")
    if error.code == _END_OF_FILE:
        return CheckpointError(f"{path}: ends at byte {error.offset}. The file is truncated.")
    if error.code == _READ_FAILED:
        return UnreadableError(f"{path}: reading at byte {error.offset} failed: {reason}.")
    if error.code == _OPEN_FAILED and error.side == _SOURCE:
        if error.errnum == errno.ENOENT:
            return MissingFileError(f"{path}: no such file. The checkpoint is incomplete.")
        return UnreadableError(f"{path}: cannot be opened: {reason}.")
    if error.code == _WRITE_FAILED:
        return OSError(error.errnum, f"{reason}, writing at byte {error.offset}", str(path))
    if error.code in (_OPEN_FAILED, _SYNC_FAILED):
        return OSError(error.errnum, reason, str(path))
    if internal:
        return UnsupportedError(f"the {engine} engine failed: {internal}.")
    return RuntimeError(f"the {engine} engine failed with code {error.code}")
