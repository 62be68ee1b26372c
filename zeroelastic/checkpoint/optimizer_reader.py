"""Reads one rank's optimizer file, header only, in each of its formats.

At stage 3, ``rigid`` is what stock DeepSpeed writes: a nested ``optimizer_state_dict`` over padded flat buffers.
``elastic`` is ``base_optimizer_state``, one lean tensor per parameter, with a table (docs/concepts/format.md).
At stages 1 and 2 DeepSpeed writes ``single_partition_of_fp32_groups`` and ``base_optimizer_state``: with
``elastic_checkpoint`` its state by group without padding and without hyper-parameters, else the state dict of the inner
optimizer with padding. Each format has a reader; one builder, which all of them call, places the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from zeroelastic.checkpoint.commit_record import CheckpointFormat
from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.optimizer_file import (
    ELASTIC_VERSION,
    FP32,
    FROZEN,
    GRAD_SCALER,
    SCALERS,
    OptimizerHeader,
    OptionValue,
    ParamGroup,
    ScalerState,
    checked_params,
    checked_table,
    damaged,
    read_group,
    read_option,
    read_scalar,
    zero_option,
)
from zeroelastic.checkpoint.tag_files import SAVE_ID
from zeroelastic.checkpoint.topology import Topology
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import (
    Int64Array,
    Layout,
    Param,
    group_split_layout,
    layout_from_sub_groups,
    original_order,
    with_slices,
)
from zeroelastic.core.slices import RankSet
from zeroelastic.errors import CheckpointError, NewerFormatError, UnsupportedError, buffer_kind, shown
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import Blocks
from zeroelastic.torch_file.header import (
    DTYPE_BYTES,
    DType,
    Extent,
    Stub,
    TensorRef,
    TorchFile,
    read_torch_file,
)

_State = Mapping[str, object]
"""The entry ``optimizer_state_dict`` of a file."""

_Make = Callable[..., OptimizerHeader]
"""``_build`` with what is the same in every format."""


class OptimizerFile(NamedTuple):
    """An optimizer file whose tree was read, and whose tensors are not placed yet: ``shard_of`` does it.

    ``num_parts`` are the ranks that share each flat buffer, where these are not all data parallel ranks: those of
    experts. ``config`` is the DeepSpeed configuration, ``save_id`` the id of a save that is not DeepSpeed's own.
    """

    file: TorchFile
    state: _State
    config: object
    stage: int
    num_parts: tuple[int, ...] | None
    save_id: object = None

    @property
    def gaps(self) -> list[list[int]] | None:
        """The elements left free behind each parameter of each group, where a file of stages 1 and 2 states them.

        Raises CheckpointError.
        """
        gaps = self.state.get("param_alignment_paddings") if self.stage != 3 else None
        if gaps is not None and not (
            isinstance(gaps, list)
            and all(isinstance(group, list) and all(type(n) is int and 0 <= n < 16 for n in group) for group in gaps)
        ):
            raise damaged(self.file.path, f"param_alignment_paddings is {shown(gaps)}")
        return gaps


class RankSlices(NamedTuple):
    """Which slices a rank's files have to hold.

    ``rank`` is counted over all ranks, ``layout`` is what the checkpoint's maps say that it has, and ``names`` are
    those of whole tensors by the name in the files, where they differ.
    """

    topology: Topology
    rank: int
    layout: Layout
    names: Mapping[str, str]


def open_shard(
    path: FilePath,
    rank: int,
    *,
    world_size: int,
    rigid_params: Sequence[Sequence[Param]] | None,
    tp_rank: int = 0,
    slices: RankSlices | None = None,
) -> OptimizerHeader:
    """Parse the optimizer file of a data parallel rank of ``world_size``, that of tensor parallel rank ``tp_rank``.

    ``rigid_params`` are the parameters by flat buffer, in buffer order, which the optimizer files of stock DeepSpeed do
    not name (they come from a ``*_model_states.pt``); elastic files of stage 3 name them themselves. ``slices``
    are those of the rank, where the checkpoint has slices. Raises CheckpointError, UnsupportedError.
    """
    opened = read_optimizer_file(path, world_size=world_size)
    return shard_of(opened, rank, world_size=world_size, rigid_params=rigid_params, tp_rank=tp_rank, slices=slices)


def read_optimizer_file(path: FilePath, *, world_size: int, through: Blocks | None = None) -> OptimizerFile:
    """Read the tree of an optimizer file of ``world_size`` data parallel ranks. Raises as ``open_shard``."""
    file = read_torch_file(path, through=through)
    root, file.root = file.root, None
    state = root.pop("optimizer_state_dict", None) if isinstance(root, dict) else None
    if not isinstance(root, dict) or not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds no optimizer_state_dict. It is not a ZeRO optimizer file.")
    # DeepSpeed's BF16_Optimizer, which steps ZeRO-1 with fp32 gradient accumulation, writes no stage.
    stage = state.get("zero_stage", 1 if _GROUPS in state else None)
    if stage not in (1, 2, 3):
        raise UnsupportedError(f"{path}: was saved with ZeRO stage {shown(stage)}; stages 1, 2 and 3 are read.")
    if _LEGACY in state:
        raise UnsupportedError(
            f"{path}: was written by the ZeRO-1 of an early DeepSpeed ({_LEGACY}; such as GPT-NeoX and Pythia), whose "
            "files are not supported: they do not say which parameters are where. Load it with the DeepSpeed that "
            "wrote it."
        )
    num_parts = _num_parts(path, state, int(stage), world_size)
    return OptimizerFile(file, state, root.get("ds_config"), int(stage), num_parts, root.get(SAVE_ID))


def _num_parts(path: FilePath, state: _State, stage: int, world_size: int) -> tuple[int, ...] | None:
    """``OptimizerFile.num_parts``. Raises CheckpointError for numbers that do not divide the data parallel ranks."""
    stated = state.get("partition_count")
    counts: list[object] = stated if stage != 3 and isinstance(stated, list) and stated else [stated]
    groups = state.get("ds_zero_partition_groups") if stage == 3 else None
    numbers = [count for count in counts if type(count) is int and count > 0 and world_size % count == 0]
    if len(numbers) < len(counts) or (world_size not in numbers and not _has_experts_alone(state)):
        said = next((count for count in counts if count not in numbers), counts[0])
        raise CheckpointError(
            f"{path}: was saved by {shown(said)} ranks, the rest of the checkpoint by {world_size}. Files of "
            "two saves are mixed in this directory."
        )
    if groups is not None:
        numbers = _partition_counts(path, groups, world_size)
    return tuple(numbers) if any(count != world_size for count in numbers) else None


def _has_experts_alone(state: _State) -> bool:
    """Return whether all optimizer groups of a file of stage 1 or 2 are groups of experts."""
    base = state.get("base_optimizer_state")
    groups = base.get("param_groups") if isinstance(base, dict) else None
    return isinstance(groups, list) and all(isinstance(group, dict) and group.get("moe") is True for group in groups)


def _partition_counts(path: FilePath, groups: object, world_size: int) -> list[int]:
    """How many ranks share each sub-group of an AutoEP run at stage 3."""
    counts: list[int] = []
    for i, group in enumerate(groups if isinstance(groups, list) else [None]):
        number, count = (
            group.get(key) if isinstance(group, dict) else None for key in ("sub_group", "partition_count")
        )
        if number != i or type(count) is not int or count < 1 or world_size % count:
            raise damaged(path, f"ds_zero_partition_groups has {shown(group)} for sub-group {i} of {world_size} ranks")
        counts.append(count)
    return counts


def shard_of(
    opened: OptimizerFile,
    rank: int,
    *,
    world_size: int,
    rigid_params: Sequence[Sequence[Param]] | None,
    tp_rank: int = 0,
    slices: RankSlices | None = None,
) -> OptimizerHeader:
    """Place the tensors of a file that was read already; arguments and errors as of ``open_shard``."""
    file, state, config, stage, num_parts, save_id = opened
    path = file.path
    if num_parts is not None and slices is None:
        raise UnsupportedError(
            f"{path}: {shown(list(num_parts))} ranks share its flat buffers: it has groups of experts (MoE), and "
            "nothing says which rank has which."
        )
    cut = _Cut(world_size, rank, num_parts) if slices is None else _cut_of(path, state, slices, num_parts)
    with file.one_open():
        file.locate()
        make = partial(_build, file, state, rank=cut.rank, config=config, stage=stage)
        if stage == 3 and "base_optimizer_state" in state:
            shard = _read_elastic(file, state, make, cut, rank=rank, world_size=world_size, tp_rank=tp_rank)
        elif rigid_params is None:
            raise damaged(path, "names no parameters and no model states file does")
        elif stage == 3:
            shard = _read_rigid(file, state, make, rigid_params, cut)
        else:
            shard = _read_groups(file, state, make, config, rigid_params, opened.gaps, cut)
    if shard.save_id is None and isinstance(save_id, str):
        shard = replace(shard, save_id=save_id)
    return shard if slices is None else _of_whole_tensors(shard, slices)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How many ranks there are, which of them a file is of, and the ranks that share each flat buffer.

    Without ``num_parts`` all ranks share all.
    """

    world_size: int
    rank: int
    num_parts: tuple[int, ...] | None = None
    ranks: tuple[RankSet, ...] | None = None

    def layout(
        self, buffers: Sequence[Sequence[Param]], path: FilePath, family: Callable[..., Layout] = layout_from_sub_groups
    ) -> Layout:
        """The layout of the parameters of each flat buffer, with the ranks. Raises CheckpointError."""
        parts = self.parts(len(buffers), path)
        checked_params([param for buffer in buffers for param in buffer], path)
        try:
            layout = family(buffers, self.world_size, num_parts=parts)
        except (ValueError, OverflowError) as error:
            raise CheckpointError(f"{path}: {error}. The file is damaged.") from None
        return layout if self.ranks is None else with_slices(layout, self.ranks)

    def parts(self, num_buffers: int, path: FilePath) -> tuple[int, ...]:
        """The ranks that share each flat buffer. Raises CheckpointError where the file has not as many buffers."""
        parts = (self.world_size,) * num_buffers if self.num_parts is None else self.num_parts
        if len(parts) != num_buffers:
            raise damaged(path, f"states how many ranks share {len(parts)} flat buffers, and has {num_buffers}")
        return parts


