"""Frameworks that are wrapped automatically, because their own state beside the engine is wrong at another world size.

An integration is looked up by name and only where its framework has been imported already: zeroelastic imports none.
The moment is the building of a ZeRO engine, which comes after the script's imports and before any load.
"""

from __future__ import annotations

import sys
from importlib import import_module

_INTEGRATIONS = {
    "accelerate.accelerator": "zeroelastic.integrations.accelerate",
    "lightning.pytorch.strategies.deepspeed": "zeroelastic.integrations.lightning",
    "pytorch_lightning.strategies.deepspeed": "zeroelastic.integrations.lightning",
}
"""The module of a framework that is wrapped -> our module whose ``wrap_module`` does it."""


def wrap_frameworks() -> None:
    """Wrap the frameworks that are imported; idempotent."""
    for framework, integration in _INTEGRATIONS.items():
        if sys.modules.get(framework) is not None:
            import_module(integration).wrap_module(sys.modules[framework])
