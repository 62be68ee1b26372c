"""State that is the same on all ranks: scalars of optimizer state, hyper-parameters and loss scales.

One saved copy is restored on every rank, so a save compares the ranks' values first (``require_equal``). The loss scale
is restored where the run has the saved precision; otherwise the run keeps its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.fp16 import loss_scaler as ds_loss_scaler

from zeroelastic.checkpoint.optimizer_file import OF_THE_PARAMS, OptimizerHeader, OptionValue, TensorForm
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.optimizers import SavedGroup, changed_class, common_state, options_to_set
from zeroelastic.distributed.collective import all_gather
from zeroelastic.errors import UnsupportedError, some
from zeroelastic.torch_file.header import DType


def replicated_facts(live: LiveOptimizer) -> dict[str, str]:
    """Scalars of optimizer state, hyper-parameters and GradScaler state of this rank: a text by description.

    Raises UnsupportedError for state that is neither cut like the weights nor a scalar, and for hyper-parameters that
    are not plain values.
    """
    refuse_common_state(live)
    facts: dict[str, str] = {}
    for i in range(live.layout.num_sub_groups):
        _, scalars = live.split_state(i)
        name = type(live.stepper(i)).__name__
        facts |= {
            f"{name}'s state {key!r} of {live.buffer_kind} {i}": value.canonical() for key, value in scalars.items()
        }
    for g, group in enumerate(live.base.param_groups):
        for key, value in group.items():
            if key not in OF_THE_PARAMS:
                facts[f"{key!r} of optimizer group {g}"] = _text(value, f"{key!r} of optimizer group {g}")
    if live.grad_scaler is not None:
        facts |= {f"{key!r} of torch's GradScaler": repr(value) for key, value in live.grad_scaler.state_dict().items()}
    return facts


def refuse_common_state(live: LiveOptimizer) -> None:
    """Raise UnsupportedError for an optimizer that keeps state that belongs to no parameter, as MADGRAD its ``k``."""
    keys = [repr(key) for key in (*common_state(live.base), *live.own_entries())]
    if keys:
        raise UnsupportedError(
            f"{type(live.base).__name__} keeps {some(keys)} beside the state of its parameters; such state "
            'cannot be resharded. Save with "format": "rigid", and resume at the saved world size.'
        )


Token = tuple[int, str]
"""The tensor parallel rank of a rank, and a hash of the facts."""


def token_of(facts: Mapping[str, str], tp_rank: int = 0) -> Token:
    """The value that ``require_equal`` compares first."""
    return tp_rank, hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()


def require_equal(facts: dict[str, str], tokens: Sequence[Token]) -> None:
    """Raise UnsupportedError, the same on all ranks, that names the values which differ between them. Collective.

    ``tokens`` are of all ranks. Tensor parallel ranks are not compared with one another: each has sub-groups of
    its own.
    """
    firsts: dict[int, int] = {}  # the first rank of each tensor parallel rank
    first_of = [firsts.setdefault(tp_rank, rank) for rank, (tp_rank, _) in enumerate(tokens)]
    if all(token == tokens[first] for token, first in zip(tokens, first_of, strict=True)):
        return
    tables = all_gather(facts)
    named: list[str] = []
    for what in dict.fromkeys(key for table in tables for key in table):
        values = [table.get(what, "none") for table in tables]
        other = next((rank for rank, first in enumerate(first_of) if values[rank] != values[first]), None)
        if other is not None:
            first = first_of[other]
            named.append(f"{what} is {values[first]} on rank {first} and {values[other]} on rank {other}")
    raise UnsupportedError(
        f"{some(named, separator='; ')}. Values that follow from a rank's own part of the weights cannot "
        'be resharded. Save with "format": "rigid", and resume at the saved world size.'
    )


def _text(value: object, where: str, depth: int = 0) -> str:
    if isinstance(value, (np.number, np.bool_)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        value = value.item()
    if type(value) in (NoneType, bool, int, float, str):  # of a class of their own they are read as no such values
        return value.hex() if isinstance(value, float) else repr(value)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple, torch.Size) and depth < 3:
        return ",".join(_text(item, where, depth + 1) for item in value)
    raise UnsupportedError(
        f"{where} is a {type(value).__name__}, not a plain value, and cannot be restored. Use numbers, text or lists "
        'of them instead; or save with "format": "rigid", resume at the saved world size, and name a class that is not '
        'on the allow-list in "allow_globals".'
    )


def set_groups(live: LiveOptimizer, groups: Sequence[SavedGroup | None]) -> list[str]:
    """Set the hyper-parameters of every group that takes saved ones. Returns notes about options that differ."""
    notes: dict[str, None] = {}
    _part_tensors(live.base.param_groups, groups)
    for saved, group in zip(groups, live.base.param_groups, strict=True):
        if saved is None:
            continue
        taken, left, own = options_to_set(saved, live.base, group)
        for option, choice in taken.items():
            if not (option == "name" and group.get("moe")):  # which names the ranks that share the experts
                set_option(group, option, choice, saved.tensors.get(option))
        if (changed := changed_class(saved, live.base, group)) is not None:
            notes[changed] = None
        if left:
            notes[f"hyper-parameters of the checkpoint that this optimizer does not have: {', '.join(left)}"] = None
        if own:
            notes[f"hyper-parameters that are the run's own: {', '.join(own)}"] = None
    return list(notes)


def _part_tensors(live: Sequence[dict[str, Any]], saved: Sequence[SavedGroup | None]) -> None:
    """Give each group its own tensor where groups share one, and were saved with different values.

    A group without a saved one keeps the value that it has.
    """
    values: dict[int, set[str]] = {}
    for own, group in zip(saved, live, strict=True):
        for option, current in group.items():
            if isinstance(current, torch.Tensor):
                value = None if own is None else own.options.get(option)
                values.setdefault(id(current), set()).add(repr(value))
    for group in live:
        for option, current in group.items():
            if isinstance(current, torch.Tensor) and len(values[id(current)]) > 1:
                group[option] = current.clone()


def set_option(group: dict[str, Any], option: str, value: OptionValue, form: TensorForm | None) -> None:
    """Set a hyper-parameter in place; a tensor keeps its identity, which compiled optimizers rely on.

    The number is the saved one, and its form the run's: a tensor, a list, a tuple. An option that the run does not have
    yet, as one that an optimizer makes at a step, has the saved form: ``form`` is that of a tensor.
    """
    current = group.get(option)
    if isinstance(current, torch.Tensor) and isinstance(value, (int, float)):
        current.fill_(value)
    elif current is None and form is not None:
        group[option] = torch.tensor(value, dtype=getattr(torch, form.dtype), device="cpu").reshape(form.shape)
    else:
        group[option] = _in_form_of(current, value)


def _in_form_of(current: object, value: object) -> object:
    """A saved value as a list, a tuple or a tensor where the live one is, within lists and tuples too."""
    if isinstance(value, (list, tuple)):
        own = current if isinstance(current, (list, tuple)) else ()
        items = [_in_form_of(own[i] if i < len(own) else None, item) for i, item in enumerate(value)]
        is_list = isinstance(current if isinstance(current, (list, tuple)) else value, list)
        return items if is_list else tuple(items)
    if isinstance(current, torch.Tensor) and isinstance(value, (int, float)):
        return torch.full_like(current, value)
    return value


def precision_of(config: Mapping[str, Any]) -> str:
    """The precision in a DeepSpeed configuration: "bf16", "fp16" or "fp32", and torch's autocast dtype if it is on."""
    autocast = config.get("torch_autocast")
    name = "fp32"
    for block, key in (("bf16", "bf16"), ("bf16", "bfloat16"), ("fp16", "fp16")):
        value = config.get(key)
        if isinstance(value, Mapping) and value.get("enabled"):
            name = block
            break
    if isinstance(autocast, Mapping) and autocast.get("enabled"):
        dtype = str(autocast.get("dtype") or "bfloat16").removeprefix("torch.")
        name += f" with {_SHORT.get(dtype, dtype)} autocast"
    return name


