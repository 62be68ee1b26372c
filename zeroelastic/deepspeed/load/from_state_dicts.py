"""Elastic state dicts in memory: ``optimizer.load_state_dict([one per saved rank])`` at any world size.

The same layout and plan as for files; the segments are copied from the tensors that the caller holds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from zeroelastic.checkpoint.optimizer_file import FP32, OF_THE_PARAMS
from zeroelastic.checkpoint.param_changes import ParamSet, compare
from zeroelastic.core.layout import Layout, Param, layout_from_sub_groups
from zeroelastic.core.plan import Plan, check_plan, make_plan
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.engine_state import begin_change, changing
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer, scalar_value
from zeroelastic.deepspeed.live.optimizers import SavedGroup, misfits
from zeroelastic.deepspeed.live.replicated import set_groups, set_loss_scaler
from zeroelastic.errors import CheckpointError, LayoutMismatchError

logger = logging.getLogger(__name__)


def is_elastic(state_dicts: object) -> bool:
    """Whether this is a list of elastic state dicts, one per saved rank."""
    return (
        isinstance(state_dicts, Sequence)
        and len(state_dicts) > 0
        and all(isinstance(state, Mapping) and "base_optimizer_state" in state for state in state_dicts)
    )


def load_state_dicts(
    engine: Engine | None,
    live: LiveOptimizer,
    state_dicts: Sequence[Mapping[str, Any]],
    *,
    optimizer_states: bool,
) -> None:
    """Fill the live optimizer, be it an engine's or not, from the elastic state dicts of all saved ranks, by rank.

    Raises CheckpointError when they are not one complete set, LayoutMismatchError when they do not fit the model.
    """
    layout = _saved_layout(state_dicts, live)
    problems = [*compare(ParamSet(layout.params, ()), ParamSet(live.layout.params, ()), (), ()).problems]
    saved_groups = [tuple(group["params"]) for group in state_dicts[0]["zeroelastic"]["param_groups"]]
    if optimizer_states and [set(group) for group in saved_groups] != [set(group) for group in live.groups]:
        problems.append("the optimizer groups of the state dicts hold other parameters than those of the run")
    groups = _saved_groups(state_dicts[0])
    if optimizer_states and not problems:
        problems += [*misfits(list(enumerate(groups)), live.base), *_mixed(layout, live, _forms(state_dicts[0]))]
    if problems:
        raise LayoutMismatchError(
            'the state dicts do not fit the model ("on_mismatch" concerns checkpoints on disk):', problems
        )
    plan = make_plan(layout, live.layout, live.rank)
    check_plan(plan)
    if engine is None:
        _fill(live, state_dicts, plan, groups, optimizer_states=optimizer_states)
        return
    with changing(engine, whole=False):
        begin_change(engine)
        _fill(live, state_dicts, plan, groups, optimizer_states=optimizer_states)


def _fill(
    live: LiveOptimizer,
    state_dicts: Sequence[Mapping[str, Any]],
    plan: Plan,
    groups: Sequence[SavedGroup],
    *,
    optimizer_states: bool,
) -> None:
    """Fill the live optimizer from state dicts that fit it, whose optimizer groups are ``groups``."""
    layout, head = plan.src, state_dicts[0]["zeroelastic"]
    index = layout.index()
    with live.filling():
        for i in range(live.layout.num_sub_groups):
            first = live.layout.params[int(np.argmax(live.layout.sub_group == i))].name
            source = int(layout.sub_group[index[first]])
            saved: Mapping[str, Any] = state_dicts[0]["base_optimizer_state"][source] if optimizer_states else {}
            if optimizer_states:
                live.drop_state(i, keep=(FP32, *saved))
            weights = live.destination(i, FP32, live.fp32(i).dtype)
            _copy(plan, i, weights, [state["fp32_flat_groups"] for state in state_dicts], None)
            for key, value in saved.items():
                if isinstance(value, list):
                    dtype = live.state_dtype(i, key) or value[0].dtype
                    target = live.destination(i, key, dtype)
                    _copy(plan, i, target, [state["base_optimizer_state"] for state in state_dicts], key)
                else:
                    where = f"optimizer state {key!r}"
                    kept = live.live_form(i, key, scalar_value(value, where), where)
                    live.set_scalar(i, key, kept)
        live.zero_padding(weights_only=not optimizer_states)
    if optimizer_states:
        live.state_filled()
        for note in set_groups(live, groups):
            logger.info("%s", note)
        first_rank = state_dicts[0]
        set_loss_scaler(
            live, first_rank["loss_scaler"], dynamic=first_rank["dynamic_loss_scale"], overflow=first_rank["overflow"]
        )
        if live.grad_scaler is not None and head.get("grad_scaler"):
            live.grad_scaler.load_state_dict(head["grad_scaler"])
    live.finish_weights(from_16_bit=False)


def _forms(state_dict: Mapping[str, Any]) -> list[dict[str, str]]:
    """The state keys of each sub-group, with the numbers of scalars."""
    return [
        {
            key: "a tensor" if isinstance(value, list) else scalar_value(value, f"optimizer state {key!r}").number()
            for key, value in entry.items()
        }
        for entry in state_dict["base_optimizer_state"]
    ]


def _mixed(layout: Layout, live: LiveOptimizer, forms: Sequence[Mapping[str, str]]) -> list[str]:
    """A sentence for each live sub-group whose parameters come from sub-groups of other ``forms``."""
    source = {param.name: i for param, i in zip(layout.params, layout.sub_group.tolist(), strict=True)}
    first: dict[int, str] = {}
    found: dict[int, str] = {}
    for param, i in zip(live.layout.params, live.layout.sub_group.tolist(), strict=True):
        name = first.setdefault(i, param.name)
        if forms[source[name]] != forms[source[param.name]]:
            found[i] = (
                f"parameters {name} and {param.name} share a sub-group in this run but were saved with different "
                "optimizer state: choose a sub_group_size that keeps them apart"
            )
    return [*found.values()]


def _saved_groups(state_dict: Mapping[str, Any]) -> list[SavedGroup]:
    meta = state_dict["zeroelastic"]
    keys: dict[str, set[str]] = {}
    for table, entry in zip(meta["sub_groups"], state_dict["base_optimizer_state"], strict=True):
        for name in table["names"]:
            keys[name] = {key for key, value in entry.items() if value is not None}
    return [
        SavedGroup(
            meta.get("optimizer"),
            {option: value for option, value in group.items() if option not in OF_THE_PARAMS},
            frozenset().union(*(keys.get(name, set()) for name in group["params"])),
        )
        for group in meta["param_groups"]
    ]


def _saved_layout(state_dicts: Sequence[Mapping[str, Any]], live: LiveOptimizer) -> Layout:
    metas = [state["zeroelastic"] for state in state_dicts]
    world_size = metas[0]["world_size"]
    if [meta["rank"] for meta in metas] != list(range(world_size)):
        raise CheckpointError(
            f"state dicts of ranks {[meta['rank'] for meta in metas]} were given; those of ranks 0 to {world_size - 1} "
            "are needed, in this order.",
            remedy="Pass the state dict of every rank that saved, by rank.",
        )
    for meta in metas:
        if meta.get("tp_rank", 0) != live.tp.rank or meta.get("tp_size", 1) != live.tp.size:
            raise CheckpointError(
                f"state dicts of tensor parallel rank {meta.get('tp_rank', 0)} of {meta.get('tp_size', 1)} were given "
                f"to rank {live.tp.rank} of {live.tp.size}. Each loads its own.",
                remedy="Pass each tensor parallel rank the state dicts of the rank of its number.",
            )
    tables = [
        [(table["names"], [tuple(shape) for shape in table["shapes"]]) for table in meta["sub_groups"]]
        for meta in metas
    ]
    others = [table != tables[0] for table in tables]
    if any(others) or any(_forms(state) != _forms(state_dicts[0]) for state in state_dicts):
        what = "list different parameters" if any(others) else "have different steps, or other scalars"
        raise CheckpointError(
            f"the state dicts {what}; they are not of one save.",
            remedy="Pass the state dicts of all ranks of one save.",
        )
    return layout_from_sub_groups(
        [[Param(name, shape) for name, shape in zip(*table, strict=True)] for table in tables[0]], world_size
    )


def _copy(plan: Plan, sub_group: int, target: torch.Tensor, sources: Sequence[Sequence[Any]], key: str | None) -> None:
    """Copy the segments of one target sub-group; ``key`` None means the flat master weights."""
    first_of_group = np.searchsorted(plan.src.sub_group, np.arange(plan.src.num_sub_groups))
    for row in np.flatnonzero(plan.dst_sub_group == sub_group).tolist():
        length, begin = int(plan.length[row]), int(plan.dst_offset[row])
        group, offset = int(plan.src_sub_group[row]), int(plan.src_offset[row])
        buffer = sources[int(plan.src_rank[row])][group]
        if key is not None:
            p = int(plan.src_param[row])
            buffer = buffer[key][p - int(first_of_group[group])]
            offset -= int(plan.src.offset[p])
        target[begin : begin + length].copy_(buffer.detach()[offset : offset + length])
