"""The module states file of a rank that does not see it: another reads it, and sends what DeepSpeed reads of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from zeroelastic.checkpoint.model_states import ModelStates, open_model_states
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.tag_files import TensorParallel, parse_rank_file
from zeroelastic.core.layout import Int64Array
from zeroelastic.deepspeed.node_local.payload import RelayCost
from zeroelastic.deepspeed.node_local.visibility import FileVisibility
from zeroelastic.distributed.collective import all_or_raise
from zeroelastic.distributed.multicast import Request, multicast
from zeroelastic.executors.dispatch import Executor, ReadTable, host_executor, read_segments
from zeroelastic.io.paths import FilePath


@contextmanager
def module_file(
    visibility: FileVisibility | None, checkpoint: Checkpoint, model: ModelStates, *, executor: Executor
) -> Iterator[tuple[str, RelayCost]]:
    """Where a rank reads its module states file, ``model``, and what it cost to get it there. Collective.

    That is the file itself for a rank that sees it on a disk. Others have the bytes that DeepSpeed reads in memory,
    which is all but parameters, under a name that lasts as long as the context.
    """
    if visibility is None:
        yield _local(model), RelayCost()
        return
    is_remote = visibility.in_store or model.path.name in visibility.remote_files
    held = os.memfd_create(model.path.name, os.MFD_CLOEXEC) if is_remote else None
    try:
        cost = _fetch(visibility, checkpoint, model, held, executor)
        yield _local(model) if held is None else f"/proc/self/fd/{held}", cost
    finally:
        if held is not None:
            os.close(held)


def _fetch(
    visibility: FileVisibility, checkpoint: Checkpoint, model: ModelStates, held: int | None, executor: Executor
) -> RelayCost:
    """Read module states for others, and fill ``held`` with what another has read, if it is given. Collective."""
    requests = [] if held is None else [Request(visibility.reader(model.path.name), model.path.name)]
    read: dict[FilePath, int] = {}

    def content(names: Sequence[str]) -> dict[str, bytes]:
        found = {}
        for name in names:
            asked = _model_states(visibility, checkpoint, name)
            found[name] = _read(asked, executor)
            read[asked.path] = len(found[name])
        return found

    answers = multicast(requests, content)
    all_or_raise(lambda: None if held is None else _write(held, model, answers.content[model.path.name]))
    return RelayCost(sum(read.values()), tuple(read), answers.sent, answers.received)


def _local(model: ModelStates) -> str:
    assert isinstance(model.path, Path), "loads read local files"
    return os.fspath(model.path)


def _model_states(visibility: FileVisibility, checkpoint: Checkpoint, name: str) -> ModelStates:
    """A module states file that this rank reads for others."""
    file = parse_rank_file(name)
    assert file is not None
    if file.tp_rank == checkpoint.tp.rank:
        return checkpoint.model_states(file.rank)
    tp = TensorParallel(file.tp_rank, checkpoint.tp.size)
    return open_model_states(visibility.tag_dir / name, file.rank, world_size=None, tp=tp)


def _read(model: ModelStates, executor: Executor) -> bytes:
    """The ranges of a file that are not payload of parameters alone, one after the other."""
    offset, nbytes, place = _without_params(model)
    buffer = np.empty(int(nbytes.sum()), dtype=np.uint8)
    first = np.zeros_like(offset)
    table = ReadTable((model.path,), first, offset, first, place, nbytes)
    read_segments(table, [buffer], executor=host_executor(executor))
    return buffer.tobytes()


def _write(held: int, model: ModelStates, content: bytes | bytearray) -> None:
    """Put the ranges where they are in the file; the rest are zeros, which take no memory."""
    os.ftruncate(held, model.size)
    view = memoryview(content)
    for offset, nbytes, place in zip(*(column.tolist() for column in _without_params(model)), strict=True):
        os.pwrite(held, view[place : place + nbytes], offset)


def _without_params(model: ModelStates) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The ranges that are not payload of parameters alone: their offsets, their bytes, and where they are together."""
    ranges: list[tuple[int, int]] = []
    at = 0
    for begin, nbytes in model.params_alone.tolist():
        if begin > at:
            ranges.append((at, begin - at))
        at = max(at, begin + nbytes)
    if at < model.size:
        ranges.append((at, model.size - at))
    offset, nbytes = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
    return offset, nbytes, np.cumsum(nbytes) - nbytes
