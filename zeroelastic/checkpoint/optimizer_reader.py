"""Reads the header of one rank's optimizer file, in each format.

At stage 3, ``rigid`` is what stock DeepSpeed writes: a nested ``optimizer_state_dict`` over padded flat buffers.
``elastic`` is ``base_optimizer_state``, one lean tensor per parameter, with a table (``rank_layout.elastic_table``).
At stages 1 and 2 DeepSpeed writes ``single_partition_of_fp32_groups`` and ``base_optimizer_state``: with
``elastic_checkpoint`` its state by group without padding and without hyper-parameters, else the state dict of the inner
optimizer with padding. Each format has a reader; all of them call ``_Reader.build``, which places the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from zeroelastic.checkpoint.commit_record import CheckpointFormat
from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.optimizer_file import (
    FP32,
    FROZEN,
    OptimizerHeader,
    ParamGroup,
    damaged,
    nested_state,
    read_group,
    read_loss_scaler,
    read_scalar,
    zero_option,
)
from zeroelastic.checkpoint.rank_layout import (
    BufferCut,
    RankSlices,
    of_whole_tensors,
    places_of_lean,
    read_elastic_table,
)
from zeroelastic.checkpoint.tag_files import SAVE_ID
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Int64Array, Layout, Param, group_split_layout, original_order
from zeroelastic.core.slices import RankSet
from zeroelastic.errors import CheckpointError, UnsupportedError, buffer_kind, shown
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import Blocks
from zeroelastic.torch_file.header import DTYPE_BYTES, TensorRef, TorchFile, read_torch_file

_State = Mapping[str, object]
"""The entry ``optimizer_state_dict`` of a file."""

_GROUPS = "single_partition_of_fp32_groups"
"""The entry of the master weights in the files of stages 1 and 2."""

_LEGACY = "local_sub_partitions_of_fp32_groups"
"""The entry of the master weights in the ZeRO-1 files of deepspeed.runtime.zero.stage1 (up to 0.5)."""

_MOST_CLIPPED = 1e30
"""A greater norm is none that a run was configured with."""


class OptimizerFile(NamedTuple):
    """An optimizer file of ``data_size`` data parallel ranks whose tree was read, and whose tensors are not placed yet.

    ``num_parts`` are the ranks that share each flat buffer, where these are not all data parallel ranks, as of
    experts. ``config`` is the DeepSpeed configuration, ``save_id`` the id of a save that is not DeepSpeed's own.
    """

    file: TorchFile
    state: _State
    config: object
    stage: int
    data_size: int
    num_parts: tuple[int, ...] | None
    save_id: str | None

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

    def header(
        self,
        rank: int,
        *,
        params: Sequence[Sequence[Param]] | None,
        tp_rank: int = 0,
        slices: RankSlices | None = None,
    ) -> OptimizerHeader:
        """Place the tensors of a file that is to be of this data parallel rank, of tensor parallel rank ``tp_rank``.

        ``params`` are the parameters by flat buffer, in buffer order, which the optimizer files of stock DeepSpeed do
        not name (they come from a ``*_model_states.pt``); elastic files of stage 3 name them themselves. ``slices``
        says which slices the rank has, where the checkpoint has slices. Raises CheckpointError, UnsupportedError.
        """
        reader = _Reader(self, _cut_of(self, rank, slices))
        with self.file.one_open():
            self.file.locate()
            if self.stage == 3 and "base_optimizer_state" in self.state:
                header = reader.elastic(rank, tp_rank)
            elif params is None:
                raise damaged(self.file.path, "names no parameters and no model states file does")
            elif self.stage == 3:
                header = reader.rigid(params)
            else:
                header = reader.groups(params)
        return header if slices is None else of_whole_tensors(header, slices)


def read_optimizer_file(path: FilePath, *, world_size: int, through: Blocks | None = None) -> OptimizerFile:
    """Read the tree of an optimizer file of ``world_size`` data parallel ranks.

    Raises CheckpointError, UnsupportedError.
    """
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
    num_parts, save_id = _num_parts(path, state, int(stage), world_size), root.get(SAVE_ID)
    save_id = save_id if isinstance(save_id, str) else None
    return OptimizerFile(file, state, root.get("ds_config"), int(stage), world_size, num_parts, save_id)


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


def _cut_of(opened: OptimizerFile, data_rank: int, slices: RankSlices | None) -> BufferCut:
    """How the flat buffers of a rank are cut. Raises UnsupportedError where that is not known."""
    if slices is None:
        if opened.num_parts is not None:
            raise UnsupportedError(
                f"{opened.file.path}: {shown(list(opened.num_parts))} ranks share its flat buffers: it has groups of "
                "experts (MoE), and nothing says which rank has which."
            )
        return BufferCut(opened.data_size, data_rank)
    topology, rank = slices.topology, slices.rank
    parts = opened.num_parts or (topology.data_size,) * slices.layout.num_sub_groups
    tensor_rank = topology.place(rank)[1]
    ranks: list[RankSet] = []
    for count in parts:
        ep = topology.data_size // count
        ranks.append(topology.sharers(tensor_rank, topology.expert_rank(rank, ep), ep))
    groups = opened.state.get("ds_zero_partition_groups") if opened.num_parts is not None else None
    for i, group in enumerate(groups if isinstance(groups, list) else ()):
        first, step, count = ranks[i]
        if group.get("partition_ranks") != [first + step * number for number in range(count)]:
            raise UnsupportedError(
                f"{opened.file.path}: the ranks {shown(group.get('partition_ranks'))} share its sub-group {i}, and not "
                f"{count} ranks from {first} on, each {step} further, as DeepSpeed groups them."
            )
    return BufferCut(topology.world_size, rank, parts, tuple(ranks))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads a file whose flat buffers are cut as ``cut`` says, with a method for each format."""

    opened: OptimizerFile
    cut: BufferCut

    @property
    def file(self) -> TorchFile:
        return self.opened.file

    @property
    def path(self) -> FilePath:
        return self.opened.file.path

    def elastic(self, rank: int, tp_rank: int) -> OptimizerHeader:
        """Read a file of stage 3 that has a table."""
        state = self.opened.state
        table = read_elastic_table(
            self.file, state.get("zeroelastic"), rank=rank, world_size=self.opened.data_size, tp_rank=tp_rank
        )
        layout = self.cut.layout(table.params, self.path)
        digests, flats = table.digests(layout), self._flat_groups(layout)
        table.check_owned(layout, self.cut.rank)
        values = state["base_optimizer_state"]
        if not isinstance(values, list) or len(values) != len(flats) or not all(isinstance(e, dict) for e in values):
            problem = f"base_optimizer_state does not hold one entry for each of {len(flats)} flat groups"
            raise damaged(self.path, problem)
        return replace(
            self.build("elastic", layout, flats, values, table.groups),
            save_id=table.save_id,
            train_batch_size=table.train_batch_size,
            optimizer=table.optimizer,
            grad_scaler=table.grad_scaler,
            digests=digests,
        )

    def rigid(self, sub_groups: Sequence[Sequence[Param]]) -> OptimizerHeader:
        """Read a file of stage 3 as stock DeepSpeed writes it."""
        layout = self.cut.layout(sub_groups, self.path)
        flats = self._flat_groups(layout)
        members, values = nested_state(self.file, self.opened.state.get("optimizer_state_dict"), len(flats))
        groups = tuple(
            replace(group, params=tuple(param.name for position in positions for param in sub_groups[position]))
            for group, positions in members
        )
        return self.build("rigid", layout, flats, values, groups)

    def groups(self, groups: Sequence[Sequence[Param]]) -> OptimizerHeader:
        """Read a file of stage 1 or 2, of ``DeepSpeedZeroOptimizer`` or ``BF16_Optimizer`` (DeepSpeed 0.19.8)."""
        state, path = self.opened.state, self.path
        layout = self.cut.layout(groups, path, partial(group_split_layout, gaps=self.opened.gaps))
        parts = self.cut.parts(len(groups), path)
        flats = self._tensors(_GROUPS)
        if len(flats) != len(groups):
            raise damaged(path, f"{_GROUPS} has {len(flats)} entries; the model states file has {len(groups)} groups")
        lean = layout.lean_numel(self.cut.rank)
        for i, flat in enumerate(flats):
            # DeepSpeedZeroOptimizer leaves the padding out, BF16_Optimizer does not.
            padded = int(layout.sub_group_numel[i])
            if len(flat.shape) != 1 or not lean[i] <= flat.numel <= padded:
                raise damaged(path, f"{_GROUPS}[{i}] has {flat.numel} elements; {parts[i]} ranks imply {padded}")
        is_round_robin = "zero_stage" in state and bool(zero_option(self.opened.config, "round_robin_gradients"))
        ordered = [
            original_order(group, count) if is_round_robin else group
            for group, count in zip(groups, parts, strict=True)
        ]
        names = [tuple(param.name for param in group) for group in ordered]
        base = state.get("base_optimizer_state")
        if isinstance(base, list):
            if len(base) != len(flats) or not all(isinstance(values, dict) for values in base):
                raise damaged(path, f"base_optimizer_state does not hold one entry for each of {len(flats)} groups")
            step = state.get("base_optimizer_state_step")  # of DeepSpeed's own optimizers; those of torch keep theirs
            shared = read_group(self.file, {} if step is None else {"step": step}, "optimizer group 0")
            own = tuple(replace(shared, params=each) for each in names)
            return self.build("rigid", layout, flats, base, own, unpadded=True)
        members, values = nested_state(self.file, base, len(flats))
        if [len(indices) for _, indices in members] != [1] * len(flats):
            raise damaged(path, f"optimizer groups do not refer to one flat buffer each of {len(flats)}")
        own = tuple(replace(group, params=each) for (group, _), each in zip(members, names, strict=True))
        return self.build("rigid", layout, flats, values, own)

    def _tensors(self, key: str) -> list[TensorRef]:
        found = self.opened.state.get(key)
        if not isinstance(found, list) or not all(isinstance(ref, TensorRef) for ref in found):
            raise damaged(self.path, f"holds no {key}")
        return found

    def _flat_groups(self, layout: Layout) -> list[TensorRef]:
        flats = self._tensors("fp32_flat_groups")
        if len(flats) != layout.num_sub_groups:
            problem = f"fp32_flat_groups has {len(flats)} entries; the parameter table implies {layout.num_sub_groups}"
            raise damaged(self.path, problem)
        for i, flat in enumerate(flats):
            want = int(layout.sub_group_numel[i])
            if flat.numel == 0 < want:  # DeepSpeed cannot restore it either, so it is not left to DeepSpeed
                raise CheckpointError(
                    f"{self.path}: has no elements in fp32_flat_groups[{i}]: DeepSpeed saved it from a run with "
                    "offload_optimizer on NVMe, and left master weights and optimizer state to raw copies of swap "
                    "files (offloaded_tensors/rankNN), which do not say what is in them. Save such runs with "
                    '"format": "elastic": all of it is then in the files, for any world size.',
                    remedy="",
                )
            if flat.shape != (want,):
                problem = f"fp32_flat_groups[{i}] has {flat.numel} elements; {layout.world_size} ranks imply {want}"
                raise damaged(self.path, problem)
        return flats

    def build(
        self,
        format: CheckpointFormat,
        layout: Layout,
        flats: Sequence[TensorRef],
        values: Sequence[Mapping[object, object]],
        groups: tuple[ParamGroup, ...],
        *,
        unpadded: bool = False,
    ) -> OptimizerHeader:
        """Place every tensor. Raises CheckpointError, UnsupportedError for a value that is no tensor or scalar.

        ``values`` is the state by sub-group as the file has it; ``unpadded``: its tensors are as long as the flat
        buffer without padding.
        """
        file, state, config, stage = self.file, self.opened.state, self.opened.config, self.opened.stage
        members = [np.flatnonzero(layout.sub_group == i) for i in range(layout.num_sub_groups)]
        owned = layout.owned(self.cut.rank)[1]
        padded = [(int(numel),) for numel in layout.sub_group_numel]
        state_shapes = [flat.shape for flat in flats] if unpadded else padded
        offsets: dict[str, Int64Array] = {}
        dtypes: dict[str, dict[int, str]] = {}
        tensor_keys: list[tuple[str, ...]] = []
        scalars: list[dict[str, ScalarValue]] = []
        for i, flat in enumerate(flats):
            placed = {FP32: _places_in_flat(file, flat, layout, members[i])}
            replicated: dict[str, ScalarValue] = {}
            for key, value in values[i].items():
                where = f"optimizer state {shown(key)} of {buffer_kind(stage)} {i}"
                if not isinstance(key, str) or key in (FP32, FROZEN):
                    raise UnsupportedError(f"{file.path}: {where} has a name that cannot be kept.")
                if format == "elastic" and isinstance(value, list):
                    placed[key] = places_of_lean(file, value, owned[members[i]], where, self.cut.rank)
                elif isinstance(value, TensorRef) and value.shape == state_shapes[i] and format == "rigid":
                    placed[key] = _places_in_flat(file, value, layout, members[i])
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
        clipped = state.get("clip_grad") if stage != 3 else None
        return OptimizerHeader(
            path=file.path,
            size=file.size,
            rank=self.cut.rank,
            stage=stage,
            format=format,
            layout=layout,
            groups=groups,
            tensor_keys=tuple(tensor_keys),
            scalars=tuple(scalars),
            extents={key: TensorExtents(file.path, dtypes[key], offset) for key, offset in offsets.items()},
            scaler=read_loss_scaler(file, state),
            ds_config={str(k): v for k, v in config.items()} if isinstance(config, dict) else {},
            header_bytes=file.header_bytes,
            save_id=self.opened.save_id,
            directory=file.directory,
            clip_grad=float(clipped) if isinstance(clipped, (int, float)) and 0 <= clipped < _MOST_CLIPPED else None,
        )


def _places_in_flat(file: TorchFile, flat: TensorRef, layout: Layout, members: Int64Array) -> tuple[Int64Array, str]:
    """Where a flat buffer has the part of each parameter, in bytes, and the dtype."""
    return file.extent(flat).offset + layout.offset[members] * DTYPE_BYTES[flat.dtype], flat.dtype
