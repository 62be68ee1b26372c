"""Everything that is checked before a load touches a tensor: files, headers, layout, and agreement of all ranks."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zeroelastic.agree import together
from zeroelastic.checkpoint import (
    Checkpoint,
    ModelStates,
    frozen_layouts,
    open_checkpoint,
    other_step,
    source_ranks,
)
from zeroelastic.digest import ScalarValue
from zeroelastic.errors import CheckpointError, LayoutMismatchError, StrictError, UnsupportedError
from zeroelastic.executors import Executor
from zeroelastic.intact import check_records
from zeroelastic.layout import Layout, unpacked_layout
from zeroelastic.membership import Inventory, Membership, compare
from zeroelastic.plan import Plan, check_plan, make_plan
from zeroelastic.record import CheckpointFormat
from zeroelastic.shard import FP32, Pieces, Shard, configured_batch
from zeroelastic.stage3.live import LiveState
from zeroelastic.stage3.nodes import Sight, look_around, open_apart
from zeroelastic.stage3.optimizers import SavedGroup, live_form, misfits
from zeroelastic.stage3.options import MissingState, Options
from zeroelastic.state import check_same_save, shard_facts
from zeroelastic.storage import FilePath


@dataclass(frozen=True, slots=True)
class Survey:
    """What one rank is going to load, all of it checked.

    ``model`` is the module states file this rank takes; ``plan`` moves trained parameters, ``frozen_plan`` frozen ones
    (None when there are none to restore). ``unfrozen_plan`` moves what was frozen and is trained now, each parameter to
    a buffer of its own, which is its part of the master weights; ``newly_frozen_plan`` the other way.
    ``tensor_keys[i]`` and ``scalars[i]`` are what target sub-group i gets, like saved sub-group ``state_sources[i]``;
    None where all of it is new to the optimizer, and gets nothing. ``sight`` says who sees which file, where not every
    rank sees all. ``checked_bytes`` were read for checksums alone.
    """

    checkpoint: Checkpoint
    format: CheckpointFormat
    model: ModelStates
    shards: Mapping[int, Shard]
    head: Shard
    plan: Plan
    membership: Membership
    frozen_plan: Plan | None
    unfrozen_plan: Plan | None
    newly_frozen_plan: Plan | None
    frozen_pieces: Mapping[int, Pieces]
    state_sources: tuple[int | None, ...]
    tensor_keys: tuple[tuple[str, ...], ...]
    scalars: tuple[Mapping[str, ScalarValue], ...]
    train_batch_size: int | None
    sight: Sight | None = None
    checked_bytes: int = 0

    @property
    def model_paths(self) -> tuple[str, ...]:
        """Where ``model`` and the same file of every tensor parallel rank are, as DeepSpeed wants them listed."""
        rank = self.model.rank
        names = (f"zero_pp_rank_{rank}_mp_rank_{tp:02d}_model_states.pt" for tp in range(self.checkpoint.tp.size))
        return tuple(os.fspath(self._local(name)) for name in names)

    def _local(self, name: str) -> Path:
        path = self.checkpoint.tag_dir / name
        assert isinstance(path, Path), "loads read local files"
        return path


Token = tuple[tuple[str, str], ...]
"""Facts that every rank must have read alike: (what, a hash of it)."""

_TP_RANK = "tensor parallel rank"
_SHARED_FACTS = ("format", "save id", "world size", "global step", "commit record")
"""The facts that tensor parallel ranks share; the others are about slices, of which each has its own."""


def survey(
    tag_dir: Path,
    live: LiveState,
    *,
    weights_only: bool,
    options: Options,
    strict_module: bool = False,
) -> Survey:
    """Open what this rank needs, check it against the model, and compare with the other ranks. Collective.

    ``weights_only`` leaves optimizer groups and state out of the comparison. ``options``: ``missing_state`` says what
    to do about parameters that the save and the run do not have in common, ``verify`` how closely files are looked at;
    ``strict_module`` refuses a save that lacks frozen parameters of the run, unless the former is "fresh". Raises
    the same error on every rank: CheckpointError, LayoutMismatchError (every disagreement listed), UnsupportedError.
    """
    kept: list[Survey] = []
    allowed = _Allowed(options.missing_state, strict_module)
    compare_directories = options.verify != "off"
    sight = look_around(tag_dir, live.rank, live.tp)
    apart = None if sight is None else open_apart(sight, live, compare_directories=compare_directories)

    def look() -> Token:
        checkpoint = apart or open_checkpoint(
            tag_dir, near_rank=live.rank, tp=live.tp, compare_directories=compare_directories
        )
        found = _open(checkpoint, sight, live, allowed, weights_only=weights_only)
        kept.append(_checked(found, options.host_executor) if options.verify == "full" else found)
        return _token(kept[0], weights_only=weights_only)

    _, tokens = together(look)
    peers: dict[str, tuple[int, Token]] = {}  # the first rank of each tensor parallel rank, whose slices are its own
    for rank, token in enumerate(tokens):
        facts = dict(token)
        first, peer = peers.setdefault(facts[_TP_RANK], (rank, token))
        for other, others in ((first, peer), (0, tokens[0])):
            names = facts if other == first else _SHARED_FACTS
            mixed = [what for what, theirs in others if what in names and facts.get(what) != theirs]
            if mixed:
                raise CheckpointError(
                    f"{tag_dir}: ranks {other} and {rank} read files that differ in {', '.join(mixed)}. Files of two "
                    "saves are mixed in this directory."
                )
    return kept[0]


class _Allowed(NamedTuple):
    """Which differences between the save and the run are an error."""

    missing_state: MissingState
    strict_module: bool


def _open(
    checkpoint: Checkpoint, sight: Sight | None, live: LiveState, allowed: _Allowed, *, weights_only: bool
) -> Survey:
    layout, rank, tag_dir = live.layout, live.rank, Path(str(checkpoint.tag_dir))
    saved = checkpoint.world_size
    model = checkpoint.model_states(rank if rank < saved else 0)
    needed = source_ranks(layout.numel.tolist(), saved_world_size=saved, world_size=layout.world_size, rank=rank) or (
        min(rank, saved - 1),
    )
    shards = {source: checkpoint.shard(source) for source in needed}
    head = shards[needed[0]]
    record = checkpoint.record
    if (mixed := other_step(model, record)) is not None:
        raise CheckpointError(mixed)
    membership = compare(
        Inventory(head.layout.params, None if model.frozen is None else model.frozen.params),
        Inventory(layout.params, live.frozen.params),
        head.groups,
        live.groups,
    )
    _check_membership(membership, allowed, tag_dir, live, weights_only=weights_only)
    if not weights_only:
        _check_kinds(membership, head, live)
        _check_optimizer(membership, head, live, tag_dir)

    if not weights_only and model.global_steps > 0:
        _refuse_lost_state(head)
    plan = make_plan(head.layout, layout.only(set(membership.restored)), rank)
    check_plan(plan)
    newly_frozen = _planned(head.layout, live.frozen.only(set(membership.newly_frozen)), rank)
    for part in (plan, newly_frozen):
        shards |= {source: checkpoint.shard(source) for source in (part.source_ranks if part else ())}
    check_same_save(shards, head)
    frozen_plan, unfrozen_plan, pieces = _open_frozen(checkpoint, model, live, membership)
    sources, keys, scalars = _target_state(membership, head, live, weights_only=weights_only)
    batch = record.train_batch_size if record is not None else head.train_batch_size
    return Survey(
        checkpoint=checkpoint,
        format=head.format,
        model=model,
        shards=shards,
        head=head,
        plan=plan,
        membership=membership,
        frozen_plan=frozen_plan,
        unfrozen_plan=unfrozen_plan,
        newly_frozen_plan=newly_frozen,
        frozen_pieces=pieces,
        state_sources=sources,
        tensor_keys=keys,
        scalars=scalars,
        train_batch_size=batch if batch is not None else configured_batch(head.ds_config, saved),
        sight=sight,
    )


def _checked(found: Survey, executor: Executor) -> Survey:
    """The same, when all that has no digest is what its checksums say, in every file that this rank uses or reads."""
    checkpoint, sight = found.checkpoint, found.sight
    shards, models = dict(found.shards), {found.model.rank: found.model}
    if sight is not None:  # what this rank reads for others, too
        shards |= {rank: checkpoint.shard(rank) for rank in _read_here(checkpoint.optim_files, sight)}
        models |= {rank: checkpoint.model_states(rank) for rank in _read_here(checkpoint.model_files, sight)}
    parts = {
        model.path: (model.size, [np.array([at for at, _ in model.fragments()], dtype=np.int64)])
        for model in models.values()
    }
    for shard in shards.values():
        parts[shard.path] = (shard.size, [pieces.offset for pieces in shard.pieces.values()])
    nbytes = sum(
        check_records(path, size, digested=np.concatenate(places), executor=executor)
        for path, (size, places) in parts.items()
        if path.name not in checkpoint.away
    )
    return replace(found, checked_bytes=nbytes)


def _read_here(paths: Sequence[FilePath], sight: Sight) -> list[int]:
    return [rank for rank, path in enumerate(paths) if sight.reader(path.name) == sight.rank]


def _refuse_lost_state(head: Shard) -> None:
    """DeepSpeed's own files of a run with partial offload lack the state of the sub-groups that the GPU stepped."""
    block = head.ds_config.get("zero_optimization")
    offload = block.get("offload_optimizer") if isinstance(block, Mapping) else None
    ratio = offload.get("ratio", 1.0) if isinstance(offload, Mapping) else 1.0
    without = sum(keys == (FP32,) for keys in head.tensor_keys)
    if head.format == "rigid" and ratio != 1.0 and without:
        raise UnsupportedError(
            f"{head.path}: was saved by DeepSpeed alone from a run with partial optimizer offload (ratio {ratio}), and "
            f"lacks the optimizer state of the {without} of {len(head.tensor_keys)} sub-groups that the GPU stepped. "
            "Save such runs with elastic_checkpoint on. load_checkpoint(load_optimizer_states=False) takes the weights."
        )


