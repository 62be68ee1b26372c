"""Client states that a save takes or refuses, by key."""

from __future__ import annotations

from typing import Any

import numpy as np

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
