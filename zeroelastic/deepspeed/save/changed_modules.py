"""Modules that changed between ``deepspeed.initialize`` and a save, so that a load would not give what they compute.

DeepSpeed's optimizer has the parameters of ``deepspeed.initialize``, and files name them as they were then. A save of
another name for the same parameter is right, as after ``torch.compile``. It is wrong where the base weights have
adapters of PEFT merged into them, which the optimizer still has, and where another parameter has the name of one.
Source: ``BaseTunerLayer`` and ``merge_and_unload`` (peft 0.19).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch.nn import Parameter

from zeroelastic.deepspeed.engine import Engine, merged_layers
from zeroelastic.deepspeed.engine_state import state_of
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.errors import SaveError, counted, some
from zeroelastic.io.paths import FilePath

logger = logging.getLogger(__name__)

_BASE = "base_layer"
"""The part of a name that PEFT puts between a module and its own parameters, where an adapter is on the module."""


def refuse_changed_module(engine: Engine, live: LiveOptimizer, where: FilePath | str, *, with_frozen: bool) -> None:
    """Raise SaveError where a load of the save would not give what the module computes.

    Without frozen weights, ``with_frozen``, merged adapters are no problem: the script loads them into its base model.
    Warns once of parameters that the optimizer has and the module has no more. No collective.
    """
    now: dict[Parameter, str] = {param: name for name, param in engine.module.named_parameters()}
    known, gone = engine.param_names, _gone(engine, live, now)
    replaced = sorted(gone.keys() & {name for param, name in now.items() if param not in known})
    if replaced:
        raise SaveError(
            f"{where}: {some(replaced)} of the module was replaced after deepspeed.initialize: the optimizer trains "
            "and would save the parameter of then, and not the one that the module computes with. Nothing was written. "
            "Build the whole model before deepspeed.initialize, or copy the values into the parameters that are there."
        )
    if with_frozen and (merged := merged_weights(engine, live)) is not None:
        raise SaveError(f"{where}: {merged}")
    state = state_of(engine)
    if gone and not state.warned_of_gone_params and engine.global_rank == 0:
        logger.warning(
            "%s: %s of the optimizer %s no longer in the module: %s. The checkpoint has them all the same. A run that "
            "loads it needs them in its model at deepspeed.initialize.",
            *(where, counted(len(gone), "parameter"), "is" if len(gone) == 1 else "are", some(sorted(gone))),
        )
    state.warned_of_gone_params = state.warned_of_gone_params or bool(gone)


def _gone(engine: Engine, live: LiveOptimizer, now: Mapping[Parameter, str]) -> dict[str, Parameter]:
    """Return the trained parameters that the module no longer has, by their names at ``deepspeed.initialize``."""
    known = engine.param_names
    return {known[param]: param for param in live.trained if param in known and param not in now}


def merged_weights(engine: Engine, live: LiveOptimizer) -> str | None:
    """Return a sentence where trained adapters are merged into frozen base weights; None where none are."""
    now: dict[Parameter, str] = {param: name for name, param in engine.module.named_parameters()}
    return _merged(live) or _unloaded(engine.param_names, now, live, _gone(engine, live, now))


def _merged(live: LiveOptimizer) -> str | None:
    """Return a sentence where frozen base weights have adapters merged into them, by ``merge_adapter``."""
    merged = [
        name
        for name, base in merged_layers(live.module).items()
        if any(param not in live.trained for param in base.parameters())
    ]
    if not merged:
        return None
    return (
        f"adapters are merged into the base weights of {some(merged)}. The save would have both, and a model that "
        "loads it would apply the adapters twice. Nothing was written. Call unmerge_adapter() before the save, and "
        "merge_adapter() after it; or leave out the frozen weights, with exclude_frozen_parameters=True."
    )


def _unloaded(
    known: Mapping[Parameter, str], now: Mapping[Parameter, str], live: LiveOptimizer, gone: Mapping[str, Parameter]
) -> str | None:
    """Return a sentence where adapters were taken off their modules, as by ``merge_and_unload``, and are still trained.

    ``known`` has the names of ``deepspeed.initialize``, ``now`` the present ones. Only frozen base weights count: of
    trained ones the optimizer has values without what was merged.
    """
    bare = {
        known[param].partition(f".{_BASE}.")[0]
        for param, name in now.items()
        if param in known and param not in live.trained and _depth(known[param]) > _depth(name)
    }
    modules = sorted(module for module in bare if any(name.startswith(f"{module}.") for name in gone))
    if not modules:
        return None
    return (
        f"the adapters of {some(modules)} are no longer in the module, as after merge_and_unload(), and the optimizer "
        "still has them. The save would have them and base weights into which they are merged, and a model that loads "
        "it would apply them twice. Nothing was written. Save before the adapters are merged, and write the merged "
        "model with its own save_pretrained()."
    )


def _depth(name: str) -> int:
    return name.split(".").count(_BASE)
