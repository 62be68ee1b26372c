"""The whole training state of a ZeRO engine, gathered, and its comparison bit for bit.

It is gathered with DeepSpeed's own tables and collectives only: the modules that save and load are judged by it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch


Number: TypeAlias = bool | int | float | str | None
Entry: TypeAlias = "torch.Tensor | Number"
State: TypeAlias = dict[str, Entry]

# Copies of state that offload_states() keeps in the optimizer state.
_DUPLICATES = "_offload_buffer"
_ENGINE_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def gather_state(engine: Any) -> State:
    """The state that training continues from, in full on every rank, as CPU tensors and values. Collective.

    Keys, where PARAM is a name from ``engine.module.named_parameters()``:

        weight/PARAM        the weight in the module, gathered; also of frozen and tied parameters
        master/PARAM        the fp32 (or master precision) weight of a trained parameter
        state/PARAM/KEY     a tensor of optimizer state, such as exp_avg, in the parameter's shape and its own dtype
        scalar/PARAM/KEY    a number of optimizer state, such as step, that the parameter shares with its sub-group
        buffer/NAME         a persistent buffer
        group/I/NAME        a hyper-parameter of parameter group I; group/I/params names its trained parameters
        scheduler/...       the leaves of the lr scheduler's state
        loss_scaler/NAME    the numbers of the loss scaler
        grad_scaler/NAME    the numbers of torch's GradScaler under fp16 autocast
        engine/NAME         global_steps, global_samples and skipped_steps

    Under tensor and expert parallelism it is the state of the slices that the rank has. Padding is left out. Raises
    RuntimeError naming a tensor without its parameter's full shape, and TypeError when the
    engine does not train with ZeRO stage 1, 2 or 3, or trains with Muon at stage 1 or 2.
    """
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    optimizer = engine.optimizer
    groups = group_buffers(optimizer)
    if groups is None and not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        raise TypeError(
            f"gather_state needs an engine that trains with ZeRO stage 1, 2 or 3; its optimizer is {type(optimizer)}."
        )
    module, names = engine.module, {param: name for name, param in engine.module.named_parameters()}
    persistent = module.state_dict().keys()
    state: State = {f"weight/{name}": _gather_weight(param, name) for param, name in names.items()}
    state |= {
        f"buffer/{key}": value.detach().cpu().clone() for key, value in module.named_buffers() if key in persistent
    }
    state |= _sub_groups(optimizer, names) if groups is None else _flat_groups(optimizer, groups, names)
    state |= _param_groups(optimizer, groups, names)
    if engine.lr_scheduler is not None:
        state |= flatten("scheduler", engine.lr_scheduler.state_dict())
    if (scaler := getattr(optimizer, "loss_scaler", None)) is not None:  # a BF16_Optimizer has none
        state |= flatten("loss_scaler", vars(scaler))
    if (scaler := getattr(optimizer, "torch_autocast_gradscaler", None)) is not None:
        state |= flatten("grad_scaler", scaler.state_dict())
    return state | {f"engine/{name}": getattr(engine, name) for name in _ENGINE_COUNTERS}


def flatten(prefix: str, value: Any) -> State:
    """The leaves of nested dicts and sequences by path; objects of other types are left out."""
    import torch

    if isinstance(value, torch.Tensor):
        return {prefix: value.detach().cpu().clone()}
    if isinstance(value, (np.number, np.bool_)):
        return {prefix: value.item()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {prefix: value}
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    )
    return {key: entry for name, item in items for key, entry in flatten(f"{prefix}/{name}", item).items()}


def fingerprint(state: Mapping[str, Entry]) -> dict[str, Number]:
    """The state with each tensor's dtype, shape and digest instead of the tensor: small, and compares as it does."""
    import torch

    return {key: _digest(entry) if isinstance(entry, torch.Tensor) else entry for key, entry in state.items()}


def compare_states(expected: Mapping[str, Entry], found: Mapping[str, Entry]) -> list[str]:
    """The differences between two states, one line for each key; empty when they agree bit for bit."""
    lines = [f"{key}: is missing" for key in expected if key not in found]
    lines += [f"{key}: is new" for key in found if key not in expected]
    for key, entry in expected.items():
        if key in found and (difference := _difference(entry, found[key])):
            lines.append(f"{key}: {difference}")
    return lines


