"""Parameters of optimizer, scheduler and loss scale that a load sets to other values than the run was configured with.

A load restores the saved ones, as DeepSpeed's own does, so a change in the configuration or in the code has no effect.
What training makes of a value is no such change: a scheduler's learning rate is compared by what it begins with.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from zeroelastic.checkpoint.optimizer_file import OptionValue
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.load.preflight import LoadPlan
from zeroelastic.errors import rank_list, some

_LR, _INITIAL_LR = "lr", "initial_lr"
_USUAL = frozenset((_LR, "betas", "eps", "momentum", "weight_decay"))
_CYCLED = frozenset(("betas", "momentum"))
_BASE_LRS = "base_lrs"
_NO_PARAMETERS = frozenset(("self", "optimizer", "last_epoch", "verbose"))
_OF_SCALER = {
    "scale_factor": "scale_factor",
    "scale_window": "loss_scale_window",
    "min_scale": "min_loss_scale",
    "delayed_shift": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
}
"""Attributes of DeepSpeed's dynamic loss scaler that training does not change, and their names in its configuration."""

_OF_DEEPSPEED = "deepspeed.runtime.lr_schedules"


@dataclass(frozen=True, slots=True)
class Configured:
    """What a run was configured with: options of each optimizer group, values of scheduler, loss scaler, clipping."""

    groups: tuple[Mapping[str, object], ...]
    scheduler: Mapping[str, object]
    scaler: Mapping[str, object]
    clipping: Mapping[str, object]


def configured_values(engine: Engine, live: LiveOptimizer) -> Configured | None:
    """What the run was configured with, before a load; None where it has trained, or loaded, since then."""
    if engine.global_steps:
        return None
    scheduler, scaler = scheduler_parameters(engine.lr_scheduler), _scaler_parameters(engine)
    return Configured(_groups(live.base), scheduler, scaler, _clipping(engine))


def overridden_notes(
    configured: Configured | None, engine: Engine, live: LiveOptimizer, load_plan: LoadPlan
) -> tuple[list[str], list[str]]:
    """After a load: a warning of what was configured otherwise, and a note of what may only have changed in training.

    Each is in a list, which is empty where there is nothing to say.
    """
    if configured is None:
        return [], []
    compared = _Compared(engine, live, load_plan)
    changed, unknown = dict[tuple[str, str, str], list[int]](), dict[tuple[str, str, str], list[int]]()
    now = _groups(live.base)
    for g, (before, after, match) in enumerate(zip(configured.groups, now, load_plan.membership.groups, strict=True)):
        if match.source is None:
            continue
        saved = load_plan.head.groups[match.source].options
        for option, was, value, certain in compared.differences(before, after, saved):
            (changed if certain else unknown).setdefault((option, _in_digits(was), _in_digits(value)), []).append(g)
    phrases = [
        _phrase(found) for found in sorted(changed.items(), key=lambda one: (one[0][0] != _LR, one[0][0], one[1]))
    ]
    places = ["engine.optimizer.param_groups"] if phrases else []
    for what, place, were, are in (
        ("scheduler", "engine.lr_scheduler", configured.scheduler, scheduler_parameters(engine.lr_scheduler)),
        ("loss scale", "engine.optimizer.loss_scaler", configured.scaler, _scaler_parameters(engine)),
        ("optimizer", "engine.optimizer.clip_grad", configured.clipping, _clipping(engine)),
    ):
        differ = [name for name in were if name in are and not _same(were[name], are[name])]
        phrases += [
            f"{name} of the {what}: {_in_digits(were[name])} configured, {_in_digits(are[name])} now" for name in differ
        ]
        places += [place] if differ else []
    loud = [
        f"CONFIGURED VALUES NOT USED, the checkpoint has others: {some(phrases, separator='; ')}. To train with "
        f"the configured ones, set them after load_checkpoint, in {' and '.join(places)}. "
        "load_lr_scheduler_states=False begins the configured scheduler anew, load_optimizer_states=False leaves out "
        "all of the optimizer's state"
    ]
    quiet = [f"{_phrase(found)}, from the checkpoint, where training may have set it" for found in unknown.items()]
    return loud if phrases else [], quiet