def _cut_of(path: FilePath, state: _State, slices: RankSlices, num_parts: tuple[int, ...] | None) -> _Cut:
    """How the flat buffers of a rank of a checkpoint with slices are cut."""
    topology, rank = slices.topology, slices.rank
    parts = num_parts or (topology.data_size,) * slices.layout.num_sub_groups
    tensor_rank = topology.place(rank)[1]
    ranks: list[RankSet] = []
    for count in parts:
        ep = topology.data_size // count
        ranks.append(topology.sharers(tensor_rank, topology.expert_rank(rank, ep), ep))
    groups = state.get("ds_zero_partition_groups") if num_parts is not None else None
    for i, group in enumerate(groups if isinstance(groups, list) else ()):
        first, step, count = ranks[i]
        if group.get("partition_ranks") != [first + step * number for number in range(count)]:
            raise UnsupportedError(
                f"{path}: the ranks {shown(group.get('partition_ranks'))} share its sub-group {i}, and not {count} "
                f"ranks from {first} on, each {step} further, as DeepSpeed groups them."
            )
    return _Cut(topology.world_size, rank, parts, tuple(ranks))


def _of_whole_tensors(shard: OptimizerHeader, slices: RankSlices) -> OptimizerHeader:
    """A shard with the layout and the names that the checkpoint's maps give it.

    Raises CheckpointError where the file has other slices.
    """
    own, layout, names = shard.layout, slices.layout, slices.names
    params = [Param(names.get(param.name, param.name), param.shape) for param in own.params]
    same = params == [*layout.params] and own.num_sub_groups == layout.num_sub_groups
    if not same or not all(
        np.array_equal(getattr(own, column), getattr(layout, column))
        for column in ("sub_group", "origin", "part", "offset")
    ):
        raise CheckpointError(
            f"{shard.path}: has other slices of tensors than the maps in the model states files give to rank "
            f"{slices.rank}. Files of two saves are mixed in this directory."
        )
    groups = [replace(group, params=tuple(names.get(name, name) for name in group.params)) for group in shard.groups]
    return replace(shard, layout=layout, groups=tuple(groups))


