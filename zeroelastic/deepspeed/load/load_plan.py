"""The plan of a load: the save and the run compared, and which bytes each rank reads.

Nothing here waits for another rank, and nothing of the engine is changed. Headers are opened as they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from zeroelastic.checkpoint.commit_record import CommitRecord
from zeroelastic.checkpoint.contradictions import check_same_save, other_models, other_step
from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.model_states import ModuleHeader
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN, OptimizerHeader
from zeroelastic.checkpoint.param_changes import ParamDiff, ParamSet, compare, other_names
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Layout, Param, are_whole, in_own_buffers, unpacked_layout
from zeroelastic.core.plan import Plan, check_plan, make_plan
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.load.compare import check_optimizer, check_params, refuse_lost_state, saved_params
from zeroelastic.deepspeed.node_local.peers import ranks_taken, sources_by_size
from zeroelastic.deepspeed.options import LoadRequest
from zeroelastic.errors import CheckpointError, UnsupportedError, some
from zeroelastic.io.paths import FilePath


class TargetState(NamedTuple):
    """The optimizer state of one sub-group of the run: ``keys`` of tensors and scalars of saved sub-group ``source``.

    ``source`` is None if all parameters of the sub-group are new to the optimizer: then it gets no state.
    """

    source: int | None = None
    keys: tuple[str, ...] = ()
    scalars: Mapping[str, ScalarValue] = {}


class Move(NamedTuple):
    """A plan for parameters that the save or the run has frozen, with their saved state key and extents.

    If ``trains``, they go into master weights, each parameter into its own buffer; else into frozen parameters.
    """

    plan: Plan
    key: str
    extents: Mapping[int, Mapping[str, TensorExtents]]
    trains: bool

    @property
    def changes(self) -> bool:
        """Whether only the save, or only the run, trains the parameters."""
        return (self.key == FP32) != self.trains


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Everything that one rank loads into ``live``, as the ``request`` says; all of it is checked.

    ``model`` is the module states file this rank takes, ``head`` the first optimizer file. ``plan`` moves trained
    parameters, ``moves`` those that either side has frozen, and ``weights_plan`` the weights of the model from
    ``model``, where the master weights may not say what they are. ``states[i]`` is the state of target sub-group i.
    ``saved_frozen`` are in files or excluded from them; ``other_frozen`` are of another base model than the save's, and
    stay. ``checked_bytes`` were read for checksums alone. ``renamed`` has the saved name of each parameter that the
    model has under another one; every other field uses the saved names.
    """

    live: LiveOptimizer
    request: LoadRequest
    checkpoint: Checkpoint
    model: ModuleHeader
    shards: Mapping[int, OptimizerHeader]
    head: OptimizerHeader
    plan: Plan
    diff: ParamDiff
    saved_frozen: tuple[Param, ...]
    moves: tuple[Move, ...]
    weights_plan: Plan | None
    states: tuple[TargetState, ...]
    train_batch_size: int | None
    other_frozen: tuple[str, ...] = ()
    checked_bytes: int = 0
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """The layout of the saved trained parameters over all ranks."""
        return self.checkpoint.layout

    @property
    def tag_dir(self) -> FilePath:
        """The directory of the tag."""
        return self.checkpoint.tag_dir

    @property
    def record(self) -> CommitRecord | None:
        """The commit record of the tag."""
        return self.checkpoint.record

    @property
    def weights_only(self) -> bool:
        """Whether optimizer state, hyper-parameters and loss scale stay as the run has them."""
        return self.request.weights_only

    @property
    def keeps_frozen(self) -> bool:
        """Whether the run keeps its own frozen weights, because the save has their digests alone."""
        return bool(self.checkpoint.inventory.excluded())

    @property
    def has_hyper_parameters(self) -> bool:
        """Whether hyper-parameters were saved; DeepSpeed leaves them out at stages 1 and 2 with elastic_checkpoint."""
        groups = self.head.groups
        return not groups or any(group.options.keys() - {"step"} for group in groups)

    @property
    def reads_model(self) -> bool:
        """Whether this rank reads ``model`` itself, from a disk."""
        seen = self.checkpoint.inventory
        return seen.reads_headers or (seen.over_nodes and seen.reads(self.model.path.name))


