"""The parameters, the optimizer and the values of a save, compared with the run.

Nothing here waits for another rank, and nothing of the engine is changed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from zeroelastic.checkpoint.model_states import COUNTERS, ModuleHeader
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import FP32, OptimizerHeader
from zeroelastic.checkpoint.param_changes import ParamDiff, ParamSet, wrapper_advice
from zeroelastic.core.layout import Param
from zeroelastic.deepspeed.client_state import SAMPLER, sampler_problem, states_to_load
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.optimizers import SavedGroup, misfits
from zeroelastic.deepspeed.options import LoadRequest
from zeroelastic.errors import LayoutMismatchError, UnsupportedError, shown
from zeroelastic.torch_file.tree import entry

_ADDED_BY_TORCH = frozenset(("_is_initial",))
"""Flags that schedulers of a newer torch have in their state, and set in their constructor alone (torch 2.13)."""


def saved_params(checkpoint: Checkpoint, live: LiveOptimizer) -> ParamSet:
    """Return the parameters of a save; their further names, which at stage 3 rank 0 alone lists, where names differ."""
    layout, params = checkpoint.layout, checkpoint.frozen.layout.whole_tensors
    if params and checkpoint.whole_model:
        params = _without_buffers(params, live.module)
    excluded = checkpoint.inventory.excluded()
    if excluded:
        params = tuple(content.param for content in excluded if content.tp_rank == live.tp.rank)
    differs = not live.whole.index().keys() <= layout.index().keys()
    all_see = checkpoint.whole_model or checkpoint.inventory.reads_headers  # all ranks have to find the same names
    tied = checkpoint.model_states(0).tied if differs and all_see and not live.sharing.has_slices else {}
    names_frozen = bool(excluded) or checkpoint.names_frozen
    return ParamSet(layout.whole_tensors, params, has_frozen=not excluded, names_frozen=names_frozen, tied=tied)


def _without_buffers(frozen: Sequence[Param], module: torch.nn.Module) -> tuple[Param, ...]:
    """Return the frozen parameters of a file of the whole module, without the buffers of the run.

    DeepSpeed's list of buffers lacks some (``all_buffer_names``); its load of the module restores them all.
    """
    params = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    others: Collection[str] = ()
    if not params.issuperset(param.name for param in frozen):
        with torch.no_grad():
            others = module.state_dict().keys() - params
    return tuple(param for param in frozen if param.name not in others)


def refuse_lost_state(head: OptimizerHeader) -> None:
    """Raise UnsupportedError for DeepSpeed's own file of a run with partial offload: the GPU's state is not in it."""
    ratio = entry(head.ds_config, "zero_optimization", "offload_optimizer", "ratio")
    without = sum(keys == (FP32,) for keys in head.tensor_keys)
    if head.format == "rigid" and ratio not in (None, 1.0) and without:
        raise UnsupportedError(
            f"{head.path}: was saved by DeepSpeed alone from a run with partial optimizer offload (ratio {ratio}), and "
            f"lacks the optimizer state of the {without} of {len(head.tensor_keys)} sub-groups that the GPU stepped. "
            'Save such runs with "format": "elastic". load_checkpoint(load_optimizer_states=False) takes the weights.'
        )


def check_params(
    diff: ParamDiff, saved: ParamSet, checkpoint: Checkpoint, live: LiveOptimizer, request: LoadRequest
) -> None:
    """Raise LayoutMismatchError that lists every difference which is not allowed.

    Whatever ``on_mismatch`` says, names that differ because one side was wrapped (``wrapper_advice``) are an error, and
    so is a load that would restore no trained parameter.
    """
    wrapped = None
    if diff.dropped:
        names = [param.name for param in (*saved.trained, *saved.frozen)]
        wrapped = wrapper_advice(names, [*live.whole.index(), *live.whole_frozen.index()])
    tag_dir, saved_as = checkpoint.tag_dir, checkpoint.inventory
    problems = [*diff.reshaped]
    strict = request.options.on_mismatch == "error"
    if not strict and wrapped is None and not diff.restores(weights_only=request.weights_only):
        raise LayoutMismatchError(
            f"{tag_dir}: no trained parameter of the model is in the checkpoint. Nothing would be resumed; the run "
            "would keep its own weights:",
            sorted(dict.fromkeys(diff.problems)),
        )
    if strict or wrapped is not None:
        compares_frozen = request.strict_module or saved_as.excluded_by == "option"
        tolerated = {*(() if compares_frozen else diff.frozen_problems)}
        tolerated |= set() if live.trains else {*diff.moved}
        problems += [problem for problem in diff.problems if problem not in tolerated]
        problems += diff.group_problems if not request.weights_only else ()
    if strict and request.strict_module and not saved_as.excluded():
        shapes = {param.name: list(param.shape) for param in live.whole_frozen.whole_tensors}
        # DeepSpeed leaves the entry of what requires a gradient in the save; without elements that is all of it.
        whole_name = live.sharing.whole_name
        requires_grad = {whole_name(name): param.requires_grad for name, param in live.module.named_parameters()}
        problems += [
            f"frozen parameter {name} {shapes[name]} is not in the checkpoint, which was saved without frozen "
            "parameters; load_module_strict=False keeps the run's own"
            for name in diff.excluded
            if math.prod(shapes[name]) or not requires_grad.get(name, False)
        ]
    if not problems:
        return
    advice = ""
    if wrapped is not None:
        advice = f" ({wrapped})"
    elif set(problems) <= {*diff.problems, *diff.group_problems} - set(diff.reshaped):
        advice = ' ("on_mismatch": "initialize" in the "zeroelastic" block restores what both have and names the rest)'
    raise LayoutMismatchError(
        f"{tag_dir}: the checkpoint does not fit the model{advice}:", sorted(dict.fromkeys(problems))
    )


def check_optimizer(diff: ParamDiff, head: OptimizerHeader, live: LiveOptimizer) -> None:
    """Raise LayoutMismatchError if the optimizer cannot continue from its parameters' saved state.

    Raises UnsupportedError if Muon would continue from the state of Adam, or the other way.
    """
    for g, match in enumerate(diff.groups):
        now = bool(live.base.param_groups[g].get("use_muon", False))
        for s in match.shared:
            if bool(head.groups[s].options.get("use_muon", False)) != now:
                was = "stepped" if not now else "not stepped"
                raise UnsupportedError(
                    f"{head.path}: optimizer group {g} of this run is {'' if now else 'not '}stepped by Muon and takes "
                    f"parameters of group {s} of the checkpoint, which was {was} by it. Their states have nothing in "
                    "common: keep use_muon as it was, or pass load_optimizer_states=False."
                )
    groups = saved_groups(head)
    taken = [(g, groups[s]) for g, match in enumerate(diff.groups) for s in match.shared]
    problems = misfits(taken, live.base)
    if problems:
        where = head.path.parent
        raise LayoutMismatchError(f"{where}: the checkpoint does not fit the optimizer:", sorted(set(problems)))


def saved_groups(head: OptimizerHeader) -> list[SavedGroup]:
    """Return each saved optimizer group with the state keys of all sub-groups."""
    group_of = {name: g for g, group in enumerate(head.groups) for name in group.params}
    keys: list[set[str]] = [set() for _ in head.groups]
    for name, sub_group in zip(head.layout.index(), head.layout.sub_group.tolist(), strict=True):
        if name in group_of:
            values = {key for key, value in head.scalars[sub_group].items() if value.value is not None}
            keys[group_of[name]] |= {*head.tensor_keys[sub_group], *values} - {FP32}
    return [
        SavedGroup(head.optimizer, group.options, frozenset(found), group.tensors)
        for group, found in zip(head.groups, keys, strict=True)
    ]


def buffer_problems(module: torch.nn.Module, model: ModuleHeader) -> list[str]:
    """Return the saved buffers that the run cannot take, without those that a module loads in a way of its own."""
    problems: list[str] = []
    own = _compared_buffers(module)
    for name, form in model.others.items():
        shape = None if form is None else form[1]
        if name in own and shape != tuple(own[name].shape) and not (shape == (1,) and own[name].dim() == 0):
            problems.append(f"buffer {name} is {_form(shape)}, and {_form(tuple(own[name].shape))} in the run")
    return problems


def value_problems(engine: Engine, model: ModuleHeader, *, with_scheduler: bool) -> list[str]:
    """Return the saved counters, and states of what the run has, that it cannot take."""
    problems: list[str] = []
    for key in COUNTERS:
        if not isinstance(model.values.get(key), (int, float)) and (key != "global_samples" or key in model.values):
            problems.append(f"{key} is {_value(model, key)}, not a number")
    for key, state in states_to_load(engine).items():
        saved, is_scheduler = model.values.get(key), key == "lr_scheduler"
        if state is None or (not with_scheduler if is_scheduler else saved is None):
            continue
        if not isinstance(state, Mapping) and saved is not None:
            continue  # a scheduler of one's own, which alone knows what it takes
        wanted = [name for name in state if name not in _ADDED_BY_TORCH] if isinstance(state, Mapping) else []
        missing = [name for name in wanted if name not in saved] if isinstance(saved, Mapping) else []
        if not isinstance(saved, Mapping) or missing:
            what = f"lacks {', '.join(map(str, missing))}" if missing else f"is {_value(model, key)}"
            advice = " (load_lr_scheduler_states=False leaves it out)" if is_scheduler else ""
            problems.append(f"{key} {what}, which the run's own state has{advice}")
        elif key == SAMPLER and (problem := sampler_problem(engine, saved)) is not None:
            problems.append(problem)
    return problems


def _compared_buffers(module: torch.nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return buffers by name, without those of modules that decide themselves what they take from a state.

    Such a module overrides ``_load_from_state_dict``, or it or an outer module has a hook before a load.
    """
    if module._load_state_dict_pre_hooks:
        return {}
    takes_all = module._load_from_state_dict.__module__.startswith("torch.nn.")
    found = {prefix + name: buffer for name, buffer in module.named_buffers(recurse=False) if takes_all}
    for name, child in module.named_children():
        found |= _compared_buffers(child, f"{prefix}{name}.")
    return found


def _form(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else f"of shape {list(shape)}"


def _value(model: ModuleHeader, key: str) -> str:
    return shown(model.values[key]) if key in model.values else "missing"
