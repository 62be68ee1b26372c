"""The live ZeRO-3 optimizer as a layout: which parameter's part is where in this rank's flat buffers.

Read off the optimizer, never recomputed: ``grad_position[ds_id] = [sub_group, offset, part]`` is DeepSpeed's own table
(``DeepSpeedZeroOptimizer_Stage3.set_grad_positions``, 0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from zeroelastic.checkpoint import NO_TENSOR_PARALLEL, TensorParallel
from zeroelastic.digest import ScalarValue
from zeroelastic.errors import UnsupportedError
from zeroelastic.layout import Layout, Param, layout_from_sub_groups, unpacked_layout
from zeroelastic.stage3.residence import Residence, uncovered
from zeroelastic.stage3.topology import tensor_parallel, uncovered_topology

StateValue = object


@dataclass(frozen=True, slots=True)
class LiveState:
    """This rank's view of the optimizer: layouts of trained and frozen parameters and the tensors behind them.

    Invariants: ``layout`` matches the optimizer's own table; ``groups[g]`` names the parameters of optimizer group g in
    flat order; ``frozen_tensors`` run parallel to ``frozen.params``. ``residence`` knows where each sub-group is. Under
    tensor parallelism ``rank`` and the layouts are those of one tensor parallel rank, ``tp``, over its data parallel
    group.
    """

    optimizer: DeepSpeedZeroOptimizer_Stage3
    rank: int
    layout: Layout
    groups: tuple[tuple[str, ...], ...]
    frozen: Layout
    frozen_tensors: tuple[torch.Tensor, ...]
    residence: Residence
    tp: TensorParallel = NO_TENSOR_PARALLEL

    def fp32(self, sub_group: int) -> torch.Tensor:
        """The flat fp32 master weights of a sub-group: 1-D, padding included."""
        return self.residence.fp32(sub_group)

    def state(self, sub_group: int) -> MutableMapping[str, StateValue]:
        """The state of a sub-group in the optimizer that owns it, live tensors; empty before the first step."""
        return self.residence.state(sub_group)

    def stepper(self, sub_group: int) -> torch.optim.Optimizer:
        """The optimizer that steps a sub-group: Muon leaves those that are not its own to an Adam, if it has one."""
        optimizer: torch.optim.Optimizer = self.optimizer.optimizer
        aux: torch.optim.Optimizer | None = getattr(optimizer, "aux_optimizer", None)
        return optimizer if aux is None or self.group(sub_group).get("use_muon", True) else aux

    def group(self, sub_group: int) -> MutableMapping[str, object]:
        """The optimizer group that a sub-group belongs to, live."""
        number = self.optimizer.sub_group_to_group_id[sub_group]
        group: MutableMapping[str, object] = self.optimizer.optimizer.param_groups[number]
        return group

    def split_state(self, sub_group: int) -> tuple[dict[str, torch.Tensor], dict[str, ScalarValue]]:
        """Tensors shaped like the flat buffer, and replicated scalars. Raises UnsupportedError for anything else."""
        shape = self.fp32(sub_group).shape
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, ScalarValue] = {}
        for key, value in self.state(sub_group).items():
            if isinstance(value, torch.Tensor) and value.shape == shape and value.is_contiguous():
                tensors[key] = value.detach()
            else:
                where = f"{type(self.stepper(sub_group)).__name__}'s optimizer state {key!r} of sub-group {sub_group}"
                scalars[key] = scalar_value(value, where)
        return tensors, scalars

    def padding(self, sub_group: int) -> Iterator[slice]:
        """The ranges of a flat buffer that hold padding, not elements of a parameter."""
        layout = self.layout
        owned = layout.owned(self.rank)[1]
        part = layout.part
        for i in np.flatnonzero((layout.sub_group == sub_group) & (owned < part)).tolist():
            yield slice(int(layout.offset[i] + owned[i]), int(layout.offset[i] + part[i]))


def scalar_value(value: StateValue, where: str) -> ScalarValue:
    """A replicated value of optimizer state as data. Raises UnsupportedError when it is neither."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        item = value.item()
        assert isinstance(item, (int, float, bool))
        return ScalarValue(str(value.dtype).removeprefix("torch."), item)
    if value is None or isinstance(value, (bool, int, float)):
        return ScalarValue.of_python(value)
    shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    raise UnsupportedError(
        f"{where} is a {type(value).__name__}{shape}, neither shaped like its flat buffer nor a scalar. "
        "Block-quantised and factored optimizer states cannot be resharded: save with elastic_checkpoint off and "
        "resume at the same world size."
    )