def plan_load(checkpoint: Checkpoint, live: LiveOptimizer, request: LoadRequest) -> LoadPlan:
    """Compare a save with the run, and plan what this rank loads.

    Raises CheckpointError, LayoutMismatchError (every disagreement listed), UnsupportedError.
    """
    saved_as = checkpoint.inventory
    own, nearest = ranks_taken(checkpoint, live)
    model = checkpoint.model_states(own)
    needed = sources_by_size(checkpoint, live, live.layout) or (nearest,)
    shards = {source: checkpoint.shard(source) for source in needed}
    head = shards[needed[0]]
    checkpoint.require_committed(head)
    if (mixed := other_step(model, saved_as) or other_models(model, head, saved_as)) is not None:
        raise CheckpointError(mixed)
    saved = saved_params(checkpoint, live)
    current = ParamSet(live.whole.whole_tensors, live.whole_frozen.whole_tensors, tied=live.tied)
    diff = compare(saved, current, checkpoint.groups(head), live.groups)
    renamed = other_names(saved, current)
    if not renamed:  # else the caller compares again, with these names
        check_params(diff, saved, checkpoint, live, request)
    if not request.weights_only:
        check_optimizer(diff, head, live)
        if model.global_steps > 0:
            refuse_lost_state(head)
    plan = make_plan(checkpoint.layout, live.layout.only(set(diff.restored)), live.rank)
    check_plan(plan)
    newly_frozen = _planned(checkpoint.layout, live.frozen.only(set(diff.newly_frozen)), live.rank)
    for part in (plan, newly_frozen):
        shards |= {source: checkpoint.shard(source) for source in (part.source_ranks if part else ())}
    check_same_save(shards, head, saved_as, resizable=not request.weights_only)
    moves = _moves(checkpoint, live, diff, newly_frozen)
    try:
        states = target_state(diff, head, checkpoint.layout, live, weights_only=request.weights_only)
    except UnsupportedError:
        _refuse_values_of_ranks(checkpoint, head)
        raise
    return LoadPlan(
        live=live,
        request=request,
        checkpoint=checkpoint,
        model=model,
        shards=shards,
        head=head,
        plan=plan,
        diff=diff,
        saved_frozen=saved.frozen,
        moves=moves,
        weights_plan=_weights_plan(checkpoint, model, live, diff),
        states=states,
        train_batch_size=checkpoint.train_batch_size(head),
        renamed=renamed,
    )


def _refuse_values_of_ranks(checkpoint: Checkpoint, head: OptimizerHeader) -> None:
    """Raise UnsupportedError where saved ranks differ in values that the optimizer computes from a rank's own part.

    No sub_group_size keeps these apart. This rank may have opened one saved rank's file only: this compares another
    one's.
    """
    other = (head.rank + 1) % checkpoint.world_size
    with suppress(CheckpointError):
        check_same_save({other: checkpoint.shard(other)}, head, checkpoint.inventory)


def _planned(src: Layout, dst: Layout, rank: int) -> Plan | None:
    """A checked plan; None where there is nothing to plan for."""
    if not dst.num_params or not dst.numel.any():
        return None
    plan = make_plan(src, dst, rank)
    check_plan(plan)
    return plan


def _moves(checkpoint: Checkpoint, live: LiveOptimizer, diff: ParamDiff, newly_frozen: Plan | None) -> tuple[Move, ...]:
    """Plan the parameters that were frozen, and find where they and the ``newly_frozen`` ones are."""
    moves: list[Move] = []
    if newly_frozen is not None:
        weights = {source: checkpoint.extents(source) for source in newly_frozen.source_ranks}
        moves.append(Move(newly_frozen, FP32, weights, trains=False))
    frozen, extents = checkpoint.frozen.layout, dict[int, Mapping[str, TensorExtents]]()
    for dst, trains in (
        (in_own_buffers(live.layout.only(set(diff.unfrozen))), True),
        (live.frozen.only(set(diff.frozen)), False),
    ):
        plan = _planned(frozen, dst, live.rank)
        if plan is None:
            continue
        for source in plan.source_ranks:
            if source not in extents:
                extents[source] = {FROZEN: checkpoint.frozen_extents(source)}
        moves.append(Move(plan, FROZEN, extents, trains))
    return tuple(moves)


