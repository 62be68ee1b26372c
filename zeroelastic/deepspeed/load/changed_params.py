"""Parameters that differ between the save and the run: their weights, their optimizer state, and the report about them.

A parameter that was frozen and is trained now, or the other way round, is filled from where the save has it. A
parameter that is new to the optimizer gets fresh state: none, or zeros where it shares a sub-group with restored
parameters, because DeepSpeed keeps one flat tensor of each state and one step per sub-group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN
from zeroelastic.checkpoint.param_changes import Membership
from zeroelastic.deepspeed.fill import Filled, Part, Target
from zeroelastic.deepspeed.live.digests import LivePiece, LiveStreams, known_digests
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.load.module_states import ModuleKeys
from zeroelastic.deepspeed.load.preflight import LoadPlan


def frozen_parts(live: LiveOptimizer, load_plan: LoadPlan) -> list[Part]:
    """Saved frozen parameters into master weights, saved master weights into frozen parameters, frozen into frozen.

    Each parameter is a target of its own.
    """
    here = live.layout.index()

    def weights(number: int, name: str) -> torch.Tensor:
        return live.fp32(int(live.layout.sub_group[here[name]]))

    def frozen(number: int, name: str) -> torch.Tensor:
        return live.frozen_tensor(number).view(-1)

    saved_frozen = {rank: {FROZEN: piece} for rank, piece in load_plan.frozen_extents.items()}
    saved_weights = {rank: shard.extents for rank, shard in load_plan.shards.items()}
    parts: list[Part] = []
    for plan, key, extents, tensor_of in (
        (load_plan.unfrozen_plan, FROZEN, saved_frozen, weights),
        (load_plan.newly_frozen_plan, FP32, saved_weights, frozen),
        (load_plan.frozen_plan, FROZEN, saved_frozen, frozen),
    ):
        if plan is None:
            continue
        saved, place = load_plan.head.extents[FP32] if key == FP32 else load_plan.model.frozen_extents, plan.src.index()
        assert saved is not None
        targets = [
            Target(key, p, tensor_of(p, param.name), saved.dtype[int(plan.src.sub_group[place[param.name]])])
            for p, param in zip(plan.dst.sub_group.tolist(), plan.dst.params, strict=True)
            if param.numel or plan is not load_plan.frozen_plan
        ]
        parts.append(Part(plan, extents, targets))
    return parts


def with_changed_digests(part: Part, filled: Filled, rank: int) -> Filled:
    """``filled`` with the digests of every target of a moved part, under the saved state key.

    They are digests of the saved tensors: computed on reading where a tensor was cast, or where what was read is known
    to be in its place; else from the live tensor.
    """
    dst = part.plan.dst
    columns = (column.tolist() for column in (*dst.owned(rank), dst.buffer_offset(rank)))
    live = [
        LivePiece(param.name, target.key, target.tensor[place : place + length], start)
        for param, target, start, length, place in zip(dst.params, part.targets, *columns, strict=True)
        if (param.name, target.key) not in filled.cast_digests
    ]
    digests = LiveStreams(tuple(live), {}).digest(known_digests(live, filled.read_digests)).table()
    return replace(filled, cast_digests={}, read_digests={}, changed_digests={**filled.cast_digests, **digests})


def join(parts: Sequence[Filled]) -> Filled:
    """The sum of several fills."""
    return Filled(
        bytes_read=sum(part.bytes_read for part in parts),
        bytes_owned=sum(part.bytes_owned for part in parts),
        files=tuple(dict.fromkeys(path for part in parts for path in part.files)),
        cast_digests={stream: digest for part in parts for stream, digest in part.cast_digests.items()},
        changed_digests={stream: digest for part in parts for stream, digest in part.changed_digests.items()},
        read_digests={stream: found for part in parts for stream, found in part.read_digests.items()},
        rounded={i: sum(part.rounded.get(i, 0) for part in parts) for part in parts for i in part.rounded},
    )


def clear_fresh(live: LiveOptimizer, load_plan: LoadPlan, sub_group: int) -> None:
    """Zero the state of parameters that are new to the optimizer, in a sub-group with restored parameters."""
    restored = frozenset(load_plan.membership.restored)
    tensors, _ = live.split_state(sub_group)
    places, lengths = live.layout.buffer_offset(live.rank).tolist(), live.layout.owned(live.rank)[1].tolist()
    for p in np.flatnonzero(live.layout.sub_group == sub_group).tolist():
        if live.layout.params[p].name not in restored:
            for key, tensor in tensors.items():
                tensor[places[p] : places[p] + lengths[p]].fill_(live.initial_value(sub_group, key))


def changes(live: LiveOptimizer, load_plan: LoadPlan, keys: ModuleKeys, *, weights_only: bool) -> tuple[str, ...]:
    """The differences between the save and the run, by name, and how each was loaded: sentences for the report."""
    membership = load_plan.membership
    lines = [
        f"{text}: {', '.join(names)}"
        for text, names in (
            ("not in the checkpoint, weights as this run made them", membership.added_trained),
            ("frozen and not in the checkpoint, weights as this run made them", membership.added_frozen),
            ("frozen in the checkpoint and trained now, weights from the checkpoint", membership.unfrozen),
            (
                "trained in the checkpoint and frozen now, weights from the saved master weights, "
                "saved optimizer state dropped",
                membership.newly_frozen,
            ),
            ("in the checkpoint and not in the model, ignored", membership.dropped),
            (
                "buffers and other module state not in the checkpoint, as this run made them",
                _others(live, keys.missing),
            ),
            ("module state of the checkpoint that the model does not have, ignored", _unknown(membership, keys)),
        )
        if names
    ]
    if not weights_only:
        lines += _state_lines(live, load_plan)
        lines += _group_lines(load_plan)
    return tuple(lines)


def _others(live: LiveOptimizer, names: Sequence[str]) -> list[str]:
    """The names that are not parameters: parameters have sentences of their own."""
    params = {name for name, _ in live.module.named_parameters(remove_duplicate=False)}
    return [name for name in names if name not in params]


def _unknown(membership: Membership, keys: ModuleKeys) -> list[str]:
    return [name for name in keys.unexpected if name not in frozenset(membership.dropped)]


def _state_lines(live: LiveOptimizer, load_plan: LoadPlan) -> list[str]:
    names: dict[str, list[str]] = {}
    new = {*load_plan.membership.added_trained, *load_plan.membership.unfrozen}
    for param, sub_group in zip(live.layout.params, live.layout.sub_group.tolist(), strict=True):
        if param.name not in new:
            continue
        state = load_plan.states[sub_group]
        tensors = [key for key in state.keys if key != FP32]
        if state.source is None or not (tensors or state.scalars):
            text = "optimizer state not created yet, as before a first step"
        else:
            step = state.scalars.get("step")
            at = f" at step {step.value} of" if step is not None else " in"
            text = (
                f"optimizer state ({', '.join(tensors) or 'none'}) as before a first step, but{at} a sub-group with "
                "restored parameters"
            )
        names.setdefault(text, []).append(param.name)
    return [f"{text}: {', '.join(members)}" for text, members in names.items()]


def _group_lines(load_plan: LoadPlan) -> list[str]:
    membership, saved = load_plan.membership, load_plan.head.groups
    if membership.same_groups:
        return []
    lines: list[str] = []
    for g, match in enumerate(membership.groups):
        if match.source is None and match.shared:
            options = [saved[s].options for s in match.shared]
            differ = sorted(
                key
                for key in {key for option in options for key in option}
                if len({repr(option.get(key)) for option in options}) > 1
            )
            listed = " and ".join(map(str, match.shared))
            lines.append(
                f"hyper-parameters of optimizer group {g} are the run's own: saved groups {listed} differ in "
                f"{', '.join(differ)}"
            )
        elif match.source is None:
            lines.append(f"hyper-parameters of optimizer group {g} are the run's own: nothing in it was restored")
        elif match.source != g or len(match.shared) > 1:
            listed = " and ".join(map(str, match.shared))
            lines.append(f"hyper-parameters of optimizer group {g} are those of saved group {listed}")
    used = {s for match in membership.groups for s in match.shared}
    ignored = [str(s) for s in range(len(saved)) if s not in used]
    if ignored:
        lines.append(f"hyper-parameters of saved group {' and '.join(ignored)} ignored: nothing of it is trained here")
    return lines
