"""An engine of about 2 M parameters, and the bytes of its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from saved_files import record_of
from training import initialize

WIDTH = 512


def build(elastic: bool, frozen: bool, executor: str = "auto", stage: int = 3, width: int = WIDTH) -> Any:
    """About 2 M parameters by default, so that headers hide nothing; with ``frozen``, half of them are not trained."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(8)] + [torch.nn.Linear(width, 3)]
    model = torch.nn.Sequential(*layers)
    if frozen:
        for layer in layers[:4]:
            for param in layer.parameters():
                param.requires_grad = False
    zero = {"stage": stage, "elastic_checkpoint": elastic, "sub_group_size": 300_000}
    options = {"io_engine": executor}
    return initialize(model, zero, train_batch_size=12, bf16={"enabled": True}, zeroelastic=options)


def state_bytes(directory: Path) -> int:
    """Bytes of state, padding excluded, from the commit record alone."""

    record = record_of(next(directory.glob("global_step*")))
    width = {"float32": 4, "bfloat16": 2}
    return sum(
        content.param.numel * width[dtype] for content in record.contents() for dtype, _ in content.tensors.values()
    )
