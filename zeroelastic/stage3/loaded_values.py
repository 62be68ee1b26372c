"""What DeepSpeed's own load takes out of the module states, checked before it touches anything.

Buffers, counters and the states of the lr scheduler, random-LTD and the data sampler
(``DeepSpeedEngine._load_checkpoint``, 0.19.8): what is missing there, or is of another kind, would end a load in the
middle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroelastic.checkpoint import COUNTERS, ModelStates
from zeroelastic.errors import LayoutMismatchError, shown
from zeroelastic.stage3.client_state import states_to_load


def check_loaded_values(engine: Any, model: ModelStates, *, buffers: bool, schedule: bool, module_only: bool) -> None:
    """Raise LayoutMismatchError, naming the file and all that the run cannot take from it.

    ``buffers`` are looked at unless the caller loads the module himself; ``schedule`` is load_lr_scheduler_states.
    """
    problems: list[str] = []
    own = dict(engine.module.named_buffers()) if buffers else {}
    for name, shape in model.others.items():
        if name in own and shape != tuple(own[name].shape) and not (shape == (1,) and own[name].dim() == 0):
            problems.append(f"buffer {name} is {_form(shape)}, and {_form(tuple(own[name].shape))} in the run")
    if not module_only:
        for key in COUNTERS:
            if not isinstance(model.values.get(key), (int, float)) and (key != "global_samples" or key in model.values):
                problems.append(f"{key} is {_value(model, key)}, not a number")
        for key, state in states_to_load(engine).items():
            saved = model.values.get(key)
            if state is None or (key == "lr_scheduler" and not schedule) or (key != "lr_scheduler" and saved is None):
                continue
            if not isinstance(saved, Mapping) or not state.keys() <= saved.keys():
                missing = [name for name in state if name not in saved] if isinstance(saved, Mapping) else []
                what = f"lacks {', '.join(map(str, missing))}" if missing else f"is {_value(model, key)}"
                advice = " (load_lr_scheduler_states=False leaves it out)" if key == "lr_scheduler" else ""
                problems.append(f"{key} {what}, which the run's own state has{advice}")
    if problems:
        raise LayoutMismatchError(f"{model.path}: cannot be loaded into this run:", problems)


def _form(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else f"of shape {list(shape)}"


def _value(model: ModelStates, key: str) -> str:
    return shown(model.values[key]) if key in model.values else "missing"
