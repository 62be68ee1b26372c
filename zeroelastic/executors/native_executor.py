"""The native engine: tables of byte runs moved by several threads, with a conversion and a digest in the same pass.

The work is done by the library built from csrc/ (interface: csrc/zeroelastic.h). It releases the GIL, checks every row
once, and starts no thread before the first call that has work for one. Results agree bit for bit with the numpy
executor, error messages included.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from zeroelastic.digest import ByteArray, UInt64Array
from zeroelastic.errors import CheckpointError, ConfigError, MissingFileError
from zeroelastic.executors.build_info import load_library
from zeroelastic.executors.table import ByteBuffer, DigestRows, ReadResult, ReadTable
from zeroelastic.layout import Int64Array

Cast = Literal["none", "float32->bfloat16", "float32->float16", "bfloat16->float32", "float16->float32"]
"""A conversion on the way, as ``Tensor.copy_`` rounds; row lengths and digests are those of the source."""

UInt32Array = npt.NDArray[np.uint32]

InstructionSet = Literal["plain", "avx2", "avx512"]

_CASTS: tuple[Cast, ...] = ("none", "float32->bfloat16", "float32->float16", "bfloat16->float32", "float16->float32")
_INSTRUCTION_SETS: tuple[InstructionSet, ...] = ("plain", "avx2", "avx512")
_MAX_DEFAULT_THREADS = 8

_OPEN_FAILED, _READ_FAILED, _END_OF_FILE, _WRITE_FAILED, _SYNC_FAILED, _BAD_TABLE, _NO_MEMORY = range(1, 8)
_SOURCE = 0


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """Row i moves ``nbytes[i]`` bytes at ``src_offset[i]`` of source ``src[i]`` to ``dst_offset[i]`` of ``dst[i]``.

    A side is a file or a buffer, as the function says. Rows must not overlap in their destinations. Each array has
    shape ``(num_rows,)``; all quantities are in bytes. With a conversion, ``nbytes`` is of the source.
    """

    src: Int64Array
    src_offset: Int64Array
    dst: Int64Array
    dst_offset: Int64Array
    nbytes: Int64Array


class _Error(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_int32),
        ("errnum", ctypes.c_int32),
        ("side", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("file", ctypes.c_int64),
        ("offset", ctypes.c_int64),
    )


class _Table(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("src", ctypes.c_void_p),
        ("src_offset", ctypes.c_void_p),
        ("dst", ctypes.c_void_p),
        ("dst_offset", ctypes.c_void_p),
        ("nbytes", ctypes.c_void_p),
    )


class _Files(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int64), ("paths", ctypes.POINTER(ctypes.c_char_p)))


class _Buffers(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int64), ("data", ctypes.c_void_p), ("nbytes", ctypes.c_void_p))


class _Digest(ctypes.Structure):
    _fields_ = (
        ("num_streams", ctypes.c_int64),
        ("seeds", ctypes.c_void_p),
        ("totals", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("start", ctypes.c_void_p),
        ("itemsize", ctypes.c_void_p),
    )


class _Options(ctypes.Structure):
    _fields_ = (
        ("threads", ctypes.c_int32),
        ("cast", ctypes.c_int32),
        ("sync", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = load_library("native")
    pointer = ctypes.c_void_p
    for name, num_arguments in (("read", 7), ("copy", 6), ("write", 7), ("move", 6)):
        function = getattr(library, f"ze_{name}_segments")
        function.restype = ctypes.c_int32
        function.argtypes = [pointer] * num_arguments
    library.ze_digest_range.restype = ctypes.c_uint64
    library.ze_digest_range.argtypes = [
        pointer,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.c_uint64,
        ctypes.c_int64,
        ctypes.c_int32,
    ]
    library.ze_crc32_join.restype = ctypes.c_uint32
    library.ze_crc32_join.argtypes = [pointer, pointer, ctypes.c_int64]
    for name in ("ze_isa", "ze_best_isa", "ze_limit_isa"):
        getattr(library, name).restype = ctypes.c_int32
    return library


def default_threads() -> int:
    """Threads of one call: ``ZEROELASTIC_THREADS``, else this rank's share of the cores, at most 8.

    Raises ConfigError when the variable is not a positive number.
    """
    asked = os.environ.get("ZEROELASTIC_THREADS")
    if asked is not None:
        if not asked.isdecimal() or int(asked) < 1:
            raise ConfigError(f"ZEROELASTIC_THREADS is {asked!r}, not a positive number of threads.")
        return int(asked)
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    sharing = int(local_ranks) if local_ranks.isdecimal() else 1
    return max(1, min(_MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0)) // max(1, sharing)))


def instruction_set() -> InstructionSet:
    """The instruction set whose kernels run."""
    return _INSTRUCTION_SETS[int(_library().ze_isa())]


def limit_instruction_set(limit: InstructionSet) -> InstructionSet:
    """Use at most this instruction set, for tests and measurements; returns the one in use now."""
    return _INSTRUCTION_SETS[int(_library().ze_limit_isa(_INSTRUCTION_SETS.index(limit)))]


def digest_range(data: ByteArray, itemsize: int, *, seed: int, start: int, threads: int | None = None) -> int:
    """As ``zeroelastic.digest.digest_range``."""
    assert itemsize in (1, 2, 4, 8) and len(data) % itemsize == 0 and start >= 0 and data.flags.c_contiguous
    threads = default_threads() if threads is None else threads
    return int(
        _library().ze_digest_range(
            data.ctypes.data, len(data) // itemsize, itemsize, seed & ((1 << 64) - 1), start, threads
        )
    )


def read_segments(
    table: ReadTable,
    buffers: Sequence[ByteBuffer],
    digest: DigestRows | None = None,
    *,
    cast: Cast = "none",
    threads: int | None = None,
) -> ReadResult:
    """Fill the buffers from files; memory beyond them: 256 KiB per thread with a conversion, else none.

    Raises MissingFileError or CheckpointError with the file and the offset at which it failed: of several failures,
    the first in file order.
    """
    rows = SegmentTable(table.file, table.file_offset, table.buffer, table.buffer_offset, table.nbytes)
    assert all(buffer.flags.writeable for buffer in buffers), "a destination is read-only"
    call = _Call(rows, digest, cast, threads)
    bytes_read = ctypes.c_int64()
    call.run("read", call.files(table.paths), call.buffers(buffers), ctypes.byref(bytes_read), src_paths=table.paths)
    files = tuple(table.paths[int(number)] for number in np.unique(table.file))
    return ReadResult(bytes_read.value, files, call.totals)


def copy_segments(
    table: SegmentTable,
    src: Sequence[ByteArray],
    dst: Sequence[ByteBuffer],
    *,
    digest: DigestRows | None = None,
    cast: Cast = "none",
    threads: int | None = None,
) -> UInt64Array | None:
    """Copy between memory buffers: flatten, unflatten, repartition. Returns the digests, when asked.

    Source and destination runs must not overlap each other in memory.
    """
    assert all(buffer.flags.writeable for buffer in dst), "a destination is read-only"
    call = _Call(table, digest, cast, threads)
    call.run("copy", call.buffers(src), call.buffers(dst))
    return call.totals


def write_segments(
    table: SegmentTable,
    src: Sequence[ByteArray],
    paths: Sequence[Path],
    *,
    digest: DigestRows | None = None,
    crc32: UInt32Array | None = None,
    cast: Cast = "none",
    sync: bool = False,
    threads: int | None = None,
) -> UInt64Array | None:
    """Write buffers into files that exist already, neither created nor truncated. Returns the digests, when asked.

    ``crc32``, shape ``(num_rows,)``, is filled with the checksum of what was written of each row, as ``zlib.crc32``.
    ``sync`` flushes each file to its device before it returns. Raises OSError naming the file.
    """
    call = _Call(table, digest, cast, threads, sync=sync)
    sums = None if crc32 is None else call.output(crc32, len(table.nbytes))
    call.run("write", call.buffers(src), call.files(paths), sums, dst_paths=paths)
    return call.totals


def join_crc32(crc32: UInt32Array, nbytes: Int64Array) -> int:
    """The checksum of runs that lie one behind the other, from the checksum and the length of each."""
    assert crc32.dtype == np.uint32 and nbytes.dtype == np.int64 and len(crc32) == len(nbytes)
    crc32, nbytes = np.ascontiguousarray(crc32), np.ascontiguousarray(nbytes)
    return int(_library().ze_crc32_join(crc32.ctypes.data, nbytes.ctypes.data, len(crc32)))


def move_segments(
    table: SegmentTable,
    src_paths: Sequence[Path],
    dst_paths: Sequence[Path],
    *,
    digest: DigestRows | None = None,
    cast: Cast = "none",
    sync: bool = False,
    threads: int | None = None,
) -> UInt64Array | None:
    """Move runs between files that exist already, through at most 1 MiB per thread. Returns the digests, when asked.

    Raises MissingFileError or CheckpointError for a source, OSError for a destination.
    """
    call = _Call(table, digest, cast, threads, sync=sync)
    call.run("move", call.files(src_paths), call.files(dst_paths), src_paths=src_paths, dst_paths=dst_paths)
    return call.totals


class _Call:
    """The arguments of one call, kept alive until it returns."""

    def __init__(
        self,
        table: SegmentTable,
        digest: DigestRows | None,
        cast: Cast,
        threads: int | None,
        *,
        sync: bool = False,
    ) -> None:
        self._alive: list[object] = []
        num_rows = len(table.nbytes)
        columns = [table.src, table.src_offset, table.dst, table.dst_offset, table.nbytes]
        self._table = _Table(num_rows, *(self._column(column, np.int64, num_rows) for column in columns))
        self._options = _Options(default_threads() if threads is None else threads, _CASTS.index(cast), sync, 0)
        assert self._options.threads >= 1, "at least one thread is needed"
        self.totals: UInt64Array | None = None
        self._digest: _Digest | None = None
        if digest is not None:
            num_streams = len(digest.seeds)
            self.totals = np.zeros(num_streams, dtype=np.uint64)
            self._digest = _Digest(
                num_streams,
                self._column(digest.seeds, np.uint64, num_streams),
                self._column(self.totals, np.uint64, num_streams),
                self._column(digest.stream, np.int64, num_rows),
                self._column(digest.start, np.int64, num_rows),
                self._column(digest.itemsize, np.int64, num_rows),
            )

    def _column(self, values: npt.NDArray[np.generic], dtype: type[np.generic], length: int) -> int:
        assert values.shape == (length,), f"a column has shape {values.shape}, not {(length,)}"
        column = np.ascontiguousarray(values, dtype=dtype)
        self._alive.append(column)
        return column.ctypes.data

    def output(self, values: UInt32Array, length: int) -> ctypes.c_void_p:
        assert values.shape == (length,) and values.dtype == np.uint32 and values.flags.c_contiguous
        return ctypes.c_void_p(values.ctypes.data)

    def buffers(self, buffers: Sequence[ByteArray]) -> _Buffers:
        assert all(b.dtype == np.uint8 and b.ndim == 1 and b.flags.c_contiguous for b in buffers), "not plain bytes"
        self._alive.append(tuple(buffers))
        addresses = np.array([buffer.ctypes.data for buffer in buffers], dtype=np.uint64)
        sizes = np.array([len(buffer) for buffer in buffers], dtype=np.int64)
        count = len(buffers)
        return _Buffers(count, self._column(addresses, np.uint64, count), self._column(sizes, np.int64, count))

    def files(self, paths: Sequence[Path]) -> _Files:
        names = (ctypes.c_char_p * len(paths))(*(os.fsencode(path) for path in paths))
        self._alive.append(names)
        return _Files(len(paths), names)

    def run(
        self,
        name: str,
        src: _Files | _Buffers,
        dst: _Files | _Buffers,
        *more: object,
        src_paths: Sequence[Path] = (),
        dst_paths: Sequence[Path] = (),
    ) -> None:
        """Call the library. Raises what its error code stands for."""
        error = _Error()
        by_reference = [
            ctypes.byref(self._table),
            ctypes.byref(src),
            ctypes.byref(dst),
            None if self._digest is None else ctypes.byref(self._digest),
            ctypes.byref(self._options),
        ]
        code = getattr(_library(), f"ze_{name}_segments")(*by_reference, *more, ctypes.byref(error))
        if code:
            paths = src_paths if error.side == _SOURCE else dst_paths
            raise _exception(error, paths[error.file] if 0 <= error.file < len(paths) else Path())


def _exception(error: _Error, path: Path) -> Exception:
    reason = os.strerror(error.errnum)
    if error.code == _BAD_TABLE:
        return AssertionError(f"row {error.offset} of a segment table leaves its file or buffer")
    if error.code == _NO_MEMORY:
        return MemoryError("the native engine is out of memory")
    if error.code == _END_OF_FILE:
        return CheckpointError(f"{path}: ends at byte {error.offset}. The file is truncated.")
    if error.code == _READ_FAILED:
        return CheckpointError(f"{path}: reading at byte {error.offset} failed: {reason}.")
    if error.code == _OPEN_FAILED and error.side == _SOURCE:
        if error.errnum == errno.ENOENT:
            return MissingFileError(f"{path}: no such file. The checkpoint is incomplete.")
        return CheckpointError(f"{path}: cannot be opened: {reason}.")
    if error.code == _WRITE_FAILED:
        return OSError(error.errnum, f"{reason}, writing at byte {error.offset}", str(path))
    if error.code in (_OPEN_FAILED, _SYNC_FAILED):
        return OSError(error.errnum, reason, str(path))
    return RuntimeError(f"the native engine failed with code {error.code}")