def _read_rigid(
    file: TorchFile, state: _State, make: _Make, sub_groups: Sequence[Sequence[Param]], cut: _Cut
) -> OptimizerHeader:
    layout = cut.layout(sub_groups, file.path)
    flats = _flat_groups(file, state, layout)
    members, values = _nested_state(file, state.get("optimizer_state_dict"), len(flats))
    groups = tuple(
        replace(group, params=tuple(param.name for position in positions for param in sub_groups[position]))
        for group, positions in members
    )
    return make(format="rigid", layout=layout, flats=flats, values=values, groups=groups)


def _nested_state(
    file: TorchFile, nested: object, num_flats: int
) -> tuple[list[tuple[ParamGroup, list[int]]], list[Mapping[object, object]]]:
    """The state dict of a torch optimizer that steps flat buffers.

    Returns each optimizer group, its parameters not named yet, with the positions of its flat buffers, and the state of
    each flat buffer. Raises CheckpointError, UnsupportedError for state that is not of a parameter.
    """
    nested = nested if isinstance(nested, dict) else {}
    groups_raw, states_raw = nested.get("param_groups"), nested.get("state")
    if not isinstance(groups_raw, list) or not isinstance(states_raw, dict):
        raise damaged(file.path, "holds no optimizer state (param_groups and state)")
    groups: list[tuple[ParamGroup, list[int]]] = []
    flat_of_index: dict[int, int] = {}
    for g, group in enumerate(groups_raw):
        indices = group.get("params") if isinstance(group, dict) else None
        if not isinstance(group, dict) or not isinstance(indices, list):
            raise damaged(file.path, f"optimizer group {g} is not a group")
        if not all(type(index) is int for index in indices):
            raise damaged(file.path, f"optimizer group {g} refers to parameters by something other than numbers")
        positions: list[int] = []
        for index in dict.fromkeys(indices):
            position = len(flat_of_index)
            if position >= num_flats or index in flat_of_index:
                raise damaged(
                    file.path, f"optimizer group {g} refers to {shown(index)}; there are {num_flats} flat groups"
                )
            flat_of_index[index] = position
            positions.append(position)
        groups.append((read_group(file, group, f"optimizer group {g}"), positions))
    if len(flat_of_index) != num_flats:
        raise damaged(file.path, f"optimizer groups hold {len(flat_of_index)} flat groups of {num_flats}")
    values: list[Mapping[object, object]] = [{} for _ in range(num_flats)]
    own_entries = (key for key in nested if key not in ("param_groups", "state"))
    for key in (*own_entries, *(index for index in states_raw if isinstance(index, str))):
        raise UnsupportedError(
            f"{file.path}: the optimizer keeps {shown(key)} beside the state of its parameters, which has no "
            "place at another world size: resume at the one that saved, where DeepSpeed alone loads it."
        )
    for index, entry in states_raw.items():
        if index not in flat_of_index or not isinstance(entry, dict):
            raise damaged(file.path, f"optimizer state {shown(index)} belongs to no flat group")
        values[flat_of_index[index]] = {
            key: value
            for key, value in entry.items()
            if not (isinstance(key, str) and key.endswith("_offload_buffer"))  # copies that offload_states() leaves
        }
    return groups, values


