"""The learning rate schedulers that accelerate steps once per process, at another number of processes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any, SupportsFloat

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from zeroelastic.deepspeed.patching import Method, patched, wrap
from zeroelastic.integrations.framework_load import Notes

_LR_TOLERANCE = 1e-6
_TICKS = "_zeroelastic_ticks_per_step"
"""An attribute of accelerate's scheduler, in ``scheduler.bin`` beside the state of the one that it steps: how often per
optimizer step, if that is not the number of processes."""
_FUNCTION = "_zeroelastic_function"
"""An attribute of a function in a LambdaLR whose counter is scaled: the function of the script."""


def wrap_schedulers(module: ModuleType) -> None:
    """Wrap accelerate's ``AcceleratedScheduler``; does nothing the second time."""
    wrap(module.AcceleratedScheduler, "state_dict", _state_dict)
    wrap(module.AcceleratedScheduler, "load_state_dict", _load_state_dict)
    wrap(module.AcceleratedScheduler, "step", _step)


def correct_scheduler(accelerated: Any, saved_size: int, world_size: int, notes: Notes) -> None:
    """Let a scheduler continue at the optimizer step at which it was saved.

    Its state counts the steps of the saved run: it is still stepped as often per optimizer step as it was. A function
    in the script may count the steps of this run (``LambdaLR`` with lengths times the number of processes): the saved
    learning rate decides whether its counter is scaled.
    """
    name = type(accelerated.scheduler).__name__
    if not accelerated.step_with_optimizer:
        notes.info(f"{name}: counts the script's own calls (step_scheduler_with_optimizer is off); left as it was")
        return
    native = 1 if accelerated.split_batches else world_size
    ticks = getattr(accelerated, _TICKS, None) or (1 if accelerated.split_batches else saved_size)
    setattr(accelerated, _TICKS, None if ticks == native else ticks)
    lambdas = _lambda_schedulers(accelerated.scheduler)
    for one in lambdas:  # as they were before an earlier load
        one.lr_lambdas = [getattr(function, _FUNCTION, function) for function in one.lr_lambdas]
    if ticks == native:
        return
    notes.info(f"{name}: goes on being stepped {ticks} times per optimizer step, as it was saved")
    for one in lambdas:
        counter, rates = one.last_epoch, one.get_last_lr()
        scaled = rates_at(one, counter * native // ticks)
        if are_close(rates_at(one, counter), rates) and not are_close(scaled, rates):
            continue
        one.lr_lambdas = [_scaled(function, native, ticks) for function in one.lr_lambdas]
        notes.info(f"LambdaLR: its function counts {native} times per optimizer step")
        if not are_close(scaled, rates):
            notes.warn(f"LEARNING RATE CHANGED: LambdaLR gives {scaled}, {rates} was saved")


def _lambda_schedulers(scheduler: Any) -> list[LambdaLR]:
    """Return a scheduler, if it is a LambdaLR, and those in it: of a ``SequentialLR``, or of a user's own class."""
    found = [scheduler]
    for one in found:
        for value in getattr(one, "__dict__", {}).values():
            inner = value if isinstance(value, list | tuple) else (value,)
            found += [one for one in inner if isinstance(one, LRScheduler) and all(one is not other for other in found)]
    return [one for one in found if isinstance(one, LambdaLR)]


def _scaled(function: Callable[[int], float], native: int, ticks: int) -> Callable[[int], float]:
    """Return the function of a LambdaLR for a counter that is stepped ``ticks`` times per optimizer step."""
    if getattr(function, "__dict__", None):  # an object whose state is saved: it counts as in the saved run
        return function

    def scaled(counter: int) -> float:
        return function(counter * native // ticks)

    setattr(scaled, _FUNCTION, function)
    return scaled


def _state_dict(original: Method, self: Any) -> Any:
    ticks = getattr(self, _TICKS, None)
    return original(self) if ticks is None else {**original(self), _TICKS: ticks}


def _load_state_dict(original: Method, self: Any, state_dict: Any) -> Any:
    ticks = state_dict.get(_TICKS) if isinstance(state_dict, dict) else None
    setattr(self, _TICKS, ticks)
    if ticks is not None:
        state_dict = {key: value for key, value in state_dict.items() if key != _TICKS}
    return original(self, state_dict)


def _step(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Step a scheduler as often per optimizer step as in the run that saved it."""
    ticks = getattr(self, _TICKS, None)
    if ticks is None:
        return original(self, *args, **kwargs)
    with (
        patched(self, split_batches=False),
        patched(sys.modules[original.__module__], AcceleratorState=lambda: SimpleNamespace(num_processes=ticks)),
    ):
        return original(self, *args, **kwargs)


def rates_at(scheduler: LambdaLR, counter: int) -> list[float]:
    """The learning rates of a LambdaLR at a counter."""
    return [
        float(base) * float(factor(counter))
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]


def are_close(ours: Iterable[SupportsFloat], theirs: Iterable[SupportsFloat]) -> bool:
    """Whether learning rates are the same but for rounding."""
    return all(
        math.isclose(float(a), float(b), rel_tol=_LR_TOLERANCE, abs_tol=1e-15)
        for a, b in zip(ours, theirs, strict=True)
    )
