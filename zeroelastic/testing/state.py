"""The whole training state of a ZeRO engine, gathered, and its comparison bit for bit.

It is gathered from the live optimizer with DeepSpeed's own tables and collectives only, and shares no code with the
modules that save and load checkpoints, because their results are judged by it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch


class Fingerprint(NamedTuple):
    """A tensor's dtype, shape and digest: equal for tensors of equal dtype, shape and bits, NaNs included."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


Number: TypeAlias = bool | int | float | str | None
Entry: TypeAlias = "torch.Tensor | Fingerprint | Number"
State: TypeAlias = dict[str, Entry]
Fingerprints: TypeAlias = dict[str, Fingerprint | Number]
"""A state without tensors: small, plain data, and compares as the state does."""

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
    names = {param: name for name, param in engine.module.named_parameters()}
    state: State = {f"weight/{name}": _gather_weight(param, name) for param, name in names.items()}
    if groups is None:
        state |= _gather_optimizer(optimizer, names)
        members = _members(optimizer, names)
    else:
        state |= _gather_groups(optimizer, groups, names)
        members = {index: [names[param] for param in group.params] for index, group in enumerate(groups)}
    state |= _gather_buffers(engine.module) | _groups(optimizer, members)
    if engine.lr_scheduler is not None:
        state |= flatten("scheduler", engine.lr_scheduler.state_dict())
    if (scaler := getattr(optimizer, "loss_scaler", None)) is not None:  # a BF16_Optimizer has none
        state |= flatten("loss_scaler", vars(scaler))
    grad_scaler = getattr(optimizer, "torch_autocast_gradscaler", None)
    if grad_scaler is not None:
        state |= flatten("grad_scaler", grad_scaler.state_dict())
    return state | {f"engine/{name}": getattr(engine, name) for name in _ENGINE_COUNTERS}