_GROUPS = "single_partition_of_fp32_groups"
"""The entry of the master weights in the files of stages 1 and 2."""


_LEGACY = "local_sub_partitions_of_fp32_groups"
"""The entry of the master weights in the ZeRO-1 files of deepspeed.runtime.zero.stage1 (up to 0.5)."""


def _read_groups(
    file: TorchFile,
    state: _State,
    make: _Make,
    config: object,
    groups: Sequence[Sequence[Param]],
    gaps: Sequence[Sequence[int]] | None,
    cut: _Cut,
) -> OptimizerHeader:
    """Read a file of stage 1 or 2, of ``DeepSpeedZeroOptimizer`` or ``BF16_Optimizer`` (DeepSpeed 0.19.8)."""
    layout = cut.layout(groups, file.path, partial(group_split_layout, gaps=gaps))
    parts = cut.parts(len(groups), file.path)
    flats = _tensors(file, state, _GROUPS)
    if len(flats) != len(groups):
        raise damaged(file.path, f"{_GROUPS} has {len(flats)} entries; the model states file has {len(groups)} groups")
    lean = lean_numel(layout, cut.rank)
    for i, flat in enumerate(flats):
        # DeepSpeedZeroOptimizer leaves the padding out, BF16_Optimizer does not.
        padded = int(layout.sub_group_numel[i])
        if len(flat.shape) != 1 or not lean[i] <= flat.numel <= padded:
            raise damaged(file.path, f"{_GROUPS}[{i}] has {flat.numel} elements; {parts[i]} ranks imply {padded}")
    is_round_robin = "zero_stage" in state and bool(zero_option(config, "round_robin_gradients"))
    ordered = [
        original_order(group, count) if is_round_robin else group for group, count in zip(groups, parts, strict=True)
    ]
    names = [tuple(param.name for param in group) for group in ordered]
    make = partial(make, format="rigid", layout=layout, flats=flats)
    base = state.get("base_optimizer_state")
    if isinstance(base, list):
        if len(base) != len(flats) or not all(isinstance(values, dict) for values in base):
            raise damaged(file.path, f"base_optimizer_state does not hold one entry for each of {len(flats)} groups")
        step = state.get("base_optimizer_state_step")  # of DeepSpeed's own optimizers; those of torch keep theirs
        shared = read_group(file, {} if step is None else {"step": step}, "optimizer group 0")
        return make(values=base, groups=tuple(replace(shared, params=each) for each in names), unpadded=True)
    members, values = _nested_state(file, base, len(flats))
    if [len(indices) for _, indices in members] != [1] * len(flats):
        raise damaged(file.path, f"optimizer groups do not refer to one flat buffer each of {len(flats)}")
    param_groups = tuple(replace(group, params=each) for (group, _), each in zip(members, names, strict=True))
    return make(values=values, groups=param_groups)