def _gather_weight(param: Any, name: str) -> torch.Tensor:
    """A weight as the next forward pass will use it, without changing it.

    A persistent parameter's full copy is read in place: gathering would replace it, so that a stale copy is not found.
    """
    import deepspeed

    weight: torch.Tensor
    if getattr(param, "ds_status", None) is None or param.ds_status.name == "AVAILABLE":
        weight = param.detach().cpu().clone()
    else:
        with deepspeed.zero.GatheredParameters([param]):
            weight = param.detach().cpu().clone()
    shape = getattr(param, "ds_shape", param.shape)
    if weight.shape != shape:  # two placeholders, which are empty, would compare as equal
        raise RuntimeError(f"weight/{name}: gathered shape {tuple(weight.shape)}, the parameter has {tuple(shape)}.")
    return weight


def _sub_groups(optimizer: Any, names: Mapping[torch.nn.Parameter, str]) -> Iterator[tuple[str, Entry]]:
    """Master weights and optimizer state at stage 3, sub-group by sub-group; tensors keep their own dtype."""
    for index, group in enumerate(optimizer.fp16_groups):
        with _resident(optimizer, index):
            tensors, numbers = _split_state(
                _sub_group_state(optimizer, index), optimizer.fp32_partitioned_groups_flat[index]
            )
            for param in group:
                _, offset, length = optimizer.grad_position[optimizer.get_param_id(param)]
                whole = {
                    key: _gather(flat.narrow(0, offset, length), getattr(param, "ds_process_group", None))
                    for key, flat in tensors.items()
                }
                parts = {key: flat[: param.ds_numel].view(param.ds_shape) for key, flat in whole.items()}
                yield from _entries(names[param], parts, numbers)


def _flat_groups(
    optimizer: Any, groups: list[GroupBuffers], names: Mapping[torch.nn.Parameter, str]
) -> Iterator[tuple[str, Entry]]:
    """Master weights and optimizer state at stages 1 and 2.

    The place of a parameter in its group's flat buffer follows from the memory that its 16-bit weight is a view of:
    DeepSpeed's tables are of another order under ``round_robin_gradients`` (0.19.8).
    """
    for group in groups:
        tensors, numbers = _split_state(optimizer.optimizer.state.get(group.master, {}), group.master)
        whole = {key: _gather(part, group.process_group) for key, part in tensors.items()}
        for param in group.params:
            begin = (param.data_ptr() - group.weights.data_ptr()) // group.weights.element_size()
            if not 0 <= begin <= group.weights.numel() - param.numel():
                raise RuntimeError(f"{names[param]} is no part of its group's flat buffer.")
            parts = {key: flat[begin : begin + param.numel()].view(param.shape) for key, flat in whole.items()}
            yield from _entries(names[param], parts, numbers)


def _entries(
    name: str, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Number]
) -> Iterator[tuple[str, Entry]]:
    """One parameter's entries of the state."""
    for key, tensor in tensors.items():
        yield f"state/{name}/{key}" if key else f"master/{name}", tensor.clone()
    for key, number in numbers.items():
        yield f"scalar/{name}/{key}", number


@contextmanager
def _resident(optimizer: Any, sub_group: int) -> Iterator[None]:
    """Keep a sub-group's master weights and state in memory, if they are on NVMe."""
    if not optimizer._swappable_optimizer_subgroup(sub_group):
        yield
        return
    optimizer._optimizer_states_and_gradient_swap_in(sub_group)
    try:
        yield
    finally:
        optimizer._release_swap_buffers(sub_group)


def _sub_group_state(optimizer: Any, sub_group: int) -> dict[str, Any]:
    """The state of one sub-group, from the optimizer that steps it."""
    master = optimizer.fp32_partitioned_groups_flat[sub_group]
    state: dict[str, Any] = {}
    for owner in (optimizer.optimizer, getattr(optimizer, "backup_optimizer", None)):
        if owner is not None:
            state |= owner.state.get(master, {})
    momentum = getattr(optimizer, "muon_momentum_buffer_partitioned_groups_flat", {}).get(sub_group)
    return state if momentum is None else state | {"momentum_buffer": momentum}


