"""Frameworks that are wrapped automatically, because their own state beside the engine is wrong at another world size.

An integration is looked up by name and only where its framework has been imported: zeroelastic imports none. Most are
wrapped when a ZeRO engine is built, which comes after the script's imports and before any load. What has to act before
there is an engine is wrapped by ``install()``, or when the framework is imported after it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

from _zeroelastic_hook import forget, when_imported

_INTEGRATIONS = {
    "accelerate.accelerator": "zeroelastic.integrations.accelerate",
    "lightning.pytorch.strategies.deepspeed": "zeroelastic.integrations.lightning",
    "pytorch_lightning.strategies.deepspeed": "zeroelastic.integrations.lightning",
}
"""The module of a framework that is wrapped -> our module whose ``wrap_module`` does it."""

_BEFORE_THE_ENGINE = {
    "transformers.trainer": "zeroelastic.integrations.trainer_batch",
    "swift.dataloader.shard": "zeroelastic.integrations.ms_swift",
}
"""The same for those that act before an engine is built."""


def wrap_frameworks() -> None:
    """Wrap the frameworks that are imported; idempotent."""
    for framework in _INTEGRATIONS:
        if sys.modules.get(framework) is not None:
            _wrap(sys.modules[framework])


def watch_frameworks() -> None:
    """Wrap the frameworks that act before an engine is built, now or when they are imported; idempotent."""
    for framework in _BEFORE_THE_ENGINE:
        when_imported(framework, _wrap)
        module = sys.modules.get(framework)
        # One that is being imported now is wrapped when its code has run.
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _wrap(module)


def forget_frameworks() -> None:
    """Undo ``watch_frameworks``, but for what is wrapped already."""
    for framework in _BEFORE_THE_ENGINE:
        forget(framework, _wrap)


def _wrap(module: ModuleType) -> None:
    name = module.__name__
    import_module({**_INTEGRATIONS, **_BEFORE_THE_ENGINE}[name]).wrap_module(module)
