"""The state of data loaders in ``fabric.load``, which fits no other number of ranks.

torchdata's ``StatefulDataLoader`` saves the batches of one rank, and new ranks get the state of rank 0. While
zeroelastic is installed, ``DeepSpeedStrategy.load_checkpoint`` refuses one of a run of another size, before anything is
loaded. This module never imports Lightning or torchdata.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.nn import Module

from zeroelastic.deepspeed.patching import Method, wrap
from zeroelastic.integrations.framework_checkpoints import (
    BatchSettings,
    is_loaded_here,
    load_and_correct,
)

_TAG = "checkpoint"
_SETTINGS = (
    "In Fabric the micro batch is the DataLoader's batch_size, which train_micro_batch_size_per_gpu in the "
    "configuration of DeepSpeedStrategy repeats."
)


def wrap_module(module: ModuleType) -> None:
    """Wrap ``load_checkpoint`` of Fabric's ``DeepSpeedStrategy``; does nothing the second time."""
    wrap(module.DeepSpeedStrategy, "load_checkpoint", _load_checkpoint)


def _load_checkpoint(original: Method, self: Any, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
    items = state if isinstance(state, dict) else {}
    engine = next((item for item in items.values() if isinstance(item, Module) and is_loaded_here(item)), None)
    if engine is None:
        return original(self, path, state, *args, **kwargs)
    return load_and_correct(
        *("Fabric", engine, lambda: original(self, path, state, *args, **kwargs)),
        directory=Path(path),
        tag=_TAG,
        read=BatchSettings.saved,
        refuse=partial(_refuse, engine, path, [key for key, item in items.items() if _counts_batches(item)]),
        settings=_SETTINGS,
    )


def _counts_batches(item: object) -> bool:
    """Whether the state of an object is that of torchdata's StatefulDataLoader: not of a subclass with its own."""
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    return torchdata is not None and getattr(type(item), "state_dict", None) is torchdata.StatefulDataLoader.state_dict


def _refuse(engine: Any, path: Any, loaders: list[str], saved: BatchSettings) -> None:
    if loaders:
        saved.refuse_other(
            BatchSettings.of(engine, saved.accumulation),
            f"{path}: {', '.join(map(repr, loaders))} in the state is a StatefulDataLoader",
            "Use zeroelastic.elastic.ElasticStatefulDataLoader, or leave the loader out of the state and count "
            "optimizer steps, as examples/lightning/train_fabric.py does.",
        )