def _check_membership(
    membership: Membership, allowed: _Allowed, tag_dir: Path, live: LiveState, *, weights_only: bool
) -> None:
    """Raise LayoutMismatchError, listing everything that differs and is not allowed to."""
    problems = [*membership.reshaped]
    if allowed.missing_state == "error":
        tolerated = () if allowed.strict_module else membership.frozen_problems
        problems += [problem for problem in membership.problems if problem not in tolerated]
        problems += membership.group_problems if not weights_only else ()
    if allowed.strict_module and allowed.missing_state == "error":
        shapes = {param.name: list(param.shape) for param in live.frozen.params}
        # DeepSpeed leaves the entry of what requires a gradient in the save; without elements that is all of it.
        requires_grad = {name: param.requires_grad for name, param in live.optimizer.module.named_parameters()}
        problems += [
            f"frozen parameter {name} {shapes[name]} is not in the checkpoint, which was saved without frozen "
            "parameters: load_module_strict=False keeps the run's own"
            for name in membership.excluded
            if math.prod(shapes[name]) or not requires_grad[name]
        ]
    if not problems:
        return
    advice = ""
    if set(problems) <= {*membership.problems, *membership.group_problems} - set(membership.reshaped):
        advice = ' ("missing_state": "fresh" in the "zeroelastic" block restores what both have and names the rest)'
    raise LayoutMismatchError(
        f"{tag_dir}: the checkpoint does not fit the model{advice}:", sorted(dict.fromkeys(problems))
    )


