"""What an engine does: its operations on files and host memory, and the options that all of them share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from zeroelastic.core.digest import ByteArray, UInt64Array
from zeroelastic.errors import ConfigError
from zeroelastic.executors.progress import ProgressFunction
from zeroelastic.executors.tables import (
    ByteBuffer,
    Cast,
    CopyTable,
    DigestRows,
    FileRanges,
    MemoryRanges,
    ReadResult,
    ReadTable,
    UInt32Array,
)
from zeroelastic.io.paths import FilePath

_MAX_DEFAULT_THREADS = 16


@dataclass(frozen=True, slots=True)
class ConvertedCopies:
    """Memory that gets what is read a second time, converted: for each buffer, one with as many elements, or None."""

    cast: Cast
    buffers: Sequence[ByteBuffer | None]


@dataclass(frozen=True, slots=True)
class Options:
    """What an engine does in the pass that moves the bytes.

    ``digest``: what each row adds to which digest, which the operation returns. ``crc32``, shape ``(num_rows,)``: an
    array that is filled with the CRC-32 of the bytes written of each row (read, where nothing is written).
    ``cast``: a conversion of the elements. ``sync``: flush each file that was written to its device. ``threads``: None
    for ``default_threads``. ``progress``: called with the bytes of the sources that are done. ``copies``: of what is
    read without a conversion. The functions of ``dispatch`` show which options an operation uses; it ignores the
    others.
    """

    digest: DigestRows | None = None
    crc32: UInt32Array | None = None
    cast: Cast = "none"
    sync: bool = False
    threads: int | None = None
    progress: ProgressFunction | None = None
    copies: ConvertedCopies | None = None


PLAIN = Options()
"""Bytes are moved as they are, and nothing is computed."""


class FileEngine(Protocol):
    """An engine whose sources are files. Each operation is documented by its function in ``dispatch``."""

    def read_segments(
        self, table: ReadTable, buffers: Sequence[ByteBuffer], options: Options = PLAIN
    ) -> ReadResult: ...

    def move_segments(
        self, table: CopyTable, src_paths: Sequence[FilePath], dst_paths: Sequence[Path], options: Options = PLAIN
    ) -> UInt64Array | None: ...

    def scan_segments(self, table: FileRanges, options: Options = PLAIN) -> UInt64Array | None: ...


class HostEngine(FileEngine, Protocol):
    """An engine whose sources are files or host memory."""

    def copy_segments(
        self, table: CopyTable, src: Sequence[ByteArray], dst: Sequence[ByteBuffer], options: Options = PLAIN
    ) -> UInt64Array | None: ...

    def write_segments(
        self, table: CopyTable, src: Sequence[ByteArray], paths: Sequence[Path], options: Options = PLAIN
    ) -> UInt64Array | None: ...

    def sum_segments(
        self, table: MemoryRanges, src: Sequence[ByteArray], options: Options = PLAIN
    ) -> UInt64Array | None: ...


def default_threads() -> int:
    """Threads of one call: ``ZEROELASTIC_THREADS``, else this rank's share of the cores, at most 16.

    Raises ConfigError when the variable is not a positive number.
    """
    asked = os.environ.get("ZEROELASTIC_THREADS")
    if asked is not None:
        if not asked.isdecimal() or int(asked) < 1:
            raise ConfigError(
                f"ZEROELASTIC_THREADS is {asked!r}, not a positive number of threads. Set it to one, or leave it out."
            )
        return int(asked)
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    sharing = int(local_ranks) if local_ranks.isdecimal() else 1
    return max(1, min(_MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0)) // max(1, sharing)))