def lean_numel(layout: Layout, rank: int) -> Int64Array:
    """The elements of a rank's part of each group up to the group's last one: shape ``(num_sub_groups,)``."""
    ends, number = (np.zeros(layout.num_sub_groups, dtype=np.int64) for _ in range(2))
    np.maximum.at(ends, layout.sub_group, layout.origin + layout.numel)
    number[layout.sub_group] = layout.part_number(rank)
    lean: Int64Array = np.clip(ends - number * layout.sub_group_numel, 0, layout.sub_group_numel)
    return lean


def _read_elastic(
    file: TorchFile, state: _State, make: _Make, cut: _Cut, *, rank: int, world_size: int, tp_rank: int
) -> OptimizerHeader:
    table = state.get("zeroelastic")
    if not isinstance(table, dict):
        raise damaged(file.path, "has base_optimizer_state but no zeroelastic table")
    version = table.get("format_version")
    if type(version) is not int or version < 1:
        raise damaged(file.path, f"has elastic format version {shown(version)}")
    if version > ELASTIC_VERSION:
        raise NewerFormatError(
            f"{file.path}: elastic format version {version} is newer than {ELASTIC_VERSION}. Upgrade zeroelastic to "
            "load it."
        )
    if table.get("rank") != rank or table.get("world_size") != world_size:
        raise CheckpointError(
            f"{file.path}: was written as rank {shown(table.get('rank'))} of {shown(table.get('world_size'))}; its "
            f"name says rank {rank} of {world_size}. The file is in the wrong place."
        )
    if (found := table.get("tp_rank", 0)) != tp_rank:
        raise CheckpointError(
            f"{file.path}: was written as tensor parallel rank {shown(found)}; its name says rank "
            f"{tp_rank}. The file is in the wrong place."
        )
    save_id = table.get("save_id")
    if not isinstance(save_id, str):
        raise damaged(file.path, "has no save id")
    sub_groups = _table_params(file, table)
    layout = cut.layout(sub_groups, file.path)
    batch, optimizer = table.get("train_batch_size"), table.get("optimizer")
    if not isinstance(optimizer, (str, type(None))):
        raise damaged(file.path, f"names an optimizer {shown(optimizer)}")
    groups, grad_scaler = _table_groups(file, table.get("param_groups")), _grad_scaler(file, table.get("grad_scaler"))
    digests = _digests(file, table.get("digests"), layout)
    flats = _flat_groups(file, state, layout)
    _check_owned_ranges(file, table["sub_groups"], layout, cut.rank)
    values = state["base_optimizer_state"]
    if not isinstance(values, list) or len(values) != len(flats) or not all(isinstance(e, dict) for e in values):
        raise damaged(file.path, f"base_optimizer_state does not hold one entry for each of {len(flats)} flat groups")
    return replace(
        make(format="elastic", layout=layout, flats=flats, values=values, groups=groups),
        save_id=save_id,
        train_batch_size=batch if type(batch) is int else None,
        optimizer=optimizer,
        grad_scaler=grad_scaler,
        digests=digests,
    )


