"""The states of the run's scheduler, random-LTD and data sampler, beyond what DeepSpeed's own saves and loads do.

DeepSpeed saves the state of each into the module states (``DeepSpeedEngine._save_checkpoint``, 0.19.8). Of its
curriculum sampler (``DeepSpeedDataSampler``) it leaves out the generator that chooses the samples, and rank 0 alone
advances the positions in the clusters; a load appends the clusters to those that are there, and leaves the difficulty
where an engine that has trained had it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.patching import patched
from zeroelastic.distributed.collective import broadcast

SAMPLER = "data_sampler"

_GENERATOR = "zeroelastic_generator"
_POSITIONS = "data_cluster_current_position"
LOADED = {"lr_scheduler": "the scheduler", "random_ltd": "random-LTD", SAMPLER: "the curriculum data sampler"}
"""What a load gives a state to, under the key of its state in the module states."""


def states_to_load(engine: Engine) -> dict[str, Any]:
    """Return the state of each of ``LOADED``, most often a mapping; None for what the run does not have."""
    sampler = _sampler(engine)
    return {
        "lr_scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        "random_ltd": engine.random_ltd_scheduler.state_dict() if engine.random_ltd_enabled() else None,
        SAMPLER: None if sampler is None else sampler.state_dict(),
    }


def sampler_state(engine: Engine) -> dict[str, Any] | None:
    """Return the state of the curriculum data sampler, complete for the next samples. Collective.

    It is the rank's own with rank 0's generator and positions. None where DeepSpeed saves no such state.
    """
    if not engine.curriculum_learning_enabled():
        return None
    sampler = _sampler(engine)
    state: dict[str, Any] = {} if sampler is None else sampler.state_dict()
    generator = getattr(sampler, "np_rng", None)
    own = None if generator is None else (generator.bit_generator.state, list(state.get(_POSITIONS, ())))
    shared = broadcast(own)
    if sampler is None or shared is None or own is None:
        return state or None
    return {**state, _GENERATOR: shared[0], _POSITIONS: shared[1]}


@contextmanager
def saving_sampler(engine: Engine) -> Iterator[None]:
    """Within this context, DeepSpeed's save writes the whole ``sampler_state``. Collective."""
    state, sampler = sampler_state(engine), _sampler(engine)
    with nullcontext() if state is None else patched(sampler, state_dict=lambda: state):
        yield


@contextmanager
def loading_sampler(engine: Engine) -> Iterator[None]:
    """Within this context, a load of the sampler replaces its clusters, and restores difficulty and generator."""
    sampler = _sampler(engine)
    if sampler is None:
        yield
        return
    original = sampler.load_state_dict

    def load(state: Mapping[str, Any]) -> None:
        for name in ("data_clusters", "data_cluster_sizes"):
            getattr(sampler, name, []).clear()
        original(state)
        for metric, scheduler in getattr(sampler, "curriculum_schedulers", {}).items():
            if metric in sampler.current_difficulties:
                scheduler.state["current_difficulty"] = sampler.current_difficulties[metric]
        if state.get(_GENERATOR) is not None:
            sampler.np_rng.bit_generator.state = state[_GENERATOR]

    with patched(sampler, load_state_dict=load):
        yield


def sampler_problem(engine: Engine, saved: Mapping[str, Any]) -> str | None:
    """Why the sampler cannot take the generator in its saved state; None if it can."""
    generator = saved.get(_GENERATOR)
    if generator is None or not hasattr(_sampler(engine), "np_rng"):
        return None
    try:
        np.random.default_rng().bit_generator.state = generator
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        return f"{SAMPLER} has a generator that numpy does not take: {error}"
    return None


def not_restored(engine: Engine, saved: Mapping[str, object], *, with_scheduler: bool) -> list[str]:
    """Return phrases for the report: states that only the checkpoint has, or only the run.

    ``saved`` are the states in the module states by key.
    """
    found: list[str] = []
    for key, own in states_to_load(engine).items():
        theirs = saved.get(key)
        if key == "lr_scheduler" and not with_scheduler:
            continue
        if own is None and theirs is not None:
            found.append(f"the state of {LOADED[key]} (this run has none)")
        elif own is not None and theirs is None:
            found.append(f"the state of {LOADED[key]} (the checkpoint has none; it is the run's own)")
        elif key == SAMPLER and _lacks_generator(engine, theirs):
            found.append("the order of samples in the curriculum (DeepSpeed alone does not save its generator)")
    return found


def without_missing(engine: Engine, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return module states without entries that are None where the run has a state, which then stays.

    DeepSpeed's load would end in the middle, with a TypeError.
    """
    own = states_to_load(engine)
    return {
        key: value for key, value in state.items() if value is not None or key == "lr_scheduler" or own.get(key) is None
    }


def _lacks_generator(engine: Engine, saved: object) -> bool:
    return isinstance(saved, Mapping) and saved.get(_GENERATOR) is None and hasattr(_sampler(engine), "np_rng")


def _sampler(engine: Engine) -> Any:
    """The sampler whose state DeepSpeed saves, or None."""
    if engine.training_dataloader is None or not engine.curriculum_learning_enabled():
        return None
    return engine.training_dataloader.data_sampler
