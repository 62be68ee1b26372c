"""Where DeepSpeed keeps each sub-group: which optimizer steps it, and what of it lies in NVMe swap files.

A swapped tensor is a file on this machine of which nothing stays in memory between two steps. It is mapped, never read
as a whole: saving and digesting stream from the map, loading fills the map, and the page cache is the only memory that
takes. DeepSpeed reads and writes the same files with O_DIRECT, which the kernel keeps coherent with maps that hold
nothing unwritten; ``sync`` writes out what a load has put into them. Source: ``OptimizerSwapper``,
``AsyncPartitionedParameterSwapper`` and ``DeepSpeedZeroOptimizer_Stage3._optimizer_step``, DeepSpeed 0.19.8.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from zeroelastic.errors import CheckpointError
from zeroelastic.shard import FP32

_DUPLICATE = "_offload_buffer"
"""The end of the names under which offload_states() keeps second copies among the optimizer state."""

_PENDING_WRITE = "async_swap_out"


@dataclass(frozen=True, slots=True)
class Residence:
    """What one rank holds of each sub-group, wherever it is.

    Maps are made once and kept, so that equal places are equal storages; what is written to them changes the files, and
    ``sync`` brings it to the disk and lets go of them.
    """

    optimizer: DeepSpeedZeroOptimizer_Stage3
    _maps: dict[str, torch.Tensor] = field(default_factory=dict)

    def owner(self, sub_group: int) -> torch.optim.Optimizer:
        """The optimizer that steps a sub-group: the backup optimizer for the GPU's share under partial offload."""
        optimizer = self.optimizer
        backup = getattr(optimizer, "backup_optimizer", None)
        by_muon = getattr(optimizer, "use_muon", False) and optimizer.sub_groups_using_muon[sub_group]
        if backup is None or by_muon or optimizer.subgroup_to_device[sub_group] == "cpu":
            main: torch.optim.Optimizer = optimizer.optimizer
            return main
        assert isinstance(backup, torch.optim.Optimizer)
        return backup

    def is_backup(self, sub_group: int) -> bool:
        """Whether the backup optimizer, a torch AdamW beside DeepSpeedCPUAdam, steps a sub-group."""
        return self.owner(sub_group) is not self.optimizer.optimizer

    def is_swapped(self, sub_group: int) -> bool:
        """Whether a sub-group lies in swap files between two steps.

        Its tensors are then empty or, left so by the pipelined swapper, views of buffers that hold something else.
        """
        return bool(self.optimizer._swappable_optimizer_subgroup(sub_group))

    def fp32(self, sub_group: int) -> torch.Tensor:
        """The flat master weights, mapped when they are swapped."""
        flat: torch.Tensor = self.optimizer.fp32_partitioned_groups_flat[sub_group]
        if not self.is_swapped(sub_group):
            return flat.detach()
        return self._map(self._info(sub_group).tensors[0].swap_path, self._numel(sub_group), self._dtype)

    def own_state(self, sub_group: int) -> MutableMapping[str, Any]:
        """The owner's own dict of a sub-group's state, made when there is none; swapped tensors in it hold nothing."""
        state: MutableMapping[str, Any] = self.owner(sub_group).state[
            self.optimizer.fp32_partitioned_groups_flat[sub_group]
        ]
        return state

    def forget(self, sub_group: int) -> None:
        """Leave a sub-group without any state, as before the first step."""
        self.owner(sub_group).state.pop(self.optimizer.fp32_partitioned_groups_flat[sub_group], None)

    def state(self, sub_group: int) -> MutableMapping[str, Any]:
        """A sub-group's state, whole: swapped tensors mapped, the backup optimizer's ``step`` a number as in the rest.

        What offload_states() keeps in duplicate is left out. A copy, unless the owner's own dict is like that.
        """
        flat = self.optimizer.fp32_partitioned_groups_flat[sub_group]
        state: MutableMapping[str, Any] = self.owner(sub_group).state.get(flat, {})
        if any(key.endswith(_DUPLICATE) for key in state):
            state = {key: value for key, value in state.items() if not key.endswith(_DUPLICATE)}
        if self.is_backup(sub_group):
            state = {key: _as_number(key, value) for key, value in state.items()}
        if self.is_swapped(sub_group):
            paths = self._paths(sub_group)
            numel = self._numel(sub_group)
            state = {
                key: self._map(paths[id(value)], numel, self._dtype) if id(value) in paths else value
                for key, value in state.items()
            }
        return state

    def differs_from_stock(self, sub_group: int) -> bool:
        """Whether the state dict of DeepSpeed's optimizer lacks a sub-group's state, or has it in duplicate."""
        flat = self.optimizer.fp32_partitioned_groups_flat[sub_group]
        duplicated = any(key.endswith(_DUPLICATE) for key in self.owner(sub_group).state.get(flat, {}))
        return duplicated or self.is_backup(sub_group) or self.is_swapped(sub_group)

    def writable(self, sub_group: int, key: str) -> torch.Tensor | None:
        """The map of a swapped tensor, whose file is made when the state has none; None if it is not swapped.

        Raises OSError when the disk has no room for it.
        """
        if not self.is_swapped(sub_group):
            return None
        if key == FP32:
            return self.fp32(sub_group)
        info, numel = self._info(sub_group), self._numel(sub_group)
        state, paths = self.own_state(sub_group), self._paths(sub_group)
        if key not in state or id(state[key]) not in paths:
            flat, swapper = self.optimizer.fp32_partitioned_groups_flat[sub_group], self.optimizer.optimizer_swapper
            state[key] = torch.empty(0, dtype=self._dtype)
            state[key].ds_id = f"{key}-{flat.ds_id}"
            info.add_state_tensors([state[key]])
            paths = self._paths(sub_group)
            _reserve(paths[id(state[key])], int(swapper._io_aligned_numel(numel)) * swapper.swap_element_size)
        return self._map(paths[id(state[key])], numel, self._dtype)

    def drop(self, sub_group: int, keys: list[str]) -> None:
        """Forget some keys of a sub-group's state; their swap files are no longer known to DeepSpeed."""
        state = self.own_state(sub_group)
        for key in keys:
            if key.endswith(_DUPLICATE) and key.removesuffix(_DUPLICATE) not in keys:
                continue  # the place that offload_states() fills again
            del state[key]
        if not self.is_swapped(sub_group):
            return
        info, kept = self._info(sub_group), {id(value) for value in state.values()}
        info.tensors = [info.tensors[0], *(t for t in info.tensors[1:] if id(t.compute_tensor) in kept)]
        info.has_state_tensors = len(info.tensors) > 1
        info.release_unswapped_gradients()

    @contextmanager
    def in_memory(self, sub_group: int) -> Iterator[None]:
        """While it lasts, DeepSpeed finds the master weights of a sub-group where it looks for them."""
        if not self.is_swapped(sub_group):
            yield
            return
        flat, view = self.optimizer.fp32_partitioned_groups_flat[sub_group], self.fp32(sub_group)
        flat.data = view
        try:
            yield
        finally:
            flat.data = torch.Tensor()  # as DeepSpeed leaves it (SwapTensorContext.release_memory)

    def frozen(self, param: Any) -> torch.Tensor:
        """This rank's part of a frozen parameter; of one that lies on NVMe the map."""
        if not is_away(param):
            part: torch.Tensor = param.ds_tensor.detach()
            return part
        swapper = param.nvme_swapper
        swapper.synchronize_reads()
        swapper.synchronize_writes()
        if not is_away(param):
            return self.frozen(param)
        return self._map(swapper.get_path(param, True), int(param.ds_tensor.ds_numel), param.dtype)

    def settle(self) -> None:
        """Wait for writes that DeepSpeed's pipelined swapper has under way."""
        swapper = self.optimizer.optimizer_swapper
        if getattr(swapper, "swap_ops", {}).get(_PENDING_WRITE):
            swapper._complete_swap_out(_PENDING_WRITE)

    def sync(self) -> None:
        """Bring what was written to maps to the disk, where DeepSpeed reads it, and let go of them."""
        for path in self._maps:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        self._maps.clear()

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.optimizer.optimizer_swapper.dtype
        return dtype

    def _numel(self, sub_group: int) -> int:
        return int(self.optimizer.fp16_partitioned_groups_flat_numel[sub_group])

    def _info(self, sub_group: int) -> Any:
        flat = self.optimizer.fp32_partitioned_groups_flat[sub_group]
        return self.optimizer.optimizer_swapper.swap_params_info[flat.ds_id]

    def _paths(self, sub_group: int) -> dict[int, str]:
        """Where each swapped state tensor lies, by the identity of the tensor in its place."""
        return {id(tensor.compute_tensor): tensor.swap_path for tensor in self._info(sub_group).tensors[1:]}

    def _map(self, path: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if path not in self._maps:
            self._maps[path] = _mapped(path, numel, dtype)
        return self._maps[path]


def is_away(param: Any) -> bool:
    """Whether a parameter's part lies on NVMe and not in memory."""
    status = getattr(param.ds_tensor, "status", None)
    return status is not None and status.name != "AVAILABLE"


def uncovered(optimizer: DeepSpeedZeroOptimizer_Stage3) -> list[str]:
    """Combinations with offloading whose state cannot be read or restored right."""
    problems: list[str] = []
    if getattr(optimizer, "swap_optimizer", False):
        if getattr(optimizer, "use_muon", False):
            problems.append("Muon with offload_optimizer to NVMe")
        if isinstance(optimizer.optimizer, torch.optim.Adagrad):
            problems.append(
                "torch's Adagrad with offload_optimizer to NVMe (DeepSpeed makes its state without elements)"
            )
    half = getattr(optimizer, "master_weights_and_grads_dtype", torch.float32) != torch.float32
    if half and getattr(optimizer, "backup_optimizer", None) is not None:
        problems.append("partial optimizer offload with master weights in 16 bits (its two optimizers differ in dtype)")
    return problems


def lost_in_stock_files(optimizer: DeepSpeedZeroOptimizer_Stage3) -> str | None:
    """What DeepSpeed's own (rigid) files of this optimizer would lack, or None when they hold everything."""
    residence = Residence(optimizer)
    sub_groups = range(len(optimizer.fp32_partitioned_groups_flat))
    if any(residence.is_swapped(i) for i in sub_groups):
        return "master weights and optimizer state on NVMe"
    if any(residence.is_backup(i) for i in sub_groups):
        return "the optimizer state that partial offload keeps on the GPU"
    return None


def _as_number(key: str, value: Any) -> Any:
    """``step`` as DeepSpeedCPUAdam keeps it, so that it does not matter which of the two optimizers has it."""
    return int(value.item()) if key == "step" and isinstance(value, torch.Tensor) and value.dim() == 0 else value


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
            "changes the nvme_path folder of this run: give each run one of its own."
        )
    return torch.from_file(path, shared=True, size=numel, dtype=dtype)
