"""Everything that is checked before a load touches a tensor: files, headers, layout, and agreement of all ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from zeroelastic.checkpoint.commit_record import CheckpointFormat, excluded_from
from zeroelastic.checkpoint.contradictions import (
    VALUE_FACTS,
    check_same_save,
    not_committed,
    other_models,
    other_step,
    shard_facts,
    shard_values,
    values_sentence,
)
from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.model_states import ModelStates
from zeroelastic.checkpoint.module_weights import SAMPLE, ComparedWeights, compare_weights, other_weights
from zeroelastic.checkpoint.open import Checkpoint, open_checkpoint
from zeroelastic.checkpoint.optimizer_file import FP32, Shard, configured_batch
from zeroelastic.checkpoint.param_changes import Membership, ParamSet, compare, other_names, wrapper_advice
from zeroelastic.checkpoint.saved_state import trained_part
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Layout, Param, in_own_buffers, unpacked_layout
from zeroelastic.core.plan import Plan, check_plan, make_plan, source_ranks
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.optimizers import SavedGroup, misfits
from zeroelastic.deepspeed.load.saved_copies import refuse_other_copies
from zeroelastic.deepspeed.node_local.peer_checkpoint import has_closed_form, open_with_peers, ranks_taken
from zeroelastic.deepspeed.node_local.visibility import FileVisibility, gather_visibility, stat_assigned_files
from zeroelastic.deepspeed.options import LoadRequest
from zeroelastic.distributed.collective import all_gather, all_gather_of_or_raise
from zeroelastic.errors import CheckpointError, LayoutMismatchError, MissingFileError, UnsupportedError, some
from zeroelastic.executors.dispatch import Executor
from zeroelastic.io.paths import FilePath, RemotePath
from zeroelastic.torch_file.graph import entry
from zeroelastic.torch_file.zip_check import check_archive


class TargetState(NamedTuple):
    """What one sub-group of the run gets: ``keys`` of tensors and scalars, like those of saved sub-group ``source``.

    ``source`` is None if all parameters of the sub-group are new to the optimizer: then it gets nothing.
    """

    source: int | None = None
    keys: tuple[str, ...] = ()
    scalars: Mapping[str, ScalarValue] = {}


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What one rank is going to load, all of it checked.

    ``model`` is the module states file this rank takes, and ``head`` the first optimizer file; ``layout`` is that of
    the saved trained parameters over all ranks, ``saved_frozen`` are the frozen ones, whether files have them or not.
    ``plan`` moves trained parameters, ``frozen_plan`` frozen ones (None when there are none to restore).
    ``unfrozen_plan`` moves what was frozen and is trained now, each parameter to a buffer of its own, which is its part
    of the master weights; ``newly_frozen_plan`` the other way. ``states[i]`` is what target sub-group i gets.
    ``weights_plan`` moves the weights of the model from ``model``, where the master weights may not say what they are.
    ``visibility`` says which rank sees which file; None where every rank sees all of them. ``other_frozen`` are the
    frozen parameters of another base model than the save's, which the run keeps. ``checked_bytes`` were read for
    checksums alone. ``renamed`` has the saved name of each parameter that has another one in the model: all else here
    goes by the saved ones, once they are known.
    """

    checkpoint: Checkpoint
    format: CheckpointFormat
    model: ModelStates
    shards: Mapping[int, Shard]
    head: Shard
    layout: Layout
    plan: Plan
    membership: Membership
    saved_frozen: tuple[Param, ...]
    frozen_plan: Plan | None
    unfrozen_plan: Plan | None
    newly_frozen_plan: Plan | None
    weights_plan: Plan | None
    frozen_extents: Mapping[int, TensorExtents]
    states: tuple[TargetState, ...]
    train_batch_size: int | None
    visibility: FileVisibility | None = None
    other_frozen: tuple[str, ...] = ()
    checked_bytes: int = 0
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def keeps_frozen(self) -> bool:
        """Whether the run keeps its own frozen weights, because the save has their digests alone."""
        return bool(excluded_from(self.checkpoint.record))

    @property
    def reads_all_locally(self) -> bool:
        """Whether this rank reads all payload of its own state itself."""
        return self.visibility is None or self.visibility.in_store

    @property
    def reads_model_elsewhere(self) -> bool:
        """Whether ``model`` is behind a URL, or on a disk that only other ranks see."""
        return isinstance(self.model.path, RemotePath) or self.model.path.name in self.checkpoint.remote_files