def _table_params(file: TorchFile, table: Mapping[str, object]) -> list[list[Param]]:
    tables = table.get("sub_groups")
    if not isinstance(tables, list):
        raise damaged(file.path, "has no sub_groups in its zeroelastic table")
    sub_groups: list[list[Param]] = []
    for i, columns in enumerate(tables):
        names, shapes = (columns.get(key) if isinstance(columns, dict) else None for key in ("names", "shapes"))
        if not isinstance(names, list) or not isinstance(shapes, list) or len(names) != len(shapes):
            raise damaged(file.path, f"sub-group {i} of its zeroelastic table is not a table of names and shapes")
        sub_groups.append(checked_table(names, shapes, file.path))
    return sub_groups


def _check_owned_ranges(file: TorchFile, sub_groups: Sequence[Mapping[str, object]], layout: Layout, rank: int) -> None:
    """Raise CheckpointError where a table does not record the ranges that ``layout``, made of it, gives the rank."""
    start, length = layout.owned(rank)
    for i, columns in enumerate(sub_groups):
        members = layout.sub_group == i
        for key, owned in (("offsets", start[members]), ("numels", length[members])):
            values = columns.get(key)
            if not isinstance(values, list) or len(values) != len(owned):
                raise damaged(file.path, f"sub-group {i} of its zeroelastic table has no {key} for each parameter")
            if values != owned.tolist():
                raise damaged(file.path, f"records other owned ranges than rank {rank} of {layout.world_size} has")


def _table_groups(file: TorchFile, groups: object) -> tuple[ParamGroup, ...]:
    if not isinstance(groups, list):
        raise damaged(file.path, "has no param_groups in its zeroelastic table")
    found: list[ParamGroup] = []
    for g, group in enumerate(groups):
        names = group.get("params") if isinstance(group, dict) else None
        if not isinstance(group, dict) or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise damaged(file.path, f"optimizer group {g} is not a group")
        found.append(read_group(file, group, f"optimizer group {g}", tuple(names)))
    return tuple(found)


def _grad_scaler(file: TorchFile, scaler: object) -> dict[str, OptionValue] | None:
    if scaler is None:
        return None
    if (
        not isinstance(scaler, dict)
        or scaler.keys() != GRAD_SCALER
        or not all(isinstance(value, (int, float)) for value in scaler.values())
    ):
        raise damaged(file.path, f"has a grad_scaler {shown(scaler)}")
    return {key: read_option(file, value, f"grad_scaler: {key}") for key, value in scaler.items()}


