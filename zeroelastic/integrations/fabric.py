"""The state of data loaders in ``fabric.load``, which fits no other number of ranks.

``fabric.load`` calls the engine's own load, and gives every object in the state dict what it saved; new ranks get that
of rank 0. torchdata's ``StatefulDataLoader`` saves the batches of one rank. While zeroelastic is installed, the wrapper
of ``DeepSpeedStrategy.load_checkpoint`` refuses one of a run of another size, before anything is loaded.

This module never imports Lightning or torchdata.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.nn import Module

from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.deepspeed.patching import wrap
from zeroelastic.errors import UnsupportedError
from zeroelastic.integrations.framework_load import is_loaded_here, load_and_correct, refuse_cut_short, saying_cut_short
from zeroelastic.io.paths import FilePath
from zeroelastic.runs.tag_directory import read_tag

logger = logging.getLogger(__name__)

_TAG = "checkpoint"
_SETTINGS = (
    " In Fabric the micro batch is the DataLoader's batch_size, which train_micro_batch_size_per_gpu in the "
    "configuration of DeepSpeedStrategy repeats."
)

_Size = tuple[int, object]
"""World size and micro batch of a run."""


def wrap_module(module: ModuleType) -> None:
    """Wrap ``load_checkpoint`` of Fabric's ``DeepSpeedStrategy``; does nothing the second time."""
    wrap(module.DeepSpeedStrategy, "load_checkpoint", _load_checkpoint)


def _load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_checkpoint(self: Any, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
        items = state if isinstance(state, dict) else {}
        engine = next((item for item in items.values() if isinstance(item, Module) and is_loaded_here(item)), None)
        if engine is None:
            return original(self, path, state, *args, **kwargs)
        refuse_cut_short(Path(path))
        with saying_cut_short(Path(path), _TAG):
            return load_and_correct(
                *(logger, "Fabric", engine),
                lambda: original(self, path, state, *args, **kwargs),
                read=lambda: read_tag(Path(path) / _TAG, _read),
                refuse=partial(
                    _refuse, self, engine, path, [key for key, item in items.items() if _counts_batches(item)]
                ),
                correct=lambda *_: None,
                settings=_SETTINGS,
            )

    return load_checkpoint


def _read(tag_dir: FilePath) -> _Size:
    checkpoint = open_checkpoint(tag_dir)
    return checkpoint.world_size, checkpoint.shard(0).ds_config.get("train_micro_batch_size_per_gpu")


def _counts_batches(item: object) -> bool:
    """Whether the state of an object is that of torchdata's StatefulDataLoader: not of a subclass with its own."""
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    return torchdata is not None and getattr(type(item), "state_dict", None) is torchdata.StatefulDataLoader.state_dict


def _refuse(strategy: Any, engine: Any, path: Any, loaders: list[str], saved: _Size) -> None:
    now = (strategy.world_size, engine.train_micro_batch_size_per_gpu())
    if loaders and saved != now:
        raise UnsupportedError(
            f"{path}: {', '.join(map(repr, loaders))} in the state is a StatefulDataLoader, which counts the batches "
            f"of {saved[0]} ranks (micro batch {saved[1]}); this run has {now[0]} ({now[1]}), where that is another "
            "place in the data. Use zeroelastic.elastic.ElasticStatefulDataLoader, or leave the loader out of the "
            "state and count optimizer steps, as examples/lightning/train_fabric.py does."
        )
