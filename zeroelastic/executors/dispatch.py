"""Run a table of byte runs between files and buffers, by one of several engines that agree bit for bit.

``numpy`` is the reference and needs nothing. ``native`` is the C++ engine for files and host memory, ``cuda`` the one
for the memory of a GPU. ``OPERATIONS`` lists what each engine can do. "auto" takes the fastest engine that is built for
the memory it is given, and logs which. The memory of a device goes through host memory (``staged``) where a host engine
moves it.
Sources may be behind an object store: their rows are fetched by range, 64 MiB at a time.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from zeroelastic.core.digest import ByteArray, UInt64Array
from zeroelastic.core.digest import digest_range as reference_digest_range
from zeroelastic.errors import ConfigError, UnsupportedError
from zeroelastic.executors import cuda_executor, native_executor, numpy_executor
from zeroelastic.executors.batches import batches, join_crc32, join_crc32_groups
from zeroelastic.executors.build_info import EngineLibrary, describe_build, is_usable, load_library
from zeroelastic.executors.tables import (
    MAX_DIGESTED_BYTES,
    ByteBuffer,
    Cast,
    ConvertedCopies,
    CopyTable,
    DeviceBuffer,
    DigestRows,
    Endpoints,
    HostEngine,
    Moved,
    MoveOptions,
    Operation,
    ProgressFunction,
    Ranges,
    ReadResult,
    Table,
    UInt32Array,
)
from zeroelastic.io.paths import FilePath, local_path

if TYPE_CHECKING:
    import torch

__all__ = [
    "OPERATIONS", "Buffer", "ByteBuffer", "Cast", "ConvertedCopies", "CopyTable", "DeviceBuffer", "DigestRows",
    "Executor", "Operation", "Ranges", "ReadResult", "UInt32Array", "batches", "choose_executor", "copy_segments",
    "describe_build", "digest_range", "host_executor", "join_crc32", "join_crc32_groups", "move_segments",
    "read_segments", "scan_segments", "sum_segments", "write_segments",
]  # fmt: skip

Executor = Literal["auto", "numpy", "native", "cuda"]
_ALL: tuple[Operation, ...] = ("read", "copy", "write", "move", "scan", "sum")
OPERATIONS: dict[str, tuple[Operation, ...]] = {
    "numpy": _ALL,
    "native": _ALL,
    "cuda": ("read", "copy", "write", "sum"),
}
"""What each executor can do."""

Buffer: TypeAlias = "ByteArray | torch.Tensor | DeviceBuffer"
"""A side in memory: bytes, a contiguous tensor, of which the bytes are meant, or a range of a GPU's memory."""

logger = logging.getLogger(__name__)


_HOST: dict[str, HostEngine] = {"numpy": numpy_executor.run, "native": native_executor.run}


def read_segments(
    table: CopyTable,
    paths: Sequence[FilePath],
    buffers: Sequence[Buffer],
    *,
    digest: DigestRows | None = None,
    crc32: UInt32Array | None = None,
    cast: Cast = "none",
    copies: ConvertedCopies | None = None,
    threads: int | None = None,
    progress: ProgressFunction | None = None,
    executor: Executor = "auto",
) -> ReadResult:
    """Fill ``buffers`` from files as ``table`` says, each byte read once; digests in the same pass when asked.

    The rows are sorted by (source, source offset): neighbours are read together. With a conversion, their bytes are of
    the file.

    ``executor`` names an engine; "auto" takes the fastest that is built for the memory that is filled. The
    cuda engine runs on torch's current stream, or the default one for a DeviceBuffer. Every engine is done when the
    call returns. Raises ConfigError for an unknown engine, for one that is not built, and for
    one that cannot fill such memory; CheckpointError when a file ends early or cannot be read (with file and offset).

    ``copies``, of host memory and files on this machine, are made while the bytes are in the cache. ``crc32``, shape
    ``(num_rows,)``, is filled with the checksum of each row, as ``zlib.crc32``; there is none with a conversion.

    ``progress`` is called on this thread with the bytes that were read since the last call: about every 50 ms, also
    with 0, and once in the end, when the sum is that of the table. An exception in it, or in a signal's handler
    (KeyboardInterrupt), ends the call soon and is raised from it.
    """
    assert crc32 is None or cast == "none", "a checksum is of bytes as they are in the file"
    options = MoveOptions(digest, crc32, cast, threads=threads, progress=progress, copies=copies)
    name = _choose(executor, "read", buffers)
    assert copies is None or name in _HOST, "only host memory is converted beside"
    digests, bytes_read = _run(name, table, options, Endpoints(paths, dst=buffers))
    files = tuple(paths[int(number)] for number in np.flatnonzero(np.bincount(table.src)))
    return ReadResult(bytes_read, files, digests)


