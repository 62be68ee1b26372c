"""The parameters and the optimizer of a save, compared with the run.

Nothing here waits for another rank, and nothing of the engine is changed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import FP32, OptimizerHeader
from zeroelastic.checkpoint.param_changes import ParamDiff, ParamSet, wrapper_advice
from zeroelastic.core.layout import Param
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.optimizers import SavedGroup, misfits
from zeroelastic.deepspeed.options import LoadRequest
from zeroelastic.errors import LayoutMismatchError, UnsupportedError
from zeroelastic.torch_file.tree import entry


def saved_params(checkpoint: Checkpoint, live: LiveOptimizer) -> ParamSet:
    """Return the parameters of a save; their further names, which at stage 3 rank 0 alone lists, where names differ."""
    layout, params = checkpoint.layout, checkpoint.frozen_layout.whole_tensors
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
            f"{tag_dir}: no trained parameter of the model is in the checkpoint: nothing would be resumed, and the "
            "run would go on from the weights that it has:",
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
            "parameters: load_module_strict=False keeps the run's own"
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
