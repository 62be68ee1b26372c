"""The cost of a load or a reshard at another world size, from rank 0's headers and the sizes of the files alone.

ZeRO-3 cuts every parameter in the same way, so all numbers are closed form: only headers are read, and parameters of
equal size are computed once. ``bytes_read`` is what a plan would move (``plan.make_plan``), summed over the pieces;
``bytes_owned`` is computed independently, from the target's own ranges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.model_states import ModelStates
from zeroelastic.checkpoint.open import Checkpoint, require_stage_3
from zeroelastic.checkpoint.optimizer_file import Shard, configured_sub_group_size
from zeroelastic.core.layout import Int64Array, Layout, layout_from_sub_groups, pack_sub_groups, partition_numel
from zeroelastic.errors import UsageError
from zeroelastic.io.storage import file_sizes
from zeroelastic.torch_file.header import DTYPE_BYTES

MAX_WORLD_SIZE = 1 << 16
"""The largest world size of a forecast."""

LOAD_MEMORY_LIMIT = 64 << 20
"""Upper bound of the memory of a load, per rank, beyond the state that it fills."""

RESHARD_MEMORY_LIMIT = 1 << 30
"""Default upper bound of the memory of an offline reshard."""

LOAD_STAGING_BYTES = 16 << 20
"""Host memory through which a load passes data that it converts or copies to a GPU."""

TABLE_ROW_BYTES = 512
"""Memory of a load for each row of its tables, copies for sorting included."""

_CHUNK_ROWS = 1 << 21


@dataclass(frozen=True, slots=True)
class Head:
    """The facts of a checkpoint that a forecast needs: rank 0's headers and the size of every file, in rank order."""

    shard: Shard
    model: ModelStates
    optimizer_sizes: Int64Array
    model_sizes: Int64Array
    record_bytes: int

    @property
    def world_size(self) -> int:
        """Ranks that saved."""
        return len(self.optimizer_sizes)

    @property
    def frozen(self) -> Layout | None:
        """The saved layout of frozen parameters with elements, or None."""
        frozen = self.model.frozen
        return frozen if frozen is not None and self.model.frozen_extents is not None and frozen.numel.any() else None

    def key_bytes(self, key: str) -> Int64Array:
        """Bytes per element of one state key of each trained parameter, 0 where it has none: ``(num_params,)``."""
        shard = self.shard
        sizes = [
            DTYPE_BYTES[shard.extents[key].dtype[i]] if key in keys else 0 for i, keys in enumerate(shard.tensor_keys)
        ]
        return np.array([*sizes, 0], dtype=np.int64)[shard.layout.sub_group]

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Every state key of the trained parameters, in the order of the file."""
        return tuple(dict.fromkeys(key for keys in self.shard.tensor_keys for key in keys))

    @property
    def element_bytes(self) -> Int64Array:
        """Bytes per element of each trained parameter, all its state keys together: ``(num_params,)``."""
        sizes = np.zeros(self.shard.layout.num_params, dtype=np.int64)
        for key in self.state_keys:
            sizes += self.key_bytes(key)
        return sizes

    @property
    def num_keys(self) -> Int64Array:
        """Tensors that each trained parameter has: ``(num_params,)``."""
        counts = np.array([*(len(keys) for keys in self.shard.tensor_keys), 0], dtype=np.int64)
        return counts[self.shard.layout.sub_group]

    @property
    def frozen_bytes(self) -> Int64Array:
        """Bytes per element of each frozen parameter."""
        frozen, extents = self.model.frozen, self.model.frozen_extents
        if frozen is None or extents is None:
            return np.zeros(0, dtype=np.int64)
        return np.array([DTYPE_BYTES[extents.dtype[p]] for p in range(frozen.num_params)], dtype=np.int64)

    def optimizer_payload(self, world_size: int) -> int:
        """Bytes of tensors in one rank's optimizer file, padding included, when that many ranks save."""
        return int((partition_numel(self.shard.layout.numel, world_size) * self.element_bytes).sum())

    def frozen_payload(self, world_size: int) -> int:
        """Bytes of frozen parameters in one rank's model states file, padding included, when that many ranks save."""
        frozen = self.frozen
        return 0 if frozen is None else int((partition_numel(frozen.numel, world_size) * self.frozen_bytes).sum())

    def module_bytes(self, world_size: int) -> Int64Array:
        """Bytes that each rank reads of a model states file besides frozen parameters; additional ranks read rank 0's.

        Shape ``(world_size,)``.
        """
        rank = np.arange(world_size)
        return self.model_sizes[np.where(rank < self.world_size, rank, 0)] - self.frozen_payload(self.world_size)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes from the files of saved ranks to target ranks, without zeros, sorted by (target, source)."""

    target: Int64Array
    source: Int64Array
    nbytes: Int64Array

    def per_target(self, world_size: int) -> Int64Array:
        """Bytes that each target rank reads: shape ``(world_size,)``."""
        total = np.zeros(world_size, dtype=np.int64)
        np.add.at(total, self.target, self.nbytes)
        return total

    def files_per_target(self, world_size: int) -> Int64Array:
        """Files that each target rank reads from: shape ``(world_size,)``."""
        return np.bincount(self.target, minlength=world_size).astype(np.int64)

    def binned(self, num_sources: int, num_targets: int, *, source_step: int = 1, target_step: int = 1) -> Int64Array:
        """The matrix source x target, with ``source_step`` x ``target_step`` ranks summed in each cell."""
        matrix = np.zeros((-(-num_sources // source_step), -(-num_targets // target_step)), dtype=np.int64)
        np.add.at(matrix, (self.source // source_step, self.target // target_step), self.nbytes)
        return matrix


@dataclass(frozen=True, slots=True)
class Forecast:
    """The cost of resuming or resharding a checkpoint on ``world_size`` ranks; arrays have shape ``(world_size,)``.

    Exact: ``bytes_owned``, ``bytes_read``, the files (as the resume report counts them, so without the commit record),
    ``segments`` (runs of one tensor from one file) and ``requests`` (segments, less those that follow each other in
    file and destination). Estimates, because only rank 0's headers are opened: ``header_bytes`` (headers, scalars,
    commit record and the module states beside frozen parameters), ``memory`` (a load's beyond the state that it
    fills), and what a reshard writes.
    """

    head: Head
    world_size: int
    state_bytes: int
    optimizer: Traffic
    frozen: Traffic
    bytes_owned: Int64Array
    bytes_read: Int64Array
    header_bytes: Int64Array
    optimizer_files: Int64Array
    model_files: Int64Array
    segments: Int64Array
    requests: Int64Array
    memory: Int64Array
    reshard_header_bytes: int
    reshard_bytes_written: int

    @property
    def saved_world_size(self) -> int:
        """Ranks that saved."""
        return self.head.world_size

    @property
    def files(self) -> Int64Array:
        """Checkpoint files that each rank opens."""
        return self.optimizer_files + self.model_files

    @property
    def amplification(self) -> float:
        """Payload bytes that all ranks read, over the bytes of the state; 1.0 for an empty state."""
        return int(self.bytes_read.sum()) / self.state_bytes if self.state_bytes else 1.0

    @property
    def traffic(self) -> Traffic:
        """Optimizer and frozen bytes together."""
        keys = [part.target * self.saved_world_size + part.source for part in (self.optimizer, self.frozen)]
        return _traffic(
            np.concatenate(keys), np.concatenate([self.optimizer.nbytes, self.frozen.nbytes]), self.saved_world_size
        )


def read_head(checkpoint: Checkpoint) -> Head:
    """Open rank 0's headers and list the files. Raises as ``Checkpoint.shard``."""
    require_stage_3(checkpoint, "The plan of a load")
    model = checkpoint.model_states(0)
    shard = checkpoint.shard(0)
    sizes = file_sizes(checkpoint.tag_dir)
    return Head(
        shard=shard,
        model=model,
        optimizer_sizes=np.array([sizes[path.name] for path in checkpoint.optim_files], dtype=np.int64),
        model_sizes=np.array([sizes[path.name] for path in checkpoint.model_files], dtype=np.int64),
        record_bytes=0 if checkpoint.record is None else sizes[RECORD_NAME],
    )


