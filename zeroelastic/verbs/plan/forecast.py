"""The cost of a load or a reshard at another world size or ZeRO stage, from rank 0's headers and all files' sizes.

The layouts of source and target are the same on every rank, so all numbers are closed form: only headers are read, and
parameters that are cut alike are computed once. ``bytes_read`` is what the plans of all ranks move
(``core.plan.overlaps``); ``bytes_owned`` is computed independently, from the target's own ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.model_states import ModelStates
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import (
    Shard,
    configured_sub_group_size,
    steps_with_bf16_optimizer,
    zero_option,
)
from zeroelastic.core.layout import (
    Int64Array,
    Layout,
    group_split_of_run,
    layout_from_sub_groups,
    pack_sub_groups,
    partition_numel,
    unpacked_layout,
)
from zeroelastic.core.plan import match_params, overlaps
from zeroelastic.errors import UsageError
from zeroelastic.io.paths import missing_file
from zeroelastic.io.storage import file_sizes
from zeroelastic.torch_file.header import DTYPE_BYTES, TensorRef, read_torch_file

MAX_WORLD_SIZE = 1 << 16
"""The largest world size of a forecast."""

LOAD_MEMORY_LIMIT = 64 << 20
"""Upper bound of the memory of a load, per rank, beyond the state that it fills."""

RESHARD_MEMORY_LIMIT = 1 << 30
"""Default upper bound of the memory of an offline reshard."""

LOAD_STAGING_BYTES = 16 << 20
"""Host memory through which a load passes data that it converts or copies to a GPU."""

PLAN_ROW_BYTES = 64
"""Memory of a plan for each of its rows."""

TABLE_ROW_BYTES = 512
"""Memory of a load for each row of its tables of byte ranges, copies for sorting included."""

TABLE_WINDOW_BYTES = 40 << 20
"""The most memory that these tables take at a time: they are made in windows (``extents.extent_windows``)."""

_CHUNK_ROWS = 1 << 21


@dataclass(frozen=True, slots=True)
class Head:
    """The facts of a checkpoint that a forecast needs: rank 0's headers and the size of every file, in rank order.

    ``model_sizes`` has an entry for each tensor parallel rank where its file has the ``whole_model`` (stages 1 and 2),
    else for each rank. ``weight_bytes`` are the bytes of an element of each tensor in the module's state.
    ``over_ranks`` are the layouts over all ranks of trained and of frozen parameters, where ranks have slices of these.
    """

    shard: Shard
    model: ModelStates
    optimizer_sizes: Int64Array
    model_sizes: Int64Array
    record_bytes: int
    weight_bytes: Mapping[str, int] = field(default_factory=dict)
    over_ranks: tuple[Layout, Layout | None] | None = None
    whole_model: bool = False

    @property
    def world_size(self) -> int:
        """Ranks that saved."""
        return len(self.optimizer_sizes)

    @property
    def layout(self) -> Layout:
        """The saved layout of the trained parameters."""
        return self.shard.layout if self.over_ranks is None else self.over_ranks[0]

    @property
    def frozen(self) -> Layout | None:
        """The saved layout of frozen parameters with elements, or None."""
        frozen = self.model.frozen if self.over_ranks is None else self.over_ranks[1]
        return frozen if frozen is not None and self.model.frozen_extents is not None and frozen.numel.any() else None

    def key_bytes(self, key: str) -> Int64Array:
        """Bytes per element of one state key of each trained parameter, 0 where it has none: ``(num_params,)``."""
        shard = self.shard
        sizes = [
            DTYPE_BYTES[shard.extents[key].dtype[i]] if key in keys else 0 for i, keys in enumerate(shard.tensor_keys)
        ]
        return np.array([*sizes, 0], dtype=np.int64)[self.layout.sub_group]

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Every state key of the trained parameters, in the order of the file."""
        return tuple(dict.fromkeys(key for keys in self.shard.tensor_keys for key in keys))

    @property
    def element_bytes(self) -> Int64Array:
        """Bytes per element of each trained parameter, all its state keys together: ``(num_params,)``."""
        sizes = np.zeros(self.layout.num_params, dtype=np.int64)
        for key in self.state_keys:
            sizes += self.key_bytes(key)
        return sizes

    @property
    def num_keys(self) -> Int64Array:
        """Tensors that each trained parameter has: ``(num_params,)``."""
        counts = np.array([*(len(keys) for keys in self.shard.tensor_keys), 0], dtype=np.int64)
        return counts[self.layout.sub_group]

    @property
    def frozen_bytes(self) -> Int64Array:
        """Bytes per element of each frozen parameter of their saved layout."""
        saved, extents, frozen = self.model.frozen, self.model.frozen_extents, self.frozen
        if saved is None or extents is None or frozen is None:
            return np.zeros(0, dtype=np.int64)
        of_name = {param.name: DTYPE_BYTES[extents.dtype[p]] for p, param in enumerate(saved.params)}
        return np.array([of_name[param.name] for param in frozen.params], dtype=np.int64)

    def optimizer_payload(self, layout: Layout, rank: int = 0) -> int:
        """Bytes of tensors in one rank's optimizer file of this layout, padding included."""
        own = layout.on_rank(rank)
        of_name = dict(zip((param.name for param in self.layout.params), self.element_bytes.tolist(), strict=True))
        sizes = np.zeros(own.num_sub_groups, dtype=np.int64)
        sizes[own.sub_group] = [of_name[param.name] for param in own.params]
        return int((own.sub_group_numel * sizes).sum())

    def frozen_payload(self, world_size: int) -> int:
        """Bytes of frozen parameters in one of that many model states files, padding included."""
        frozen = self.frozen
        return 0 if frozen is None else int((partition_numel(frozen.numel, world_size) * self.frozen_bytes).sum())

    @property
    def trained_weights(self) -> int:
        """Bytes of the trained weights in a module that has them whole."""
        tensors = self.layout.whole_tensors
        return sum(param.numel * self.weight_bytes.get(param.name, self.default_weight_bytes) for param in tensors)

    @property
    def default_weight_bytes(self) -> int:
        """Bytes of an element of a weight by the saved configuration."""
        blocks = (self.shard.ds_config.get(name) for name in ("bf16", "fp16"))
        return 2 if any(isinstance(block, dict) and block.get("enabled") for block in blocks) else 4

    def module_bytes(self, world_size: int) -> Int64Array:
        """Bytes that each rank reads of a model states file besides parameters: shape ``(world_size,)``.

        Additional ranks read rank 0's file, or that of their tensor parallel rank.
        """
        of_params = sum(nbytes for _, nbytes in self.model.fragments()) + int(self.model.weights[:, 1].sum())
        rank, parts = np.arange(world_size), len(self.model_sizes)
        number = rank % parts if self.whole_model else np.where(rank < parts, rank, 0)
        nbytes: Int64Array = np.maximum(self.model_sizes[number] - of_params, 0)
        return nbytes

    @property
    def num_files(self) -> int:
        """Files that the checkpoint is in, without its record."""
        return len(self.optimizer_sizes) + len(self.model_sizes)