def _check_kinds(membership: Membership, head: Shard, live: LiveState) -> None:
    """Raise UnsupportedError where Muon would have to go on from the state of Adam, or the other way."""
    for g, match in enumerate(membership.groups):
        now = bool(live.optimizer.optimizer.param_groups[g].get("use_muon", False))
        for s in match.shared:
            if bool(head.groups[s].options.get("use_muon", False)) != now:
                was = "stepped" if not now else "not stepped"
                raise UnsupportedError(
                    f"{head.path}: optimizer group {g} of this run is {'' if now else 'not '}stepped by Muon and takes "
                    f"parameters of group {s} of the checkpoint, which was {was} by it. Their states have nothing in "
                    "common: keep use_muon as it was, or pass load_optimizer_states=False."
                )


def _check_optimizer(membership: Membership, head: Shard, live: LiveState, tag_dir: Path) -> None:
    """Raise LayoutMismatchError where the run's optimizer cannot go on from the state of parameters that it takes."""
    groups = saved_groups(head)
    taken = [(g, groups[s]) for g, match in enumerate(membership.groups) for s in match.shared]
    problems = misfits(taken, live.optimizer.optimizer)
    if problems:
        raise LayoutMismatchError(f"{tag_dir}: the checkpoint does not fit the optimizer:", sorted(set(problems)))


