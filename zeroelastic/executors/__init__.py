"""Run a table of byte runs between files and buffers, by one of several engines that agree bit for bit.

``numpy`` is the reference and needs nothing; ``native`` is the C++ engine, for host memory and files.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from zeroelastic.digest import ByteArray, UInt64Array, digest_range_reference, use_digest_range
from zeroelastic.errors import ConfigError
from zeroelastic.executors import native_executor, numpy_executor
from zeroelastic.executors.build_info import describe_build, load_library
from zeroelastic.executors.crc32 import join_crc32
from zeroelastic.executors.table import (
    ByteBuffer,
    Cast,
    DeviceBuffer,
    DigestRows,
    ReadResult,
    ReadTable,
    SegmentTable,
    UInt32Array,
)

__all__ = [
    "ByteBuffer",
    "Cast",
    "DeviceBuffer",
    "DigestRows",
    "Executor",
    "Operation",
    "ReadResult",
    "ReadTable",
    "SegmentTable",
    "UInt32Array",
    "choose_executor",
    "copy_segments",
    "describe_build",
    "join_crc32",
    "move_segments",
    "read_segments",
    "write_segments",
]

Executor = Literal["auto", "numpy", "native"]
Operation = Literal["read", "copy", "write", "move"]


class _HostEngine(Protocol):
    """What the module of an engine for files and host memory has."""

    def read_segments(
        self,
        table: ReadTable,
        buffers: Sequence[ByteBuffer],
        digest: DigestRows | None = None,
        *,
        cast: Cast = "none",
        threads: int | None = None,
    ) -> ReadResult: ...

    def copy_segments(
        self,
        table: SegmentTable,
        src: Sequence[ByteArray],
        dst: Sequence[ByteBuffer],
        *,
        digest: DigestRows | None = None,
        cast: Cast = "none",
        threads: int | None = None,
    ) -> UInt64Array | None: ...

    def write_segments(
        self,
        table: SegmentTable,
        src: Sequence[ByteArray],
        paths: Sequence[Path],
        *,
        digest: DigestRows | None = None,
        crc32: UInt32Array | None = None,
        cast: Cast = "none",
        sync: bool = False,
        threads: int | None = None,
    ) -> UInt64Array | None: ...

    def move_segments(
        self,
        table: SegmentTable,
        src_paths: Sequence[Path],
        dst_paths: Sequence[Path],
        *,
        digest: DigestRows | None = None,
        cast: Cast = "none",
        sync: bool = False,
        threads: int | None = None,
    ) -> UInt64Array | None: ...


_HOST: dict[str, _HostEngine] = {"numpy": numpy_executor, "native": native_executor}

logger = logging.getLogger(__name__)


def read_segments(
    table: ReadTable,
    buffers: Sequence[ByteBuffer],
    *,
    digest: DigestRows | None = None,
    cast: Cast = "none",
    threads: int | None = None,
    executor: Executor = "auto",
) -> ReadResult:
    """Fill ``buffers`` from files as ``table`` says, each byte read once; digests in the same pass when asked.

    ``executor`` names an engine; "auto" takes the fastest that is built. Raises ConfigError for an unknown one and for
    one that is not built, CheckpointError when a file ends early or cannot be read (with file and offset).
    """
    engine = _HOST[choose_executor(executor)]
    return engine.read_segments(table, buffers, digest, cast=cast, threads=threads)


def copy_segments(
    table: SegmentTable,
    src: Sequence[ByteArray],
    dst: Sequence[ByteBuffer],
    *,
    digest: DigestRows | None = None,
    cast: Cast = "none",
    threads: int | None = None,
    executor: Executor = "auto",
) -> UInt64Array | None:
    """Copy between buffers: flatten, unflatten, repartition. Returns the digests of the sources, when asked.

    Source and destination runs must not overlap each other in memory. Raises ConfigError as ``read_segments``.
    """
    engine = _HOST[choose_executor(executor)]
    return engine.copy_segments(table, src, dst, digest=digest, cast=cast, threads=threads)


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
    executor: Executor = "auto",
) -> UInt64Array | None:
    """Write buffers into files that exist already, neither created nor truncated; digests in the same pass.

    ``crc32``, shape ``(num_rows,)``, is filled with the checksum of what was written of each row, as ``zlib.crc32``.
    ``sync`` flushes each file to its device before it returns. Raises OSError naming the file, and the byte at which
    writing failed; ConfigError as ``read_segments``.
    """
    engine = _HOST[choose_executor(executor)]
    return engine.write_segments(table, src, paths, digest=digest, crc32=crc32, cast=cast, sync=sync, threads=threads)


def move_segments(
    table: SegmentTable,
    src_paths: Sequence[Path],
    dst_paths: Sequence[Path],
    *,
    digest: DigestRows | None = None,
    cast: Cast = "none",
    sync: bool = False,
    threads: int | None = None,
    executor: Executor = "auto",
) -> UInt64Array | None:
    """Move runs between files that exist already, through at most 1 MiB per thread; digests in the same pass.

    Raises CheckpointError for a source that is missing, ends early or cannot be read, OSError for a destination, both
    naming the file; ConfigError as ``read_segments``.
    """
    engine = _HOST[choose_executor(executor)]
    return engine.move_segments(table, src_paths, dst_paths, digest=digest, cast=cast, sync=sync, threads=threads)


def choose_executor(executor: Executor) -> str:
    """The engine that a name stands for; "auto" is the fastest that is built, which is logged once.

    Raises ConfigError for an unknown name, and for an engine that is not built, saying how to build it.
    """
    if executor == "auto":
        return _fastest()
    if executor not in _HOST:
        raise ConfigError(f"no executor {executor!r}; there are: auto, {', '.join(sorted(_HOST))}")
    if executor == "native":
        load_library("native")
    return executor


@functools.lru_cache(maxsize=1)
def _fastest() -> str:
    info = describe_build("native")
    if os.environ.get("RANK", "0") == "0":
        if info.usable:
            logger.info("payload is moved by the native engine (%s)", info.compiler)
        else:
            logger.warning("payload is moved by numpy, which is slower: %s. %s", info.reason, info.remedy)
    return "native" if info.usable else "numpy"


def _digest_range(data: ByteArray, itemsize: int, *, seed: int, start: int) -> int:
    if describe_build("native").usable:
        return native_executor.digest_range(data, itemsize, seed=seed, start=start)
    return digest_range_reference(data, itemsize, seed=seed, start=start)


# Live digests take the same engine. Which one that is is found out when there is something to digest.
use_digest_range(_digest_range)
