"""Changes to a model or an optimizer between deepspeed.initialize and a save."""

from __future__ import annotations

from typing import Any

import torch


def freeze(module: Any) -> None:
    """A layer that the optimizer has."""
    module.up.requires_grad_(False)


def freeze_a_weight(module: Any) -> None:
    """A part of a layer."""
    module.down.weight.requires_grad_(False)


def thaw(module: Any) -> None:
    """What the optimizer does not have."""
    module.adapter.requires_grad_(True)


def thaw_and_freeze(module: Any) -> None:
    """Both at once."""
    thaw(module)
    freeze_a_weight(module)


def rename(module: Any) -> None:
    """A layer by another name, which the forward pass finds."""
    module.lift = module.up
    del module.up
    type(module).up = property(lambda self: self.lift)


def register_a_buffer(module: Any) -> None:
    """One more entry of the module's state."""
    module.register_buffer("late", torch.arange(3.0))


def add_a_group(engine: Any) -> None:
    """To the optimizer that DeepSpeed keeps."""
    engine.optimizer.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


def register_a_parameter(engine: Any) -> None:
    """It is not partitioned."""
    engine.module.late = torch.nn.Parameter(torch.zeros(3), requires_grad=False)


def replace_a_module(engine: Any) -> None:
    """By one whose parameters the optimizer does not have."""
    engine.module.down = torch.nn.Linear(33, 16)
