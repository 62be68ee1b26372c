"""A DCP directory as torch's own ``dcp.load`` reads it: every tensor and every object, by its flattened key."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def read_dcp(folder: Path) -> dict[str, object]:
    """What is in a directory, loaded into empty tensors of the shapes and dtypes that its table states."""
    table = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, object] = {
        key: torch.empty(found.size, dtype=found.properties.dtype) if isinstance(found, TensorStorageMetadata) else None
        for key, found in table.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state