def _digests(file: TorchFile, digests: object, layout: Layout) -> Extent | None:
    if digests is None:
        return None
    if not isinstance(digests, TensorRef) or digests.dtype != "int64" or digests.shape != (layout.num_params,):
        raise damaged(file.path, f"has digests that are not one int64 for each of {layout.num_params} parameters")
    return file.extent(digests)


def _tensors(file: TorchFile, state: _State, key: str) -> list[TensorRef]:
    found = state.get(key)
    if not isinstance(found, list) or not all(isinstance(ref, TensorRef) for ref in found):
        raise damaged(file.path, f"holds no {key}")
    return found


def _flat_groups(file: TorchFile, state: _State, layout: Layout) -> list[TensorRef]:
    flats = _tensors(file, state, "fp32_flat_groups")
    if len(flats) != layout.num_sub_groups:
        raise damaged(
            file.path,
            f"fp32_flat_groups has {len(flats)} entries; the parameter table implies {layout.num_sub_groups}",
        )
    for i, flat in enumerate(flats):
        want = int(layout.sub_group_numel[i])
        if flat.numel == 0 < want:  # DeepSpeed cannot restore it either, so it is not left to DeepSpeed
            raise CheckpointError(
                f"{file.path}: has no elements in fp32_flat_groups[{i}]: DeepSpeed saved it from a run with "
                "offload_optimizer on NVMe, and left master weights and optimizer state to raw copies of swap "
                "files (offloaded_tensors/rankNN), which do not say what is in them. Save such runs with "
                "elastic_checkpoint on: all of it is then in the files, for any world size.",
                remedy="",
            )
        if flat.shape != (want,):
            raise damaged(
                file.path,
                f"fp32_flat_groups[{i}] has {flat.numel} elements; {layout.world_size} ranks imply {want}",
            )
    return flats


def _build(
    file: TorchFile,
    state: _State,
    *,
    rank: int,
    config: object,
    stage: int,
    format: CheckpointFormat,
    layout: Layout,
    flats: Sequence[TensorRef],
    values: Sequence[Mapping[object, object]],
    groups: tuple[ParamGroup, ...],
    unpadded: bool = False,
) -> OptimizerHeader:
    """Place every tensor. Raises CheckpointError, UnsupportedError for what is no tensor or scalar.

    ``values`` is the state by sub-group as the file has it; ``unpadded``: its tensors are as long as the flat buffer
    without padding.
    """
    members = [np.flatnonzero(layout.sub_group == i) for i in range(layout.num_sub_groups)]
    owned = layout.owned(rank)[1]
    padded = [(int(numel),) for numel in layout.sub_group_numel]
    state_shapes = [flat.shape for flat in flats] if unpadded else padded
    offsets: dict[str, Int64Array] = {}
    dtypes: dict[str, dict[int, str]] = {}
    tensor_keys: list[tuple[str, ...]] = []
    scalars: list[dict[str, ScalarValue]] = []
    for i, flat in enumerate(flats):
        placed = {FP32: _cut(file, flat, layout, members[i])}
        replicated: dict[str, ScalarValue] = {}
        for key, value in values[i].items():
            where = f"optimizer state {shown(key)} of {buffer_kind(stage)} {i}"
            if not isinstance(key, str) or key in (FP32, FROZEN):
                raise UnsupportedError(f"{file.path}: {where} has a name that cannot be kept.")
            if format == "elastic" and isinstance(value, list):
                placed[key] = _lean(file, value, owned[members[i]], where, rank)
            elif isinstance(value, TensorRef) and value.shape == state_shapes[i] and format == "rigid":
                placed[key] = _cut(file, value, layout, members[i])
            elif isinstance(value, TensorRef) and value.shape != ():
                raise UnsupportedError(
                    f"{file.path}: {where} has shape {value.shape}, neither that of its flat buffer "
                    f"{state_shapes[i]} nor a scalar. Block-quantised and factored states cannot be resharded."
                )
            else:
                replicated[key] = read_scalar(file, value, where)
        for key, (offset, dtype) in placed.items():
            offsets.setdefault(key, np.full(layout.num_params, -1, dtype=np.int64))[members[i]] = offset
            dtypes.setdefault(key, {})[i] = dtype
        tensor_keys.append(tuple(placed))
        scalars.append(replicated)
    return OptimizerHeader(
        path=file.path,
        size=file.size,
        rank=rank,
        stage=stage,
        format=format,
        layout=layout,
        groups=groups,
        tensor_keys=tuple(tensor_keys),
        scalars=tuple(scalars),
        extents={key: TensorExtents(file.path, dtypes[key], offset) for key, offset in offsets.items()},
        scaler=_scaler(file, state),
        ds_config={str(k): v for k, v in config.items()} if isinstance(config, dict) else {},
        header_bytes=file.header_bytes,
        directory=file.directory,
        clip_grad=_clip_grad(state.get("clip_grad")) if stage != 3 else None,
    )


