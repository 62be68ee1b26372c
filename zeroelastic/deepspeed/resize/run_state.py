"""What is alike on all ranks of a world, and continues in the next one: layouts, hyper-parameters, counters, buffers.

One member sends it to all others, pickled: it comes from a process of the same job, never from a file. What DeepSpeed
has in its module states file is restored by DeepSpeed's own ``DeepSpeedEngine._load_checkpoint`` (0.19.8).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import torch

from zeroelastic.checkpoint.optimizer_file import OF_THE_PARAMS
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Layout
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.engine_state import lineage_of, state_of
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.replicated import restore_clipping, set_loss_scaler, set_option
from zeroelastic.deepspeed.patching import patched
from zeroelastic.deepspeed.run_objects import SAMPLER, loading_sampler, states_to_load
from zeroelastic.errors import CheckpointError, LayoutMismatchError, UnsupportedError


@dataclass(frozen=True, slots=True)
class GroupState:
    """One optimizer group: its parameters in buffer order, options, state keys with their dtypes, and scalars."""

    params: tuple[str, ...]
    options: Mapping[str, Any]
    dtypes: Mapping[str, torch.dtype]
    scalars: Mapping[str, ScalarValue]


@dataclass(frozen=True, slots=True)
class RunState:
    """What one world leaves to the next; ``keys`` are the state keys in the order that numbers buffers.

    ``root`` is the content root, if it was computed. ``module_states`` is what DeepSpeed would have read from a module
    states file, without parameters, and ``client_state`` what a load returns to its caller.
    """

    layout: Layout
    frozen: Layout
    keys: tuple[str, ...]
    groups: tuple[GroupState, ...]
    loss_scaler: Any
    dynamic_loss_scale: bool
    overflow: bool
    clip_grad: float | None
    grad_scaler: Mapping[str, Any] | None
    module_states: Mapping[str, Any]
    client_state: Mapping[str, Any]
    train_batch_size: int
    save_id: str | None
    committed_at: float
    run: str
    unsaved_steps: int
    unsaved_seconds: float
    root: str | None

    def values(self) -> dict[str, str]:
        """The numbers and texts of the optimizer, as texts by description: those of one rank are set on all."""
        found: dict[str, str] = {}
        for g, group in enumerate(self.groups):
            values = {k: _plain(v) for k, v in group.options.items()}
            values |= {k: v.canonical() for k, v in group.scalars.items()}
            found |= {f"{k!r} of optimizer group {g}": str(v) for k, v in values.items()}
        return found


def _plain(value: Any) -> Any:
    """A hyper-parameter with each tensor, or number of numpy, as Python's numbers, whose text has all digits.

    Of an object of another class the text may have its address, so the name of the class is in its place.
    """
    if isinstance(value, (torch.Tensor, np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)]
    return value if isinstance(value, (bool, int, float, str, NoneType)) else type(value).__name__


def run_state_of(
    engine: Engine,
    live: LiveOptimizer,
    client_state: Mapping[str, Any],
    *,
    keys: tuple[str, ...],
    root: str | None,
    sampler: Mapping[str, Any] | None,
) -> RunState:
    """What this rank leaves; ``sampler`` is the ``sampler_state``.

    Raises UnsupportedError where sub-groups of one group differ in their state.
    """
    optimizer, lineage = live.optimizer, lineage_of(engine)
    grad_scaler = None if live.grad_scaler is None else dict(live.grad_scaler.state_dict())
    return RunState(
        layout=live.layout,
        frozen=live.frozen,
        keys=keys,
        groups=group_states(live),
        loss_scaler=copy.deepcopy(getattr(optimizer, "loss_scaler", None)),
        dynamic_loss_scale=bool(getattr(optimizer, "dynamic_loss_scale", False)),
        overflow=bool(getattr(optimizer, "overflow", False)),
        clip_grad=getattr(optimizer, "clip_grad", None),
        grad_scaler=grad_scaler,
        module_states=copy.deepcopy(_module_states(engine, sampler)),
        client_state=copy.deepcopy(dict(client_state)),
        train_batch_size=int(engine.train_batch_size()),
        save_id=lineage.save_id,
        committed_at=lineage.committed_at,
        run=lineage.run,
        unsaved_steps=lineage.unsaved_steps,
        unsaved_seconds=lineage.unsaved_seconds,
        root=root,
    )


def group_states(live: LiveOptimizer) -> tuple[GroupState, ...]:
    """The optimizer groups of this rank. Raises UnsupportedError where sub-groups of one differ in their state."""
    return tuple(_group_state(live, g) for g in range(len(live.groups)))


def _group_state(live: LiveOptimizer, group: int) -> GroupState:
    found: list[tuple[dict[str, torch.dtype], dict[str, ScalarValue]]] = []
    for i in (i for i, g in enumerate(live.group_of) if g == group):
        tensors, scalars = live.split_state(i)
        one = ({key: tensor.dtype for key, tensor in tensors.items()}, scalars)
        if one not in found:
            found.append(one)
    if len(found) > 1:
        raise UnsupportedError(
            f"optimizer group {group}: its sub-groups have different state ({found[0]} and {found[1]}), as after "
            "parameters were added to it. Save, and start again at the other size."
        )
    dtypes, scalars = found[0] if found else ({}, {})
    options = {key: value for key, value in live.base.param_groups[group].items() if key not in OF_THE_PARAMS}
    return GroupState(live.groups[group], copy.deepcopy(options), dtypes, scalars)


def _module_states(engine: Engine, sampler: Mapping[str, Any] | None) -> dict[str, Any]:
    """What ``_load_checkpoint`` reads, with buffers and extra state of the module, and without parameters."""
    params = {name for name, _ in engine.module.named_parameters(remove_duplicate=False)}
    module = {name: value for name, value in engine.module.state_dict().items() if name not in params}
    counters: dict[str, Any] = {name: getattr(engine, name) for name in ("skipped_steps", "global_steps")}
    return {
        "module": {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in module.items()},
        **states_to_load(engine),
        SAMPLER: sampler,
        **counters,
        "global_samples": engine.global_samples,
        "dp_world_size": engine.seq_dp_world_size,
        "mp_world_size": engine.mp_world_size,
    }


def require_same_run(state: RunState, live: LiveOptimizer) -> None:
    """Raise LayoutMismatchError for an engine of another model or with other optimizer groups than the one before."""
    problems = []
    for what, old, new in (("trained", state.layout, live.layout), ("frozen", state.frozen, live.frozen)):
        before, now = ({param.name: param.shape for param in layout.params} for layout in (old, new))
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                problems.append(f"{what} parameter {name} was {before.get(name)} and is {now.get(name)}")
    groups = [set(group.params) for group in state.groups]
    if groups != [set(names) for names in live.groups]:
        problems.append("parameters are in other optimizer groups than before")
    if problems:
        raise LayoutMismatchError(
            "the function that builds the engine has built another one than for the world before:", problems
        )


def restore_module(engine: Engine, state: RunState, own: RunState) -> None:
    """Restore counters, scheduler, buffers, random-LTD and the data sampler by DeepSpeed's own load.

    ``own`` is what this member left, of which it keeps buffers and extra state: they may differ by rank, as running
    statistics of batch norms do.
    """
    params = {name: param.data for name, param in engine.module.named_parameters(remove_duplicate=False)}
    states = {**state.module_states, "module": {**params, **own.module_states["module"]}}

    with (
        patched(engine.checkpoint_engine, load=lambda path, map_location=None: dict(states)),
        patched(state_of(engine), module_paths=(os.devnull,)),
        loading_sampler(engine),
    ):
        path, _ = engine._load_checkpoint("", "", load_optimizer_states=True)
    if path is None:
        raise CheckpointError("DeepSpeed did not take the state of the world before.")
    lineage = lineage_of(engine)
    lineage.save_id, lineage.run = state.save_id, state.run
    lineage.follow(state.committed_at)
    lineage.unsaved_steps, lineage.unsaved_seconds = state.unsaved_steps, state.unsaved_seconds


def restore_values(live: LiveOptimizer, state: RunState) -> None:
    """Set scalars of optimizer state, hyper-parameters, loss scales and the norm to which gradients are clipped."""
    for i, g in enumerate(live.group_of):
        for key, value in state.groups[g].scalars.items():
            live.set_scalar(i, key, value)
    for group, saved in zip(live.base.param_groups, state.groups, strict=True):
        for option, value in saved.options.items():
            set_option(group, option, value)
    if state.loss_scaler is not None and getattr(live.optimizer, "loss_scaler", None) is not None:
        set_loss_scaler(live, state.loss_scaler, dynamic=state.dynamic_loss_scale, overflow=state.overflow)
    restore_clipping(live, state.clip_grad)
    if live.grad_scaler is not None and state.grad_scaler is not None:
        live.grad_scaler.load_state_dict(dict(state.grad_scaler))