_SHORT = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


def restore_scales(
    live: LiveOptimizer, head: OptimizerHeader, config: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Set DeepSpeed's loss scaler and the GradScaler of fp16 autocast. Returns notes, and what was not restored."""
    notes: list[str] = []
    reset: list[str] = []
    saved, running = precision_of(head.ds_config), precision_of(config)
    own = getattr(live.optimizer, "loss_scaler", None)
    if saved == running and own is not None:  # a BF16_Optimizer has none; without fp16 the scale is 1
        if head.scaler is not None and head.scaler.dynamic != bool(live.optimizer.dynamic_loss_scale):
            kinds = {True: "dynamic", False: "static"}
            notes.append(
                f"the loss scale is {kinds[head.scaler.dynamic]}, as in the checkpoint; this run's configuration says "
                f"{kinds[not head.scaler.dynamic]}"
            )
        if head.scaler is None and running.startswith("fp16"):
            reset.append("the loss scale (the checkpoint has none; it is the run's own)")
        elif head.scaler is not None:
            kind = getattr(ds_loss_scaler, head.scaler.class_name)
            scaler = own if type(own) is kind else kind.__new__(kind)
            for key, value in head.scaler.attributes.items():
                setattr(scaler, key, getattr(torch, value.name) if isinstance(value, DType) else value)
            live.optimizer.loss_scaler = scaler
            live.optimizer.dynamic_loss_scale = head.scaler.dynamic
            live.optimizer.overflow = head.scaler.overflow
    elif saved != running:
        notes.append(f"saved with {saved}, running with {running}: the loss scale is the run's own")
    if live.grad_scaler is not None and head.grad_scaler is not None:
        live.grad_scaler.load_state_dict(dict(head.grad_scaler))
    elif live.grad_scaler is not None:
        reset.append("the GradScaler of fp16 autocast (the checkpoint has none; it begins anew)")
    return notes, reset


def restore_clipping(live: LiveOptimizer, saved: float | None) -> list[str]:
    """Set the norm to which gradients are clipped, as DeepSpeed's own loads do at stages 1 and 2. Returns notes.

    At stage 3 it is the run's own. Source: ``DeepSpeedZeroOptimizer._load_global_state`` (0.19.8).
    """
    optimizer, own = live.optimizer, getattr(live.optimizer, "clip_grad", None)
    if live.per_param or saved is None or own is None or saved == own:
        return []
    if saved > 0 and not getattr(optimizer, "compute_grad_norm", True):
        return [f"gradient_clipping is {own:g}, the run's own, which computes no norm; the checkpoint has {saved:g}"]
    optimizer.clip_grad = saved
    return [f"gradient_clipping is {saved:g}, as in the checkpoint; this run's configuration says {own:g}"]
