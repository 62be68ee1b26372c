"""The native engine: tables of byte runs moved by several threads, with a conversion and a digest in the same pass.

The work is done by the library built from csrc/ (interface: csrc/zeroelastic.h). It releases the GIL, checks every row
once, and starts no thread before the first call that has work for one. Results agree bit for bit with the numpy
executor, and a fault raises the same error; of several faults in different files, another one may come first. Ctrl-C
interrupts the work where there is a progress function.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from zeroelastic.digest import ByteArray, UInt64Array
from zeroelastic.errors import ConfigError
from zeroelastic.executors.build_info import load_library
from zeroelastic.executors.c_interface import Buffers, Call, Error, Files, exception_of
from zeroelastic.executors.progress import ProgressFunction
from zeroelastic.executors.table import (
    ByteBuffer,
    Cast,
    DigestRows,
    FileRows,
    MemoryRows,
    ReadResult,
    ReadTable,
    SegmentTable,
    UInt32Array,
    check_crc32,
)
from zeroelastic.layout import Int64Array
from zeroelastic.storage import FilePath, local_paths

InstructionSet = Literal["plain", "avx2", "avx512"]

_INSTRUCTION_SETS: tuple[InstructionSet, ...] = ("plain", "avx2", "avx512")
_MAX_DEFAULT_THREADS = 8


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = load_library("native")
    pointer = ctypes.c_void_p
    for name, num_arguments in (("read", 7), ("copy", 6), ("write", 7), ("move", 7), ("scan", 6), ("sum", 6)):
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
    progress: ProgressFunction | None = None,
) -> ReadResult:
    """Fill the buffers from files; memory beyond them: 256 KiB per thread with a conversion, else none.

    Raises MissingFileError or CheckpointError with the file and the offset at which it failed: of several failures,
    the first in file order.
    """
    assert all(buffer.flags.writeable for buffer in buffers), "a destination is read-only"
    call = _call(table.segments, digest, cast, threads, progress=progress)
    bytes_read = ctypes.c_int64()
    src, dst = call.files(table.local_paths), call.buffers(buffers)
    _run("read", call, src, dst, ctypes.byref(bytes_read), src_paths=table.local_paths)
    return ReadResult(bytes_read.value, table.files, call.totals)


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
    call = _call(table, digest, cast, threads)
    _run("copy", call, call.buffers(src), call.buffers(dst))
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
    progress: ProgressFunction | None = None,
) -> UInt64Array | None:
    """Write buffers into files that exist already, neither created nor truncated. Returns the digests, when asked.

    ``crc32``, shape ``(num_rows,)``, is filled with the checksum of what was written of each row, as ``zlib.crc32``.
    ``sync`` flushes each file to its device before it returns. Raises OSError naming the file.
    """
    check_crc32(crc32, len(table.nbytes))
    call = _call(table, digest, cast, threads, sync=sync, progress=progress)
    _run("write", call, call.buffers(src), call.files(paths), _address(crc32), dst_paths=paths)
    return call.totals


def join_crc32(crc32: UInt32Array, nbytes: Int64Array) -> int:
    """As ``zeroelastic.executors.crc32.join_crc32``."""
    return int(_library().ze_crc32_join(crc32.ctypes.data, nbytes.ctypes.data, len(crc32)))


def move_segments(
    table: SegmentTable,
    src_paths: Sequence[FilePath],
    dst_paths: Sequence[Path],
    *,
    digest: DigestRows | None = None,
    crc32: UInt32Array | None = None,
    cast: Cast = "none",
    sync: bool = False,
    threads: int | None = None,
    progress: ProgressFunction | None = None,
) -> UInt64Array | None:
    """Move runs between files that exist already, through at most 1 MiB per thread. Returns the digests, when asked.

    ``crc32`` and ``sync`` as of ``write_segments``. Raises MissingFileError or CheckpointError for a source, OSError
    for a destination.
    """
    check_crc32(crc32, len(table.nbytes))
    call = _call(table, digest, cast, threads, sync=sync, progress=progress)
    sources = local_paths(src_paths)
    src, dst = call.files(sources), call.files(dst_paths)
    _run("move", call, src, dst, _address(crc32), src_paths=sources, dst_paths=dst_paths)
    return call.totals


def scan_segments(
    table: FileRows,
    *,
    digest: DigestRows | None = None,
    crc32: UInt32Array | None = None,
    threads: int | None = None,
    progress: ProgressFunction | None = None,
) -> UInt64Array | None:
    """Digests, when asked, and checksums of rows of files, through at most 1 MiB per thread; nothing is kept.

    ``crc32``, shape ``(num_rows,)``, is filled with the checksum of each row, as ``zlib.crc32``. Raises what
    ``read_segments`` raises.
    """
    check_crc32(crc32, len(table.nbytes))
    call = _call(table, digest, "none", threads, progress=progress)
    _run("scan", call, call.files(table.local_paths), None, _address(crc32), src_paths=table.local_paths)
    return call.totals


def sum_segments(
    table: MemoryRows,
    src: Sequence[ByteArray],
    *,
    digest: DigestRows | None = None,
    crc32: UInt32Array | None = None,
    threads: int | None = None,
) -> UInt64Array | None:
    """Digests, when asked, and checksums of rows of memory. ``crc32`` as of ``scan_segments``."""
    check_crc32(crc32, len(table.nbytes))
    call = _call(table, digest, "none", threads)
    _run("sum", call, call.buffers(src), None, _address(crc32))
    return call.totals


def _address(crc32: UInt32Array | None) -> ctypes.c_void_p | None:
    return None if crc32 is None else ctypes.c_void_p(crc32.ctypes.data)


def _call(
    table: SegmentTable | FileRows | MemoryRows,
    digest: DigestRows | None,
    cast: Cast,
    threads: int | None,
    *,
    sync: bool = False,
    progress: ProgressFunction | None = None,
) -> Call:
    threads = default_threads() if threads is None else threads
    return Call(table, digest, cast, threads=threads, sync=sync, progress=progress)


def _run(
    name: str,
    call: Call,
    src: Files | Buffers,
    dst: Files | Buffers | None,
    *more: object,
    src_paths: Sequence[Path] = (),
    dst_paths: Sequence[Path] = (),
) -> None:
    error = Error()
    function = getattr(_library(), f"ze_{name}_segments")
    sides = [ctypes.byref(side) for side in (src, dst) if side is not None]
    options = ctypes.byref(call.options)
    code = function(ctypes.byref(call.table), *sides, call.digest, options, *more, ctypes.byref(error))
    call.end()
    if code:
        raise exception_of(error, "native", src_paths=src_paths, dst_paths=dst_paths)
