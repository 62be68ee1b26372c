"""A checkpoint with files that other ranks see: these ranks read and send headers, module states and payload.

A rank that sees a file parses its header and records the ranges that parsing took; the rank that asked parses the same
from these. Content from another rank is checked like the content of a local file. Of a module states file, another rank
also reads and sends the bytes that DeepSpeed reads.

Payload is read once by a rank that sees it, sent, and written as the plan says. Every rank asks the readers of its
files for byte ranges and serves the requests of others. The requests to one reader are one stream, row after row, in
the rounds of ``exchange_rows``; its buffers are all the memory that this needs.
"""

from __future__ import annotations

import os
import pickle
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from zeroelastic.checkpoint.extents import ExtentTable
from zeroelastic.checkpoint.model_states import ModuleHeader
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.tag_files import parse_rank_file
from zeroelastic.core.digest import ByteArray, UInt64Array
from zeroelastic.core.layout import Int64Array, Layout, are_whole
from zeroelastic.core.plan import make_plan, source_ranks
from zeroelastic.deepspeed.fill import FillJob, RowStreams
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.patching import patched
from zeroelastic.distributed.collective import all_or_raise
from zeroelastic.distributed.exchange import Arrived, RoundBuffer, device_of, exchange_rows
from zeroelastic.distributed.spreading import Request, multicast
from zeroelastic.errors import CheckpointError
from zeroelastic.executors.dispatch import (
    CopyTable,
    Executor,
    Ranges,
    copy_segments,
    host_executor,
    read_segments,
    sum_segments,
)
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import Blocks, open_blocks

Pieces = Sequence[tuple[int, bytes]]
"""(offset, bytes) of a file."""


@contextmanager
def recording(path: FilePath, size: int | None = None) -> Iterator[tuple[Blocks, list[tuple[int, bytes]]]]:
    """Open a file within this context, and list the ranges that are read then: (offset, bytes).

    ``size``, if it is known, saves a request for a file behind a URL. Raises as the readers do.
    """
    ranges: list[tuple[int, bytes]] = []

    def read(offset: int, nbytes: int) -> bytes:
        data = original(offset, nbytes)
        if data:
            ranges.append((offset, data))
        return data

    with open_blocks(path, size) as file:
        original = file.read
        with patched(file, read=read):
            yield file, ranges


def joined(ranges: Pieces) -> Pieces:
    """Join ranges: each byte once, in ranges that neither overlap nor touch, ascending."""
    merged: list[tuple[int, bytearray]] = []
    for offset, data in sorted(ranges, key=lambda one: one[0]):
        end = merged[-1][0] + len(merged[-1][1]) if merged else -1
        if offset > end:
            merged.append((offset, bytearray(data)))
        elif offset + len(data) > end:
            merged[-1][1].extend(data[end - offset :])
    return [(offset, bytes(data)) for offset, data in merged]


class ReceivedFile(Blocks):
    """A file of ``size`` bytes of which only some ranges are here, ``joined``; reading it costs no bytes of a disk."""

    def __init__(self, path: FilePath, size: int, ranges: Pieces) -> None:
        self.path, self.size, self.bytes_read = path, size, 0
        self._starts = [offset for offset, _ in ranges]
        self._ranges = ranges

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read as the file does. Raises CheckpointError for a range that was not read where the file is."""
        nbytes = max(0, min(nbytes, self.size - offset))
        if nbytes == 0:
            return b""
        at = bisect_right(self._starts, offset) - 1
        start, data = self._ranges[at] if at >= 0 else (0, b"")
        if offset + nbytes > start + len(data):
            raise CheckpointError(
                f"{self.path}: bytes {offset} to {offset + nbytes} of its header did not come from the rank that sees "
                "it. The ranks run different versions of zeroelastic or Python.",
                remedy="Install the same versions on every node.",
            )
        return bytes(data[offset - start : offset - start + nbytes])


@dataclass(slots=True)
class _Headers:
    """The headers of a checkpoint that this rank reads, for itself and for others, each once; by file name."""

    own: Checkpoint
    recorded: dict[str, tuple[int, Pieces]] = field(default_factory=dict)

    def read(self, name: str) -> None:
        """Parse a header now, wherever the file is, in such a way that it can be sent to others. Collective."""
        all_or_raise(partial(self.record, [name] if self.own.inventory.reads(name) else []))
        self.fetch([name])

    def fetch(self, wanted: Iterable[str]) -> None:
        """Parse the wanted headers of files that other ranks see, and send theirs to other ranks. Collective."""
        remote = [name for name in wanted if not self.own.inventory.reads(name)]
        requests = [Request(self.own.inventory.reader(name), name) for name in remote]
        content, _ = multicast(requests, self.content)
        all_or_raise(partial(self.take, content))

    def content(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the ranges that parsing these headers reads, by file name, for ranks that do not see the files."""
        self.record(names)
        return {name: pickle.dumps(self.recorded[name]) for name in names}

    def record(self, names: Iterable[str]) -> None:
        """Read the headers, not read before, of files that this rank sees."""
        for name in dict.fromkeys(names):
            if name in self.recorded:
                continue
            path, inventory = self.own.tag_dir / name, self.own.inventory
            with inventory.named_in_errors(path), recording(path, inventory.sizes.get(name)) as (file, ranges):
                self.parse(name, file)
            self.recorded[name] = (file.size, joined(ranges))

    def take(self, answers: Mapping[str, bytes | bytearray]) -> None:
        """Parse headers that others have read."""
        for name, content in answers.items():
            size, ranges = pickle.loads(content)
            self.parse(name, ReceivedFile(self.own.tag_dir / name, size, ranges))

    def parse(self, name: str, through: Blocks) -> None:
        file = parse_rank_file(name)
        assert file is not None
        checkpoint, rank = self.own.holding(file)
        if file.kind != "optimizer":
            checkpoint.model_states(rank, through=through)
            return
        model = checkpoint.model_file(rank).name
        if not checkpoint.models and self.own.inventory.reads(model):
            self.record([model])  # rigid optimizer files do not name their parameters
        checkpoint.shard(rank, through=through)


