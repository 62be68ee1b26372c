"""Run a plan's segments from file extents into live tensors, in place, each byte read once."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from zeroelastic.checkpoint.extents import ExtentTable, TensorExtents, TensorSlot, extent_windows, stream_seeds
from zeroelastic.core.digest import DigestKey, UInt64Array, combine, stream_of, streams_of
from zeroelastic.core.layout import Int64Array
from zeroelastic.core.plan import Plan
from zeroelastic.core.slices import places_in_slices, strips_of_runs
from zeroelastic.deepspeed.live.digests import ReadDigest
from zeroelastic.errors import UnsupportedError
from zeroelastic.executors.dispatch import (
    ConvertedCopies,
    CopyTable,
    DigestRows,
    Executor,
    ReadResult,
    batches,
    choose_executor,
    host_executor,
    read_segments,
)
from zeroelastic.executors.tables import cast_between
from zeroelastic.io.paths import FilePath

STAGING_BYTES = 16 << 20
"""Host memory used for tensors that no engine fills as they are: of another dtype than the file's, or on a GPU without
the cuda engine."""

_HOST = "host"

logger = logging.getLogger(__name__)


Digests = dict[DigestKey, int]
"""A partial digest of each stream."""


ReadDigests = dict[DigestKey, ReadDigest]
"""What was read of each stream."""


FillPath: TypeAlias = str
"""How a target is filled: in place in host memory or on the GPU that is named, or "" for through staging."""


@dataclass(frozen=True, slots=True)
class Target:
    """A live flat tensor to fill: its state key, its target sub-group, and the dtype in the files.

    ``rounded``, in host memory, gets the same elements in 16 bits where the pass that reads can make them.
    """

    key: str
    sub_group: int
    tensor: torch.Tensor
    dtype: str
    rounded: torch.Tensor | None = None

    @property
    def in_place(self) -> bool:
        """Whether the tensor takes the file's bytes as they are."""
        return not self.cast and self.tensor.is_contiguous()

    @property
    def address(self) -> int:
        """The address of the first byte on the tensor's device; -1 if the elements are not contiguous."""
        return self.tensor.data_ptr() if self.tensor.is_contiguous() else -1

    @property
    def cast(self) -> bool:
        """Whether the values are converted on the way, so that bits are not comparable afterwards."""
        return bool(self.tensor.dtype != getattr(torch, self.dtype))


FillItem = tuple[Plan, Mapping[int, Mapping[str, TensorExtents]], Sequence[Target]]
"""A plan to fill, where its source is (``extents[source rank][key]``), and the tensors it goes to."""


def fill(
    plan: Plan,
    extents: Mapping[int, Mapping[str, TensorExtents]],
    targets: Sequence[Target],
    *,
    executor: Executor = "auto",
    remote_files: Collection[str] = (),
    digest: bool = False,
) -> FillJob:
    """Fill every target as ``plan`` says, from ``extents[source rank][key]``; rows of ``remote_files`` stay unread.

    Tensors with the file's dtype are filled in place, those on a GPU by the cuda engine, if it is built; the others
    through ``STAGING_BYTES`` of staging, cast like ``Tensor.copy_``. ``executor`` "numpy" and "native" name the engine
    that reads into host memory, from which a GPU is filled, and "cuda" the engine for a GPU, or an error. ``digest``
    asks for ``read_digests``, computed in the pass that reads. Padding of the targets is not touched.
    Raises CheckpointError as the executors do, ConfigError when the engine that is named is not built.
    """
    choose_executor(executor)
    asked = [TensorSlot(target.key, target.sub_group, target.dtype) for target in targets]
    filled = FillJob(plan, targets, executor, digest=digest)
    for rows in extent_windows(plan, extents, asked):
        filled.bytes_owned += int(rows.nbytes.sum())
        if remote_files:
            elsewhere = np.array([path.name in remote_files for path in rows.paths], dtype=bool)[rows.file]
            rows, absent = rows.take(np.flatnonzero(~elsewhere)), rows.take(np.flatnonzero(elsewhere))
            filled.unread = absent if filled.unread is None else filled.unread.joined(absent)
        filled.add(rows)
    return filled


