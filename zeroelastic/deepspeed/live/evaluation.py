"""The parameters of a ZeRO-3 engine without an optimizer, which evaluates: every one is partitioned, and none trained.

DeepSpeed makes such an engine where ``deepspeed.initialize`` gets no optimizer, with a ``DeepSpeedZeRoOffload`` in the
place of one. It has no way to load a checkpoint into it (0.19.8).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from zeroelastic.checkpoint.tag_files import NO_TENSOR_PARALLEL
from zeroelastic.core.layout import layout_from_sub_groups, unpacked_layout
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.persistent_params import gather_persistent_params
from zeroelastic.deepspeed.live.stage3 import Stage3
from zeroelastic.deepspeed.live.swap_files import is_param_on_nvme


class Evaluation(Stage3):
    """A ``DeepSpeedZeRoOffload``: all parameters are ``frozen``, and there is nothing else."""

    trains = False

    def __init__(self, optimizer: Any, names: Mapping[torch.nn.Parameter, str]) -> None:
        self.optimizer = optimizer
        no_optimizer: Any = SimpleNamespace(param_groups=[], state={})
        self.base = no_optimizer
        params = list(optimizer.module.parameters())
        world: Any = dist.group.WORLD
        self.dp_group = next((param.ds_process_group for param in params if hasattr(param, "ds_id")), world)
        self.tp_group, self.grad_scaler = None, None
        self.rank, self.tp = dist.get_rank(group=self.dp_group), NO_TENSOR_PARALLEL
        self._read(names)

    def _read(self, names: Mapping[torch.nn.Parameter, str]) -> None:
        self.module = self.optimizer.module
        world_size = dist.get_world_size(group=self.dp_group)
        self.groups, self.group_of = (), ()
        self.layout = layout_from_sub_groups([], world_size)
        self.trained = frozenset()
        self._frozen = list(self.module.parameters())
        self.frozen = unpacked_layout([self._param(param, names) for param in self._frozen], world_size)

    @staticmethod
    def uncovered(optimizer: Any, engine: Engine) -> list[str]:
        params = list(optimizer.module.parameters())
        used = {
            "mixture-of-experts layers": bool(getattr(engine, "has_moe_layers", False)),
            "tensor parallelism": int(getattr(engine, "mp_world_size", 1) or 1) > 1,
            "parameters on NVMe": any(hasattr(param, "ds_id") and is_param_on_nvme(param) for param in params),
            "quantized weights": any(hasattr(getattr(param, "ds_tensor", None), "ds_quant_scale") for param in params),
        }
        return [what for what, is_used in used.items() if is_used]

    def frozen_tensor(self, param: int) -> torch.Tensor:
        parameter: Any = self._frozen[param]
        part: torch.Tensor = parameter.ds_tensor.detach()
        return part

    def begin_load(self) -> None:
        offload: Any = self.optimizer
        offload.partition_all_parameters()

    def refresh(self) -> None:
        """Nothing is replaced."""

    def state_filled(self) -> None:
        """There is no state."""

    def finish_weights(self, *, from_16_bit: bool, rounded: Collection[int] = ()) -> None:
        """Drop the secondary copies of hpZ, which are of the weights from before the load."""
        params: Iterator[Any] = self.module.parameters()
        for param in params:
            if getattr(param, "ds_secondary_tensor", None) is not None:
                param.ds_secondary_tensor = None

    def end_load(self) -> None:
        def gather_the_rest() -> None:
            left = [param for param in kept if param.ds_status == ZeroParamStatus.NOT_AVAILABLE]
            if left:
                left[0].all_gather(left)

        kept = list(self.optimizer.persistent_parameters)
        gather_persistent_params(self.optimizer, gather_the_rest)

    def sync(self) -> None:
        """Nothing is on NVMe."""
