"""The optimizer's part of the training state at ZeRO stages 1 and 2, gathered, for ``gather_state``.

The place of a parameter in its group's flat buffer follows from the memory that its 16-bit weight is a view of, and not
from DeepSpeed's tables: under ``round_robin_gradients`` those that ``safe_get_full_fp32_param`` uses are of another
order than the buffer (DeepSpeed 0.19.8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Split = Callable[[Mapping[str, Any], "torch.Tensor"], tuple[dict[str, "torch.Tensor"], dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class GroupBuffers:
    """One optimizer group: the buffer of all its weights, this rank's part of its master weights, its parameters."""

    weights: torch.Tensor
    master: torch.Tensor
    params: list[torch.nn.Parameter]


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
    return [GroupBuffers(*group) for group in zip(*columns, strict=True)]


def gather_groups(
    optimizer: Any, groups: list[GroupBuffers], names: Mapping[torch.nn.Parameter, str], split: Split
) -> Iterator[tuple[str, Any]]:
    """Master weights and optimizer state of every trained parameter, with the keys of ``gather_state``. Collective."""
    for group in groups:
        sharded, scalars = split(optimizer.optimizer.state.get(group.master, {}), group.master)
        whole = {"master": _gather(group.master), **{f"state/{key}": _gather(part) for key, part in sharded.items()}}
        for param in group.params:
            begin = (param.data_ptr() - group.weights.data_ptr()) // group.weights.element_size()
            if not 0 <= begin <= group.weights.numel() - param.numel():
                raise RuntimeError(f"{names[param]} is no part of its group's flat buffer.")
            for key, flat in whole.items():
                kind, _, state_key = key.partition("/")
                place = "/".join(filter(None, (kind, names[param], state_key)))
                yield place, flat[begin : begin + param.numel()].view(param.shape).clone()
            for key, number in scalars.items():
                yield f"scalar/{names[param]}/{key}", number


def _gather(part: torch.Tensor) -> torch.Tensor:
    """A group's whole buffer from every rank's part, on the CPU, as raw bytes whatever the dtype."""
    import torch
    from deepspeed.accelerator import get_accelerator

    mine = part.detach().to(get_accelerator().current_device_name()).contiguous().view(torch.uint8)
    parts = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, mine)
    return torch.cat(parts).cpu().view(part.dtype)
