"""Frameworks with state of their own that is wrong at another world size, and our modules that wrap their methods.

Such a module is looked up by name, and only where the framework has been imported: zeroelastic imports none.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

from zeroelastic.activation import forget, when_imported

_BEFORE_THE_ENGINE = {
    "transformers.trainer": "zeroelastic.integrations.trainer",
    "swift.dataloader.shard": "zeroelastic.integrations.ms_swift",
}
"""The module of a framework that is wrapped -> our module whose ``wrap_module`` does it.

These act before there is an engine, and are wrapped by ``install()``, or when the framework is imported after it.
"""

_WITH_AN_ENGINE = {
    "accelerate.accelerator": "zeroelastic.integrations.accelerate",
    "lightning.fabric.strategies.deepspeed": "zeroelastic.integrations.fabric",
    "lightning_fabric.strategies.deepspeed": "zeroelastic.integrations.fabric",
    "lightning.pytorch.strategies.deepspeed": "zeroelastic.integrations.lightning",
    "pytorch_lightning.strategies.deepspeed": "zeroelastic.integrations.lightning",
}
"""The same for those that are wrapped when a ZeRO engine is built: after the script's imports, and before any load."""


def wrap_before_the_engine() -> None:
    """Wrap the frameworks that act before there is an engine, now or when they are imported."""
    for framework in _BEFORE_THE_ENGINE:
        when_imported(framework, _wrap)
        module = sys.modules.get(framework)
        # One that is being imported now is wrapped when its code has run.
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _wrap(module)


def forget_all() -> None:
    """Wrap no framework that is imported from now on."""
    for framework in _BEFORE_THE_ENGINE:
        forget(framework, _wrap)


def wrap_frameworks() -> None:
    """Wrap the frameworks that are imported, when a ZeRO engine is built; idempotent."""
    for framework in _WITH_AN_ENGINE:
        if (module := sys.modules.get(framework)) is not None:
            _wrap(module)


def _wrap(module: ModuleType) -> None:
    import_module({**_WITH_AN_ENGINE, **_BEFORE_THE_ENGINE}[module.__name__]).wrap_module(module)