ConsistencyDigest = tuple[tuple[str, str], ...]
"""Facts that every rank must have read alike: (what, a hash of it)."""

_TP_RANK = "tensor parallel rank"
_SHARED_FACTS = ("format", "save id", "world size", "global step", "commit record")
"""The facts that opaque tensor parallel ranks share; the others are about slices, of which each has its own."""


def preflight(
    tag_dir: FilePath,
    live: LiveOptimizer,
    request: LoadRequest,
    check_values: Callable[[ModelStates], None],
) -> LoadPlan:
    """Open what this rank needs, check it against the model, and compare with the other ranks. Collective.

    A load of weights only leaves optimizer groups and state out of the comparison. Of the options, ``on_mismatch``
    says what to do about parameters that only the save or only the run has, ``verify`` how closely files are checked.
    A strict load of the module refuses a save that lacks frozen parameters of the run, unless ``on_mismatch`` is
    "initialize". ``check_values`` raises where the run cannot take the values of the module states. Raises the
    same error on every rank: CheckpointError, LayoutMismatchError (every disagreement listed), UnsupportedError.
    """
    options = request.options
    compare_directories = options.verify != "off"
    visibility: FileVisibility | None = None
    found = gather_visibility(tag_dir, live.tp)
    if isinstance(found, FileVisibility):
        visibility = found
        opened = open_with_peers(found, live, compare_directories=compare_directories)

    def open_here() -> Checkpoint:
        if isinstance(found, FileVisibility):
            return opened
        return open_checkpoint(
            tag_dir,
            near_rank=live.rank,
            tp=live.tp,
            listing=stat_assigned_files(tag_dir, found),
            compare_directories=compare_directories,
        )

    def check() -> LoadPlan:
        plan = _open(open_here(), visibility, live, request)
        check_values(plan.model)
        return _with_checksums(plan, options.host_io_engine) if options.verifies_content else plan

    plan, digests = all_gather_of_or_raise(
        check, lambda plan: _consistency_digest(plan, weights_only=request.weights_only)
    )
    _check_consistent(tag_dir, digests, plan)
    tensor_size = plan.checkpoint.topology.tensor_size
    if plan.checkpoint.record is None and tensor_size not in (1, live.topology.tensor_size):
        keys = sorted({key for own in plan.head.tensor_keys for key in own})
        device = next(live.module.parameters()).device
        refuse_other_copies(plan.checkpoint, plan.visibility, keys=keys, device=device)
    if plan.checkpoint.record is None and plan.checkpoint.whole_model and options.verifies_content:
        _refuse_other_weights(plan)
    return plan


def _refuse_other_weights(plan: LoadPlan) -> None:
    """Raise CheckpointError where the weights of the module are those of another save than the optimizer's. Collective.

    Each rank compares a sample of each parameter in the files that it reads.
    """
    is_remote = plan.checkpoint.remote_files.__contains__

    def compare() -> ComparedWeights:
        if plan.model.save_id is not None or plan.reads_model_elsewhere:
            return ComparedWeights()
        shards = {rank: shard for rank, shard in plan.shards.items() if not is_remote(shard.path.name)}
        return compare_weights(trained_part(shards, plan.head, plan.layout), shards, plan.model, sample=SAMPLE)

    _, found = all_gather_of_or_raise(compare, tuple)
    compared, differing = (frozenset().union(*names) for names in zip(*found, strict=True))
    if (mixed := other_weights(plan.model, plan.head, ComparedWeights(compared, differing))) is not None:
        raise CheckpointError(mixed)