def ranks_taken(checkpoint: Checkpoint, live: LiveOptimizer) -> tuple[int, int]:
    """Return the saved rank whose module states a rank of the run takes, and one whose optimizer file it opens.

    Both are of the same tensor parallel rank, or of one that is there. The state that a data parallel rank keeps to
    itself is its own, or rank 0's.
    """
    saved = checkpoint.topology
    data_rank, tensor_rank = live.topology.place(live.rank)
    tensor_rank %= saved.tensor_size
    own = data_rank if data_rank < saved.data_size else 0
    return saved.rank(own, tensor_rank), saved.rank(min(data_rank, saved.data_size - 1), tensor_rank)


def sources_by_size(checkpoint: Checkpoint, live: LiveOptimizer, *layouts: Layout) -> tuple[int, ...] | None:
    """Return the saved ranks that have some of the elements that a rank of the run has of some ``layouts``.

    None where sizes of parameters alone do not say it.
    """
    if (
        not are_whole(live.layout)
        or checkpoint.topology.tensor_size != 1
        or not live.per_param
        or checkpoint.whole_model
    ):
        return None
    numels = [numel for layout in layouts for numel in layout.numel.tolist()]
    saved, current = checkpoint.world_size, live.layout.world_size
    return source_ranks(numels, saved_world_size=saved, world_size=current, rank=live.rank)


def receive_headers(checkpoint: Checkpoint, live: LiveOptimizer) -> Checkpoint:
    """Parse every header that this rank needs, also the ones that only other ranks read. Collective.

    Raises on every rank what the parsing of headers raises on any.
    """
    headers = _Headers(checkpoint)
    own, nearest = ranks_taken(checkpoint, live)
    first = checkpoint.model_file(own).name
    headers.read(first)
    headers.fetch(sorted({checkpoint.model_file(each).name for each in checkpoint.layout_models} - {first}))
    by_size = sources_by_size(checkpoint, live, live.layout, live.frozen)
    if by_size is not None:
        optim = models = {nearest, *by_size}
    else:  # the layout is in the headers
        headers.read(checkpoint.optim_files[nearest].name)
        optim, models = all_or_raise(lambda: _sources(checkpoint, live, nearest=nearest))
    wanted = [checkpoint.optim_files[source].name for source in sorted(optim)]
    model = checkpoint.model_states(own)
    if model.names_frozen and not checkpoint.whole_model:
        wanted += [checkpoint.model_files[source].name for source in sorted(models - {own})]
    headers.fetch(wanted)
    return checkpoint


def _sources(checkpoint: Checkpoint, live: LiveOptimizer, *, nearest: int) -> tuple[set[int], set[int]]:
    """Return the saved ranks whose optimizer files, and whose model states files, this rank needs.

    The headers of a model states file and of the optimizer file of rank ``nearest`` are here.
    """
    checkpoint.shard(nearest)
    trained, frozen = checkpoint.layout, checkpoint.frozen.layout
    optim, models = {nearest}, set[int]()
    for target in (live.layout, live.frozen):
        optim |= _holders(trained, target, live.rank)
        models |= _holders(frozen, target, live.rank)
    return optim, models


