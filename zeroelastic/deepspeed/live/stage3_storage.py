"""Where ZeRO-3 keeps parameters and their state between two steps: in NVMe swap files, or whole on every rank.

A swapped tensor is a file on this machine, and nothing of it stays in memory between two steps. It is mapped, never
read as a whole: saves and digests stream from the map, loads fill the map, and the page cache is the only memory that
this takes. DeepSpeed reads and writes the same files with O_DIRECT, which the kernel keeps coherent with maps that hold
nothing unwritten; ``sync`` writes out the changes of a load. Source: ``OptimizerSwapper``,
``AsyncPartitionedParameterSwapper`` and ``DeepSpeedZeroOptimizer_Stage3._optimizer_step``, DeepSpeed 0.19.8.

DeepSpeed partitions all parameters before a save and a load, and gathers the persistent ones (the small ones, which
every rank keeps whole between steps) again after it, by one collective for each. Here many are gathered at once.
Parameters that are quantized, on NVMe, or partitioned over other ranks (hpZ, MiCS, experts) are left to DeepSpeed.
Source: ``DeepSpeedZeroOptimizer_Stage3.checkpoint_event_epilogue``, ``Init._allgather_params_coalesced`` (0.19.8).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, ZeroParamStatus

from zeroelastic.deepspeed.engine import Stage3Optimizer
from zeroelastic.errors import CheckpointError

_PENDING_WRITE = "async_swap_out"

BATCH_BYTES = 8 << 20
"""Persistent parameters that are gathered at once, if they are not larger each: the memory of it is twice as much."""


class SwapFiles:
    """The swap files of this rank's part of an optimizer.

    A map of a swap file is made once and kept, so that equal places are equal storages. Writing to a map changes the
    file; ``sync`` brings the changes to the disk and releases the maps.
    """

    def __init__(self, optimizer: Stage3Optimizer) -> None:
        self._optimizer = optimizer
        self._swapper: Any = getattr(optimizer, "optimizer_swapper", None)  # an engine without an optimizer has none
        self._maps: dict[str, torch.Tensor] = {}

    def has(self, sub_group: int) -> bool:
        """Whether a sub-group is in swap files between two steps.

        Its tensors are then empty or, left so by the pipelined swapper, views of buffers that hold something else.
        """
        return bool(self._optimizer._swappable_optimizer_subgroup(sub_group))

    def fp32(self, sub_group: int) -> torch.Tensor:
        """The flat master weights, mapped."""
        return self._map(self._info(sub_group).tensors[0].swap_path, self._numel(sub_group), self._swapper.dtype)

    def state(self, sub_group: int, own: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """A copy of the optimizer's ``own`` dict of a sub-group's state, with its swapped tensors mapped."""
        paths = self._paths(sub_group)
        return {
            key: self._map(paths[id(value)], self._numel(sub_group), self._swapper.dtype)
            if id(value) in paths
            else value
            for key, value in own.items()
        }

    def writable(self, sub_group: int, key: str, own: MutableMapping[str, Any]) -> torch.Tensor:
        """The map of a state tensor, whose file is created if the optimizer's ``own`` state lacks the key.

        Raises OSError when the disk has no room for it.
        """
        info, numel, paths = self._info(sub_group), self._numel(sub_group), self._paths(sub_group)
        if key not in own or id(own[key]) not in paths:
            flat, swapper = self._optimizer.fp32_partitioned_groups_flat[sub_group], self._swapper
            own[key] = torch.empty(0, dtype=swapper.dtype, device="cpu")
            own[key].ds_id = f"{key}-{flat.ds_id}"  # type: ignore[attr-defined]
            info.add_state_tensors([own[key]])
            paths = self._paths(sub_group)
            _reserve(paths[id(own[key])], int(swapper._io_aligned_numel(numel)) * swapper.swap_element_size)
        return self._map(paths[id(own[key])], numel, self._swapper.dtype)

    def keep_only(self, sub_group: int, values: Collection[object]) -> None:
        """Have DeepSpeed use the swap files of these state tensors alone."""
        info, kept = self._info(sub_group), {id(value) for value in values}
        info.tensors = [info.tensors[0], *(t for t in info.tensors[1:] if id(t.compute_tensor) in kept)]
        info.has_state_tensors = len(info.tensors) > 1
        info.release_unswapped_gradients()

    @contextmanager
    def resident(self, sub_group: int) -> Iterator[None]:
        """Within this context, DeepSpeed finds the master weights of a sub-group where it looks for them."""
        flat = self._optimizer.fp32_partitioned_groups_flat[sub_group]
        flat.data = self.fp32(sub_group)
        try:
            yield
        finally:
            flat.data = torch.Tensor()  # as DeepSpeed leaves it (SwapTensorContext.release_memory)

    def param(self, param: Any) -> torch.Tensor:
        """This rank's part of a parameter, mapped if it is on NVMe."""
        if is_param_on_nvme(param):
            param.nvme_swapper.synchronize_reads()
            param.nvme_swapper.synchronize_writes()
        if is_param_on_nvme(param):
            path = param.nvme_swapper.get_path(param, True)
            return self._map(path, int(param.ds_tensor.ds_numel), param.dtype)
        part: torch.Tensor = param.ds_tensor.detach()
        return part

    def wait(self) -> None:
        """Wait for the writes that DeepSpeed's pipelined swapper has started."""
        if getattr(self._swapper, "swap_ops", {}).get(_PENDING_WRITE):
            self._swapper._complete_swap_out(_PENDING_WRITE)

    def sync(self) -> None:
        """Write the changes of all maps to the disk, where DeepSpeed reads them, and release the maps."""
        for path in self._maps:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        self._maps.clear()

    def _numel(self, sub_group: int) -> int:
        return int(self._optimizer.fp16_partitioned_groups_flat_numel[sub_group])

    def _info(self, sub_group: int) -> Any:
        return self._swapper.swap_params_info[self._optimizer.fp32_partitioned_groups_flat[sub_group].ds_id]  # type: ignore[attr-defined]

    def _paths(self, sub_group: int) -> dict[int, str]:
        """Return the path of each swapped state tensor, by the identity of the tensor in its place."""
        return {id(tensor.compute_tensor): tensor.swap_path for tensor in self._info(sub_group).tensors[1:]}

    def _map(self, path: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if path not in self._maps:
            self._maps[path] = _mapped(path, numel, dtype)
        return self._maps[path]


def on_nvme(optimizer: Any) -> bool:
    """Whether optimizer state or parameters may lie on NVMe."""
    return bool(getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False))


def is_param_on_nvme(param: Any) -> bool:
    """Whether a parameter's part is on NVMe and not in memory."""
    status = getattr(param.ds_tensor, "status", None)
    return status is not None and status.name != "AVAILABLE"


def _reserve(path: str, nbytes: int) -> None:
    """Make a file at least that long, with room on the disk for all of it: writing to a map cannot fail, only die."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(fd)


def _mapped(path: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    try:
        size = Path(path).stat().st_size
    except FileNotFoundError:
        size = -1
    if size < numel * dtype.itemsize:
        found = "does not exist" if size < 0 else f"has {size} bytes"
        raise CheckpointError(
            f"{path}: this swap file of DeepSpeed's {found}; {numel * dtype.itemsize} are in use. Something else "
            "changes the nvme_path folder of this run: give each run one of its own.",
            remedy="",
        )
    return torch.from_file(path, shared=True, size=numel, dtype=dtype)


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