def copy_segments(
    table: CopyTable,
    src: Sequence[Buffer],
    dst: Sequence[Buffer],
    *,
    digest: DigestRows | None = None,
    cast: Cast = "none",
    threads: int | None = None,
    executor: Executor = "auto",
) -> UInt64Array | None:
    """Copy between buffers: flatten, unflatten, repartition. Returns the digests of the sources, when asked.

    Source and destination runs must not overlap each other in memory. The cuda engine wants both sides on one device,
    and with a conversion elements that are aligned to their size; host engines take sides on different devices.
    Errors as of ``read_segments``.
    """
    options = MoveOptions(digest, cast=cast, threads=threads)
    name = _choose(executor, "copy", [*src, *dst])
    return _run(name, table, options, Endpoints(src=src, dst=dst), may_stage=executor != "cuda")[0]


def write_segments(
    table: CopyTable,
    src: Sequence[Buffer],
    paths: Sequence[Path],
    *,
    digest: DigestRows | None = None,
    crc32: UInt32Array | None = None,
    cast: Cast = "none",
    sync: bool = False,
    threads: int | None = None,
    progress: ProgressFunction | None = None,
    executor: Executor = "auto",
) -> UInt64Array | None:
    """Write buffers into files that exist already, neither created nor truncated; digests in the same pass.

    ``crc32``, shape ``(num_rows,)``, is filled with the checksum of what was written of each row, as ``zlib.crc32``.
    ``sync`` flushes each file to its device before it returns. What is on a GPU goes through pinned host memory, while
    the copies of what comes next are under way ("cuda"), or by turns (a host engine). Raises OSError naming the file,
    and the byte at which writing failed; ConfigError as ``read_segments``. ``progress`` as there, in bytes of the
    sources.
    """
    options = MoveOptions(digest, crc32, cast, sync, threads, progress)
    name = _choose(executor, "write", src)
    return _run(name, table, options, Endpoints(src=src, dst_paths=paths), may_stage=executor != "cuda")[0]


def move_segments(
    table: CopyTable,
    src_paths: Sequence[FilePath],
    dst_paths: Sequence[Path],
    *,
    digest: DigestRows | None = None,
    crc32: UInt32Array | None = None,
    cast: Cast = "none",
    threads: int | None = None,
    progress: ProgressFunction | None = None,
    executor: Executor = "auto",
) -> UInt64Array | None:
    """Move runs between files that exist already, through at most 1 MiB per thread; digests in the same pass.

    ``crc32`` as of ``write_segments``. Raises CheckpointError for a source that is missing, ends early or
    cannot be read, OSError for a destination, both naming the file; ConfigError as ``read_segments``. ``progress`` as
    there.
    """
    options = MoveOptions(digest, crc32, cast, threads=threads, progress=progress)
    sides: Endpoints[Buffer] = Endpoints(src_paths, dst_paths=dst_paths)
    return _run(choose_executor(executor, "move"), table, options, sides)[0]


def scan_segments(
    table: Ranges,
    paths: Sequence[FilePath],
    *,
    digest: DigestRows | None = None,
    crc32: UInt32Array | None = None,
    threads: int | None = None,
    progress: ProgressFunction | None = None,
    executor: Executor = "auto",
) -> UInt64Array | None:
    """Digests and checksums of ranges of files, through at most 1 MiB per thread; nothing is kept.

    Returns the digests, when asked. ``crc32``, shape ``(num_rows,)``, is filled with the checksum of each row, as
    ``zlib.crc32``. Errors and ``progress`` as of ``read_segments``.
    """
    options = MoveOptions(digest, crc32, threads=threads, progress=progress)
    sides: Endpoints[Buffer] = Endpoints(paths)
    return _run(choose_executor(executor, "scan"), table, options, sides)[0]


def sum_segments(
    table: Ranges,
    src: Sequence[Buffer],
    *,
    digest: DigestRows | None = None,
    crc32: UInt32Array | None = None,
    threads: int | None = None,
    executor: Executor = "auto",
) -> UInt64Array | None:
    """Digests and checksums of ranges of memory, in one pass over it.

    Returns the digests, when asked; ``crc32`` as of ``scan_segments``, ConfigError as of ``read_segments``. Digests of
    a GPU's memory are made there; it has no checksums.
    """
    options = MoveOptions(digest, crc32, threads=threads)
    name = _choose(executor, "sum", src)
    return _run(name, table, options, Endpoints(src=src), may_stage=executor != "cuda")[0]


def _run(name: str, table: Table, options: MoveOptions, sides: Endpoints[Buffer], *, may_stage: bool = False) -> Moved:
    """Run the engine that was chosen. What CUDA refuses goes through host memory, if it ``may_stage``."""
    is_remote = not all(map(local_path, sides.src_paths or ()))
    if name == "cuda" and is_remote:
        name = _fastest()  # through host memory
    if name == "cuda":
        try:
            return cuda_executor.run(table, options, sides=sides.having(_device_buffers), stream=_stream(sides.buffers))
        except UnsupportedError as error:
            if not may_stage or any(isinstance(buffer, DeviceBuffer) for buffer in sides.buffers):
                raise
            logger.warning("memory of the GPU goes through host memory instead, which is slower: %s", error)
            name = _fastest()
    host = _HOST[name]
    if is_remote:
        from zeroelastic.executors.remote_executor import RemoteEngine

        host = RemoteEngine(host)
    if all(_kind(buffer) == "host" for buffer in sides.buffers):
        return host(table, options, sides=sides.having(_arrays))
    from zeroelastic.executors import staged

    return staged.run(table, options, sides=sides.having(_tensors), host=host)


