"""The sink: run a plan's segments from file extents into live tensors, in place, each byte read once."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from zeroelastic.checkpoint.extents import Destination, ExtentTable, TensorExtents, extent_table
from zeroelastic.core.digest import combine, stream_seed
from zeroelastic.core.layout import Int64Array
from zeroelastic.core.plan import Plan
from zeroelastic.errors import UnsupportedError
from zeroelastic.executors.dispatch import (
    DigestRows,
    Executor,
    ReadResult,
    ReadTable,
    batches,
    choose_executor,
    read_segments,
)
from zeroelastic.io.paths import FilePath

STAGING_BYTES = 16 << 20
"""Host memory used for tensors that no engine fills as they are: of another dtype than the file's, or on a GPU without
the cuda engine."""

_HOST = "host"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """A live flat tensor to fill: which state key, which target sub-group, and the dtype that the files hold."""

    key: str
    sub_group: int
    tensor: torch.Tensor
    dtype: str

    @property
    def in_place(self) -> bool:
        """Whether the tensor takes the file's bytes as they are."""
        return not self.cast and self.tensor.is_contiguous()

    @property
    def cast(self) -> bool:
        """Whether the values are converted on the way, so that bits are not comparable afterwards."""
        return bool(self.tensor.dtype != getattr(torch, self.dtype))


class Part(NamedTuple):
    """Something to fill: a plan, where its source lies (``extents[source rank][key]``), and the tensors it goes to."""

    plan: Plan
    extents: Mapping[int, Mapping[str, TensorExtents]]
    targets: Sequence[Target]


@dataclass(frozen=True, slots=True)
class Filled:
    """What filling cost, and the digests of what was cast on the way: {(parameter, key): partial digest}.

    ``cast_digests`` has the same keys on every rank; 0 where the rank owns nothing of a parameter. So has
    ``changed_digests``, of what the save has as trained and the run as frozen, or the other way. ``unread`` are
    the rows of files that only other ranks see.
    """

    bytes_read: int
    bytes_owned: int
    files: tuple[FilePath, ...]
    cast_digests: Mapping[tuple[str, str], int]
    changed_digests: Mapping[tuple[str, str], int] = field(default_factory=dict)
    unread: ExtentTable | None = None


def host_executor(executor: Executor) -> Executor:
    """The engine for host memory, where the one that is named is for a GPU."""
    return "auto" if executor in ("torch", "cuda") else executor