def _planned(src: Layout, dst: Layout, rank: int) -> Plan | None:
    """A checked plan; None where there is nothing to plan for."""
    if not dst.num_params or not dst.numel.any():
        return None
    plan = make_plan(src, dst, rank)
    check_plan(plan)
    return plan


def _open_frozen(
    checkpoint: Checkpoint, model: ModelStates, live: LiveState, membership: Membership
) -> tuple[Plan | None, Plan | None, Mapping[int, Pieces]]:
    """The plans for what was frozen, and where it lies."""
    if model.frozen is None:
        return None, None, {}
    unfrozen = set(membership.unfrozen)
    own_buffers = unpacked_layout([p for p in live.layout.params if p.name in unfrozen], live.layout.world_size)
    plans = (
        _planned(model.frozen, live.frozen.only(set(membership.frozen)), live.rank),
        _planned(model.frozen, own_buffers, live.rank),
    )
    sources = sorted({source for plan in plans if plan for source in plan.source_ranks})
    models = {source: checkpoint.model_states(source) for source in sources}
    frozen_layouts({model.rank: model, **models})
    pieces = {source: states.frozen_pieces for source, states in models.items()}
    return *plans, {source: piece for source, piece in pieces.items() if piece is not None}


def saved_groups(head: Shard) -> list[SavedGroup]:
    """What the checkpoint says of each optimizer group, with the state keys of all its sub-groups."""
    group_of = {name: g for g, group in enumerate(head.groups) for name in group.params}
    keys: list[set[str]] = [set() for _ in head.groups]
    for name, sub_group in zip(head.layout.index(), head.layout.sub_group.tolist(), strict=True):
        if name in group_of:
            values = {key for key, value in head.scalars[sub_group].items() if value.value is not None}
            keys[group_of[name]] |= {*head.tensor_keys[sub_group], *values} - {FP32}
    return [
        SavedGroup(head.optimizer, group.options, frozenset(found))
        for group, found in zip(head.groups, keys, strict=True)
    ]


def _token(found: Survey, *, weights_only: bool) -> Token:
    facts = shard_facts(found.head)
    if weights_only:
        facts = {what: facts[what] for what in ("format", "save id", "parameters", "sub-groups")}
    facts[_TP_RANK] = str(found.checkpoint.tp.rank)
    facts["world size"] = str(found.checkpoint.world_size)
    facts["global step"] = str(found.model.global_steps)
    facts["frozen parameters"] = repr(None if found.model.frozen is None else found.model.frozen.params)
    record = found.checkpoint.record
    facts["commit record"] = "none" if record is None else record.save_id + record.content_root
    return tuple((what, hashlib.sha256(text.encode()).hexdigest()) for what, text in facts.items())


