"""Loss scales: restored where the run has the saved precision; otherwise the run keeps its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.fp16 import loss_scaler as ds_loss_scaler

from zeroelastic.checkpoint.optimizer_file import Shard
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.torch_file.header import DType


def precision_of(config: Mapping[str, Any]) -> str:
    """The precision in a DeepSpeed configuration: "bf16", "fp16" or "fp32", and torch's autocast dtype if it is on."""
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


def restore_scales(live: LiveOptimizer, head: Shard, config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Set DeepSpeed's loss scaler and the GradScaler of fp16 autocast. Returns notes, and what was not restored."""
    notes: list[str] = []
    reset: list[str] = []
    saved, running = precision_of(head.ds_config), precision_of(config)
    own = getattr(live.optimizer, "loss_scaler", None)
    if saved == running and own is not None:  # a BF16_Optimizer has none; without fp16 the scale is 1
        if head.scaler is not None and head.scaler.dynamic != bool(live.optimizer.dynamic_loss_scale):
            kinds = {True: "dynamic", False: "static"}
            notes.append(
                f"the loss scale is {kinds[head.scaler.dynamic]}, as in the checkpoint; this run's configuration says "
                f"{kinds[not head.scaler.dynamic]}"
            )
        if head.scaler is None and running.startswith("fp16"):
            reset.append("the loss scale (the checkpoint has none; it is the run's own)")
        elif head.scaler is not None:
            kind = getattr(ds_loss_scaler, head.scaler.class_name)
            scaler = own if type(own) is kind else kind.__new__(kind)
            for key, value in head.scaler.attributes.items():
                setattr(scaler, key, getattr(torch, value.name) if isinstance(value, DType) else value)
            set_loss_scaler(live, scaler, dynamic=head.scaler.dynamic, overflow=head.scaler.overflow)
    elif saved != running:
        notes.append(f"saved with {saved}, running with {running}: the loss scale is the run's own")
    if live.grad_scaler is not None and head.grad_scaler is not None:
        live.grad_scaler.load_state_dict(dict(head.grad_scaler))
    elif live.grad_scaler is not None:
        reset.append("the GradScaler of fp16 autocast (the checkpoint has none; it begins anew)")
    return notes, reset


def set_loss_scaler(live: LiveOptimizer, scaler: Any, *, dynamic: bool, overflow: bool) -> None:
    """Set DeepSpeed's loss scaler, and the flags beside it."""
    live.optimizer.loss_scaler = scaler
    live.optimizer.dynamic_loss_scale = dynamic
    live.optimizer.overflow = overflow