def _holders(src: Layout, dst: Layout, rank: int) -> set[int]:
    """Return the ranks of ``src`` that have some of ``rank``'s elements of the tensors in both layouts."""
    shapes = {tensor.name: tensor.shape for tensor in src.tensors}
    both = dst.only({tensor.name for tensor in dst.tensors if shapes.get(tensor.name) == tensor.shape})
    return set(make_plan(src, both, rank).source_ranks) if both.numel.any() else set()


@contextmanager
def module_file(checkpoint: Checkpoint, model: ModuleHeader, cost: LoadCost, *, executor: Executor) -> Iterator[str]:
    """Yield the path at which a rank reads its module states file, ``model``. Collective.

    That is the file itself for a rank that sees it on a disk. Others have the bytes that DeepSpeed reads in memory,
    which is all but parameters, under a name that lasts as long as the context; ``cost`` counts them.
    """
    inventory, name = checkpoint.inventory, model.path.name
    if inventory.reads_headers:
        yield str(model.path)
        return

    def content(names: Sequence[str]) -> dict[str, bytes]:
        found = {}
        for name in names:
            file = parse_rank_file(name)
            assert file is not None
            holding, rank = checkpoint.holding(file)
            asked = holding.model_states(rank)
            found[name] = _read(asked, executor)
            cost.header_bytes += len(found[name])
            cost.files.add(asked.path)
        return found

    is_remote = inventory.reads_payload or not inventory.reads(name)
    answers, moved = multicast([Request(inventory.reader(name), name)] if is_remote else [], content)
    cost.bytes_sent += moved.sent
    cost.bytes_received += moved.received
    held = os.memfd_create(name, os.MFD_CLOEXEC) if is_remote else None
    try:
        all_or_raise(lambda: None if held is None else _write(held, model, answers[name]))
        yield str(model.path) if held is None else f"/proc/self/fd/{held}"
    finally:
        if held is not None:
            os.close(held)


def _read(model: ModuleHeader, executor: Executor) -> bytes:
    """Read the ranges of a file that are not payload of parameters alone, one after the other."""
    offset, nbytes, place = _without_params(model)
    buffer = np.empty(int(nbytes.sum()), dtype=np.uint8)
    first = np.zeros_like(offset)
    table = CopyTable(first, offset, first, place, nbytes)
    read_segments(table, [model.path], [buffer], executor=host_executor(executor))
    return buffer.tobytes()


def _write(held: int, model: ModuleHeader, content: bytes | bytearray) -> None:
    """Put the ranges where they are in the file; the rest are zeros, which take no memory."""
    os.ftruncate(held, model.size)
    view = memoryview(content)
    for offset, nbytes, place in zip(*(column.tolist() for column in _without_params(model)), strict=True):
        os.pwrite(held, view[place : place + nbytes], offset)