def _check_consistent(tag_dir: FilePath, digests: Sequence[ConsistencyDigest], own: LoadPlan) -> None:
    """Raise CheckpointError where two ranks read files of different saves; ``digests`` are by rank.

    UnsupportedError where they differ in values of the optimizer that follow from a rank's part. Collective.
    """
    first_of: dict[str, int] = {}  # the first rank of each opaque tensor parallel rank, whose slices are its own
    for rank, digest in enumerate(digests):
        facts = dict(digest)
        first = first_of.setdefault(facts[_TP_RANK], rank)
        for other, compared in ((first, facts.keys()), (0, _SHARED_FACTS)):
            theirs = dict(digests[other])
            mixed = [fact for fact in theirs if fact in compared and facts.get(fact) != theirs[fact]]
            if mixed and VALUE_FACTS.issuperset(mixed) and own.checkpoint.record is None:  # which all ranks found
                values = all_gather((own.checkpoint.tp.rank, own.head.rank, shard_values(own.head)))
                sentence = values_sentence([(saved, found) for tp, saved, found in values if tp == values[rank][0]])
                if sentence is not None:
                    raise UnsupportedError(f"{tag_dir}: {sentence}")
            if mixed:
                raise CheckpointError(
                    f"{tag_dir}: ranks {other} and {rank} read files that differ in {', '.join(mixed)}. Files of two "
                    "saves are mixed in this directory."
                )


def _open(
    checkpoint: Checkpoint,
    visibility: FileVisibility | None,
    live: LiveOptimizer,
    request: LoadRequest,
) -> LoadPlan:
    rank, tag_dir = live.rank, checkpoint.tag_dir
    own, nearest = ranks_taken(checkpoint, live)
    model = checkpoint.model_states(own)
    needed: tuple[int, ...] = ()
    if has_closed_form(checkpoint, live):  # else only the plan says which ranks hold a parameter
        numels = live.layout.numel.tolist()
        saved, current = checkpoint.world_size, live.layout.world_size
        needed = source_ranks(numels, saved_world_size=saved, world_size=current, rank=rank)
    needed = needed or (nearest,)
    shards = {source: checkpoint.shard(source) for source in needed}
    head = shards[needed[0]]
    layout, frozen, groups = checkpoint.layout, checkpoint.frozen_layout, checkpoint.groups(head)
    record = checkpoint.record
    if (missing := not_committed(head, record)) is not None:
        raise MissingFileError(missing)
    if (mixed := other_step(model, record) or other_models(model, head, record)) is not None:
        raise CheckpointError(mixed)
    frozen_params = None if frozen is None else frozen.whole_tensors
    if frozen_params and checkpoint.whole_model:
        frozen_params = _without_buffers(frozen_params, live.module)
    excluded = excluded_from(record)
    if excluded:
        frozen_params = tuple(content.param for content in excluded if content.tp_rank == live.tp.rank)
    tied = _tied_names(checkpoint, visibility, layout, live)
    listed = ParamSet(layout.whole_tensors, frozen_params, has_frozen=not excluded, tied=tied)
    own_params = ParamSet(live.whole.whole_tensors, live.whole_frozen.whole_tensors, tied=live.tied)
    membership = compare(listed, own_params, groups, live.groups)
    renamed = other_names(listed, own_params)
    wrapped = None
    if membership.dropped:
        saved_names = [*layout.index(), *(param.name for param in frozen_params or ())]
        wrapped = wrapper_advice(saved_names, [*live.whole.index(), *live.whole_frozen.index()])
    if not renamed:  # else the caller checks again, with these names
        _check_membership(membership, request, checkpoint, live, wrapped)
    if not request.weights_only:
        _check_optimizer(membership, head, live, tag_dir)
        if model.global_steps > 0:
            refuse_lost_state(head)
    plan = make_plan(layout, live.layout.only(set(membership.restored)), rank)
    check_plan(plan)
    newly_frozen = _planned(layout, live.frozen.only(set(membership.newly_frozen)), rank)
    for part in (plan, newly_frozen):
        shards |= {source: checkpoint.shard(source) for source in (part.source_ranks if part else ())}
    check_same_save(shards, head, recorded=record is not None, resizable=not request.weights_only)
    frozen_plan, unfrozen_plan, extents = _open_frozen(checkpoint, frozen, live, membership)
    try:
        states = target_state(membership, head, layout, live, weights_only=request.weights_only)
    except UnsupportedError:
        if record is None:
            _refuse_values_of_ranks(checkpoint, head)
        raise
    batch = record.train_batch_size if record is not None else head.train_batch_size
    return LoadPlan(
        checkpoint=checkpoint,
        format=head.format,
        model=model,
        shards=shards,
        head=head,
        layout=layout,
        plan=plan,
        membership=membership,
        saved_frozen=frozen_params or (),
        frozen_plan=frozen_plan,
        unfrozen_plan=unfrozen_plan,
        newly_frozen_plan=newly_frozen,
        weights_plan=_weights_plan(checkpoint, model, live, membership),
        frozen_extents=extents,
        states=states,
        train_batch_size=batch
        if batch is not None
        else configured_batch(head.ds_config, checkpoint.topology.data_size),
        visibility=visibility,
        renamed=renamed,
    )


