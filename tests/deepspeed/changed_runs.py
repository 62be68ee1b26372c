"""What runs may change before a save: the model or the optimizer, and client states that a save takes or refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
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


COUNTERS = {"global_steps": 77, "global_samples": 5, "skipped_steps": 2, "micro_steps": 3}


FREE = {"optimizer": "adam", "ds_config": {}, "ds_version": "mine", "data_sampler": 4, "random_ltd": [], "epoch": 1}
FREE |= {"labels": {frozenset({"a"})}, "best": np.str_("step 7")}  # a file has them as what our readers do not make


REFUSED: dict[str, Any] = {
    "module": "resnet",
    "param_shapes": {"conv": (3, 3)},
    "frozen_param_shapes": {"conv": (3, 3)},
    "frozen_param_fragments": 3,
    "shared_params": {"a": "b"},
    "buffer_names": "none",
    "dp_world_size": 9,
    "mp_world_size": 7,
    "lr_scheduler": "cosine",
    "global_steps": "seven",
    "checkpoint_parallel_dimensions": {},
}
