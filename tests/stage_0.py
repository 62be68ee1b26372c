"""The training state of an engine without ZeRO, read off the live optimizer: what a resume at stage 0 is judged by.

DeepSpeed wraps the optimizer there or not: its own classes for 16 bits keep float32 copies of the weights, one by one
(FP16_UnfusedOptimizer) or in a flat buffer for each group (FP16_Optimizer).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch


def stepped_params(engine: Any) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, torch.Tensor], dict[str, Any]]]:
    """Each trained parameter, the number of its group, its tensors in its shape ("fp32" first), its scalars."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_flat"):  # FP16_Optimizer
        for number, (weights, flat) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
            tensors, scalars = _split(flat, optimizer.optimizer.state[flat])
            begin = 0
            for weight in weights:
                own = {key: value[begin : begin + weight.numel()] for key, value in tensors.items()}
                yield weight, number, {key: value.view(weight.shape) for key, value in own.items()}, scalars
                begin += weight.numel()
            assert begin == flat.numel()
        return
    groups = [group["params"] for group in optimizer.param_groups]
    inner = getattr(optimizer, "optimizer", optimizer)
    for number, masters in enumerate(groups):
        weights = optimizer.fp16_groups[number] if hasattr(optimizer, "fp16_groups") else masters
        for weight, master in zip(weights, masters, strict=True):
            yield weight, number, *_split(master, inner.state.get(master, {}))


def _split(master: torch.Tensor, state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, scalars = {"fp32": master}, {}
    for key, value in state.items():
        if torch.is_tensor(value) and value.shape == master.shape:
            tensors[key] = value
        else:
            scalars[key] = value.item() if torch.is_tensor(value) else value
    return tensors, scalars


def gathered_at_stage_0(engine: Any) -> dict[str, str]:
    """As ``training.gathered``, for an engine without ZeRO: every rank has everything."""
    names = {param: name for name, param in engine.module.named_parameters()}
    found: dict[str, str] = {}
    for weight, _, tensors, _ in stepped_params(engine):
        for key, value in tensors.items():
            raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found[f"{names[weight]}/{key}"] = f"{value.dtype}:{hashlib.sha256(raw).hexdigest()}"
    return found