def choose_executor(executor: Executor, operation: Operation = "read", *, on_gpu: bool = False) -> str:
    """The engine that a name stands for; "auto" is the fastest that is built for such memory, which is logged once.

    Raises ConfigError for an unknown name, for an engine that does not have the operation, naming those that do, and
    for one that is not built, saying how to build it.
    """
    if executor == "auto":
        return _fastest("cuda") if on_gpu else _fastest()
    if executor not in OPERATIONS:
        raise ConfigError(f"no executor {executor!r}; there are: auto, {', '.join(sorted(OPERATIONS))}")
    if operation not in OPERATIONS[executor]:
        able = sorted(name for name, operations in OPERATIONS.items() if operation in operations)
        raise ConfigError(f"executor {executor!r} has no {operation}_segments; these have: auto, {', '.join(able)}")
    if executor == "native" or executor == "cuda":
        load_library(executor)
    return executor


def host_executor(executor: Executor) -> Executor:
    """The engine for files and host memory: "auto" where the one that is named is for a GPU."""
    return "auto" if executor == "cuda" else executor


def _choose(executor: Executor, operation: Operation, buffers: Sequence[Buffer]) -> str:
    """Choose as ``choose_executor``, by the memory that is moved, too."""
    kinds = {_kind(buffer) for buffer in buffers}
    if executor == "auto":
        if kinds == {"cuda"} and len({buffer.device for buffer in _device_buffers(buffers)}) == 1:
            chosen = choose_executor("auto", operation, on_gpu=True)
            if chosen != "cuda" and any(isinstance(buffer, DeviceBuffer) for buffer in buffers):
                load_library("cuda")  # raises: torch does not know this memory
            return chosen
        return _fastest()
    chosen = choose_executor(executor, operation)
    if chosen == "cuda" and not kinds <= {"cuda"}:
        raise ConfigError(f"executor 'cuda' does not move memory of: {', '.join(sorted(kinds - {'cuda'}))}. Use auto.")
    return chosen


def _kind(buffer: Buffer) -> str:
    """The kind of device that a buffer is on: "host", "cuda", or as torch calls it."""
    if isinstance(buffer, np.ndarray):
        return "host"
    if isinstance(buffer, DeviceBuffer):
        return "cuda"
    kind = str(buffer.device.type)
    return "host" if kind == "cpu" else kind


def _arrays(buffers: Sequence[Buffer]) -> list[ByteArray]:
    return [buffer if isinstance(buffer, np.ndarray) else _bytes_of(buffer).numpy() for buffer in buffers]


def _tensors(buffers: Sequence[Buffer]) -> list[ByteArray | torch.Tensor]:
    tensors = [buffer for buffer in buffers if not isinstance(buffer, DeviceBuffer)]
    if len(tensors) < len(buffers):
        raise ConfigError("a device address is moved by the executor 'cuda' alone. Use it, or pass a tensor.")
    return tensors


def _device_buffers(buffers: Sequence[Buffer]) -> list[DeviceBuffer]:
    ranges: list[DeviceBuffer] = []
    for buffer in buffers:
        if not isinstance(buffer, DeviceBuffer):
            data = _bytes_of(buffer)
            buffer = DeviceBuffer(data.data_ptr(), data.numel(), data.device.index or 0)
        ranges.append(buffer)
    return ranges


def _bytes_of(buffer: Buffer) -> torch.Tensor:
    from zeroelastic.executors import staged

    assert not isinstance(buffer, (DeviceBuffer, np.ndarray)), "such memory is not for this engine"
    return staged.bytes_of(buffer)


def _stream(buffers: Sequence[Buffer]) -> int:
    for buffer in buffers:
        if not isinstance(buffer, (DeviceBuffer, np.ndarray)):
            from zeroelastic.executors import staged

            return staged.current_stream(buffer.device)
    return 0


@functools.cache
def _fastest(name: EngineLibrary = "native") -> str:
    """The engine of this name where it is built, else what takes its place; logged once."""
    what, instead = ("payload", "numpy") if name == "native" else ("memory of the GPU", "way of host memory")
    info = describe_build(name)
    if os.environ.get("RANK", "0") == "0":
        if info.usable:
            logger.debug("%s is moved by the %s engine (%s)", what, name, info.compiler)
        else:
            logger.warning("%s is moved by %s, which is slower: %s. %s", what, instead, info.reason, info.remedy)
    if info.usable:
        return name
    return "numpy" if name == "native" else _fastest()


def digest_range(data: ByteArray, itemsize: int, *, seed: int, start: int) -> int:
    """``digest.digest_range`` by the native engine where it is built, and in numpy where it is not; see DigestRows."""
    if itemsize == 2 * MAX_DIGESTED_BYTES:
        itemsize, start = MAX_DIGESTED_BYTES, 2 * start
    if is_usable("native"):
        return native_executor.digest_range(data, itemsize, seed=seed, start=start)
    return reference_digest_range(data, itemsize, seed=seed, start=start)