def flatten(prefix: str, value: Any) -> State:
    """The leaves of nested dicts and sequences by path; objects of other types are left out."""
    import torch

    if isinstance(value, Mapping):
        parts = [flatten(f"{prefix}/{key}", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [flatten(f"{prefix}/{index}", item) for index, item in enumerate(value)]
    elif isinstance(value, torch.Tensor):
        return {prefix: value.detach().cpu().clone()}
    elif isinstance(value, (np.number, np.bool_)):
        return {prefix: value.item()}
    elif value is None or isinstance(value, (bool, int, float, str)):
        return {prefix: value}
    else:
        return {}
    return {key: entry for part in parts for key, entry in part.items()}


def fingerprint(state: Mapping[str, Entry]) -> Fingerprints:
    """The state with fingerprints instead of tensors: small, and compares as the state does."""
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

    if getattr(param, "ds_status", None) is None or param.ds_status.name == "AVAILABLE":
        weight = param.detach().cpu().clone()
    else:
        with deepspeed.zero.GatheredParameters([param]):
            weight = param.detach().cpu().clone()
    return _checked(weight, param, f"weight/{name}")


def _gather_optimizer(optimizer: Any, names: Mapping[torch.nn.Parameter, str]) -> Iterator[tuple[str, Entry]]:
    """Master weights and optimizer state, sub-group by sub-group; tensors keep their own dtype."""
    for index, group in enumerate(optimizer.fp16_groups):
        with _resident(optimizer, index):
            master = optimizer.fp32_partitioned_groups_flat[index]
            sharded, scalars = _split_state(_optimizer_state(optimizer, index), master)
            for param in group:
                name = names[param]
                sub_group, offset, length = optimizer.grad_position[optimizer.get_param_id(param)]
                if sub_group != index:
                    raise RuntimeError(f"{name} is in sub-group {index}, and its position says {sub_group}.")
                for key, flat in {
                    f"master/{name}": master,
                    **{f"state/{name}/{k}": v for k, v in sharded.items()},
                }.items():
                    yield key, _gather_fragment(flat.narrow(0, offset, length), param, key)
                for key, number in scalars.items():
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


def _optimizer_state(optimizer: Any, sub_group: int) -> dict[str, Any]:
    """The state of one sub-group, from the optimizer that steps it."""
    master = optimizer.fp32_partitioned_groups_flat[sub_group]
    state: dict[str, Any] = {}
    for owner in (optimizer.optimizer, getattr(optimizer, "backup_optimizer", None)):
        if owner is not None:
            state |= owner.state.get(master, {})
    momentum = getattr(optimizer, "muon_momentum_buffer_partitioned_groups_flat", {}).get(sub_group)
    return state if momentum is None else state | {"momentum_buffer": momentum}


def _split_state(
    state: Mapping[str, Any], master: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, bool | int | float | None]]:
    """State that is partitioned as the master weights are, and numbers."""
    import torch

    sharded: dict[str, torch.Tensor] = {}
    scalars: dict[str, bool | int | float | None] = {}
    for key, value in state.items():
        if key.endswith(_DUPLICATES):
            continue
        if isinstance(value, torch.Tensor) and value.shape == master.shape:
            sharded[key] = value
        elif isinstance(value, (np.number, np.bool_)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            scalars[key] = value.item()
        elif value is None or isinstance(value, (bool, int, float)):
            scalars[key] = value
        else:
            raise TypeError(
                f"optimizer state {key!r} is neither partitioned as its parameters nor a number: {type(value)}. The "
                "momentum of Muon at ZeRO stages 1 and 2 is such state, and is not gathered."
            )
    return sharded, scalars


def _gather_fragment(fragment: torch.Tensor, param: Any, key: str) -> torch.Tensor:
    """A parameter's tensor from the fragments of all ranks."""
    whole = _gather(fragment, getattr(param, "ds_process_group", None))[: param.ds_numel]
    return _checked(whole.view(param.ds_shape).clone(), param, key)


def _gather(part: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The parts of all ranks end to end, on the CPU, gathered as raw bytes for any dtype."""
    import torch
    from deepspeed.accelerator import get_accelerator

    mine = part.detach().to(get_accelerator().current_device_name()).contiguous().view(torch.uint8)
    parts = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, mine, group=group)
    return torch.cat(parts).cpu().view(part.dtype)


@dataclass(frozen=True, slots=True)
class GroupBuffers:
    """One optimizer group: the buffer of all its weights, this rank's part of its master weights, its parameters.

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


def _gather_groups(
    optimizer: Any, groups: list[GroupBuffers], names: Mapping[torch.nn.Parameter, str]
) -> Iterator[tuple[str, Entry]]:
    """Master weights and optimizer state at stages 1 and 2.

    The place of a parameter in its group's flat buffer follows from the memory that its 16-bit weight is a view of, and
    not from DeepSpeed's tables: under ``round_robin_gradients`` those that ``safe_get_full_fp32_param`` uses are of
    another order than the buffer (DeepSpeed 0.19.8).
    """
    for group in groups:
        sharded, scalars = _split_state(optimizer.optimizer.state.get(group.master, {}), group.master)
        master = _gather(group.master, group.process_group)
        state = {key: _gather(part, group.process_group) for key, part in sharded.items()}
        for param in group.params:
            name = names[param]
            begin = (param.data_ptr() - group.weights.data_ptr()) // group.weights.element_size()
            if not 0 <= begin <= group.weights.numel() - param.numel():
                raise RuntimeError(f"{name} is no part of its group's flat buffer.")
            for key, flat in {f"master/{name}": master, **{f"state/{name}/{k}": v for k, v in state.items()}}.items():
                yield key, flat[begin : begin + param.numel()].view(param.shape).clone()
            for key, number in scalars.items():
                yield f"scalar/{name}/{key}", number


def _checked(tensor: torch.Tensor, param: Any, key: str) -> torch.Tensor:
    """The tensor, if it is whole: two placeholders, which are empty, would compare as equal."""
    shape = getattr(param, "ds_shape", param.shape)
    if tensor.shape != shape or tensor.numel() != math.prod(shape):
        raise RuntimeError(f"{key}: gathered shape {tuple(tensor.shape)}, the parameter has {tuple(shape)}.")
    return tensor


def _gather_buffers(module: torch.nn.Module) -> State:
    persistent = module.state_dict().keys()
    return {
        f"buffer/{name}": buffer.detach().cpu().clone() for name, buffer in module.named_buffers() if name in persistent
    }


def _members(optimizer: Any, names: Mapping[torch.nn.Parameter, str]) -> dict[int, list[str]]:
    """The trained parameters of each optimizer group of a stage 3 optimizer."""
    members: dict[int, list[str]] = {}
    for sub_group, params in enumerate(optimizer.fp16_groups):
        members.setdefault(optimizer.sub_group_to_group_id[sub_group], []).extend(names[param] for param in params)
    return members


def _groups(optimizer: Any, members: Mapping[int, list[str]]) -> State:
    """Hyper-parameters of the parameter groups, and which parameters each one holds."""
    entries: State = {}
    for index, group in enumerate(optimizer.optimizer.param_groups):
        for name, value in group.items():
            if name not in ("params", "param_names"):
                entries.update(flatten(f"group/{index}/{name}", value))
        entries[f"group/{index}/params"] = " ".join(sorted(members.get(index, [])))
    return entries


def _digest(tensor: torch.Tensor) -> Fingerprint:
    raw = _bytes(tensor).numpy().data
    return Fingerprint(str(tensor.dtype), tuple(tensor.shape), hashlib.blake2b(raw, digest_size=16).hexdigest())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _difference(expected: Entry, found: Entry) -> str:
    """The difference between two entries as text; empty if there is none."""
    import torch

    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        return _tensor_difference(expected, found)
    if isinstance(expected, torch.Tensor) and isinstance(found, Fingerprint):
        expected = _digest(expected)
    if isinstance(expected, Fingerprint) and isinstance(found, Fingerprint):
        if (expected.dtype, expected.shape) != (found.dtype, found.shape):
            return f"is {found.dtype} {found.shape}, expected {expected.dtype} {expected.shape}"
        return "" if expected == found else "has other elements"
    same_nan = isinstance(expected, float) and isinstance(found, float) and expected != expected and found != found
    return "" if same_nan or expected == found else f"is {found!r}, expected {expected!r}"


def _tensor_difference(expected: torch.Tensor, found: torch.Tensor) -> str:
    import torch

    if expected.dtype != found.dtype or expected.shape != found.shape:
        return f"is {found.dtype} {tuple(found.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    mine, theirs = _bytes(expected), _bytes(found)
    if torch.equal(mine, theirs):
        return ""
    wrong = (mine != theirs).view(-1, expected.element_size()).any(dim=1).nonzero().flatten()
    first = int(wrong[0])
    return (
        f"{len(wrong)} of {expected.numel()} elements differ, the first at {first}: "
        f"{found.reshape(-1)[first].item()!r}, expected {expected.reshape(-1)[first].item()!r}"
    )
