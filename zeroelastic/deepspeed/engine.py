"""The members of DeepSpeed's engine and stage 3 optimizer that loads and saves use, as types; and its configuration.

DeepSpeed has no type stubs. These protocols name what we rely on, so that mypy finds a misspelt member, and a reader
sees the whole surface at once. Whether the installed DeepSpeed has the methods is checked by ``seams``.
Sources: ``deepspeed.runtime.engine.DeepSpeedEngine``, ``deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3``
(0.18.9 to 0.19.8).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zeroelastic.deepspeed.engine_state import state_of
from zeroelastic.deepspeed.options import Options, parse_options
from zeroelastic.distributed.partners import agree_on
from zeroelastic.errors import UnsupportedError, some
from zeroelastic.report import ResumeReport


class Engine(Protocol):
    """A ``DeepSpeedEngine``; ``live.kinds`` says which optimizers are covered."""

    module: torch.nn.Module
    optimizer: Any
    lr_scheduler: Any
    checkpoint_engine: Any
    training_dataloader: Any
    param_names: Mapping[torch.nn.Parameter, str]
    global_rank: int
    global_steps: int
    micro_steps: int
    device: torch.device
    seq_dp_world_size: int
    mp_world_size: int
    has_moe_layers: bool
    mpu: Any
    random_ltd_scheduler: Any
    global_samples: int
    zeroelastic_report: ResumeReport
    _config: Any

    def destroy(self) -> None: ...
    def train_batch_size(self) -> int: ...
    def train_micro_batch_size_per_gpu(self) -> int: ...
    def gradient_accumulation_steps(self) -> int: ...
    def fp16_enabled(self) -> bool: ...
    def bfloat16_enabled(self) -> bool: ...
    def zero_load_from_fp32_weights(self) -> bool: ...
    def zero_optimization(self) -> bool: ...
    def zero_optimization_stage(self) -> int: ...
    def use_node_local_storage(self) -> bool: ...
    def load_universal_checkpoint(self) -> bool: ...
    def random_ltd_enabled(self) -> bool: ...
    def curriculum_learning_enabled(self) -> bool: ...
    def _get_buffer_names(self) -> Sequence[str]: ...
    def _get_ckpt_name(self, checkpoints_path: str, tag: str) -> str: ...
    def _get_zero_ckpt_name(self, checkpoints_path: str, tag: str) -> str: ...
    def _save_checkpoint(self, save_dir: str, tag: str, client_state: Any = ...) -> None: ...
    def _save_zero_checkpoint(self, save_path: str, tag: str) -> None: ...
    def _copy_recovery_script(self, save_path: str) -> None: ...
    def _get_non_moe_state_dict(self, full_state_dict: dict[str, Any]) -> dict[str, Any]: ...
    def module_state_dict(self, *args: Any, **flags: Any) -> dict[str, Any]: ...
    def _get_zero_param_shapes(self) -> Any: ...
    def _get_param_shape_func(self, param: torch.nn.Parameter) -> Any: ...
    def _get_zero_frozen_param_attributes(self, attr_func: Callable[[Any], Any]) -> Any: ...
    def _get_shared_params(self) -> dict[str, str]: ...
    def _get_param_fragment_func(self, param: torch.nn.Parameter) -> Any: ...
    def _load_checkpoint(self, load_dir: str, tag: str, **flags: Any) -> tuple[str | None, dict[str, Any]]: ...


class Stage3Optimizer(Protocol):
    """A ``DeepSpeedZeroOptimizer_Stage3``; ``optimizer`` is the torch optimizer that it wraps.

    Lists are by sub-group. An entry of ``fp16_partitioned_groups_flat`` is None where parameters are on NVMe.
    """

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    dtype: torch.dtype
    dp_process_group: dist.ProcessGroup
    fp32_partitioned_groups_flat: Sequence[torch.Tensor]
    fp16_partitioned_groups_flat: Sequence[torch.Tensor | None]
    fp16_partitioned_groups_flat_numel: Sequence[int]
    fp16_groups: Sequence[Sequence[torch.nn.Parameter]]
    sub_group_to_group_id: Mapping[int, int]
    sub_group_size: int | None
    grad_position: Mapping[int, Sequence[int]]
    persistent_parameters: Sequence[Any]
    optimizer_swapper: Any
    loss_scaler: Any
    dynamic_loss_scale: bool
    overflow: bool

    def checkpoint_event_prologue(self) -> None: ...
    def checkpoint_event_epilogue(self) -> None: ...
    def reload_states(self) -> None: ...
    def get_param_id(self, param: torch.nn.Parameter) -> int: ...
    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None: ...
    def _unflatten_partitioned_parameters(self, sub_group_id: int) -> None: ...
    def _rigid_state_dict(self) -> dict[str, Any]: ...
    def _swappable_optimizer_subgroup(self, sub_group_id: int) -> bool: ...


class GroupOptimizer(Protocol):
    """The common members of a ``DeepSpeedZeroOptimizer`` of stages 1 and 2 and a ``BF16_Optimizer``.

    Their lists, which have other names in each, are in ``live.group_split``.
    """

    optimizer: torch.optim.Optimizer
    dp_process_group: dist.ProcessGroup
    real_dp_process_group: Sequence[dist.ProcessGroup]
    _hp_optimizer_states_linked: bool

    def state_dict(self) -> dict[str, Any]: ...
    def _link_all_hp_params(self) -> None: ...
    def _lazy_init_hp_params_optimizer_state(self) -> None: ...


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Within this context, which is also a decorator, ``torch.inference_mode`` does not hold.

    Training or a thread later changes the tensors that a save or a load makes, and torch lets nobody change a tensor of
    that mode outside of it. Gradients are recorded, or not, as before.
    """
    records_gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records_gradients):
        yield