class FillJob:
    """Targets that are filled table by table; the cost so far, and the digests of the bytes that were read.

    ``cast_digests``, of tensors that are cast on the way, has all streams of the rank's parameters; 0 where the rank
    owns nothing of a parameter. ``read_digests``, of the others, has the parameters that the rank owns a part of, if it
    was asked for. ``unread`` are the rows of files that only other ranks see. ``rounded`` says by sub-group how many
    elements of the 16-bit weights have been made.
    """

    def __init__(self, plan: Plan, targets: Sequence[Target], executor: Executor, *, digest: bool) -> None:
        self.plan, self.targets, self.executor, self.digest = plan, targets, executor, digest
        self._host = host_executor(executor)
        self._fill_paths = [fill_path_of(target, executor) for target in targets]
        self._cast = np.array([target.cast for target in targets], dtype=bool)
        self.rounded: dict[int, int] = {}
        self.bytes_read = self.bytes_owned = 0
        self.unread: ExtentTable | None = None
        self.files: dict[FilePath, None] = {}
        self.read_digests: ReadDigests = {}
        self.cast_digests: Digests = {
            stream: 0
            for target in targets
            if target.cast
            for stream in streams_of(plan.dst, target.sub_group, target.key)
        }

    def add(self, rows: ExtentTable) -> None:
        """Read some rows: each device's in place, in one call, and then the others by way of staging."""
        for fill_path in sorted({fill_path for fill_path in self._fill_paths if fill_path}):
            members = [t for t, other in enumerate(self._fill_paths) if other == fill_path]
            executor: Executor = self._host if fill_path == _HOST else "cuda"
            try:
                self._fill_in_place(rows, members, executor)
                for t in members if fill_path == _HOST else ():
                    if self.targets[t].rounded is not None:
                        sub_group = self.targets[t].sub_group
                        numel = int(rows.numel[rows.target == t].sum())
                        self.rounded[sub_group] = self.rounded.get(sub_group, 0) + numel
            except UnsupportedError as error:
                if fill_path == _HOST or self.executor == "cuda":
                    raise
                logger.warning("%s is filled through host memory instead, which is slower: %s", fill_path, error)
                self._fill_paths = ["" if other == fill_path else other for other in self._fill_paths]
        staged = np.array([not fill_path for fill_path in self._fill_paths], dtype=bool)
        for is_cast in (False, True):
            chosen = rows.where(staged[rows.target] & (self._cast[rows.target] == is_cast))
            for batch in batches(chosen.nbytes, STAGING_BYTES):
                itemsize = chosen.itemsize[batch.row]
                pieces = chosen.pieces(batch.row, batch.start // itemsize, batch.nbytes // itemsize)
                self._fill_staged(pieces, batch.offset, is_cast=is_cast)

    def _fill_in_place(self, rows: ExtentTable, members: list[int], executor: Executor) -> None:
        buffer = np.full(len(self.targets), -1, dtype=np.int64)
        buffer[members] = np.arange(len(members))
        targets = [self.targets[t] for t in members]
        mine = rows.where(buffer[rows.target] >= 0)
        streams = RowStreams.of(self.plan, mine, self.targets) if self.digest else None
        result = read_segments(
            CopyTable(
                mine.file,
                mine.file_offset,
                buffer[mine.target],
                mine.target_offset * mine.itemsize,
                mine.numel * mine.itemsize,
            ),
            mine.paths,
            [target.tensor for target in targets],
            digest=None if streams is None else streams.table,
            copies=_rounded_copies(targets),
            executor=executor,
        )
        self._note(result, streams, is_cast=False)

    def _fill_staged(self, rows: ExtentTable, offsets: Int64Array, *, is_cast: bool) -> None:
        """Fill targets by way of a staging buffer, each row at its offset there."""
        nbytes = rows.nbytes
        staging = torch.empty(int(offsets[-1] + nbytes[-1]), dtype=torch.uint8, device="cpu")
        streams = RowStreams.of(self.plan, rows, self.targets) if self.digest or is_cast else None
        result = read_segments(
            CopyTable(rows.file, rows.file_offset, np.zeros(len(nbytes), dtype=np.int64), offsets, nbytes),
            rows.paths,
            [staging.numpy()],
            digest=None if streams is None else streams.table,
            executor=self._host,
        )
        for i, number in enumerate(rows.target.tolist()):
            target = self.targets[number]
            values = staging[int(offsets[i]) : int(offsets[i] + nbytes[i])].view(getattr(torch, target.dtype))
            begin = int(rows.target_offset[i])
            target.tensor[begin : begin + len(values)].copy_(values)
        self._note(result, streams, is_cast=is_cast)

    def _note(self, result: ReadResult, streams: RowStreams | None, *, is_cast: bool) -> None:
        self.bytes_read += result.bytes_read
        self.files.update(dict.fromkeys(result.files))
        if streams is None or result.digests is None:
            return
        if is_cast:
            streams.add_cast(result.digests, self.cast_digests)
        else:
            streams.add_read(result.digests, self.read_digests)


def fill_path_of(target: Target, executor: Executor) -> FillPath:
    """Return the fill path of a target; which GPUs are filled in place depends on the executor."""
    device = target.tensor.device
    if not target.in_place:
        return ""
    if device.type == "cpu":
        return _HOST
    by_cuda = device.type == "cuda" and choose_executor(executor, on_gpu=True) == "cuda"
    return str(device) if by_cuda else ""


def _rounded_copies(targets: Sequence[Target]) -> ConvertedCopies | None:
    """The 16-bit tensors of targets in host memory; None if they have none."""
    kinds = {target.rounded.dtype for target in targets if target.rounded is not None}
    if not kinds:
        return None
    (kind,) = kinds
    cast = cast_between("float32", str(kind).removeprefix("torch."))
    assert cast is not None
    return ConvertedCopies(
        cast, [None if target.rounded is None else target.rounded.view(torch.uint8).numpy() for target in targets]
    )


@dataclass(frozen=True, slots=True)
class RowStreams:
    """The streams whose digests some rows add to, and what each row adds (``table``).

    ``origin``, ``begin`` and ``end``, of shape ``(num_streams,)``, say where the rows of each stream go, as in
    ``ReadDigest``.
    """

    names: list[DigestKey]
    table: DigestRows
    origin: list[int | None]
    begin: list[int]
    end: list[int]

    @classmethod
    def of(cls, plan: Plan, rows: ExtentTable, targets: Sequence[Target]) -> RowStreams:
        """Return the streams of rows that go to ``targets``."""
        strip, at, slices = rows.param, rows.start, plan.dst.slices
        if slices is not None:
            strip = strips_of_runs(slices, rows.param, rows.start)
            at = places_in_slices(slices, strip, rows.start)
        number = strip * len(targets) + rows.target
        first = np.flatnonzero(np.diff(number, prepend=-1))  # neighbours are of one stream: few numbers to sort
        numbers, which = np.unique(number[first], return_inverse=True)
        which = which.reshape(-1)
        names = [stream_of(plan.dst, n // len(targets), targets[n % len(targets)].key) for n in numbers.tolist()]
        addresses = np.array([target.address for target in targets], dtype=np.int64)[rows.target]
        origin = np.where(addresses < 0, -1, addresses + (rows.target_offset - at) * rows.itemsize)
        lowest, begin = (np.full(len(names), np.iinfo(np.int64).max) for _ in range(2))
        highest, end = (np.full(len(names), -1) for _ in range(2))
        for column, values, ufunc in (
            (lowest, origin, np.minimum),
            (highest, origin, np.maximum),
            (begin, at, np.minimum),
            (end, at + rows.numel, np.maximum),
        ):
            ufunc.at(column, which, ufunc.reduceat(values, first) if len(first) else values)
        same = (lowest == highest) & (lowest >= 0)
        stream = np.repeat(which, np.diff(first, append=len(number)))
        return cls(
            names,
            DigestRows(stream_seeds([(name.param, name.key) for name in names]), stream, rows.start, rows.itemsize),
            [at if agreed else None for at, agreed in zip(lowest.tolist(), same.tolist(), strict=True)],
            begin.tolist(),
            end.tolist(),
        )

    def add_read(self, found: UInt64Array, digests: ReadDigests) -> None:
        """Add partial digests of what was read, one of each tensor, to a table of them."""
        columns = found.tolist(), self.origin, self.begin, self.end
        for name, read in zip(self.names, map(ReadDigest, *columns), strict=True):
            digests[name] = digests[name].joined(read) if name in digests else read

    def add_cast(self, found: UInt64Array, digests: Digests) -> None:
        """Add partial digests of what was cast when it was read."""
        for name, digest in zip(self.names, found.tolist(), strict=True):
            digests[name] = combine(digests.get(name, 0), digest)
