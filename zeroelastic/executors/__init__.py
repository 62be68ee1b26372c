"""Run a table of byte runs: from files straight into live buffers, by one of several engines that agree bit for bit."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Literal

from zeroelastic.digest import ByteArray, digest_range_reference, use_digest_range
from zeroelastic.errors import ConfigError
from zeroelastic.executors.build_info import describe_build, load_library
from zeroelastic.executors.native_executor import digest_range as _digest_native
from zeroelastic.executors.native_executor import read_segments as _read_native
from zeroelastic.executors.numpy_executor import read_segments as _read_numpy
from zeroelastic.executors.table import ByteBuffer, DigestRows, ReadResult, ReadTable

__all__ = [
    "ByteBuffer",
    "DigestRows",
    "Executor",
    "ReadResult",
    "ReadTable",
    "choose_executor",
    "describe_build",
    "read_segments",
]

Executor = Literal["auto", "numpy", "native"]

_READERS: dict[str, Callable[[ReadTable, Sequence[ByteBuffer], DigestRows | None], ReadResult]] = {
    "numpy": _read_numpy,
    "native": _read_native,
}

logger = logging.getLogger(__name__)


def read_segments(
    table: ReadTable,
    buffers: Sequence[ByteBuffer],
    *,
    digest: DigestRows | None = None,
    executor: Executor = "auto",
) -> ReadResult:
    """Fill ``buffers`` from files as ``table`` says, each byte read once; digests in the same pass when asked.

    ``executor`` names an engine; "auto" takes the fastest that is built. Raises ConfigError for an unknown one and for
    one that is not built, CheckpointError when a file ends early or cannot be read (with file and offset).
    """
    reader = _READERS[choose_executor(executor)]
    table.check(buffers)
    return reader(table, buffers, digest)


def choose_executor(executor: Executor) -> str:
    """The engine that a name stands for; "auto" is the fastest that is built, which is logged once.

    Raises ConfigError for an unknown name, and for an engine that is not built, saying how to build it.
    """
    if executor == "auto":
        return _fastest()
    if executor not in _READERS:
        raise ConfigError(f"no executor {executor!r}; there are: auto, {', '.join(sorted(_READERS))}")
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
        return _digest_native(data, itemsize, seed=seed, start=start)
    return digest_range_reference(data, itemsize, seed=seed, start=start)


# Live digests take the same engine. Which one that is is found out when there is something to digest.
use_digest_range(_digest_range)