def _split_state(state: Mapping[str, Any], master: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Number]]:
    """The master weights, under "", and state that is partitioned as they are; and numbers."""
    import torch

    sharded = {"": master}
    numbers: dict[str, Number] = {}
    for key, value in state.items():
        if key.endswith(_DUPLICATES):
            continue
        if isinstance(value, torch.Tensor) and value.shape == master.shape:
            sharded[key] = value
        elif isinstance(value, (np.number, np.bool_)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            numbers[key] = value.item()
        elif value is None or isinstance(value, (bool, int, float)):
            numbers[key] = value
        else:
            raise TypeError(
                f"optimizer state {key!r} is neither partitioned as its parameters nor a number: {type(value)}. The "
                "momentum of Muon at ZeRO stages 1 and 2 is such state, and is not gathered."
            )
    return sharded, numbers


def _gather(part: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The parts of all ranks end to end, on the CPU, gathered as raw bytes for any dtype."""
    import torch
    from deepspeed.accelerator import get_accelerator

    mine = part.detach().to(get_accelerator().current_device_name()).contiguous().view(torch.uint8)
    parts = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, mine, group=group)
    return torch.cat(parts).cpu().view(part.dtype)


class GroupBuffers(NamedTuple):
    """One optimizer group: the buffer of all weights, this rank's part of the master weights, the parameters.

    ``process_group`` are the ranks that have the parts: of a group of experts, only some.
    """

    weights: torch.Tensor
    master: torch.Tensor
    params: list[torch.nn.Parameter]
    process_group: Any


def group_buffers(optimizer: Any) -> list[GroupBuffers] | None:
    """The groups of a ``DeepSpeedZeroOptimizer`` of stage 1 or 2, or of a ``BF16_Optimizer``; None for another one."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if isinstance(optimizer, BF16_Optimizer):
        columns = (optimizer.bf16_groups_flat, optimizer.fp32_groups_flat_partition, optimizer.bf16_groups)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        columns = (optimizer.bit16_groups_flat, optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups)
    else:
        return None
    return [GroupBuffers(*group) for group in zip(*columns, optimizer.real_dp_process_group, strict=True)]


def _param_groups(optimizer: Any, buffers: list[GroupBuffers] | None, names: Mapping[torch.nn.Parameter, str]) -> State:
    """Hyper-parameters of the parameter groups, and which parameters each one holds."""
    if buffers is None:
        members = [(optimizer.sub_group_to_group_id[i], params) for i, params in enumerate(optimizer.fp16_groups)]
    else:
        members = [(index, group.params) for index, group in enumerate(buffers)]
    state: State = {}
    for index, group in enumerate(optimizer.optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        held = sorted(names[param] for of, params in members if of == index for param in params)
        state |= flatten(f"group/{index}", options) | {f"group/{index}/params": " ".join(held)}
    return state


def _digest(tensor: torch.Tensor) -> str:
    """Text that is equal for tensors of equal dtype, shape and bits, NaNs included."""
    digest = hashlib.blake2b(_bytes(tensor).numpy().data, digest_size=16).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)} {digest}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _difference(expected: Entry, found: Entry) -> str:
    """The difference between two entries as text; empty if there is none."""
    import torch

    mine, theirs = (_digest(entry) if isinstance(entry, torch.Tensor) else entry for entry in (expected, found))
    if mine == theirs or (mine != mine and theirs != theirs):  # NaN is equal to NaN
        return ""
    if not (isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor)):
        return f"is {theirs!r}, expected {mine!r}"
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return f"is {theirs}, expected {mine}"
    wrong = (_bytes(expected) != _bytes(found)).view(-1, expected.element_size()).any(dim=1).nonzero().flatten()
    first = int(wrong[0])
    return (
        f"{len(wrong)} of {expected.numel()} elements differ, the first at {first}: "
        f"{found.reshape(-1)[first].item()!r}, expected {expected.reshape(-1)[first].item()!r}"
    )
