"""The native engine: tables of byte ranges moved by several threads, with a conversion and a digest in the same pass.

The work is done by the library built from csrc/. It releases the GIL, checks every row once, and starts no thread
before the first call that has work for one. Results agree bit for bit with the numpy executor, and a fault raises the
same error; of several faults in different files, another one may come first. Ctrl-C interrupts the work where there is
a progress function.

Its interface is csrc/zeroelastic.h, here in ctypes, which the CUDA engine has too: the structures, the arguments of a
call (``NativeCall``), and the exceptions that its errors stand for.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from zeroelastic.core.digest import ByteArray, UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import CheckpointError, UnreadableError, UnsupportedError, missing_file
from zeroelastic.executors import tables
from zeroelastic.executors.build_info import load_library
from zeroelastic.executors.tables import (
    CASTS,
    ByteBuffer,
    CopyTable,
    DeviceBuffer,
    Endpoints,
    Moved,
    MoveOptions,
    ProgressFunction,
    Table,
    UInt32Array,
    check_crc32,
    default_threads,
)
from zeroelastic.io.paths import local_paths

_OPEN_FAILED, _READ_FAILED, _END_OF_FILE, _WRITE_FAILED, _SYNC_FAILED, BAD_TABLE, _NO_MEMORY = range(1, 8)
_SOURCE = 0


_I32, _I64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_CALLBACK = ctypes.CFUNCTYPE(None, _PTR)


class Error(ctypes.Structure):
    """``ze_error``: a code, errno or a CUDA error, and where."""

    _fields_ = (*((name, _I32) for name in ("code", "errnum", "side", "reserved")), ("file", _I64), ("offset", _I64))


class TableStruct(ctypes.Structure):
    """``ze_table``."""

    _fields_ = (
        ("num_rows", _I64),
        *((name, _PTR) for name in ("src", "src_offset", "dst", "dst_offset", "nbytes")),
    )


class Files(ctypes.Structure):
    """``ze_files``."""

    _fields_ = (("count", _I64), ("paths", ctypes.POINTER(ctypes.c_char_p)))


class Buffers(ctypes.Structure):
    """``ze_buffers``: addresses in host or device memory."""

    _fields_ = (("count", _I64), ("data", _PTR), ("nbytes", _PTR))


class Digest(ctypes.Structure):
    """``ze_digest``."""

    _fields_ = (
        ("num_streams", _I64),
        *((name, _PTR) for name in ("seeds", "totals", "stream", "start", "itemsize")),
    )


class ProgressStruct(ctypes.Structure):
    """``ze_progress``."""

    _fields_ = (("report", _CALLBACK), ("nbytes", _I64), ("keep_going", _I32), ("reserved", _I32))


class CallOptions(ctypes.Structure):
    """``ze_options``."""

    _fields_ = (
        *((name, _I32) for name in ("threads", "cast", "sync", "copies_cast")),
        ("progress", ctypes.POINTER(ProgressStruct)),
        ("copies", ctypes.POINTER(Buffers)),
    )


class NativeCall:
    """The arguments of one call, kept alive until it returns.

    ``totals`` are the digests, where they are asked for; ``totals_address`` puts them in device memory instead.
    The progress function is called meanwhile; an exception in it ends the call, and ``end`` raises it.
    """

    def __init__(self, table: tables.Table, options: MoveOptions, *, totals_address: int | None = None) -> None:
        self._alive: list[object] = []
        num_rows = len(table.nbytes)
        to = (table.dst, table.dst_offset) if isinstance(table, CopyTable) else (None, None)
        columns = (table.src, table.src_offset, *to, table.nbytes)
        addresses = (None if c is None else self._column(c, np.int64, num_rows) for c in columns)
        self.table = TableStruct(num_rows, *addresses)
        threads = default_threads() if options.threads is None else options.threads
        assert threads >= 1, "at least one thread is needed"
        self._server: Generator[None, object, None] | None = None
        self._raised: list[BaseException] = []
        progress = None if options.progress is None else self._progress(options.progress)
        copies = None if options.copies is None else ctypes.pointer(self._copies(options.copies.buffers))
        copies_cast = "none" if options.copies is None else options.copies.cast
        self._options = CallOptions(
            threads, CASTS.index(options.cast), options.sync, CASTS.index(copies_cast), progress, copies
        )
        self.totals: UInt64Array | None = None
        self._digest: Digest | None = None
        digest = options.digest
        if digest is not None:
            num_streams = len(digest.seeds)
            if totals_address is None:
                self.totals = np.zeros(num_streams, dtype=np.uint64)
                totals_address = self._column(self.totals, np.uint64, num_streams)
            rows = (self._column(c, np.int64, num_rows) for c in (digest.stream, digest.start, digest.itemsize))
            seeds = self._column(digest.seeds, np.uint64, num_streams)
            self._digest = Digest(num_streams, seeds, totals_address, *rows)

    @property
    def digest(self) -> object:
        """A reference to the digest, or None."""
        return None if self._digest is None else ctypes.byref(self._digest)

    @property
    def options(self) -> object:
        """A reference to the options."""
        return ctypes.byref(self._options)

    def buffers(self, buffers: Sequence[ByteArray]) -> Buffers:
        """Host memory as a side of the call."""
        assert all(b.dtype == np.uint8 and b.ndim == 1 and b.flags.c_contiguous for b in buffers), "not plain bytes"
        self._alive.append(tuple(buffers))
        return self._ranges([buffer.ctypes.data for buffer in buffers], [len(buffer) for buffer in buffers])

    def _copies(self, buffers: Sequence[ByteBuffer | None]) -> Buffers:
        kept = [buffer if buffer is not None else np.empty(0, dtype=np.uint8) for buffer in buffers]
        self._alive.append(kept)
        addresses = [0 if buffer is None else buffer.ctypes.data for buffer in buffers]
        return self._ranges(addresses, [len(buffer) for buffer in kept])

    def device_buffers(self, buffers: Sequence[DeviceBuffer]) -> Buffers:
        """Device memory as a side of the call."""
        return self._ranges([buffer.address for buffer in buffers], [buffer.nbytes for buffer in buffers])

    def files(self, paths: Sequence[Path]) -> Files:
        """Files as a side of the call."""
        names = (ctypes.c_char_p * len(paths))(*(os.fsencode(path) for path in paths))
        self._alive.append(names)
        return Files(len(paths), names)

    def end(self) -> None:
        """Release the progress function, and raise its exception, if there was one."""
        if self._server is not None:
            self._server.close()
        if self._raised:
            raise self._raised.pop()

    def _progress(self, function: ProgressFunction) -> ctypes._Pointer[ProgressStruct]:
        progress = ProgressStruct()
        self._server = _serve(progress, function, self._raised)
        next(self._server)
        progress.report = _CALLBACK(self._server.send)
        return ctypes.pointer(progress)

    def _ranges(self, addresses: list[int], sizes: list[int]) -> Buffers:
        at, nbytes = np.array(addresses, dtype=np.uint64), np.array(sizes, dtype=np.int64)
        count = len(addresses)
        return Buffers(count, self._column(at, np.uint64, count), self._column(nbytes, np.int64, count))

    def _column(self, values: npt.NDArray[np.generic], dtype: type[np.generic], length: int) -> int:
        assert values.shape == (length,), f"a column has shape {values.shape}, not {(length,)}"
        column = np.ascontiguousarray(values, dtype=dtype)
        self._alive.append(column)
        return column.ctypes.data


def checksums(table: tables.Table, options: MoveOptions) -> ctypes.c_void_p | None:
    """The address of the array that takes the checksum of each row, where they are asked for."""
    check_crc32(options.crc32, len(table.nbytes))
    return None if options.crc32 is None else ctypes.c_void_p(options.crc32.ctypes.data)


def _serve(
    progress: ProgressStruct, function: ProgressFunction, raised: list[BaseException]
) -> Generator[None, object, None]:
    """Call the function whenever the engine reports progress, and keep its exception.

    A generator, because a signal's handler runs as soon as Python does: what it raises (KeyboardInterrupt) is raised
    where a generator waits, inside the ``try``; a function would be left before it had entered its own.
    """
    try:
        while True:
            yield
            function(progress.nbytes)
            progress.keep_going = 1
    except GeneratorExit:
        return
    except BaseException as error:
        raised.append(error)
        progress.keep_going = 0
    yield


def exception_of(
    error: Error, engine: str, *, src_paths: Sequence[Path] = (), dst_paths: Sequence[Path] = (), internal: str = ""
) -> Exception:
    """The exception that an error stands for; ``internal`` is the text of a failure inside the engine."""
    paths = src_paths if error.side == _SOURCE else dst_paths
    path = paths[error.file] if 0 <= error.file < len(paths) else Path()
    reason = os.strerror(error.errnum)
    if error.code == BAD_TABLE:
        return AssertionError(f"row {error.offset} of a segment table leaves its file or buffer")
    if error.code == _NO_MEMORY:
        return MemoryError(f"the {engine} engine is out of memory")
    if error.code == _END_OF_FILE:
        return CheckpointError(f"{path}: ends at byte {error.offset}. The file is truncated.")
    if error.code == _READ_FAILED:
        return UnreadableError(f"{path}: reading at byte {error.offset} failed: {reason}.")
    if error.code == _OPEN_FAILED and error.side == _SOURCE:
        if error.errnum == errno.ENOENT:
            return missing_file(path)
        return UnreadableError(f"{path}: cannot be opened: {reason}.")
    if error.code == _WRITE_FAILED:
        return OSError(error.errnum, f"{reason}, writing at byte {error.offset}", str(path))
    if error.code in (_OPEN_FAILED, _SYNC_FAILED):
        return OSError(error.errnum, reason, str(path))
    if internal:
        return UnsupportedError(f"the {engine} engine failed: {internal}.")
    return RuntimeError(f"the {engine} engine failed with code {error.code}")


InstructionSet = Literal["plain", "avx2", "avx512"]

_INSTRUCTION_SETS: tuple[InstructionSet, ...] = ("plain", "avx2", "avx512")


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = load_library("native")
    pointer = ctypes.c_void_p
    for name, num_arguments in (("read", 8), ("copy", 7), ("write", 7), ("move", 7), ("scan", 6), ("sum", 6)):
        function = getattr(library, f"ze_{name}_segments")
        function.restype = ctypes.c_int32
        function.argtypes = [pointer] * num_arguments
    library.ze_digest_range.restype = ctypes.c_uint64
    number, wide = ctypes.c_int32, ctypes.c_int64
    library.ze_digest_range.argtypes = [pointer, wide, number, ctypes.c_uint64, wide, number]
    library.ze_crc32_join.restype = ctypes.c_uint32
    library.ze_crc32_join.argtypes = [pointer, pointer, ctypes.c_int64]
    for name in ("ze_isa", "ze_best_isa", "ze_limit_isa"):
        getattr(library, name).restype = ctypes.c_int32
    return library


def instruction_set() -> InstructionSet:
    """The instruction set whose kernels run."""
    return _INSTRUCTION_SETS[int(_library().ze_isa())]


def limit_instruction_set(limit: InstructionSet) -> InstructionSet:
    """Use at most this instruction set, for tests and measurements; returns the one in use now."""
    return _INSTRUCTION_SETS[int(_library().ze_limit_isa(_INSTRUCTION_SETS.index(limit)))]


def digest_range(data: ByteArray, itemsize: int, *, seed: int, start: int, threads: int | None = None) -> int:
    """Compute ``zeroelastic.core.digest.digest_range``."""
    assert itemsize in (1, 2, 4, 8) and len(data) % itemsize == 0 and start >= 0 and data.flags.c_contiguous
    threads = default_threads() if threads is None else threads
    return int(
        _library().ze_digest_range(
            data.ctypes.data, len(data) // itemsize, itemsize, seed & ((1 << 64) - 1), start, threads
        )
    )


def join_crc32(crc32: UInt32Array, nbytes: Int64Array) -> int:
    """Compute ``zeroelastic.executors.batches.join_crc32``."""
    return int(_library().ze_crc32_join(crc32.ctypes.data, nbytes.ctypes.data, len(crc32)))


def run(table: Table, options: MoveOptions, *, sides: Endpoints[ByteArray]) -> Moved:
    """Run a table as a ``tables.HostEngine``.

    Memory: 256 KiB per thread to read with a conversion, 1 MiB to move or scan files.
    """
    assert all(buffer.flags.writeable for buffer in sides.dst or ()), "a destination is read-only"
    call, error, bytes_read = NativeCall(table, options), Error(), ctypes.c_int64()
    files, operation = local_paths(sides.src_paths or ()), sides.operation
    arguments: list[Files | Buffers] = [call.files(files) if sides.src_paths is not None else call.buffers(sides.src)]
    if sides.dst_paths is not None:
        arguments.append(call.files(sides.dst_paths))
    elif sides.dst is not None:
        arguments.append(call.buffers(sides.dst))
    references = [ctypes.byref(argument) for argument in (call.table, *arguments)]
    more = [checksums(table, options), *([ctypes.byref(bytes_read)] if operation == "read" else [])]
    function = getattr(_library(), f"ze_{operation}_segments")
    code = function(*references, call.digest, call.options, *more, ctypes.byref(error))
    call.end()
    if code:
        raise exception_of(error, "native", src_paths=files, dst_paths=sides.dst_paths or ())
    return call.totals, bytes_read.value
