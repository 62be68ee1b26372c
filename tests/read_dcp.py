"""A DCP directory as torch's own ``dcp.load`` reads it: every tensor and every object, by its flattened key."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def load_alone(state: dict[str, Any], folder: Path) -> None:
    """torch's own load in this process alone, which torch 2.6 does where there are no process groups."""
    alone = {"no_dist": True} if "no_dist" in inspect.signature(dcp.load).parameters else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        dcp.load(state, checkpoint_id=folder, **alone)


def read_dcp(folder: Path) -> dict[str, object]:
    """What is in a directory, loaded into empty tensors of the shapes and dtypes that its table states."""
    table = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, object] = {
        key: torch.empty(found.size, dtype=found.properties.dtype) if isinstance(found, TensorStorageMetadata) else None
        for key, found in table.items()
    }
    load_alone(state, folder)
    return state
