"""Model states files: what is refused, and what many parameters take."""

from __future__ import annotations

import tracemalloc
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic import model_name

from zeroelastic.checkpoint.model_states import open_model_states
from zeroelastic.errors import CheckpointError


def test_a_file_of_stage_0_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00_model_states.pt"
    module = torch.nn.Sequential(*[torch.nn.Linear(2, 3) for _ in range(4)]).state_dict()
    torch.save({"module": module, "param_shapes": None, "dp_world_size": 1, "mp_world_size": 1}, path)
    with pytest.raises(CheckpointError, match="holds no param_shapes"):
        open_model_states(path, 0, world_size=None)


PARAMS = 10_000


@pytest.fixture(scope="module")
def many_params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model states of stage 3 with a record, a name and a shape for each of many parameters."""
    path = tmp_path_factory.mktemp("many") / model_name(0)
    module = OrderedDict((f"layers.{i}.weight", torch.empty(0, dtype=torch.bfloat16)) for i in range(PARAMS))
    module._metadata = OrderedDict((f"layers.{i}", {"version": 1}) for i in range(PARAMS))  # type: ignore[attr-defined]
    shapes = OrderedDict((name, torch.Size((i % 7, 2))) for i, name in enumerate(module))
    torch.save(
        {"module": module, "param_shapes": [shapes], "global_steps": 1, "dp_world_size": 1, "mp_world_size": 1}, path
    )
    return path


def test_opening_model_states_takes_few_bytes_for_each_parameter(many_params: Path) -> None:
    """Beside the parameters themselves: the pickle, and what is read of it."""
    tracemalloc.start()
    try:
        model = open_model_states(many_params, 0, world_size=1)
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(model.sub_groups[0]) == PARAMS and np.size(model.weights) == 0
    assert left < 250 * PARAMS and peak < 1800 * PARAMS, (left / PARAMS, peak / PARAMS)