def _tied_names(
    checkpoint: Checkpoint, visibility: FileVisibility | None, layout: Layout, live: LiveOptimizer
) -> Mapping[str, str]:
    """Return the further names of saved parameters, which at stage 3 rank 0 alone lists; looked up where names differ.

    All ranks have to find the same ones.
    """
    differs = not live.whole.index().keys() <= layout.index().keys()
    all_see = checkpoint.whole_model or visibility is None
    return checkpoint.model_states(0).tied if differs and all_see and not live.sharing.has_slices else {}


def _without_buffers(frozen: Sequence[Param], module: torch.nn.Module) -> tuple[Param, ...]:
    """The frozen parameters of a file of the whole module, without what is a buffer of the run.

    DeepSpeed's list of buffers lacks some (``all_buffer_names``); its load of the module restores them all.
    """
    params = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    others: Collection[str] = ()
    if not params.issuperset(param.name for param in frozen):
        with torch.no_grad():
            others = module.state_dict().keys() - params
    return tuple(param for param in frozen if param.name not in others)


def _refuse_values_of_ranks(checkpoint: Checkpoint, head: Shard) -> None:
    """Raise UnsupportedError where saved ranks differ in values that the optimizer computes from a rank's own part.

    A sub_group_size does not keep these apart. This rank may have opened the file of one saved rank only: here is
    another one's, where it is readable.
    """
    other = (head.rank + 1) % checkpoint.world_size
    with suppress(CheckpointError):
        check_same_save({other: checkpoint.shard(other)}, head, recorded=False)


def _with_checksums(load_plan: LoadPlan, executor: Executor) -> LoadPlan:
    """The same, when all that has no digest is what its checksums say, in every file that this rank uses or reads."""
    checkpoint, visibility = load_plan.checkpoint, load_plan.visibility
    shards, models = dict(load_plan.shards), {load_plan.model.rank: load_plan.model}
    if visibility is not None:  # what this rank reads for others, too
        shards |= {rank: checkpoint.shard(rank) for rank in _read_here(checkpoint.optim_files, visibility)}
        models |= {rank: checkpoint.model_states(rank) for rank in _read_here(checkpoint.model_files, visibility)}
    own_weights = checkpoint.record is not None and checkpoint.record.own_weights  # which no digest is of
    parts = {
        model.path: (
            model.size,
            [
                np.array([at for at, _ in model.fragments()], dtype=np.int64),
                model.weights[: 0 if own_weights else None, 0],
            ],
        )
        for model in models.values()
    }
    for shard in shards.values():
        parts[shard.path] = (shard.size, [extents.offset for extents in shard.extents.values()])
    nbytes = 0
    for path, (size, places) in parts.items():
        if path.name not in checkpoint.remote_files:
            with nullcontext() if visibility is None else visibility.named_in_errors(path):
                nbytes += check_archive(path, size, digested=np.concatenate(places), executor=executor)
    return replace(load_plan, checked_bytes=nbytes)


def _read_here(paths: Sequence[FilePath], visibility: FileVisibility) -> list[int]:
    return [rank for rank, path in enumerate(paths) if visibility.reader(path.name) == visibility.rank]


