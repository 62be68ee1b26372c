"""Parameters that the save and the run do not treat alike: their weights, their optimizer state, and what to say of it.

What was frozen and is trained now, or the other way, is filled from where the save has it. What the optimizer did not
have gets fresh state: none, or zeros where it shares a sub-group with restored parameters, because DeepSpeed keeps one
flat tensor of each state and one step per sub-group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from zeroelastic.membership import Membership
from zeroelastic.shard import FP32, FROZEN
from zeroelastic.stage3.contents import digest_tensor
from zeroelastic.stage3.fill import Filled, Part, Target
from zeroelastic.stage3.live import LiveState
from zeroelastic.stage3.module_keys import ModuleKeys
from zeroelastic.stage3.survey import Survey


def moved_parts(live: LiveState, found: Survey) -> list[Part]:
    """Saved frozen parameters into master weights, and saved master weights into frozen parameters: one target each."""
    parts: list[Part] = []
    if found.unfrozen_plan is not None:
        plan = found.unfrozen_plan
        assert found.model.frozen_pieces is not None
        saved, here = plan.src.index(), live.layout.index()
        targets: list[Target] = []
        for p, param in enumerate(plan.dst.params):
            at = here[param.name]
            begin = int(live.layout.offset[at])
            part = live.fp32(int(live.layout.sub_group[at]))[begin : begin + int(live.layout.part[at])]
            targets.append(Target(FROZEN, p, part, found.model.frozen_pieces.dtype[saved[param.name]]))
        parts.append(Part(plan, {rank: {FROZEN: piece} for rank, piece in found.frozen_pieces.items()}, targets))
    if found.newly_frozen_plan is not None:
        plan = found.newly_frozen_plan
        saved = plan.src.index()
        dtypes = found.head.pieces[FP32].dtype
        targets = [
            Target(
                FP32, number, live.frozen_tensors[number].view(-1), dtypes[int(plan.src.sub_group[saved[param.name]])]
            )
            for number, param in zip(plan.dst.sub_group.tolist(), plan.dst.params, strict=True)
        ]
        parts.append(Part(plan, {rank: shard.pieces for rank, shard in found.shards.items()}, targets))
    return parts


def with_moved_digests(part: Part, filled: Filled, rank: int) -> Filled:
    """The same with the digests of every target of a moved part under the saved state key.

    They are those of the saved tensors: as read where they were cast, else of what is live.
    """
    digests: dict[tuple[str, str], int] = {}
    owned = (column.tolist() for column in part.plan.dst.owned(rank))
    for param, target, start, length in zip(part.plan.dst.params, part.targets, *owned, strict=True):
        stream = (param.name, target.key)
        digests[stream] = (
            filled.cast_digests[stream]
            if target.cast
            else digest_tensor(target.tensor[:length], param.name, target.key, start)
        )
    return Filled(filled.bytes_read, filled.bytes_owned, filled.files, {}, digests)


def join(parts: Sequence[Filled]) -> Filled:
    """What several fills cost together."""
    return Filled(
        bytes_read=sum(part.bytes_read for part in parts),
        bytes_owned=sum(part.bytes_owned for part in parts),
        files=tuple(dict.fromkeys(path for part in parts for path in part.files)),
        cast_digests={stream: digest for part in parts for stream, digest in part.cast_digests.items()},
        moved_digests={stream: digest for part in parts for stream, digest in part.moved_digests.items()},
    )


def fresh_state(live: LiveState, sub_group: int) -> None:
    """Put the optimizer state of a sub-group back to what it is before the first step, which is mostly none."""
    optimizer = live.optimizer.optimizer
    owner = live.optimizer.fp32_partitioned_groups_flat[sub_group]
    if owner in optimizer.state and isinstance(
        optimizer, torch.optim.Adagrad
    ):  # makes its state when it is made itself
        optimizer.state[owner]["sum"].fill_(_initial(live, sub_group, "sum"))
        optimizer.state[owner]["step"].zero_()
        return
    live.residence.drop(sub_group, list(live.residence.own_state(sub_group)))
    live.residence.forget(sub_group)


def clear_fresh(live: LiveState, found: Survey, sub_group: int) -> None:
    """Zero the state of what is new to the optimizer in a sub-group whose other parameters were restored."""
    restored = frozenset(found.membership.restored)
    tensors, _ = live.split_state(sub_group)
    for p in np.flatnonzero(live.layout.sub_group == sub_group).tolist():
        if live.layout.params[p].name not in restored:
            begin, part = int(live.layout.offset[p]), int(live.layout.part[p])
            for key, tensor in tensors.items():
                tensor[begin : begin + part].fill_(_initial(live, sub_group, key))


def _initial(live: LiveState, sub_group: int, key: str) -> float:
    """What an element of a state tensor is before the first step."""
    group = live.optimizer.optimizer.param_groups[live.optimizer.sub_group_to_group_id[sub_group]]
    return float(group.get("initial_accumulator_value", 0.0)) if key == "sum" else 0.0


def changes(live: LiveState, found: Survey, keys: ModuleKeys, *, weights_only: bool) -> tuple[str, ...]:
    """What the save and the run do not have in common, by name, and what became of it: sentences for the report."""
    membership = found.membership
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
        lines += _state_lines(live, found)
        lines += _group_lines(found)
    return tuple(lines)


def _others(live: LiveState, names: Sequence[str]) -> list[str]:
    """Entries of the module's state that are no parameters; those have sentences of their own."""
    module = live.optimizer.module
    params = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return [name for name in names if name not in params]


def _unknown(membership: Membership, keys: ModuleKeys) -> list[str]:
    return [name for name in keys.unexpected if name not in frozenset(membership.dropped)]


def _state_lines(live: LiveState, found: Survey) -> list[str]:
    names: dict[str, list[str]] = {}
    new = {*found.membership.added_trained, *found.membership.unfrozen}
    for param, sub_group in zip(live.layout.params, live.layout.sub_group.tolist(), strict=True):
        if param.name not in new:
            continue
        tensors = [key for key in found.tensor_keys[sub_group] if key != FP32]
        if found.state_sources[sub_group] is None or not (tensors or found.scalars[sub_group]):
            text = "optimizer state not created yet, as before a first step"
        else:
            step = found.scalars[sub_group].get("step")
            at = f" at step {step.value} of" if step is not None else " in"
            text = (
                f"optimizer state ({', '.join(tensors) or 'none'}) as before a first step, but{at} a sub-group with "
                "restored parameters"
            )
        names.setdefault(text, []).append(param.name)
    return [f"{text}: {', '.join(members)}" for text, members in names.items()]


def _group_lines(found: Survey) -> list[str]:
    membership, saved = found.membership, found.head.groups
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