def read_live(optimizer: DeepSpeedZeroOptimizer_Stage3, param_names: Mapping[torch.nn.Parameter, str]) -> LiveState:
    """The live state of one rank: trained is what the optimizer has, frozen every other parameter of the module.

    Raises UnsupportedError for parameters that are not partitioned over all ranks.
    """
    world_size = dist.get_world_size(group=optimizer.dp_process_group)
    rank = dist.get_rank(group=optimizer.dp_process_group)
    residence = Residence(optimizer)
    residence.settle()
    sub_groups: list[list[Param]] = []
    owned_by_optimizer: set[int] = set()
    group_names: list[list[str]] = [[] for _ in optimizer.optimizer.param_groups]
    expected: list[tuple[int, int, int]] = []
    for i, members in enumerate(optimizer.fp16_groups):
        names: list[Param] = []
        for param in members:
            live = _param(param, param_names)
            _check_partition_group(param, live.name, rank, world_size)
            owned_by_optimizer.add(param.ds_id)
            names.append(live)
            position = optimizer.grad_position[optimizer.get_param_id(param)]
            expected.append((int(position[0]), int(position[1]), int(position[2])))
        sub_groups.append(names)
        group_names[optimizer.sub_group_to_group_id[i]] += [param.name for param in names]
    added = [g for g, group in enumerate(optimizer.optimizer.param_groups) if group["params"] and not group_names[g]]
    if added:
        raise UnsupportedError(
            f"optimizer group {added[0]} was added after deepspeed.initialize: ZeRO-3 partitions nothing of it, and "
            "DeepSpeed does not train it. Give the optimizer all of its groups before."
        )
    layout = layout_from_sub_groups(sub_groups, world_size)
    if list(zip(layout.sub_group.tolist(), layout.offset.tolist(), layout.part.tolist(), strict=True)) != expected:
        raise UnsupportedError(
            "DeepSpeed places this model's parameters in another way than ZeRO-3's ceil split (is ZenFlow on?)."
        )
    share_muon_momentum(optimizer)
    frozen: list[Param] = []
    tensors: list[torch.Tensor] = []
    for param in optimizer.module.parameters():
        if getattr(param, "ds_id", None) in owned_by_optimizer:
            continue
        live = _param(param, param_names)
        _check_partition_group(param, live.name, rank, world_size)
        frozen.append(live)
        tensors.append(residence.frozen(param))
    return LiveState(
        optimizer=optimizer,
        rank=rank,
        layout=layout,
        groups=tuple(tuple(names) for names in group_names),
        frozen=unpacked_layout(frozen, world_size),
        frozen_tensors=tuple(tensors),
        residence=residence,
        tp=tensor_parallel(optimizer),
    )


def _check_partition_group(param: torch.nn.Parameter, name: str, rank: int, world_size: int) -> None:
    """Raise UnsupportedError for a parameter that is cut over other ranks than the data parallel group's."""
    group = getattr(param, "ds_process_group", None)
    count = world_size if group is None else dist.get_world_size(group=group)
    if count == world_size and (group is None or dist.get_rank(group=group) == rank):
        return
    raise UnsupportedError(
        f"parameter {name} is partitioned over {count} ranks, the model over {world_size}. Expert and other "
        "per-parameter partition groups cannot be resharded yet. (Under tensor parallelism, deepspeed.zero.Init "
        "partitions what is not sliced over all ranks: build the model without it.) Save with elastic_checkpoint off, "
        "and resume at the world size that saved."
    )


def share_muon_momentum(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    """Let the optimizer state hold the momentum that Muon goes on from, where that is kept outside of it.

    Under ``save_muon_momentum_buffer_in_memory`` DeepSpeed steps with a buffer of its own, and puts it into the state
    at each step; a stock load replaces what is in the state alone.
    """
    buffers: Mapping[int, torch.Tensor] = getattr(optimizer, "muon_momentum_buffer_partitioned_groups_flat", None) or {}
    for i, buffer in buffers.items():
        optimizer.optimizer.state[optimizer.fp32_partitioned_groups_flat[i]]["momentum_buffer"] = buffer


def _param(param: torch.nn.Parameter, names: Mapping[torch.nn.Parameter, str]) -> Param:
    name = names.get(param)
    if name is None or not hasattr(param, "ds_id"):
        raise UnsupportedError(
            f"parameter {name or '(without a name)'} is not managed by ZeRO-3: it was not in the model when "
            "deepspeed.initialize was called. Build the whole model before."
        )
    return Param(name, tuple(int(size) for size in param.ds_shape))  # type: ignore[attr-defined]


def refuse_unsupported(optimizer: DeepSpeedZeroOptimizer_Stage3, engine: object) -> None:
    """Raise UnsupportedError, naming it, for a configuration whose state cannot be read or restored right."""
    problems = uncovered(optimizer)
    problems += uncovered_topology(optimizer, engine)
    if any(getattr(t, "ds_quant_scale", None) is not None for t in _ds_tensors(optimizer)):
        problems.append("zero_quantized_nontrainable_weights")
    if problems:
        raise UnsupportedError(
            f"elastic checkpoints do not cover {', '.join(problems)} yet. Save with elastic_checkpoint off, and resume "
            "at the world size that saved."
        )


def _ds_tensors(optimizer: DeepSpeedZeroOptimizer_Stage3) -> Iterator[torch.Tensor]:
    for param in optimizer.module.parameters():
        if hasattr(param, "ds_tensor"):
            yield param.ds_tensor
