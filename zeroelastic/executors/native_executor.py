"""The native engine: tables of byte ranges moved by several threads, with a conversion and a digest in the same pass.

The work is done by the library built from csrc/ (interface: csrc/zeroelastic.h). It releases the GIL, checks every row
once, and starts no thread before the first call that has work for one. Results agree bit for bit with the numpy
executor, and a fault raises the same error; of several faults in different files, another one may come first. Ctrl-C
interrupts the work where there is a progress function.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Literal

from zeroelastic.core.digest import ByteArray
from zeroelastic.core.layout import Int64Array
from zeroelastic.executors.abi import Buffers, Error, Files, NativeCall, checksums, exception_of
from zeroelastic.executors.build_info import load_library
from zeroelastic.executors.tables import Endpoints, Moved, MoveOptions, Table, UInt32Array, default_threads
from zeroelastic.io.paths import local_paths

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