def _weights_plan(checkpoint: Checkpoint, model: ModuleHeader, live: LiveOptimizer, diff: ParamDiff) -> Plan | None:
    """Plan weights of the model that may not be the master weights, cast; None where those are made.

    DeepSpeed loads the weights at stages 1 and 2 from the file of the whole module. A commit record says whether they
    differ; where that is not known they are taken if possible. Raises UnsupportedError where they differ and cannot be
    taken.
    """
    own_weights = checkpoint.inventory.own_weights
    if not checkpoint.whole_model or own_weights is False:
        return None
    src, dst = checkpoint.layout, live.layout.only(set(diff.restored))
    params = [param for param in src.params if param.name in diff.restored]
    places, weights = model.weight_places, [live.weights(i) for i in set(dst.sub_group.tolist())]
    saved = {places[param.name][0] if param.name in places else "unknown" for param in params}
    current = {"none" if weight is None else str(weight.dtype).removeprefix("torch.") for weight in weights}
    if are_whole(src, dst) and len(saved) <= 1 and saved == current:
        return _planned(unpacked_layout(params, 1), dst, live.rank)
    if not own_weights:
        return None
    raise UnsupportedError(
        f"{model.path}: the weights of the model ({some(sorted(saved))}) differed from the master weights when this "
        "was saved, as with a schedule-free optimizer in eval(). This run has no place for them: it is at stage 3, or "
        f"has slices of experts or of tensor parallelism, or another dtype ({some(sorted(current))}). Resume at stage "
        "1 or 2 with the same precision, train a step, and save."
    )


def target_state(
    diff: ParamDiff, head: OptimizerHeader, layout: Layout, live: LiveOptimizer, *, weights_only: bool
) -> tuple[TargetState, ...]:
    """Choose for each sub-group of the run the saved sub-group whose optimizer state it gets.

    Sub-groups have the same numbers on all saved ranks; ``layout`` has parameters that ``head`` lacks. Raises
    UnsupportedError for a sub-group whose parameters were saved with different optimizer state.
    """
    restored = set(diff.restored)
    saved_in = {param.name: i for param, i in zip(layout.params, layout.sub_group.tolist(), strict=True)}
    if layout is not head.layout:
        saved_in |= {param.name: i for param, i in zip(head.layout.params, head.layout.sub_group.tolist(), strict=True)}
    members: list[list[str]] = [[] for _ in range(live.layout.num_sub_groups)]
    for param, sub_group in zip(live.layout.params, live.layout.sub_group.tolist(), strict=True):
        if param.name in restored:
            members[sub_group].append(param.name)
    found: list[TargetState] = []
    for i, names in enumerate(members):
        if not names:
            found.append(TargetState())
            continue
        first = saved_in[names[0]]
        if weights_only:
            found.append(TargetState(first, (FP32,)))
            continue
        want = _state_of(head, first)
        for name in names[1:]:
            other = saved_in[name]
            if other != first and _state_of(head, other) != want:
                advice = (
                    "Choose a" if live.per_param else "Each has one state at stages 1 and 2: resume at stage 3, with a"
                )
                raise UnsupportedError(
                    f"{head.path}: parameters {names[0]} and {name} share {live.buffer_kind} {i} in this run but were "
                    f"saved with different optimizer state ({_difference(want, _state_of(head, other))}). "
                    f"{advice} sub_group_size that keeps them apart."
                )
        scalars = {
            key: live.live_form(i, key, value, f"{head.path}: optimizer state {key!r}")
            for key, value in head.scalars[first].items()
        }
        found.append(TargetState(first, head.tensor_keys[first], scalars))
    return tuple(found)


def _state_of(shard: OptimizerHeader, sub_group: int) -> dict[str, str]:
    state = {key: f"{shard.extents[key].dtype[sub_group]} tensor" for key in shard.tensor_keys[sub_group]}
    return state | {key: value.number() for key, value in shard.scalars[sub_group].items()}


def _difference(left: Mapping[str, str], right: Mapping[str, str]) -> str:
    keys = sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
    return ", ".join(f"{key}: {left.get(key, 'none')} and {right.get(key, 'none')}" for key in keys)