def fill(
    plan: Plan,
    extents: Mapping[int, Mapping[str, TensorExtents]],
    targets: Sequence[Target],
    *,
    executor: Executor = "auto",
    remote_files: Collection[str] = (),
) -> Filled:
    """Fill every target as ``plan`` says, from ``extents[source rank][key]``; rows of ``remote_files`` stay unread.

    Tensors with the file's dtype are filled in place, those on a GPU by the cuda engine, if it is built; the others
    through ``STAGING_BYTES`` of staging, cast like ``Tensor.copy_``. ``executor`` "numpy" and "native" name the engine
    that reads into host memory, and staging for a GPU; "torch" staging for a GPU, and "cuda" the engine for it, or an
    error. Padding of the targets is not touched. Raises CheckpointError as the executors do, ConfigError when the
    engine that is named is not built.
    """
    host = host_executor(executor)
    choose_executor(executor)
    rows = extent_table(plan, extents, [Destination(target.key, target.sub_group, target.dtype) for target in targets])
    owned = int((rows.numel * rows.itemsize).sum())
    unread = None
    if remote_files:
        elsewhere = np.array([path.name in remote_files for path in rows.paths], dtype=bool)[rows.file]
        rows, unread = rows.take(np.flatnonzero(~elsewhere)), rows.take(np.flatnonzero(elsewhere))
    ways = [_way(target, executor) for target in targets]
    files: dict[FilePath, None] = {}
    total = 0
    for way in sorted({way for way in ways if way}):
        members = [t for t, other in enumerate(ways) if other == way]
        try:
            result = _fill_in_place(rows, members, targets, host if way == _HOST else "cuda")
        except UnsupportedError as error:
            if way == _HOST or executor == "cuda":
                raise
            logger.warning("%s is filled through host memory instead, which is slower: %s", way, error)
            ways = ["" if other == way else other for other in ways]
            continue
        files.update(dict.fromkeys(result.files))
        total += result.bytes_read
    staged = np.array([not way for way in ways], dtype=bool)
    digests = {
        (plan.dst.params[p].name, target.key): 0
        for target in targets
        if target.cast
        for p in np.flatnonzero(plan.dst.sub_group == target.sub_group).tolist()
    }
    cast = np.array([target.cast for target in targets], dtype=bool)
    for with_digests in (False, True):  # digests are compared where bits change on the way, and nowhere else
        chosen = rows.take(np.flatnonzero(staged[rows.target] & (cast[rows.target] == with_digests)))
        for batch in batches(chosen.nbytes, STAGING_BYTES):
            itemsize = chosen.itemsize[batch.row]
            pieces = chosen.pieces(batch.row, batch.start // itemsize, batch.nbytes // itemsize)
            filled = _fill_staged(plan, pieces, batch.offset, targets, digests if with_digests else None, host)
            total += filled.bytes_read
            files.update(dict.fromkeys(filled.files))
    return Filled(total, owned, tuple(files), digests, unread=unread)


def _way(target: Target, executor: Executor) -> str:
    """How a target is filled: in place in host memory or on the GPU that is named, or "" for by way of staging."""
    device = target.tensor.device
    if not target.in_place:
        return ""
    if device.type == "cpu":
        return _HOST
    by_cuda = device.type == "cuda" and choose_executor(executor, on_gpu=True) == "cuda"
    return str(device) if by_cuda else ""


def _fill_in_place(rows: ExtentTable, members: list[int], targets: Sequence[Target], executor: Executor) -> ReadResult:
    buffer = np.full(len(targets), -1, dtype=np.int64)
    buffer[members] = np.arange(len(members))
    mine = rows.take(np.flatnonzero(buffer[rows.target] >= 0))
    return read_segments(
        ReadTable(
            paths=mine.paths,
            file=mine.file,
            file_offset=mine.file_offset,
            buffer=buffer[mine.target],
            buffer_offset=mine.target_offset * mine.itemsize,
            nbytes=mine.numel * mine.itemsize,
        ),
        [targets[t].tensor for t in members],
        executor=executor,
    )


def _fill_staged(
    plan: Plan,
    rows: ExtentTable,
    offsets: Int64Array,
    targets: Sequence[Target],
    digests: dict[tuple[str, str], int] | None,
    executor: Executor,
) -> Filled:
    """Fill targets by way of a staging buffer, each row at its offset there; ``digests``, if given, takes theirs."""
    nbytes = rows.nbytes
    staging = torch.empty(int(offsets[-1] + nbytes[-1]), dtype=torch.uint8)
    names = [(plan.dst.params[int(p)].name, targets[int(t)].key) for p, t in zip(rows.param, rows.target, strict=True)]
    result = read_segments(
        ReadTable(
            paths=rows.paths,
            file=rows.file,
            file_offset=rows.file_offset,
            buffer=np.zeros(len(nbytes), dtype=np.int64),
            buffer_offset=offsets,
            nbytes=nbytes,
        ),
        [staging.numpy()],
        digest=_digest_rows(names, rows) if digests is not None else None,
        executor=executor,
    )
    for i, name in enumerate(names):
        target = targets[int(rows.target[i])]
        values = staging[int(offsets[i]) : int(offsets[i] + nbytes[i])].view(getattr(torch, target.dtype))
        begin = int(rows.target_offset[i])
        target.tensor[begin : begin + len(values)].copy_(values)
        if digests is not None:
            assert result.digests is not None
            digests[name] = combine(digests.get(name, 0), int(result.digests[i]))
    return Filled(result.bytes_read, 0, result.files, {})


def _digest_rows(names: Sequence[tuple[str, str]], rows: ExtentTable) -> DigestRows:
    return DigestRows(
        seeds=np.array([stream_seed(*name) for name in names], dtype=np.uint64),
        stream=np.arange(len(names), dtype=np.int64),
        start=rows.start,
        itemsize=rows.itemsize,
    )