def make_forecast(head: Head, world_size: int) -> Forecast:
    """The forecast of a load or a reshard of this checkpoint on ``world_size`` ranks.

    Raises UsageError for a world size below 1 or above MAX_WORLD_SIZE.

    Example::

        forecast = make_forecast(read_head(open_checkpoint("ckpt/global_step4")), 3)
        forecast.bytes_read.max(), forecast.files.max()
    """
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise UsageError(f"a world size is a number from 1 to {MAX_WORLD_SIZE}, not {world_size}.")
    saved = head.world_size
    layout, element_bytes, num_keys = head.shard.layout, head.element_bytes, head.num_keys
    optimizer, rows, pieces = _pieces(layout.numel, element_bytes, num_keys, saved, world_size)
    owned = _owned(layout.numel, element_bytes, world_size)
    state_bytes = int((layout.numel * element_bytes).sum())
    segments, requests = rows, rows - _joined(head, target_layout(head.shard, world_size))
    empty = np.zeros(0, dtype=np.int64)
    frozen = Traffic(empty, empty, empty)
    if head.frozen is not None:
        sizes = head.frozen_bytes
        frozen, more, more_pieces = _pieces(head.frozen.numel, sizes, np.ones_like(sizes), saved, world_size)
        # Each frozen parameter has its own destination: no two segments ever follow each other.
        segments, requests, pieces = segments + more, requests + more, pieces + more_pieces
        owned = owned + _owned(head.frozen.numel, sizes, world_size)
        state_bytes += int((head.frozen.numel * sizes).sum())
    # A rank that owns nothing still opens one optimizer file.
    optimizer_files = np.maximum(optimizer.files_per_target(world_size), 1)
    model_files = _model_files(frozen, saved, world_size)
    module = head.module_bytes(world_size)
    return Forecast(
        head=head,
        world_size=world_size,
        state_bytes=state_bytes,
        optimizer=optimizer,
        frozen=frozen,
        bytes_owned=owned,
        bytes_read=optimizer.per_target(world_size) + frozen.per_target(world_size),
        header_bytes=head.record_bytes
        + optimizer_files * head.shard.header_bytes
        + model_files * head.model.header_bytes
        + 2 * module,  # read for its checksums, and again when DeepSpeed loads it
        optimizer_files=optimizer_files,
        model_files=model_files,
        segments=segments,
        requests=requests,
        memory=LOAD_STAGING_BYTES + TABLE_ROW_BYTES * (segments + pieces) + module,
        reshard_header_bytes=head.record_bytes
        + saved * (head.shard.header_bytes + head.model.header_bytes)
        + int(module.sum()),
        reshard_bytes_written=_bytes_written(head, world_size, module),
    )