def refuse_lost_state(head: Shard) -> None:
    """Raise UnsupportedError for DeepSpeed's own file of a run with partial offload, which lacks state.

    It is that of the sub-groups that the GPU stepped.
    """
    ratio = entry(head.ds_config, "zero_optimization", "offload_optimizer", "ratio")
    without = sum(keys == (FP32,) for keys in head.tensor_keys)
    if head.format == "rigid" and ratio not in (None, 1.0) and without:
        raise UnsupportedError(
            f"{head.path}: was saved by DeepSpeed alone from a run with partial optimizer offload (ratio {ratio}), and "
            f"lacks the optimizer state of the {without} of {len(head.tensor_keys)} sub-groups that the GPU stepped. "
            "Save such runs with elastic_checkpoint on. load_checkpoint(load_optimizer_states=False) takes the weights."
        )


def _check_membership(
    membership: Membership, request: LoadRequest, checkpoint: Checkpoint, live: LiveOptimizer, wrapped: str | None
) -> None:
    """Raise LayoutMismatchError, listing everything that differs and is not allowed to.

    Whatever ``on_mismatch`` says, names that differ because one side was ``wrapped`` (``wrapper_advice``) are an error,
    and so is a load that would restore nothing that is trained.
    """
    tag_dir, record = checkpoint.tag_dir, checkpoint.record
    excluded_by = None if record is None else record.excluded_by
    problems = [*membership.reshaped]
    strict = request.options.on_mismatch == "error"
    if not strict and wrapped is None and not membership.restores(weights_only=request.weights_only):
        raise LayoutMismatchError(
            f"{tag_dir}: no trained parameter of the model is in the checkpoint: nothing would be resumed, and the "
            "run would go on from the weights that it has:",
            sorted(dict.fromkeys(membership.problems)),
        )
    if strict or wrapped is not None:
        compares_frozen = request.strict_module or excluded_by == "option"
        tolerated = {*(() if compares_frozen else membership.frozen_problems)}
        tolerated |= set() if live.trains else {*membership.moved}
        problems += [problem for problem in membership.problems if problem not in tolerated]
        problems += membership.group_problems if not request.weights_only else ()
    if strict and request.strict_module and not excluded_from(record):
        shapes = {param.name: list(param.shape) for param in live.whole_frozen.whole_tensors}
        # DeepSpeed leaves the entry of what requires a gradient in the save; without elements that is all of it.
        whole_name = live.sharing.whole_name
        requires_grad = {whole_name(name): param.requires_grad for name, param in live.module.named_parameters()}
        problems += [
            f"frozen parameter {name} {shapes[name]} is not in the checkpoint, which was saved without frozen "
            "parameters: load_module_strict=False keeps the run's own"
            for name in membership.excluded
            if math.prod(shapes[name]) or not requires_grad.get(name, False)
        ]
    if not problems:
        return
    advice = ""
    if wrapped is not None:
        advice = f" ({wrapped})"
    elif set(problems) <= {*membership.problems, *membership.group_problems} - set(membership.reshaped):
        advice = ' ("on_mismatch": "initialize" in the "zeroelastic" block restores what both have and names the rest)'
    raise LayoutMismatchError(
        f"{tag_dir}: the checkpoint does not fit the model{advice}:", sorted(dict.fromkeys(problems))
    )


def _check_optimizer(membership: Membership, head: Shard, live: LiveOptimizer, tag_dir: FilePath) -> None:
    """Raise where the run's optimizer cannot continue from the saved state of its parameters.

    UnsupportedError if Muon would continue from the state of Adam, or the other way, else LayoutMismatchError.
    """
    for g, match in enumerate(membership.groups):
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
    taken = [(g, groups[s]) for g, match in enumerate(membership.groups) for s in match.shared]
    problems = misfits(taken, live.base)
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
    checkpoint: Checkpoint, frozen: Layout | None, live: LiveOptimizer, membership: Membership
) -> tuple[Plan | None, Plan | None, Mapping[int, TensorExtents]]:
    """The plans for what was ``frozen``, and where it is."""
    if frozen is None:
        return None, None, {}
    unfrozen = set(membership.unfrozen)
    own_buffers = in_own_buffers(live.layout.only(unfrozen))
    plans = (
        _planned(frozen, live.frozen.only(set(membership.frozen)), live.rank),
        _planned(frozen, own_buffers, live.rank),
    )
    extents: dict[int, TensorExtents] = {}
    for source in sorted({source for plan in plans if plan for source in plan.source_ranks}):
        piece = checkpoint.frozen_extents(source)
        assert piece is not None, "a rank that a plan names has parts"
        extents[source] = piece
    return *plans, extents