class _Compared:
    """How the options of a group are compared, before and after a load."""

    def __init__(self, engine: Engine, live: LiveOptimizer, load_plan: LoadPlan) -> None:
        self.base = live.base
        self.names = _option_names(type(live.base))
        self.has_scheduler = engine.lr_scheduler is not None
        self.of_deepspeed = type(engine.lr_scheduler).__module__ == _OF_DEEPSPEED
        self.has_base_lrs = hasattr(engine.lr_scheduler, _BASE_LRS)
        self.saved = load_plan.head.ds_config
        self.config: Mapping[str, Any] = engine._config._param_dict

    def differences(
        self, before: Mapping[str, object], after: Mapping[str, object], saved: Mapping[str, OptionValue]
    ) -> list[tuple[str, object, object, bool]]:
        """(option, configured value, present value, whether it was configured otherwise) of what differs."""
        found = [one] if (one := self._lr(before, after, saved)) is not None else []
        cycles = bool({"base_momentum", "max_momentum"} & {*before, *saved}) or self.of_deepspeed
        for option in sorted(self.names - {_LR}):
            if option not in before or _same(before[option], after.get(option)) or (cycles and option in _CYCLED):
                continue
            if self._as_before(option, before[option]):
                continue
            found.append((option, before[option], after.get(option), True))
        return found

    def _lr(
        self, before: Mapping[str, object], after: Mapping[str, object], saved: Mapping[str, OptionValue]
    ) -> tuple[str, object, object, bool] | None:
        """A scheduler that knows what it begins with is compared itself; DeepSpeed's go on from the configured ones."""
        if self.has_base_lrs or self.of_deepspeed or _LR not in before:
            return None
        begins, now = before.get(_INITIAL_LR, before[_LR]), after.get(_LR)
        if _INITIAL_LR in saved:
            was = _plain(saved[_INITIAL_LR])
            if _same(begins, was):
                return None
            return (_INITIAL_LR, begins, was, True) if _INITIAL_LR in before else (_LR, begins, now, True)
        if _same(begins, now):
            return None
        as_before = self._as_before(_LR, begins)
        if as_before is False:
            return _LR, begins, now, True
        return None if as_before or self.has_scheduler else (_LR, begins, now, False)

    def _as_before(self, option: str, value: object) -> bool | None:
        """Whether the JSON configuration gives an option what that of the save gave it; None: unknown."""
        (kind, then), (own_kind, now) = (_optimizer_of(config) for config in (self.saved, self.config))
        if kind is None or kind != own_kind or not _same(value, _plain(self.base.defaults.get(option))):
            return None
        if option == _LR and bool(self.saved.get("scheduler")) != bool(self.config.get("scheduler")):
            return False
        missing = object()
        return _same(_plain(then.get(option, missing)), _plain(now.get(option, missing)))


def scheduler_parameters(scheduler: Any) -> dict[str, object]:
    """What a scheduler of torch was made with, as far as it keeps that in plain values, by name.

    Of a sequence of schedulers these are those of each.
    """
    if scheduler is None or type(scheduler).__module__ == _OF_DEEPSPEED:
        return {}
    attributes = getattr(scheduler, "__dict__", {})
    names = {name for name in _arguments(type(scheduler)) if name not in _NO_PARAMETERS} | {_BASE_LRS}
    found = {name: _plain(attributes[name]) for name in sorted(names) if _is_plain(attributes.get(name))}
    inner = attributes.get("_schedulers")
    for i, one in enumerate(inner if isinstance(inner, Sequence) else ()):
        found |= {f"{name} of {type(one).__name__} {i}": value for name, value in scheduler_parameters(one).items()}
    return found


def _scaler_parameters(engine: Engine) -> dict[str, object]:
    """What DeepSpeed's loss scaler was made with, by the names of its configuration."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is None:
        return {}
    if not engine.optimizer.dynamic_loss_scale:
        return {"loss_scale": float(scaler.cur_scale)}
    return {name: getattr(scaler, key) for key, name in _OF_SCALER.items() if hasattr(scaler, key)}


def _clipping(engine: Engine) -> dict[str, object]:
    """The norm to which gradients are clipped, by its name in DeepSpeed's configuration."""
    clip_grad = getattr(engine.optimizer, "clip_grad", None)
    return {} if clip_grad is None else {"gradient_clipping": float(clip_grad)}


def _in_digits(value: object) -> str:
    """A value as text, without the noise of a float32."""
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, (list, tuple)):
        inside = some(map(_in_digits, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return repr(value)


def _phrase(found: tuple[tuple[str, str, str], list[int]]) -> str:
    (option, was, now), groups = found
    numbers = rank_list(groups).replace("rank", "group", 1)
    return f"{option} of optimizer {numbers}: {was} configured, {now} now"


def _groups(optimizer: torch.optim.Optimizer) -> tuple[Mapping[str, object], ...]:
    return tuple(
        {key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    )


def _option_names(kind: type) -> frozenset[str]:
    """The options that an optimizer is made with: what else it keeps in its groups is state."""
    classes = [one for one in kind.__mro__ if issubclass(one, torch.optim.Optimizer)]
    return _USUAL.union(*(_arguments(one) for one in classes if one is not torch.optim.Optimizer)) - {"self", "params"}


def _arguments(kind: type) -> Iterable[str]:
    try:
        return inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    except (TypeError, ValueError):
        return ()


def _optimizer_of(config: Mapping[Any, Any]) -> tuple[str | None, Mapping[Any, Any]]:
    """The type of the optimizer in a DeepSpeed configuration, None where it names none, and its parameters."""
    block = config.get("optimizer")
    if not isinstance(block, Mapping) or not block.get("type"):
        return None, {}
    params = block.get("params")
    return str(block["type"]).lower(), params if isinstance(params, Mapping) else {}


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str, np.generic)) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )


def _plain(value: object) -> object:
    """A copy in which a tensor of one element, or a number of numpy, is its number, and each sequence a tuple."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return value


def _same(left: object, right: object) -> bool:
    """Whether two values are alike, as close as a float32 is to the number that it was made of."""
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return left == right or math.isclose(left, right, rel_tol=1e-6)
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return left == right
