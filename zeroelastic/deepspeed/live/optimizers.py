"""The state keys of each known class of optimizer, and the type in which the class keeps ``step`` and other scalars.

torch keeps a step as a 0-dim tensor, DeepSpeed's ops as an int; neither can continue from the other's type. The state
of a fresh run is empty, so the class alone says what its optimizer expects there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from zeroelastic.checkpoint.optimizer_file import OF_THE_PARAMS, OptionValue, TensorForm
from zeroelastic.core.digest import ScalarValue
from zeroelastic.errors import UnsupportedError, shown

_INT = "pyint"
_TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class _KnownState:
    """State of one optimizer class: keys of tensors that are partitioned like the weights, and scalar types.

    Each of the ``optional`` tensors exists while the group's option paired with it is set.
    """

    tensors: tuple[str, ...]
    scalars: Mapping[str, str]
    optional: tuple[tuple[str, str], ...] = ()


_ADAM = ("exp_avg", "exp_avg_sq")
_STEP = {"step": _TENSOR}
_INT_STEP = {"step": _INT}
_AMSGRAD = (("max_exp_avg_sq", "amsgrad"),)

_KNOWN = {
    "torch.optim.adam.Adam": _KnownState(_ADAM, _STEP, _AMSGRAD),
    "torch.optim.adamw.AdamW": _KnownState(_ADAM, _STEP, _AMSGRAD),
    "torch.optim.nadam.NAdam": _KnownState(_ADAM, {"step": _TENSOR, "mu_product": _TENSOR}),
    "torch.optim.radam.RAdam": _KnownState(_ADAM, _STEP),
    "torch.optim.adamax.Adamax": _KnownState(("exp_avg", "exp_inf"), _STEP),
    "torch.optim.adadelta.Adadelta": _KnownState(("square_avg", "acc_delta"), _STEP),
    "torch.optim.adagrad.Adagrad": _KnownState(("sum",), _STEP),
    "torch.optim.asgd.ASGD": _KnownState(("ax",), {"step": _TENSOR, "eta": _TENSOR, "mu": _TENSOR}),
    "torch.optim.rprop.Rprop": _KnownState(("prev", "step_size"), _STEP),
    "torch.optim.rmsprop.RMSprop": _KnownState(
        ("square_avg",), _STEP, (("momentum_buffer", "momentum"), ("grad_avg", "centered"))
    ),
    "torch.optim.sgd.SGD": _KnownState((), {}, (("momentum_buffer", "momentum"),)),
    "deepspeed.ops.adam.fused_adam.FusedAdam": _KnownState(_ADAM, _INT_STEP),
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": _KnownState(_ADAM, _INT_STEP),
    "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad": _KnownState(("exp_avg_sq",), _INT_STEP),
    "deepspeed.ops.lion.fused_lion.FusedLion": _KnownState(("exp_avg",), _INT_STEP),
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion": _KnownState(("exp_avg", "exp_avg_sq"), _INT_STEP),
}
"""As of torch 2.13 and DeepSpeed 0.19.8."""

_MUON = "deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam"
_MUON_STATE = _KnownState(("momentum_buffer",), {})
_MUON_ADAM = _KnownState(_ADAM, _INT_STEP)

SCHEDULED = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""Options that learning rate schedulers add to groups."""

_DECOUPLED = "decoupled_weight_decay"
_OF_THE_CLASS = {_DECOUPLED}
"""Options that make a class what it is: torch's AdamW is its Adam with this one set."""

_CLASS_MARKERS = {"amsgrad", "eps"}
"""Options by which classes of the same state keys differ: Adam has both, RAdam and FusedAdam ``eps``, Lion neither."""


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """One optimizer group in a checkpoint: its optimizer's class if it is known, options, and state keys.

    ``keys`` are the state keys that have a value, without the master weights; empty before the first step. ``tensors``
    are the forms of the options that are tensors in the file.
    """

    class_path: str | None
    options: Mapping[str, OptionValue]
    keys: frozenset[str]
    tensors: Mapping[str, TensorForm] = field(default_factory=dict)