def _target_state(
    membership: Membership, head: Shard, live: LiveState, *, weights_only: bool
) -> tuple[tuple[int | None, ...], tuple[tuple[str, ...], ...], tuple[Mapping[str, ScalarValue], ...]]:
    """What each target sub-group gets, from the source sub-groups that its restored parameters come from."""
    index = head.layout.index()
    restored = set(membership.restored)
    sources: list[int | None] = []
    keys: list[tuple[str, ...]] = []
    scalars: list[Mapping[str, ScalarValue]] = []
    members: list[list[str]] = [[] for _ in range(live.layout.num_sub_groups)]
    for param, sub_group in zip(live.layout.params, live.layout.sub_group.tolist(), strict=True):
        if param.name in restored:
            members[sub_group].append(param.name)
    for names in members:
        if not names:
            sources.append(None)
            keys.append(())
            scalars.append({})
            continue
        first = int(head.layout.sub_group[index[names[0]]])
        want = _state_of(head, first)
        for name in names[1:]:
            other = int(head.layout.sub_group[index[name]])
            if other != first and _state_of(head, other) != want and not weights_only:
                raise UnsupportedError(
                    f"{head.path}: parameters {names[0]} and {name} share a sub-group in this run but were saved with "
                    f"different optimizer state ({_difference(_state_of(head, first), _state_of(head, other))}). "
                    "Choose a sub_group_size that keeps them apart."
                )
        sources.append(first)
        keys.append((FP32,) if weights_only else head.tensor_keys[first])
        scalars.append({} if weights_only else _live_scalars(head, first, live, len(scalars)))
    return tuple(sources), tuple(keys), tuple(scalars)


def _live_scalars(head: Shard, source: int, live: LiveState, sub_group: int) -> dict[str, ScalarValue]:
    """The saved scalars of a sub-group in the form that the optimizer which steps the target sub-group keeps."""
    current = live.state(sub_group)
    return {
        key: live_form(
            value,
            key=key,
            current=current.get(key),
            optimizer=live.stepper(sub_group),
            options=live.group(sub_group),
            where=f"{head.path}: optimizer state {key!r}",
        )
        for key, value in head.scalars[source].items()
    }


def _state_of(shard: Shard, sub_group: int) -> dict[str, str]:
    state = {key: f"{shard.pieces[key].dtype[sub_group]} tensor" for key in shard.tensor_keys[sub_group]}
    return state | {key: value.number() for key, value in shard.scalars[sub_group].items()}


def _difference(left: Mapping[str, str], right: Mapping[str, str]) -> str:
    keys = sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
    return ", ".join(f"{key}: {left.get(key, 'none')} and {right.get(key, 'none')}" for key in keys)


def check_batch(saved: int | None, current: int, world_size: int, *, strict: bool) -> str | None:
    """A warning when a resume would change the global batch; StrictError when ``strict``."""
    if saved is None or saved == current:
        return None
    keep = [m for m in range(1, saved // world_size + 1) if saved % (m * world_size) == 0]
    how = (
        f"train_micro_batch_size_per_gpu {keep[-1]} with gradient_accumulation_steps {saved // (keep[-1] * world_size)}"
        if keep
        else f"no micro batch does on {world_size} ranks; world sizes that divide {saved} can"
    )
    if keep and len(keep) > 1:
        how += f", or {keep[0]} with {saved // (keep[0] * world_size)}"
    message = f"GLOBAL BATCH CHANGED from {saved} to {current}; to keep it: {how}"
    if strict:
        raise StrictError(message + '. ("strict": false in the "zeroelastic" block allows the change.)')
    return message
