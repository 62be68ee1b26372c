"""Client state that has a key of DeepSpeed's own: what a save may override, and what a load relies on.

DeepSpeed's save does ``state.update(client_state)`` (``DeepSpeedEngine._save_checkpoint``, 0.19.8), so the caller's
value replaces DeepSpeed's. Counters such as ``global_steps`` are the caller's to set: a load takes them, as DeepSpeed's
own does. What describes the model or its partition is not. A load returns some of these keys to its caller, who may
pass them on to the next save: there DeepSpeed's present value is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.runtime import engine as ds_engine

from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.engine_state import state_of
from zeroelastic.deepspeed.run_objects import LOADED, states_to_load
from zeroelastic.errors import UnsupportedError, shown

STEP = "global_steps"

_CHANGING = frozenset({STEP, "global_samples", "skipped_steps", "ds_config", "ds_version", *LOADED})
"""DeepSpeed's own values of the moment. A load returns some of them, those that it does not restore as well."""


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
            f"client_state[{key!r}] is {shown(value)}: DeepSpeed keeps a value of its own under this key, which a load "
            f"relies on. Rename the key in client_state{_ADVICE.get(key, '')}."
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
