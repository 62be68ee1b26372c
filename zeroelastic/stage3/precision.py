"""Loss scales, which belong to a precision: restored where the run has the saved one, the run's own otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.fp16 import loss_scaler as ds_loss_scaler

from zeroelastic.shard import ScalerState, Shard
from zeroelastic.torchfile import DType


def precision_of(config: Mapping[str, Any]) -> str:
    """What a DeepSpeed configuration trains in: "bf16", "fp16" or "fp32", and torch's autocast dtype if it is on."""
    autocast = config.get("torch_autocast")
    name = "fp32"
    for block, key in (("bf16", "bf16"), ("bf16", "bfloat16"), ("fp16", "fp16")):
        value = config.get(key)
        if isinstance(value, Mapping) and value.get("enabled"):
            name = block
            break
    if isinstance(autocast, Mapping) and autocast.get("enabled"):
        dtype = str(autocast.get("dtype") or "bfloat16").removeprefix("torch.")
        name += f" with {_SHORT.get(dtype, dtype)} autocast"
    return name


_SHORT = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


def restore_scales(optimizer: Any, head: Shard, config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Set DeepSpeed's loss scaler and the GradScaler of fp16 autocast; what is said of it, and what is not restored."""
    notes: list[str] = []
    reset: list[str] = []
    saved, running = precision_of(head.ds_config), precision_of(config)
    if saved == running:
        if head.scaler is not None and head.scaler.dynamic != bool(optimizer.dynamic_loss_scale):
            kinds = {True: "dynamic", False: "static"}
            notes.append(
                f"the loss scale is {kinds[head.scaler.dynamic]}, as in the checkpoint; this run's configuration says "
                f"{kinds[not head.scaler.dynamic]}"
            )
        if head.scaler is None:
            reset.append("the loss scale (the checkpoint has none; it is the run's own)")
        else:
            _set_scaler(optimizer, head.scaler)
    else:
        notes.append(f"saved with {saved}, running with {running}: the loss scale is the run's own")
    grad_scaler: torch.amp.GradScaler | None = getattr(optimizer, "torch_autocast_gradscaler", None)
    if grad_scaler is not None and head.grad_scaler is not None:
        grad_scaler.load_state_dict(dict(head.grad_scaler))
    elif grad_scaler is not None:
        reset.append("the GradScaler of fp16 autocast (the checkpoint has none; it begins anew)")
    return notes, reset


def _set_scaler(optimizer: Any, saved: ScalerState) -> None:
    kind = getattr(ds_loss_scaler, saved.class_name)
    scaler = optimizer.loss_scaler if type(optimizer.loss_scaler) is kind else kind.__new__(kind)
    for key, value in saved.attributes.items():
        setattr(scaler, key, getattr(torch, value.name) if isinstance(value, DType) else value)
    optimizer.loss_scaler = scaler
    optimizer.dynamic_loss_scale = saved.dynamic
    optimizer.overflow = saved.overflow