def options_of(engine: Engine) -> Options:
    """The engine's "zeroelastic" block; strict while a caller loads strictly. Raises ConfigError."""
    options = parse_options(engine._config._param_dict)
    return options.model_copy(update={"strict": True}) if state_of(engine).strict else options


def saves_elastic(engine: Engine) -> bool:
    """Return whether the configuration asks for elastic saves, by our option or by DeepSpeed's key."""
    chosen = options_of(engine).format
    return chosen == "elastic" if chosen else bool(getattr(engine._config.zero_config, "elastic_checkpoint", False))


def accumulated_micro_batches(engine: Engine) -> int:
    """Return how many micro batches were taken since the last optimizer step: gradients in memory.

    DeepSpeed's counter of micro steps counts calls of ``step``: not the backward passes since the last one, nor any
    where the caller decides which of them is an optimizer step (``decides_boundaries``). The optimizer counts backward
    passes at ZeRO stages 2 and 3, and those of ``coalesce_grad_reduction`` as one. At stage 1 it may know only that
    there are some.
    """
    steps = 0 if decides_boundaries(engine) else int(engine.micro_steps % engine.gradient_accumulation_steps())
    return max(steps, _waiting_backward_passes(engine))


def _waiting_backward_passes(engine: Engine) -> int:
    optimizer = engine.optimizer
    if getattr(optimizer, "_coalesce_grad_reduction", False):  # within the block no counter moves
        waiting = (getattr(param, "grad_accum", None) is not None for param in engine.module.parameters())
        return int(any(waiting) or any(param.grad is not None for param in engine.module.parameters()))
    counted = getattr(optimizer, "micro_step_id", None)
    if counted is None:  # BF16_Optimizer; without an optimizer there is neither
        return int(any(map(any, getattr(optimizer, "fp32_groups_has_gradients", ()))))
    if engine.zero_optimization_stage() < 3:
        return int(counted) + 1
    return int(counted) + bool(getattr(optimizer, "_epilogue_ran_this_backward", False))  # of the last backward


def merged_layers(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Base layers into whose weights PEFT has merged adapters, by ``merge_adapter`` (``BaseTunerLayer``, peft 0.19)."""
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return {}
    layers = ((name, one) for name, one in module.named_modules() if isinstance(one, tuners.BaseTunerLayer))
    return {name: one.get_base_layer() for name, one in layers if one.merged}


def refuse_merged(module: torch.nn.Module, what: str) -> None:
    """Raise UnsupportedError while adapters are merged: unmerging would take them out of weights without them."""
    if merged := merged_layers(module):
        raise UnsupportedError(
            f"{what}: adapters are merged into the base weights of {some(merged)}, and a checkpoint has the two "
            "apart. Call unmerge_adapter() before this, and merge_adapter() after it."
        )


def decides_boundaries(engine: Engine) -> bool:
    """Return whether the caller, and not DeepSpeed's counter, decides when an accumulation of gradients ends.

    So it is after ``set_gradient_accumulation_boundary``, which accelerate calls, and without
    ``managed_gradient_accumulation``.
    """
    managed = getattr(engine._config, "managed_gradient_accumulation", True)
    return not managed or getattr(engine, "_is_gradient_accumulation_boundary", None) is not None


def agree_on_options(engine: Engine) -> None:
    """Raise the same ConfigError on every rank where the options differ between ranks; once per engine. Collective.

    ``verify`` may differ: the least of it holds.
    """

    def facts() -> dict[str, object]:
        options = parse_options(engine._config._param_dict).model_dump(exclude={"verify", "io_engine"})
        named = {f'"{name}" in the "zeroelastic" block': value for name, value in options.items()}
        return {'"elastic_checkpoint"': saves_elastic(engine), **named}

    state = state_of(engine)
    if not state.options_agreed:
        agree_on(facts)
        state.options_agreed = True