def target_layout(shard: Shard, world_size: int) -> Layout:
    """The layout that DeepSpeed would make at another world size, with the saved ``sub_group_size``."""
    sub_group_size = configured_sub_group_size(shard.ds_config)
    by_name = {param.name: param for param in shard.layout.params}
    groups = [[by_name[name] for name in group.params if name in by_name] for group in shard.groups]
    grouped = {param.name for group in groups for param in group}
    groups.append([param for param in shard.layout.params if param.name not in grouped])
    return layout_from_sub_groups(
        pack_sub_groups(groups, world_size=world_size, sub_group_size=sub_group_size), world_size
    )


def _pieces(
    numel: Int64Array, element_bytes: Int64Array, num_keys: Int64Array, src_world_size: int, dst_world_size: int
) -> tuple[Traffic, Int64Array, Int64Array]:
    """Bytes by source and target; and each target rank's number of segments, and of pieces (all state keys as one)."""
    sizes, which = np.unique(numel, return_inverse=True)
    # [bytes per element, tensors, parameters] of all parameters of one size.
    weights = np.zeros((len(sizes), 3), dtype=np.int64)
    np.add.at(weights, which, np.stack([element_bytes, num_keys, np.ones_like(num_keys)], axis=1))
    keep = sizes > 0
    sizes, weights = sizes[keep], weights[keep]
    segments, pieces = np.zeros((2, dst_world_size), dtype=np.int64)
    empty = np.zeros(0, dtype=np.int64)
    found = Traffic(empty, empty, empty)
    for size, target, source, length in _overlaps(sizes, src_world_size, dst_world_size):
        np.add.at(segments, target, weights[size, 1])
        np.add.at(pieces, target, weights[size, 2])
        keys = np.concatenate([found.target * src_world_size + found.source, target * src_world_size + source])
        nbytes = np.concatenate([found.nbytes, length * weights[size, 0]])
        found = _traffic(keys, nbytes, src_world_size)
    return found, segments, pieces