def _without_params(model: ModuleHeader) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the ranges that are not payload of parameters alone: offsets, bytes, and places together."""
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


@dataclass(slots=True)
class LoadCost:
    """The cost of a load to this rank so far; ``header_bytes`` are all bytes read but payload."""

    bytes_owned: int = 0
    bytes_read: int = 0
    header_bytes: int = 0
    files: set[FilePath] = field(default_factory=set)
    bytes_sent: int = 0
    bytes_received: int = 0


def fill_from_others(checkpoint: Checkpoint, filled: Sequence[FillJob], cost: LoadCost) -> None:
    """Fill the rows that ``fill`` left unread because this rank does not see their files. Collective.

    Raises the same error on every rank. Adds the digests as ``fill`` does, and what it took, also to read for other
    ranks, to ``cost``.
    """
    executor = filled[0].executor
    inventory = checkpoint.inventory
    names = sorted(inventory.readers_of)  # a number for each that means the same on every rank
    numbers = {name: number for number, name in enumerate(names)}
    paths = tuple(checkpoint.tag_dir / name for name in names)
    tables: list[Int64Array] = [np.empty((0, 4), dtype=np.int64)]  # number of the file, offset, nbytes, reader
    first_row = [0]
    for one in filled:
        unread = one.unread
        count = 0 if unread is None else unread.num_rows
        if unread is not None and count:
            file = np.array([numbers[path.name] for path in unread.paths], dtype=np.int64)
            reader = np.array([inventory.reader(path.name, inventory.rank) for path in unread.paths], dtype=np.int64)
            columns = (file[unread.file], unread.file_offset, unread.nbytes, reader[unread.file])
            tables.append(np.stack(columns, axis=1))
        first_row.append(first_row[-1] + count)

    def read(asked: Int64Array, parts: Arrived, buffer: ByteArray) -> None:
        """Read what other ranks want; a range that several ask for is read once."""
        file, offset, nbytes, at = asked[:, 0], asked[:, 1] + parts.skip, parts.nbytes, parts.at
        _, first, same = np.unique(np.stack((file, offset, nbytes), 1), axis=0, return_index=True, return_inverse=True)
        same = same.reshape(-1)
        table = CopyTable(file[first], offset[first], np.zeros_like(first), at[first], nbytes[first])
        result = read_segments(table, paths, [buffer], executor=host_executor(executor))
        for i in np.flatnonzero(first[same] != np.arange(len(same))).tolist():
            source, count = int(at[first[same[i]]]), int(nbytes[i])
            buffer[int(at[i]) : int(at[i]) + count] = buffer[source : source + count]
        cost.bytes_read += result.bytes_read
        cost.files |= {*result.files}

    def put(arrived: Arrived, buffer: RoundBuffer) -> None:
        owner = np.searchsorted(first_row, arrived.row, side="right") - 1
        for number in np.unique(owner).tolist():
            here = owner == number
            some = Arrived(*(column[here] for column in arrived))
            part = filled[number]
            assert part.unread is not None
            row = some.row - first_row[number]
            rows = part.unread.take(row)
            pieces = rows.pieces(np.arange(len(row)), some.skip // rows.itemsize, some.nbytes // rows.itemsize)
            _put(part, pieces, some.at, buffer)
            is_cast = np.array([target.cast for target in part.targets], dtype=bool)[pieces.target]
            cast, read = np.flatnonzero(is_cast), np.flatnonzero(part.digest & ~is_cast)
            if len(cast):
                streams, totals = _digest(part, pieces.take(cast), some.at[cast], buffer)
                streams.add_cast(totals, part.cast_digests)
            if len(read):
                streams, totals = _digest(part, pieces.take(read), some.at[read], buffer)
                streams.add_read(totals, part.read_digests)

    rows = np.concatenate(tables)
    # Where a host engine is named, it moves what arrives; nothing of ours moves a GPU's memory then.
    filled_there = () if executor in ("numpy", "native") else (t.tensor for part in filled for t in part.targets)
    taken_on = device_of(filled_there)
    moved = all_or_raise(lambda: exchange_rows(rows[:, :3], rows[:, 3], read, put, taken_on=taken_on))
    cost.bytes_sent += moved.sent
    cost.bytes_received += moved.received


def _put(part: FillJob, pieces: ExtentTable, at: Int64Array, buffer: RoundBuffer) -> None:
    """Copy bytes that arrived, piece i of them at ``at[i]`` of a buffer, into the tensors of one part."""
    values = torch.from_numpy(buffer) if isinstance(buffer, np.ndarray) else buffer
    direct = np.array([each.in_place and each.tensor.device == values.device for each in part.targets], dtype=bool)
    quick = np.flatnonzero(direct[pieces.target])
    members, dst = np.unique(pieces.target[quick], return_inverse=True)
    begin = pieces.target_offset[quick] * pieces.itemsize[quick]
    copy_segments(
        CopyTable(np.zeros_like(quick), at[quick], dst.reshape(-1), begin, pieces.nbytes[quick]),
        [buffer],
        [part.targets[t].tensor for t in members.tolist()],
        executor=host_executor(part.executor) if isinstance(buffer, np.ndarray) else part.executor,
    )
    for i in np.flatnonzero(~direct[pieces.target]).tolist():
        target, place = part.targets[int(pieces.target[i])], int(pieces.target_offset[i])
        data = values[int(at[i]) : int(at[i] + pieces.nbytes[i])].view(getattr(torch, target.dtype))
        target.tensor[place : place + len(data)].copy_(data)


def _digest(part: FillJob, pieces: ExtentTable, at: Int64Array, buffer: RoundBuffer) -> tuple[RowStreams, UInt64Array]:
    """Digest pieces, each of which is at ``at`` in a buffer, and return the streams that they belong to."""
    streams = RowStreams.of(part.plan, pieces, part.targets)
    totals = sum_segments(Ranges(np.zeros_like(at), at, pieces.nbytes), [buffer], digest=streams.table)
    assert totals is not None
    return streams, totals
