"""What optimizers keep: the state keys of each known class, and in which form it keeps ``step`` and its like.

torch keeps a step as a 0-dim tensor, DeepSpeed's ops as an int; one cannot go on from the other's form. A state of a
fresh run is empty, so that what its optimizer is going to expect there has to be known from its class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zeroelastic.digest import ScalarValue
from zeroelastic.errors import UnsupportedError

_INT = "pyint"
_TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class _Known:
    """State of one optimizer class: keys of tensors that are cut like the weights, and the form of its scalars.

    ``optional`` tensors exist while the option of the group that is given with them is set.
    """

    tensors: tuple[str, ...]
    scalars: Mapping[str, str]
    optional: tuple[tuple[str, str], ...] = ()


_ADAM = ("exp_avg", "exp_avg_sq")
_STEP = {"step": _TENSOR}
_INT_STEP = {"step": _INT}
_AMSGRAD = (("max_exp_avg_sq", "amsgrad"),)

_KNOWN = {
    "torch.optim.adam.Adam": _Known(_ADAM, _STEP, _AMSGRAD),
    "torch.optim.adamw.AdamW": _Known(_ADAM, _STEP, _AMSGRAD),
    "torch.optim.nadam.NAdam": _Known(_ADAM, {"step": _TENSOR, "mu_product": _TENSOR}),
    "torch.optim.radam.RAdam": _Known(_ADAM, _STEP),
    "torch.optim.adamax.Adamax": _Known(("exp_avg", "exp_inf"), _STEP),
    "torch.optim.adadelta.Adadelta": _Known(("square_avg", "acc_delta"), _STEP),
    "torch.optim.adagrad.Adagrad": _Known(("sum",), _STEP),
    "torch.optim.asgd.ASGD": _Known(("ax",), {"step": _TENSOR, "eta": _TENSOR, "mu": _TENSOR}),
    "torch.optim.rprop.Rprop": _Known(("prev", "step_size"), _STEP),
    "torch.optim.rmsprop.RMSprop": _Known(
        ("square_avg",), _STEP, (("momentum_buffer", "momentum"), ("grad_avg", "centered"))
    ),
    "torch.optim.sgd.SGD": _Known((), {}, (("momentum_buffer", "momentum"),)),
    "deepspeed.ops.adam.fused_adam.FusedAdam": _Known(_ADAM, _INT_STEP),
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": _Known(_ADAM, _INT_STEP),
    "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad": _Known(("exp_avg_sq",), _INT_STEP),
    "deepspeed.ops.lion.fused_lion.FusedLion": _Known(("exp_avg",), _INT_STEP),
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion": _Known(("exp_avg", "exp_avg_sq"), _INT_STEP),
}
"""As of torch 2.13 and DeepSpeed 0.19.8; the tests run each of them."""


def class_path(optimizer: torch.optim.Optimizer) -> str:
    """Module and name of an optimizer's class."""
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def live_form(
    value: ScalarValue, *, key: str, current: object, optimizer: torch.optim.Optimizer, where: str
) -> ScalarValue:
    """A saved scalar in the form that the optimizer which goes on from it keeps: the same number.

    ``current`` is what it holds there now, None before its first step; it decides, else the optimizer's class, else the
    saved form stays. Raises UnsupportedError where the form cannot hold the number.
    """
    kind = _kind_of(current) or _kind_known(optimizer, key)
    tensor = not value.kind.startswith("py")
    if kind is None or kind == value.kind or isinstance(value.value, bool) or value.value is None:
        return value
    if kind == _TENSOR and tensor:
        return value  # of its own dtype, which is kept
    made = _as_kind(value.value, kind)
    if made.number() != value.number():
        raise UnsupportedError(
            f"{where} is {value.value!r}, which {type(optimizer).__name__} cannot keep as {made.kind}. Resume with the "
            "optimizer that saved it, or with load_optimizer_states=False for the weights alone."
        )
    return made


def _as_kind(value: int | float, kind: str) -> ScalarValue:
    """The nearest value of a kind."""
    if kind == _INT:
        return ScalarValue(kind, int(value) if math.isfinite(value) else 0)
    if kind != _TENSOR:
        return ScalarValue(kind, float(value))
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return ScalarValue(str(dtype).removeprefix("torch."), float(torch.tensor(value, dtype=dtype).item()))


def _kind_of(current: object) -> str | None:
    if isinstance(current, torch.Tensor):
        return _TENSOR if current.dim() == 0 else None
    if isinstance(current, (bool, int, float)):
        return ScalarValue.of_python(current).kind
    return None


def _kind_known(optimizer: torch.optim.Optimizer, key: str) -> str | None:
    """What the class keeps, the user's own subclasses of a known one included."""
    for kind in type(optimizer).__mro__:
        known = _KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")
        if known is not None:
            return known.scalars.get(key)
    return None
