"""What the tests of exports share: a model with every kind of buffer, and comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from synthetic import edit, model_name, raw

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def buffers() -> dict[str, torch.Tensor]:
    """Every kind of buffer that a module may have."""
    made = {str(dtype): torch.linspace(-3, 3e4, 11, dtype=torch.float64).to(dtype) for dtype in FLOATS}
    made |= {
        "count": torch.tensor(7),
        "causal": torch.tensor([[True, False, True], [False, False, True]]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "transposed": torch.arange(12, dtype=torch.float32).view(3, 4).t(),
        "narrow half": torch.arange(24, dtype=torch.bfloat16).view(4, 6)[1:3, ::2],
        "expanded": torch.tensor([1.5, -2.5]).expand(3, 2),
        "nothing": torch.empty(0, 4),
    }
    return made


TIES = {"head": "w", "head again": "head", "lookup": "embedding", "counter": "count"}


def add_to_model(tag_dir: Path, world_size: int, ties: dict[str, str] | None = None) -> None:
    """Buffers and tied names, as DeepSpeed writes them: the ties in rank 0's file only."""
    for rank in range(world_size):

        def change(data: dict[str, Any], rank: int = rank) -> None:
            data["module"].update(buffers())
            data["buffer_names"] = list(buffers())
            data["shared_params"] = (TIES if ties is None else ties) if rank == 0 else {}

        edit(tag_dir / model_name(rank), change)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and raw(left) == raw(right)


def plain(value: Any) -> Any:
    """A value of a file such that == compares it, tensors by their bits, shapes and requires_grad."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), value.requires_grad, raw(value))
    if isinstance(value, dict):
        return (type(value).__name__, [(key, plain(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [plain(item) for item in value])
    return (type(value).__name__, plain(vars(value))) if hasattr(value, "cur_scale") else value