_COMMON = {"MADGRAD": ("k",), "MirrorMADGRAD": ("k",)}
"""State of no parameter that classes make at a step."""


def common_state(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the state of an optimizer that belongs to no parameter."""
    state: Mapping[Any, object] = optimizer.state
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


def common_state_made_later(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the keys of such state that an optimizer of this class is known to make at a step."""
    return _COMMON.get(type(optimizer).__name__, ())


def class_path(optimizer: torch.optim.Optimizer) -> str:
    """Module and name of an optimizer's class."""
    return _path(type(optimizer))


def misfits(taken: Sequence[tuple[int, SavedGroup]], optimizer: torch.optim.Optimizer) -> list[str]:
    """Return a sentence for each live group, by number, that cannot continue from the saved group that it takes."""
    found = [(g, _misfit(saved, optimizer, optimizer.param_groups[g])) for g, saved in taken]
    other_kinds = [
        f"{key} of optimizer group {g} is {shown(value)} in the checkpoint and {shown(own)} in the run"
        for g, saved in taken
        for key, own in optimizer.param_groups[g].items()
        if None not in (value := saved.options.get(key), own) and _family(value) != _family(own)
    ]
    return other_kinds + [
        f"optimizer group {g} {problem}; resume with the optimizer that saved it, or with load_optimizer_states=False "
        "for the weights alone"
        for g, problem in found
        if problem is not None
    ]


def _family(option: object) -> str:
    """Return the kind of a hyper-parameter: a saved value can replace a live one of the same kind."""
    if isinstance(option, (bool, int, float, np.number, np.bool_)):
        return "number"
    if isinstance(option, torch.Tensor) and option.numel() == 1:
        return "number"
    return "sequence" if isinstance(option, (list, tuple)) else type(option).__name__


def _misfit(saved: SavedGroup, optimizer: torch.optim.Optimizer, options: Mapping[str, object]) -> str | None:
    """Return why a live group with these options cannot continue from the saved group; None if it can."""
    if not saved.keys:
        return None
    name = type(optimizer).__name__
    same = _same_class(saved, optimizer, options)
    known = _known(optimizer, options, bases=not same)
    if known is not None:
        want = {*known.tensors, *known.scalars}
        taken = {**options, **{key: value for key, value in saved.options.items() if key in options}}
        want |= {key for key, option in known.optional if taken.get(option)}
        if want == saved.keys:
            return None
        return f"has the state of {_of(saved)} ({_listed(saved.keys)}), this run's {name} keeps {_listed(want)}"
    if same:
        return None
    return f"has the state of {_of(saved)} ({_listed(saved.keys)}), and what this run's {name} keeps is not known"


def options_to_set(
    saved: SavedGroup, optimizer: torch.optim.Optimizer, options: Mapping[str, object]
) -> tuple[Mapping[str, OptionValue], tuple[str, ...], tuple[str, ...]]:
    """Return the saved options that a live group takes, the names of those that it lacks, and of those it keeps.

    The same class of optimizer takes all saved options; another class takes those that it has too.
    """
    own = tuple(sorted(options.keys() - saved.options.keys() - OF_THE_PARAMS - SCHEDULED))
    if _same_class(saved, optimizer, options):
        return saved.options, (), own
    taken = {key: value for key, value in saved.options.items() if key in options and key not in _OF_THE_CLASS}
    own = tuple(sorted({*own, *(options.keys() & saved.options.keys() & _OF_THE_CLASS)}))
    return taken, tuple(sorted(saved.options.keys() - options.keys() - SCHEDULED)), own


def changed_class(saved: SavedGroup, optimizer: torch.optim.Optimizer, options: Mapping[str, object]) -> str | None:
    """Return a sentence about an optimizer that continues from the state of another class, or None."""
    name = type(optimizer).__name__
    was = _other_class(saved, optimizer, options) if saved.class_path is None else saved.class_path.rpartition(".")[2]
    if was in (None, name):
        return None
    return f"optimizer: {name} goes on from the state of {was}, which has the same keys"


def state_dtype(
    optimizer: torch.optim.Optimizer, options: Mapping[str, object], key: str, flat: torch.dtype
) -> torch.dtype | None:
    """Return the dtype of an optimizer's tensor for master weights of dtype ``flat``; None: as it was saved."""
    known = _known(optimizer, options, bases=False)
    if known is None or known is _MUON_STATE or key not in (*known.tensors, *(name for name, _ in known.optional)):
        return None
    return torch.float32 if getattr(optimizer, "fp32_optimizer_states", False) else flat


def _same_class(saved: SavedGroup, optimizer: torch.optim.Optimizer, options: Mapping[str, object]) -> bool:
    """Compare class names without their modules; hyper-parameters decide where a checkpoint names no class."""
    if saved.class_path is not None:
        return saved.class_path.rpartition(".")[2] == type(optimizer).__name__
    if _other_class(saved, optimizer, options) is not None:
        return False
    return not options.keys() - saved.options.keys() - OF_THE_PARAMS - SCHEDULED


def _other_class(saved: SavedGroup, optimizer: torch.optim.Optimizer, options: Mapping[str, object]) -> str | None:
    """Return the class that saved a group, if it is not the run's, of a file without its name: by hyper-parameters."""
    if _CLASS_MARKERS & (saved.options.keys() ^ options.keys()):
        return "another optimizer"
    was, own = saved.options.get(_DECOUPLED), optimizer.defaults.get(_DECOUPLED)
    if not isinstance(optimizer, torch.optim.Adam) or None in (was, own) or bool(was) == bool(own):
        return None
    return "AdamW" if was else "Adam"


def _known(optimizer: torch.optim.Optimizer, options: Mapping[str, object], *, bases: bool) -> _KnownState | None:
    """Return the known state of a class, or with ``bases`` of the nearest class that it derives from."""
    if class_path(optimizer) == _MUON:
        return _MUON_STATE if options.get("use_muon") else _MUON_ADAM
    classes = type(optimizer).__mro__ if bases else (type(optimizer),)
    return next((known for kind in classes if (known := _KNOWN.get(_path(kind))) is not None), None)


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _of(saved: SavedGroup) -> str:
    return "another optimizer" if saved.class_path is None else saved.class_path.rpartition(".")[2]


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(sorted(keys)) or "none"


def scalar_value(value: object, where: str) -> ScalarValue:
    """Return a replicated value of optimizer state as data. Raises UnsupportedError for anything else."""
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex():
        item = value.item()
        assert isinstance(item, (int, float, bool))
        return ScalarValue(str(value.dtype).removeprefix("torch."), item)
    if isinstance(value, (np.number, np.bool_)):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float)):
        return ScalarValue.of_python(value)
    shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    raise UnsupportedError(
        f"{where} is a {type(value).__name__}{shape}, neither shaped like its flat buffer nor a scalar. "
        'Block-quantised and factored optimizer states cannot be resharded. Save with "format": "rigid", '
        "and resume at the saved world size."
    )


def live_form(
    value: ScalarValue,
    *,
    key: str,
    current: object,
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, object],
    where: str,
) -> ScalarValue:
    """Return a saved scalar in the type that the run's optimizer keeps: the same number.

    The type is that of ``current``, the live value, which is None before the first step; else that of the optimizer's
    class; else the saved one. Raises UnsupportedError if the type cannot hold the number.
    """
    known = _known(optimizer, options, bases=True)
    kind = _kind_of(current) or (None if known is None else known.scalars.get(key))
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
    if kind == _INT:
        return ScalarValue(kind, int(value) if math.isfinite(value) else 0)
    if kind != _TENSOR:
        return ScalarValue(kind, float(value))
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return ScalarValue(str(dtype).removeprefix("torch."), float(torch.tensor(value, dtype=dtype, device="cpu").item()))


def _kind_of(current: object) -> str | None:
    if isinstance(current, torch.Tensor):
        return _TENSOR if current.dim() == 0 else None
    if isinstance(current, (np.number, np.bool_)):
        current = current.item()
    if isinstance(current, (bool, int, float)):
        return ScalarValue.of_python(current).kind
    return None