_MOST_CLIPPED = 1e30
"""A greater norm is none that a run was configured with."""


def _clip_grad(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < _MOST_CLIPPED else None


def _cut(file: TorchFile, flat: TensorRef, layout: Layout, members: Int64Array) -> tuple[Int64Array, str]:
    """Where a flat buffer has the part of each parameter of its sub-group, in bytes, and its dtype."""
    return file.extent(flat).offset + layout.offset[members] * DTYPE_BYTES[flat.dtype], flat.dtype


def _lean(file: TorchFile, tensors: list[object], owned: Int64Array, where: str, rank: int) -> tuple[Int64Array, str]:
    """Where the tensors of a sub-group's parameters are, in bytes, and their dtype. ``owned`` are their elements."""
    if len(tensors) != len(owned):
        raise damaged(file.path, f"{where} has {len(tensors)} tensors; the sub-group has {len(owned)} parameters")
    refs: list[TensorRef] = []
    for i, (tensor, numel) in enumerate(zip(tensors, owned.tolist(), strict=True)):
        if not isinstance(tensor, TensorRef):
            raise damaged(file.path, f"{where} holds something that is not a tensor")
        if tensor.shape != (numel,):
            raise damaged(file.path, f"{where}: part {i} has shape {tensor.shape}; rank {rank} owns {numel} elements")
        refs.append(tensor)
    dtypes = {tensor.dtype for tensor in refs}
    if len(dtypes) != 1:
        raise damaged(file.path, f"{where} mixes the dtypes {sorted(dtypes)}")
    return file.ranges(refs)[:, 0], dtypes.pop()


def _scaler(file: TorchFile, state: _State) -> ScalerState | None:
    stub = state.get("loss_scaler")
    if stub is None:
        return None
    if not isinstance(stub, Stub) or (stub.module, stub.qualname) not in SCALERS:
        kind = f"a {stub.module}.{stub.qualname}" if isinstance(stub, Stub) else shown(stub)
        raise UnsupportedError(
            f"{file.path}: its loss_scaler is {kind}, and none of DeepSpeed's. Its state cannot be restored."
        )
    attributes: dict[str, OptionValue | DType] = {
        key: value if isinstance(value, DType) else read_option(file, value, f"loss_scaler.{key}")
        for key, value in stub.attributes.items()
    }
    for key in SCALERS[stub.module, stub.qualname]:
        number = attributes.get(key)
        if type(number) not in (int, float) or (key == "cur_scale" and not 0 < float(str(number)) < math.inf):
            raise damaged(file.path, f"its loss_scaler has {key} {shown(number)}")
    return ScalerState(
        class_name=stub.qualname,
        attributes=attributes,
        dynamic=bool(state.get("dynamic_loss_scale")),
        overflow=bool(read_scalar(file, state.get("overflow"), "overflow").value),
    )