def _weights_plan(
    checkpoint: Checkpoint, model: ModelStates, live: LiveOptimizer, membership: Membership
) -> Plan | None:
    """The plan for weights of the model that may not be the master weights, cast; None where those are made.

    DeepSpeed loads the weights at stages 1 and 2 from the file of the whole module. A commit record says whether they
    differ; where that is not known they are taken if that is possible. Raises UnsupportedError where it is not possible
    and they differ.
    """
    record = checkpoint.record
    if not checkpoint.whole_model or (record is not None and record.own_weights is False):
        return None
    src, dst = checkpoint.layout, live.layout.only(set(membership.restored))
    params = [param for param in src.params if param.name in membership.restored]
    places, weights = model.weight_places, [live.weights(i) for i in set(dst.sub_group.tolist())]
    saved = {places[param.name][0] if param.name in places else "unknown" for param in params}
    current = {"none" if weight is None else str(weight.dtype).removeprefix("torch.") for weight in weights}
    if src.slices is None and dst.slices is None and len(saved) <= 1 and saved == current:
        return _planned(unpacked_layout(params, 1), dst, live.rank)
    if record is None or not record.own_weights:
        return None
    raise UnsupportedError(
        f"{model.path}: the weights of the model ({some(sorted(saved))}) were not the master weights when this was "
        "saved, as those of a schedule-free optimizer in eval() are not, and this run has no place for them: stage 3, "
        f"slices of experts or of tensor parallelism, or another dtype ({some(sorted(current))}). Resume at stage 1 or "
        "2 with the same precision, train a step, and save."
    )


def saved_groups(head: Shard) -> list[SavedGroup]:
    """What the checkpoint says of each optimizer group, with the state keys of all its sub-groups."""
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


def _consistency_digest(load_plan: LoadPlan, *, weights_only: bool) -> ConsistencyDigest:
    facts = shard_facts(load_plan.head)
    if weights_only:
        facts = {what: facts[what] for what in ("format", "save id", "parameters", "sub-groups")}
    facts[_TP_RANK] = str(load_plan.checkpoint.tp.rank)
    facts["world size"] = str(load_plan.checkpoint.world_size)
    facts["global step"] = str(load_plan.model.global_steps)
    frozen = load_plan.checkpoint.frozen_layout
    facts["frozen parameters"] = repr(None if frozen is None else frozen.whole_tensors)
    record = load_plan.checkpoint.record
    facts["commit record"] = "none" if record is None else record.save_id + record.content_root
    return tuple((what, hashlib.sha256(text.encode()).hexdigest()) for what, text in facts.items())


def target_state(
    membership: Membership, head: Shard, layout: Layout, live: LiveOptimizer, *, weights_only: bool
) -> tuple[TargetState, ...]:
    """What each sub-group of the run gets, from the saved sub-groups that its restored parameters come from.

    Sub-groups have the same numbers on all saved ranks, whose ``layout`` has parameters that ``head`` has not.
    Raises UnsupportedError where these were saved with different optimizer state.
    """
    restored = set(membership.restored)
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


def _state_of(shard: Shard, sub_group: int) -> dict[str, str]:
    state = {key: f"{shard.extents[key].dtype[sub_group]} tensor" for key in shard.tensor_keys[sub_group]}
    return state | {key: value.number() for key, value in shard.scalars[sub_group].items()}


def _difference(left: Mapping[str, str], right: Mapping[str, str]) -> str:
    keys = sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
    return ", ".join(f"{key}: {left.get(key, 'none')} and {right.get(key, 'none')}" for key in keys)