def _traffic(keys: Int64Array, nbytes: Int64Array, num_sources: int) -> Traffic:
    """Add up the bytes of equal keys; a key is ``target * num_sources + source``."""
    if len(keys) == 0:
        return Traffic(keys, keys, nbytes)
    order = np.argsort(keys, kind="stable")
    keys, nbytes = keys[order], nbytes[order]
    first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    return Traffic(keys[first] // num_sources, keys[first] % num_sources, np.add.reduceat(nbytes, first))


def _overlaps(
    sizes: Int64Array, src_world_size: int, dst_world_size: int
) -> Iterator[tuple[Int64Array, Int64Array, Int64Array, Int64Array]]:
    """Every piece of parameters of these sizes, none of them 0, some sizes at a time.

    Four parallel columns: index of the size, target rank, source rank, elements.
    """
    step = max(1, _CHUNK_ROWS // (src_world_size + dst_world_size))
    for at in range(0, len(sizes), step):
        numel = sizes[at : at + step]
        src_part, dst_part = partition_numel(numel, src_world_size), partition_numel(numel, dst_world_size)
        owners = -(-numel // dst_part)
        which = np.repeat(np.arange(len(numel)), owners)
        target = np.arange(len(which)) - np.repeat(np.cumsum(owners) - owners, owners)
        begin = target * dst_part[which]
        end = np.minimum(begin + dst_part[which], numel[which])
        first = begin // src_part[which]
        count = (end - 1) // src_part[which] - first + 1
        row = np.repeat(np.arange(len(which)), count)
        source = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        part = src_part[which[row]]
        length = np.minimum(end[row], (source + 1) * part) - np.maximum(begin[row], source * part)
        yield at + which[row], target[row], source, length


def _owned(numel: Int64Array, element_bytes: Int64Array, world_size: int) -> Int64Array:
    """Bytes that each rank owns, from its ranges alone: shape ``(world_size,)``."""
    rank = np.arange(world_size, dtype=np.int64)
    total = np.zeros(world_size, dtype=np.int64)
    sizes, which = np.unique(numel, return_inverse=True)
    weight = np.zeros(len(sizes), dtype=np.int64)
    np.add.at(weight, which, element_bytes)
    for size, weighs in zip(sizes.tolist(), weight.tolist(), strict=True):
        part = partition_numel(size, world_size)
        total += (np.minimum((rank + 1) * part, size) - np.minimum(rank * part, size)) * weighs
    return total


def _joined(head: Head, dst: Layout) -> Int64Array:
    """Segments of each target rank that begin where the previous one ends, both in the file and in the destination.

    Such segments belong to parameters p, q that are neighbours in source and target: the piece of p ends where both
    sides' parts of p end, without padding behind it, and the piece of q begins where both parts begin.
    """
    src, shard = head.shard.layout, head.shard
    index = dst.index()
    order = np.array([index[param.name] for param in src.params], dtype=np.int64)
    sub_group, offset = dst.sub_group[order], dst.offset[order]
    follows = (src.sub_group[1:] == src.sub_group[:-1]) & (src.offset[1:] == (src.offset + src.part)[:-1])
    follows &= (sub_group[1:] == sub_group[:-1]) & (offset[1:] == (offset + dst.part[order])[:-1])
    keys = np.zeros(max(src.num_params - 1, 0), dtype=np.int64)
    for key, extents in shard.extents.items():
        size, at = head.key_bytes(key), extents.offset
        keys += (at[:-1] >= 0) & (at[1:] == at[:-1] + src.part[:-1] * size[:-1]) & (size[1:] == size[:-1])
    pairs = np.stack([src.numel[:-1], src.numel[1:]], axis=1)[follows & (keys > 0)]
    joined = np.zeros(dst.world_size, dtype=np.int64)
    if len(pairs) == 0:
        return joined
    pairs, which = np.unique(pairs, axis=0, return_inverse=True)
    weight = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(weight, which.reshape(-1), keys[follows & (keys > 0)])
    rank = np.arange(dst.world_size, dtype=np.int64)
    for (numel, next_numel), weighs in zip(pairs.tolist(), weight.tolist(), strict=True):
        src_part, dst_part = partition_numel(numel, src.world_size), partition_numel(numel, dst.world_size)
        end = (rank + 1) * dst_part
        source = end // src_part - 1
        begin = rank * partition_numel(next_numel, dst.world_size)
        joined += weighs * (
            (end <= numel)
            & (end % src_part == 0)
            & (begin < next_numel)
            & (source * partition_numel(next_numel, src.world_size) == begin)
        )
    return joined


def _model_files(frozen: Traffic, saved: int, world_size: int) -> Int64Array:
    """Model states files that each rank opens: its own, or rank 0's, and those of the frozen pieces it needs."""
    rank = np.arange(world_size, dtype=np.int64)
    own = np.where(rank < saved, rank, 0)
    others = frozen.source != own[frozen.target]
    return 1 + np.bincount(frozen.target[others], minlength=world_size).astype(np.int64)


def _bytes_written(head: Head, world_size: int, module: Int64Array) -> int:
    """Bytes that a reshard writes: files like the saved ones, with the payload of the new world size and padding."""
    around = int(head.optimizer_sizes[0]) - head.optimizer_payload(head.world_size)
    optimizer = world_size * (around + head.optimizer_payload(world_size))
    return optimizer + int(module.sum()) + world_size * head.frozen_payload(world_size) + head.record_bytes
