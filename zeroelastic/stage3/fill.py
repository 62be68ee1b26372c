"""The sink: run a plan's segments from file extents into live tensors, in place, each byte read once."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from zeroelastic.digest import combine, stream_seed
from zeroelastic.errors import UnsupportedError
from zeroelastic.executors import (
    DigestRows,
    Executor,
    ReadResult,
    ReadTable,
    choose_executor,
    read_segments,
)
from zeroelastic.plan import Plan
from zeroelastic.rows import ByteRows, RowTarget, byte_rows
from zeroelastic.shard import Pieces
from zeroelastic.storage import FilePath

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
    """Something to fill: a plan, where its source lies (``pieces[source rank][key]``), and the tensors it goes to."""

    plan: Plan
    pieces: Mapping[int, Mapping[str, Pieces]]
    targets: Sequence[Target]


@dataclass(frozen=True, slots=True)
class Filled:
    """What filling cost, and the digests of what was cast on the way: {(parameter, key): partial digest}.

    ``cast_digests`` has the same keys on every rank; 0 where the rank owns nothing of a parameter. So has
    ``moved_digests``, of what the save has as trained and the run as frozen, or the other way. ``unread`` are
    rows whose files are away.
    """

    bytes_read: int
    bytes_owned: int
    files: tuple[FilePath, ...]
    cast_digests: Mapping[tuple[str, str], int]
    moved_digests: Mapping[tuple[str, str], int] = field(default_factory=dict)
    unread: ByteRows | None = None


def host_executor(executor: Executor) -> Executor:
    """The engine for host memory, where the one that is named is for a GPU."""
    return "auto" if executor in ("torch", "cuda") else executor


def fill(
    plan: Plan,
    pieces: Mapping[int, Mapping[str, Pieces]],
    targets: Sequence[Target],
    *,
    executor: Executor = "auto",
    away: Collection[str] = (),
) -> Filled:
    """Fill every target with what ``plan`` says, from ``pieces[source rank][key]``, but for files that are ``away``.

    Tensors with the file's dtype are filled in place, those on a GPU by the cuda engine, if it is built; the others
    through ``STAGING_BYTES`` of staging, cast like ``Tensor.copy_``. ``executor`` "numpy" and "native" name the engine
    that reads into host memory, and staging for a GPU; "torch" staging for a GPU, and "cuda" the engine for it, or an
    error. Padding of the targets is not touched. Raises CheckpointError as the executors do, ConfigError when the
    engine that is named is not built.
    """
    host = host_executor(executor)
    choose_executor(executor)
    rows = byte_rows(plan, pieces, [RowTarget(target.key, target.sub_group, target.dtype) for target in targets])
    owned = int((rows.numel * rows.itemsize).sum())
    unread = None
    if away:
        elsewhere = np.array([path.name in away for path in rows.paths], dtype=bool)[rows.file]
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
    for batch in _batches(rows.take(np.flatnonzero(staged[rows.target]))):
        filled = _fill_staged(plan, batch, targets, digests, host)
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


def _fill_in_place(rows: ByteRows, members: list[int], targets: Sequence[Target], executor: Executor) -> ReadResult:
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


def _batches(rows: ByteRows) -> list[ByteRows]:
    """Cut rows so that each batch fits the staging buffer; long segments are split at whole elements."""
    cut: list[tuple[int, int, int]] = []  # row, first element, elements
    batches: list[list[tuple[int, int, int]]] = []
    room = 0
    for i in range(len(rows.numel)):
        done, numel, itemsize = 0, int(rows.numel[i]), int(rows.itemsize[i])
        while done < numel:
            if room < itemsize:
                cut = []
                batches.append(cut)
                room = STAGING_BYTES
            count = min(numel - done, room // itemsize)
            cut.append((i, done, count))
            done += count
            room -= -(-count * itemsize // 8) * 8  # keep pieces 8-byte aligned in the staging buffer
    made: list[ByteRows] = []
    for batch in batches:
        table = np.array(batch, dtype=np.int64)
        part = rows.take(table[:, 0])
        made.append(
            ByteRows(
                part.paths,
                part.file,
                part.file_offset + table[:, 1] * part.itemsize,
                part.target,
                part.target_offset + table[:, 1],
                table[:, 2],
                part.itemsize,
                part.param,
                part.start + table[:, 1],
            )
        )
    return made


def _fill_staged(
    plan: Plan,
    rows: ByteRows,
    targets: Sequence[Target],
    digests: dict[tuple[str, str], int],
    executor: Executor,
) -> Filled:
    nbytes = rows.numel * rows.itemsize
    ends = np.cumsum(-(-nbytes // 8) * 8)
    offsets = ends - (-(-nbytes // 8) * 8)
    staging = torch.empty(int(ends[-1]), dtype=torch.uint8)
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
        digest=_digest_rows(names, rows) if any(target.cast for target in targets) else None,
        executor=executor,
    )
    for i, name in enumerate(names):
        target = targets[int(rows.target[i])]
        values = staging[int(offsets[i]) : int(offsets[i] + nbytes[i])].view(getattr(torch, target.dtype))
        begin = int(rows.target_offset[i])
        target.tensor[begin : begin + len(values)].copy_(values)
        if target.cast:
            assert result.digests is not None
            digests[name] = combine(digests.get(name, 0), int(result.digests[i]))
    return Filled(result.bytes_read, 0, result.files, digests)


def _digest_rows(names: Sequence[tuple[str, str]], rows: ByteRows) -> DigestRows:
    return DigestRows(
        seeds=np.array([stream_seed(*name) for name in names], dtype=np.uint64),
        stream=np.arange(len(names), dtype=np.int64),
        start=rows.start,
        itemsize=rows.itemsize,
    )
