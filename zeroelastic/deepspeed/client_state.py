"""What the module states have of the run: its own states, and client state, which may have a key of DeepSpeed's own.

DeepSpeed's save does ``state.update(client_state)`` (``DeepSpeedEngine._save_checkpoint``, 0.19.8), so the caller's
value replaces DeepSpeed's. Counters such as ``global_steps`` are the caller's to set: a load takes them, as DeepSpeed's
own does. What describes the model or its partition is not. A load returns some of these keys to its caller, who may
pass them on to the next save: there DeepSpeed's present value is written.

DeepSpeed saves the states of the run's scheduler, random-LTD and data sampler. Of its curriculum sampler
(``DeepSpeedDataSampler``) it leaves out the generator that chooses the samples, and rank 0 alone advances the positions
in the clusters; a load appends the clusters to those that are there, and leaves the difficulty where an engine that has
trained had it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from deepspeed.runtime import engine as ds_engine

from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.engine_state import state_of
from zeroelastic.deepspeed.patching import patched
from zeroelastic.distributed.collective import broadcast
from zeroelastic.errors import UnsupportedError, shown

STEP = "global_steps"

SAMPLER = "data_sampler"
LOADED = {"lr_scheduler": "the scheduler", "random_ltd": "random-LTD", SAMPLER: "the curriculum data sampler"}
"""What a load gives a state to, under the key of its state in the module states."""

_CHANGING = frozenset({STEP, "global_samples", "skipped_steps", "ds_config", "ds_version", *LOADED})
"""DeepSpeed's own values of the moment. A load returns some of them, those that it does not restore as well."""

_GENERATOR = "zeroelastic_generator"
_POSITIONS = "data_cluster_current_position"


def changing_values(client_state: Mapping[str, object] | None) -> dict[str, object]:
    """Return the entries of a returned client state that are DeepSpeed's own values of the moment."""
    return {key: value for key, value in (client_state or {}).items() if key in _CHANGING}


def checked_client_state(engine: Engine, client_state: Any) -> dict[str, Any]:
    """Return the client state to pass on to DeepSpeed. Raises UnsupportedError for a key that no load would take.

    Left out are keys whose value says the same of the model as DeepSpeed's own, and counters, scheduler and
    configuration that are passed on as the last load returned them: they would replace the present ones.
    """
    returned = state_of(engine).returned
    given = dict(client_state)
    kept = {key: value for key, value in given.items() if key not in returned or value is not returned[key]}
    loaded = states_to_load(engine) if not kept.keys().isdisjoint(LOADED) else {}
    for key in sorted(kept.keys() & {*_OWN, *LOADED, STEP}):
        value = kept[key]
        if key in _OWN and _OWN[key](engine, value):
            del kept[key]
            continue
        if key == STEP and type(value) is int:
            continue
        if key in LOADED:
            own = loaded[key]
            if own is None or (isinstance(value, type(own)) and not isinstance(own, Mapping)):
                continue
            if isinstance(own, Mapping) and isinstance(value, Mapping) and own.keys() <= value.keys():
                continue
        raise UnsupportedError(
            f"client_state[{key!r}] is {shown(value)}: DeepSpeed stores its own value under this key, and a load "
            f"needs that value. Rename the key in client_state{_ADVICE.get(key, '')}."
        )
    return kept


def saved_step(engine: Engine, client_state: Mapping[str, Any]) -> int:
    """The step that a save with this client state states."""
    return int(client_state.get(STEP, engine.global_steps))


def _shapes(tables: object) -> dict[object, tuple[object, ...]] | None:
    """The shape of every parameter in a list of tables, or in one; None for anything else."""
    tables = [tables] if isinstance(tables, Mapping) else tables
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        return None
    pairs = [pair for table in tables for pair in table.items()]
    return {name: tuple(shape) for name, shape in pairs} if all(isinstance(s, tuple) for _, s in pairs) else None


def _frozen_shapes(engine: Engine) -> dict[object, tuple[object, ...]] | None:
    return _shapes(engine._get_zero_frozen_param_attributes(engine._get_param_shape_func))


def _are_tied(engine: Engine, names: Mapping[object, object]) -> bool:
    """Return whether each name is a further one of the parameter that it is listed with; rank 0 lists them."""
    params: dict[object, object] = dict(engine.module.named_parameters(remove_duplicate=False))
    own = engine._get_shared_params()
    return all(
        own.get(str(alias)) == name or (name in params and params.get(alias) is params[name])
        for alias, name in names.items()
    )


_OWN: dict[str, Callable[[Engine, Any], bool]] = {
    "module": lambda engine, value: False,
    "param_shapes": lambda engine, value: _shapes(value) == _shapes(engine._get_zero_param_shapes()),
    # A file of DeepSpeed's own has its list, which lacks some (``all_buffer_names``).
    "buffer_names": lambda engine, value: (
        isinstance(value, list) and value in (engine._get_buffer_names(), type(engine)._get_buffer_names(engine))
    ),
    "shared_params": lambda engine, value: isinstance(value, Mapping) and _are_tied(engine, value),
    "frozen_param_shapes": lambda engine, value: value is None or _shapes(value) == _frozen_shapes(engine),
    "frozen_param_fragments": lambda engine, value: (
        value is None or (isinstance(value, Mapping) and value.keys() == (_frozen_shapes(engine) or {}).keys())
    ),
    "dp_world_size": lambda engine, value: type(value) is int and value == engine.seq_dp_world_size,
    "mp_world_size": lambda engine, value: type(value) is int and value == engine.mp_world_size,
    "checkpoint_parallel_dimensions": lambda engine, value: value == _dimensions(engine),
}
"""What describes the model and its partition, and whether a value says of it what DeepSpeed's own says."""

_ADVICE = {STEP: ", or pass an int, which a load sets the engine's counter to"}


def _dimensions(engine: Engine) -> object:
    """Return DeepSpeed's own value, since 0.19.8; a save with the caller's under this key ends in the middle."""
    metadata = getattr(ds_engine, "_checkpoint_parallel_metadata", None)
    return None if metadata is None else metadata(engine.mpu).get("checkpoint_parallel_dimensions")


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
