"""The parameters that ZeRO-3 keeps whole on every rank between steps, gathered again after a save or a load.

DeepSpeed partitions all parameters before a save and a load, and gathers the persistent ones (the small ones, which
every rank keeps whole between steps) again after it, by one collective for each. Here many are gathered at once.
Parameters that are quantized, on NVMe, or partitioned over other ranks (hpZ, MiCS, experts) are left to DeepSpeed.
Source: ``DeepSpeedZeroOptimizer_Stage3.checkpoint_event_epilogue``, ``Init._allgather_params_coalesced`` (0.19.8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, ZeroParamStatus

from zeroelastic.deepspeed.engine import Stage3Optimizer

BATCH_BYTES = 8 << 20
"""Persistent parameters that are gathered at once, if they are not larger each: the memory of it is twice as much."""


def gather_persistent_params(optimizer: Stage3Optimizer, epilogue: Callable[[], None]) -> None:
    """Make persistent parameters whole; ``epilogue`` is DeepSpeed's way to do so. Collective."""
    params = [param for param in optimizer.persistent_parameters if param.ds_status == ZeroParamStatus.NOT_AVAILABLE]
    groups = {id(param.ds_process_group): param.ds_process_group for param in params}
    if len(groups) == 1 and all(map(_is_plain, params)):
        (group,) = groups.values()
        world_size = dist.get_world_size(group=group)
        for batch in _batches(params, world_size) if world_size > 1 else ():
            _gather(batch, group)
    epilogue()  # nothing is left to gather, or all of it


def _is_plain(param: Any) -> bool:
    part = param.ds_tensor
    return (
        part.status == PartitionedParamStatus.AVAILABLE
        and getattr(param, "ds_zero_param_process_group", None) is None
        and not hasattr(part, "ds_quant_scale")
        and getattr(param, "ds_secondary_tensor", None) is None
    )


def _batches(params: Sequence[Any], world_size: int) -> Iterator[list[Any]]:
    """Group neighbours of one dtype and device: at most ``BATCH_BYTES`` together, or one larger parameter."""
    batch: list[Any] = []
    nbytes = 0
    for param in params:
        part = param.ds_tensor
        size = part.numel() * part.element_size() * world_size
        alike = not batch or (batch[0].ds_tensor.dtype, batch[0].ds_tensor.device) == (part.dtype, part.device)
        if batch and (not alike or nbytes + size > BATCH_BYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(param)
        nbytes += size
    if batch:
        yield batch


def _gather(params: Sequence[Any], group: Any) -> None:
    """Gather parameters whose parts are equally long on all ranks, as DeepSpeed pads them. Collective."""
    device = params[0].device
    own = torch.cat([param.ds_tensor.detach().view(-1) for param in params]).to(device)
    ranks = own.new_empty(dist.get_world_size(group=group), len(own))
    dist.all_gather_into_tensor(ranks.view(-1), own, group=group)
    ends = list(accumulate(param.ds_tensor.numel() for param in params))
    for param, end in zip(params, ends, strict=True):
        whole = ranks[:, end - param.ds_tensor.numel() : end].contiguous().view(-1)
        param.data = whole[: param.ds_numel].view(param.ds_shape)
        param.ds_status = ZeroParamStatus.AVAILABLE