def read_head(checkpoint: Checkpoint) -> Head:
    """Open rank 0's headers and list the files. Raises as ``Checkpoint.shard``."""
    model = checkpoint.model_states(0)
    shard = checkpoint.shard(0)
    sizes, layout = file_sizes(checkpoint.tag_dir), checkpoint.layout
    record = () if checkpoint.record is None else (checkpoint.tag_dir / RECORD_NAME,)
    for path in (*checkpoint.optim_files, *checkpoint.model_files, *record):
        if path.name not in sizes:  # removed since they were opened
            raise missing_file(path)
    return Head(
        shard=shard,
        model=model,
        optimizer_sizes=np.array([sizes[path.name] for path in checkpoint.optim_files], dtype=np.int64),
        model_sizes=np.array([sizes[path.name] for path in checkpoint.model_files], dtype=np.int64),
        record_bytes=0 if checkpoint.record is None else sizes[RECORD_NAME],
        weight_bytes=_weight_bytes(checkpoint),
        over_ranks=None if layout.slices is None else (layout, checkpoint.frozen_layout),
        whole_model=checkpoint.whole_model,
    )


def _weight_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    root = read_torch_file(checkpoint.model_files[0], foreign="inert").root
    module = root.get("module") if isinstance(root, dict) else None
    pairs = module.items() if isinstance(module, dict) else ()
    return {name: DTYPE_BYTES[ref.dtype] for name, ref in pairs if isinstance(ref, TensorRef)}


