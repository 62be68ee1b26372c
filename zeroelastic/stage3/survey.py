"""Everything that is checked before a load touches a tensor: files, headers, layout, and agreement of all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zeroelastic.agree import together
from zeroelastic.checkpoint import (
    Checkpoint,
    ModelStates,
    compare_params,
    frozen_layouts,
    open_checkpoint,
    source_ranks,
)
from zeroelastic.digest import ScalarValue
from zeroelastic.errors import CheckpointError, LayoutMismatchError, StrictError, UnsupportedError
from zeroelastic.plan import Plan, check_plan, make_plan
from zeroelastic.record import CheckpointFormat
from zeroelastic.shard import FP32, Pieces, Shard, configured_batch
from zeroelastic.stage3.live import LiveState
from zeroelastic.state import check_same_save, shard_facts


@dataclass(frozen=True, slots=True)
class Survey:
    """What one rank is going to load, all of it checked.

    ``model`` is the module states file this rank takes; ``plan`` moves trained parameters, ``frozen_plan`` frozen ones
    (None when there are none to restore). ``tensor_keys[i]`` and ``scalars[i]`` are what target sub-group i gets.
    """

    checkpoint: Checkpoint
    format: CheckpointFormat
    model: ModelStates
    shards: Mapping[int, Shard]
    head: Shard
    plan: Plan
    frozen_plan: Plan | None
    frozen_pieces: Mapping[int, Pieces]
    tensor_keys: tuple[tuple[str, ...], ...]
    scalars: tuple[Mapping[str, ScalarValue], ...]
    train_batch_size: int | None

    @property
    def model_paths(self) -> tuple[str, ...]:
        """The names of ``model`` and of the same file of every tensor parallel rank, as DeepSpeed wants them listed."""
        tag_dir, rank = self.checkpoint.tag_dir, self.model.rank
        names = (f"zero_pp_rank_{rank}_mp_rank_{tp:02d}_model_states.pt" for tp in range(self.checkpoint.tp.size))
        return tuple(str(tag_dir / name) for name in names)


Token = tuple[tuple[str, str], ...]
"""Facts that every rank must have read alike: (what, a hash of it)."""

_TP_RANK = "tensor parallel rank"
_SHARED_FACTS = ("format", "save id", "world size", "global step", "commit record")
"""The facts that tensor parallel ranks share; the others are about slices, of which each has its own."""


def survey(tag_dir: Path, live: LiveState, *, weights_only: bool) -> Survey:
    """Open what this rank needs, check it against the model, and compare with the other ranks. Collective.

    ``weights_only`` leaves optimizer groups and state out of the comparison. Raises the same error on every rank:
    CheckpointError, LayoutMismatchError (every disagreement listed), UnsupportedError.
    """
    kept: list[Survey] = []

    def look() -> Token:
        kept.append(_open(tag_dir, live, weights_only=weights_only))
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


def _open(tag_dir: Path, live: LiveState, *, weights_only: bool) -> Survey:
    layout, rank = live.layout, live.rank
    checkpoint = open_checkpoint(tag_dir, near_rank=rank, tp=live.tp)
    saved = checkpoint.world_size
    model = checkpoint.model_states(rank if rank < saved else 0)
    needed = source_ranks(layout.numel.tolist(), saved_world_size=saved, world_size=layout.world_size, rank=rank) or (
        min(rank, saved - 1),
    )
    shards = {source: checkpoint.shard(source) for source in needed}
    head = shards[needed[0]]
    record = checkpoint.record
    if record is not None and record.global_steps != model.global_steps:
        raise CheckpointError(
            f"{model.path}: was saved at step {model.global_steps}, the commit record at step {record.global_steps}. "
            "Files of two saves are mixed in this directory."
        )
    problems = compare_params(head.layout.params, layout.params, kind="parameter")
    if model.frozen is not None:
        problems += compare_params(model.frozen.params, live.frozen.params, kind="frozen parameter")
    if not weights_only:
        problems += _compare_groups(head, live)
    if problems:
        raise LayoutMismatchError(f"{tag_dir}: the checkpoint does not fit the model:", sorted(set(problems)))
    check_same_save(shards, head)

    plan = make_plan(head.layout, layout, rank)
    check_plan(plan)
    assert set(plan.source_ranks) <= set(shards)
    frozen_plan, pieces = _open_frozen(checkpoint, model, live)
    keys, scalars = _target_state(plan, head, live, weights_only=weights_only)
    batch = record.train_batch_size if record is not None else head.train_batch_size
    return Survey(
        checkpoint=checkpoint,
        format=head.format,
        model=model,
        shards=shards,
        head=head,
        plan=plan,
        frozen_plan=frozen_plan,
        frozen_pieces=pieces,
        tensor_keys=keys,
        scalars=scalars,
        train_batch_size=batch if batch is not None else configured_batch(head.ds_config, saved),
    )


def _open_frozen(
    checkpoint: Checkpoint, model: ModelStates, live: LiveState
) -> tuple[Plan | None, Mapping[int, Pieces]]:
    if model.frozen is None or not len(live.frozen.numel) or not live.frozen.numel.any():
        return None, {}
    sources = source_ranks(
        live.frozen.numel.tolist(),
        saved_world_size=checkpoint.world_size,
        world_size=live.frozen.world_size,
        rank=live.rank,
    )
    models = {source: checkpoint.model_states(source) for source in sources}
    layout = frozen_layouts({model.rank: model, **models})
    plan = make_plan(layout, live.frozen, live.rank)
    check_plan(plan)
    pieces = {source: states.frozen_pieces for source, states in models.items()}
    return plan, {source: piece for source, piece in pieces.items() if piece is not None}


def _compare_groups(head: Shard, live: LiveState) -> list[str]:
    if len(head.groups) != len(live.groups):
        return [f"the checkpoint has {len(head.groups)} optimizer groups and the run has {len(live.groups)}"]
    saved_group = {name: g for g, group in enumerate(head.groups) for name in group.params}
    return [
        f"parameter {name} is in optimizer group {saved_group[name]} of the checkpoint and in group {g} of the run"
        for g, names in enumerate(live.groups)
        for name in names
        if saved_group.get(name, g) != g
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
    plan: Plan, head: Shard, live: LiveState, *, weights_only: bool
) -> tuple[tuple[tuple[str, ...], ...], tuple[Mapping[str, ScalarValue], ...]]:
    """What each target sub-group gets, from the source sub-groups that its parameters come from."""
    index = head.layout.index()
    keys: list[tuple[str, ...]] = []
    scalars: list[Mapping[str, ScalarValue]] = []
    members: list[list[str]] = [[] for _ in range(live.layout.num_sub_groups)]
    for param, sub_group in zip(live.layout.params, live.layout.sub_group.tolist(), strict=True):
        members[sub_group].append(param.name)
    for names in members:
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
        keys.append((FP32,) if weights_only else head.tensor_keys[first])
        scalars.append({} if weights_only else head.scalars[first])
    return tuple(keys), tuple(scalars)


def _state_of(shard: Shard, sub_group: int) -> dict[str, str]:
    state = {key: f"{shard.pieces[key].dtype[sub_group]} tensor" for key in shard.tensor_keys[sub_group]}
    return state | {key: value.canonical() for key, value in shard.scalars[sub_group].items()}


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