def target_layout(head: Head, world_size: int, stage: int) -> Layout:
    """The layout that DeepSpeed would make at another world size, with the options of the saved configuration."""
    shard = head.shard
    by_name = {param.name: param for param in shard.layout.params}
    groups = [[by_name[name] for name in group.params if name in by_name] for group in shard.groups]
    grouped = {param.name for group in groups for param in group}
    groups.append([param for param in shard.layout.params if param.name not in grouped])
    if stage == 3:
        size = configured_sub_group_size(shard.ds_config)
        return layout_from_sub_groups(pack_sub_groups(groups, world_size=world_size, sub_group_size=size), world_size)
    if stage == 1 and steps_with_bf16_optimizer(shard.ds_config):  # which knows neither option
        return group_split_of_run(groups, world_size)[0]
    round_robin = bool(zero_option(shard.ds_config, "round_robin_gradients"))
    itemsizes = None
    if zero_option(shard.ds_config, "parameter_alignment"):
        firsts = (members[0].name if members else "" for members in groups)
        itemsizes = [head.weight_bytes.get(name, head.default_weight_bytes) for name in firsts]
    return group_split_of_run(groups, world_size, round_robin=round_robin, itemsizes=itemsizes)[0]


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

    def binned(self, num_sources: int, num_targets: int, *, source_step: int = 1, target_step: int = 1) -> Int64Array:
        """The matrix source x target, with ``source_step`` x ``target_step`` ranks summed in each cell."""
        matrix = np.zeros((-(-num_sources // source_step), -(-num_targets // target_step)), dtype=np.int64)
        np.add.at(matrix, (self.source // source_step, self.target // target_step), self.nbytes)
        return matrix


NO_TRAFFIC = Traffic(*np.zeros((3, 0), dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Forecast:
    """The cost of resuming or resharding a checkpoint on ``world_size`` ranks at ZeRO ``stage``.

    Arrays have shape ``(world_size,)``.

    Exact: ``bytes_owned``, ``bytes_read``, the files (as the resume report counts them, so without the commit record),
    ``segments`` (runs of one tensor from one file) and ``requests`` (segments, less those that follow each other in
    file and destination). Estimates, because only rank 0's headers are opened: ``header_bytes`` (headers, scalars,
    commit record and the module states beside frozen parameters), ``memory`` (a load's beyond the state that it
    fills), and what a reshard writes. ``pieces`` are segments whose state keys count as one. ``module`` is what each
    rank reads of a model states file beside parameters; a reshard reads that of ``modules_resharded`` ranks.
    """

    head: Head
    world_size: int
    stage: int
    state_bytes: int
    optimizer: Traffic
    frozen: Traffic
    bytes_owned: Int64Array
    model_files: Int64Array
    segments: Int64Array
    requests: Int64Array
    pieces: Int64Array
    module: Int64Array
    modules_resharded: int
    reshard_bytes_written: int
    reshard_files_written: int

    @property
    def bytes_read(self) -> Int64Array:
        """Payload bytes that each rank reads."""
        return self.optimizer.per_target(self.world_size) + self.frozen.per_target(self.world_size)

    @property
    def optimizer_files(self) -> Int64Array:
        """Optimizer files that each rank opens: one where it owns nothing."""
        sources = np.bincount(self.optimizer.target, minlength=self.world_size)
        return np.maximum(sources, 1).astype(np.int64)

    @property
    def header_bytes(self) -> Int64Array:
        """Bytes that each rank reads beside the payload."""
        head = self.head
        headers = self.optimizer_files * head.shard.header_bytes
        headers += self.model_files * head.model.header_bytes
        headers[0] += head.record_bytes  # rank 0 reads it for all
        return headers + 2 * self.module  # a module is read for its checksums, and to load it

    @property
    def memory(self) -> Int64Array:
        """Memory of a load on each rank."""
        tables: Int64Array = np.minimum(TABLE_ROW_BYTES * (self.segments + self.pieces), TABLE_WINDOW_BYTES)
        rows = PLAN_ROW_BYTES * self.segments
        return LOAD_STAGING_BYTES + rows + tables + self.module

    @property
    def reshard_header_bytes(self) -> int:
        """Bytes that a reshard reads beside the payload."""
        head = self.head
        headers = head.world_size * head.shard.header_bytes + len(head.model_sizes) * head.model.header_bytes
        return head.record_bytes + headers + int(self.module[: self.modules_resharded].sum())

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
        """Payload bytes that all ranks read, over the bytes that they own; 1.0 for an empty state."""
        owned = int(self.bytes_owned.sum())
        return int(self.bytes_read.sum()) / owned if owned else 1.0

    @property
    def traffic(self) -> Traffic:
        """Optimizer and frozen bytes together."""
        keys = [part.target * self.saved_world_size + part.source for part in (self.optimizer, self.frozen)]
        return add_traffic(
            np.concatenate(keys), np.concatenate([self.optimizer.nbytes, self.frozen.nbytes]), self.saved_world_size
        )


def make_forecast(head: Head, world_size: int, *, stage: int | None = None) -> Forecast:
    """The forecast of a load or a reshard of this checkpoint on ``world_size`` ranks at ZeRO ``stage``.

    The stage is by default that of the save. Raises UsageError for a world size below 1 or above MAX_WORLD_SIZE.

    Example::

        forecast = make_forecast(read_head(open_checkpoint("ckpt/global_step4")), 3)
        forecast.bytes_read.max(), forecast.files.max()
    """
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise UsageError(
            f"a world size is a number from 1 to {MAX_WORLD_SIZE}, not {world_size}. Give --world-size another."
        )
    stage = stage or head.shard.stage
    layout, element_bytes = head.shard.layout, head.element_bytes
    target = target_layout(head, world_size, stage)
    optimizer, rows, pieces = _pieces(layout, target, element_bytes, head.num_keys)
    owned = _owned(target, element_bytes[match_params(layout, target)])
    state_bytes = int((layout.numel * element_bytes).sum())
    segments, requests = rows, rows - _joined(head, target)
    frozen = NO_TRAFFIC
    if head.frozen is not None:
        sizes = head.frozen_bytes
        parts = unpacked_layout(head.frozen.params, world_size)  # at every stage each rank fills its part
        frozen, more, more_pieces = _pieces(head.frozen, parts, sizes, np.ones_like(sizes))
        # Each frozen parameter has its own destination: no two segments ever follow each other.
        segments, requests, pieces = segments + more, requests + more, pieces + more_pieces
        owned = owned + _owned(parts, sizes)
        state_bytes += int((head.frozen.numel * sizes).sum())
    module = head.module_bytes(world_size)
    return Forecast(
        head=head,
        world_size=world_size,
        stage=stage,
        state_bytes=state_bytes,
        optimizer=optimizer,
        frozen=frozen,
        bytes_owned=owned,
        model_files=_model_files(frozen, len(head.model_sizes), world_size),
        segments=segments,
        requests=requests,
        pieces=pieces,
        module=module,
        modules_resharded=world_size if stage == 3 else 1,
        reshard_bytes_written=_bytes_written(head, target, stage, module),
        reshard_files_written=world_size + (world_size if stage == 3 else 1),
    )


def _pieces(
    src: Layout, dst: Layout, element_bytes: Int64Array, num_keys: Int64Array
) -> tuple[Traffic, Int64Array, Int64Array]:
    """Bytes by source and target; and each target rank's number of segments, and of pieces (all state keys as one).

    ``element_bytes`` and ``num_keys`` belong to the parameters of ``src``. Parameters that are cut alike are computed
    once.
    """
    order = match_params(src, dst)
    columns = (dst.numel, dst.part, dst.origin, src.part[order], src.origin[order])
    _, alike, which = np.unique(np.stack(columns, axis=1), axis=0, return_index=True, return_inverse=True)
    # [bytes per element, tensors, parameters] of all parameters that are cut alike.
    weights = np.zeros((len(alike), 3), dtype=np.int64)
    each = np.stack([element_bytes[order], num_keys[order], np.ones_like(order)], axis=1)
    np.add.at(weights, which.reshape(-1), each)
    keep = dst.numel[alike] > 0
    alike, weights = alike[keep], weights[keep]
    segments, pieces = np.zeros((2, dst.world_size), dtype=np.int64)
    found = NO_TRAFFIC
    step = max(1, _CHUNK_ROWS // (src.world_size + dst.world_size))
    for at in range(0, len(alike), step):
        row, target, source, length = overlaps(src, dst, alike[at : at + step], order)
        weight = weights[at + row]
        np.add.at(segments, target, weight[:, 1])
        np.add.at(pieces, target, weight[:, 2])
        keys = np.concatenate([found.target * src.world_size + found.source, target * src.world_size + source])
        found = add_traffic(keys, np.concatenate([found.nbytes, length * weight[:, 0]]), src.world_size)
    return found, segments, pieces


def add_traffic(keys: Int64Array, nbytes: Int64Array, num_sources: int) -> Traffic:
    """Add up the bytes of equal keys; a key is ``target * num_sources + source``."""
    if len(keys) == 0:
        return Traffic(keys, keys, nbytes)
    order = np.argsort(keys, kind="stable")
    keys, nbytes = keys[order], nbytes[order]
    first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    return Traffic(keys[first] // num_sources, keys[first] % num_sources, np.add.reduceat(nbytes, first))


def _owned(dst: Layout, element_bytes: Int64Array) -> Int64Array:
    """Bytes that each rank owns, from its ranges alone: shape ``(world_size,)``."""
    rank = np.arange(dst.world_size, dtype=np.int64)
    total = np.zeros(dst.world_size, dtype=np.int64)
    columns = np.stack([dst.numel, dst.part, dst.origin], axis=1)
    alike, which = np.unique(columns, axis=0, return_inverse=True)
    weight = np.zeros(len(alike), dtype=np.int64)
    np.add.at(weight, which.reshape(-1), element_bytes)
    for (numel, part, origin), weighs in zip(alike.tolist(), weight.tolist(), strict=True):
        total += (np.clip((rank + 1) * part - origin, 0, numel) - np.clip(rank * part - origin, 0, numel)) * weighs
    return total


def _joined(head: Head, dst: Layout) -> Int64Array:
    """Segments of each target rank that begin where the previous one ends, both in the file and in the destination.

    Such segments belong to parameters p and q, neighbours in the buffers of source and target: the last piece of p and
    the first one of q come from one source rank, with nothing between them on either side.
    """
    src, shard = head.shard.layout, head.shard
    order = np.lexsort((src.in_buffer, src.sub_group))
    p, q = order[:-1], order[1:]
    to_dst = match_params(dst, src)
    dst_p, dst_q = to_dst[p], to_dst[q]
    keys = np.zeros(len(p), dtype=np.int64)
    for key, extents in shard.extents.items():
        size, at = head.key_bytes(key), extents.offset
        apart = (src.offset[q] - src.offset[p]) * size[p]
        keys += (at[p] >= 0) & (at[q] - at[p] == apart) & (size[p] == size[q])
    keys *= (src.sub_group[p] == src.sub_group[q]) & (dst.sub_group[dst_p] == dst.sub_group[dst_q])
    columns = [
        *(column[i] for column in (src.numel, src.part, src.origin) for i in (p, q)),
        *(column[i] for column in (dst.part, dst.origin) for i in (dst_p, dst_q)),
        src.offset[q] - src.offset[p],
        dst.offset[dst_q] - dst.offset[dst_p],
    ]
    pairs, which = np.unique(np.stack(columns, axis=1)[keys > 0], axis=0, return_inverse=True)
    weight = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(weight, which.reshape(-1), keys[keys > 0])
    joined = np.zeros(dst.world_size, dtype=np.int64)
    rank = np.arange(dst.world_size, dtype=np.int64)
    step = max(1, _CHUNK_ROWS // 8 // dst.world_size)
    for at_pair in range(0, len(pairs), step):
        some = pairs[at_pair : at_pair + step, :, None]
        numel, part, origin = ((some[:, i], some[:, i + 1]) for i in (0, 2, 4))
        begins, ends, first, last = [], [], [], []
        for side, (dst_part, dst_origin) in enumerate(((some[:, 6], some[:, 8]), (some[:, 7], some[:, 9]))):
            begin = np.clip(rank * dst_part - dst_origin, 0, numel[side])
            end = np.clip((rank + 1) * dst_part - dst_origin, 0, numel[side])
            in_dst = np.maximum(dst_origin - rank * dst_part, 0)
            begins.append(begin)
            ends.append(end)
            first.append(in_dst)
            last.append(in_dst + end - begin)
        source = (ends[0] - 1 + origin[0]) // part[0]
        same = (begins[1] + origin[1]) // part[1] == source
        same &= (ends[0] > begins[0]) & (ends[1] > begins[1])
        same &= last[0] == first[1] + some[:, 11]
        same &= ends[0] + origin[0] - source * part[0] == begins[1] + origin[1] - source * part[1] + some[:, 10]
        joined += (same * weight[at_pair : at_pair + step, None]).sum(axis=0)
    return joined


def _model_files(frozen: Traffic, num_files: int, world_size: int) -> Int64Array:
    """Model states files that each rank opens: its own, or rank 0's, and those of the frozen pieces it needs."""
    rank = np.arange(world_size, dtype=np.int64)
    own = np.where(rank < num_files, rank, 0)
    others = frozen.source != own[frozen.target]
    return 1 + np.bincount(frozen.target[others], minlength=world_size).astype(np.int64)


def _bytes_written(head: Head, target: Layout, stage: int, module: Int64Array) -> int:
    """Bytes that a reshard writes: files like the saved ones, with the payload of the new world size and padding."""
    world_size = target.world_size
    around = int(head.optimizer_sizes[0]) - head.optimizer_payload(head.shard.layout)
    optimizer = world_size * (around + head.optimizer_payload(target))
    if stage == 3:
        model = int(module.sum()) + world_size * head.frozen_payload(world_size)
    else:
        model = int(module[0]) + head.trained_weights + head.frozen_payload(1)
    return optimizer + model + head.record_bytes
