"""Everything that is checked before a load touches a tensor: files, headers, layout, and agreement of all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from zeroelastic.checkpoint.contradictions import only_values, shard_facts, shard_values, values_sentence
from zeroelastic.checkpoint.open import Checkpoint, open_checkpoint
from zeroelastic.checkpoint.optimizer_file import FROZEN
from zeroelastic.checkpoint.param_changes import renamed_base_weights
from zeroelastic.checkpoint.saved_state import SAMPLE, ComparedWeights, compare_weights, other_weights, trained_part
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.digests import frozen_digests, gather_over_tp
from zeroelastic.deepspeed.live.kinds import covered_live
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.load.compare import buffer_problems, value_problems
from zeroelastic.deepspeed.load.load_plan import LoadPlan, plan_load
from zeroelastic.deepspeed.load.notes import LOAD_BASE_FIRST, other_base
from zeroelastic.deepspeed.load.saved_copies import check_tp_replicas
from zeroelastic.deepspeed.node_local.peers import receive_headers
from zeroelastic.deepspeed.node_local.visibility import gather_inventory, stat_assigned_files
from zeroelastic.deepspeed.options import LoadRequest
from zeroelastic.distributed.collective import all_gather, all_gather_of_or_raise, all_or_raise
from zeroelastic.errors import (
    CheckpointError,
    LayoutMismatchError,
    StrictError,
    UndescribedSlicesError,
    UnsupportedError,
)
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.zip_check import check_archive

ConsistencyDigest = tuple[tuple[str, str], ...]
"""Facts that every rank must have read alike: (what, a hash of it)."""

_TP_RANK = "tensor parallel rank"
_SHARED_FACTS = ("format", "save id", "world size", "global step", "commit record")
"""The facts that opaque tensor parallel ranks share; the others are about slices, of which each has its own."""


def preflight(engine: Engine, live: LiveOptimizer, request: LoadRequest, tag_dir: FilePath) -> LoadPlan:
    """Open what this rank needs, check it against the model, and compare with the other ranks. Collective.

    Slices that the files do not describe go into the slices of the same ranks. Weights that an adapter has renamed, or
    that are tied, go to their present names. Nothing of the engine is changed. Raises the same error on every rank:
    CheckpointError, LayoutMismatchError, UnsupportedError.
    """
    try:
        plan = _check(engine, live, request, tag_dir)
    except UndescribedSlicesError:
        if live.topology.tensor_size == 1 or not live.per_param:
            raise
        plan = _check(engine, covered_live(engine, engine.optimizer, opaque=True), request, tag_dir)
    renamed = plan.renamed or _renamed(plan)
    if renamed:  # alike on all ranks
        live = covered_live(engine, engine.optimizer, opaque=plan.live.tp.size > 1, renamed=renamed)
        plan = replace(_check(engine, live, request, tag_dir), renamed=renamed)
    return replace(plan, other_frozen=_other_frozen(plan))


def _check(engine: Engine, live: LiveOptimizer, request: LoadRequest, tag_dir: FilePath) -> LoadPlan:
    """Open, plan and compare with a live state as it is. Collective."""
    inventory = gather_inventory(tag_dir)

    def open_here() -> Checkpoint:
        return open_checkpoint(
            tag_dir,
            near_rank=live.rank,
            tp=live.tp,
            inventory=stat_assigned_files(tag_dir, inventory),
            compare_directories=request.options.verify != "off",
        )

    received = None if inventory.reads_headers else receive_headers(all_or_raise(open_here), live)

    def check() -> LoadPlan:
        plan = plan_load(received or open_here(), live, request)
        _check_loaded_values(engine, plan)
        return replace(plan, checked_bytes=_check_checksums(plan)) if request.options.verifies_content else plan

    plan, digests = all_gather_of_or_raise(check, _consistency_digest)
    _check_consistent(digests, plan)
    if not plan.checkpoint.inventory.is_recorded:
        _check_unrecorded(plan)
    return plan


def _check_loaded_values(engine: Engine, plan: LoadPlan) -> None:
    """Raise LayoutMismatchError, naming the file and every value that the run cannot take from it."""
    model, request, problems = plan.model, plan.request, list[str]()
    if request.custom_load_fn is None:
        problems += buffer_problems(engine.module, model)
    if not request.load_module_only:
        problems += value_problems(engine, model, with_scheduler=request.load_lr_scheduler_states)
    if problems:
        raise LayoutMismatchError(f"{model.path}: cannot be loaded into this run:", problems)


def _check_unrecorded(plan: LoadPlan) -> None:
    """Compare in the files what a save with a commit record has compared. Collective."""
    if plan.checkpoint.topology.tensor_size not in (1, plan.live.topology.tensor_size):
        check_tp_replicas(plan.checkpoint, keys=sorted({key for own in plan.head.tensor_keys for key in own}))
    if plan.checkpoint.whole_model and plan.request.options.verifies_content:
        _refuse_other_weights(plan)


def _other_frozen(plan: LoadPlan) -> tuple[str, ...]:
    """Return the names of frozen parameters that differ from the save, which has only their digests. Collective.

    Raises LayoutMismatchError where the save was made with ``"frozen": "exclude"``, or the module is loaded strictly;
    StrictError under ``"strict": true``.
    """
    if not plan.keeps_frozen:
        return ()
    live, request, saved = plan.live, plan.request, plan.checkpoint.inventory
    recorded = {
        content.param.name: (content.param.shape, *content.tensors[FROZEN])
        for content in saved.excluded()
        if content.tp_rank == live.tp.rank
    }
    found = frozen_digests(live)
    own = [name for name in plan.diff.excluded if found[name] != recorded[name]]
    others = tuple(sorted({name for names in gather_over_tp(live, own) for name in names}))
    if not others:
        return ()
    what = f"{plan.tag_dir}: {other_base(others, saved)}. {LOAD_BASE_FIRST}"
    advice = "pass load_module_strict=False to keep the run's own"
    if saved.excluded_by == "option":
        advice = 'save with "frozen": "include" to have frozen weights in the checkpoint'
    if saved.excluded_by == "option" or (request.strict_module and request.options.on_mismatch == "error"):
        shapes = {tensor.name: list(tensor.shape) for tensor in live.whole_frozen.whole_tensors}
        raise LayoutMismatchError(
            f"{what}; or {advice}:", [f"frozen parameter {name} {shapes.get(name, '')}" for name in others]
        )
    if request.options.strict:
        raise StrictError(f'{what}. Or set "strict": false in the "zeroelastic" block to keep the run\'s own.')
    return others


def _renamed(plan: LoadPlan) -> dict[str, str]:
    """Return the saved name of each frozen weight that PEFT has given another one since."""
    frozen, diff, live = plan.saved_frozen, plan.diff, plan.live
    if not (diff.dropped and diff.added_frozen) or live.sharing.has_slices:
        return {}
    return renamed_base_weights(
        saved_frozen={param.name: param.shape for param in frozen},
        live_frozen={param.name: param.shape for param in live.whole_frozen.params},
        saved=[*plan.layout.index(), *(param.name for param in frozen)],
        live=[*live.whole.index(), *live.whole_frozen.index()],
    )


def _refuse_other_weights(plan: LoadPlan) -> None:
    """Raise CheckpointError where the weights of the module and the optimizer are of two saves. Collective.

    Each rank compares a sample of each parameter in the files that it reads.
    """
    reads = plan.checkpoint.inventory.reads

    def compare() -> ComparedWeights:
        if plan.model.save_id is not None or not plan.reads_model:
            return ComparedWeights()
        shards = {rank: shard for rank, shard in plan.shards.items() if reads(shard.path.name)}
        return compare_weights(trained_part(shards, plan.head, plan.layout), shards, plan.model, sample=SAMPLE)

    _, found = all_gather_of_or_raise(compare, tuple)
    compared, differing = (frozenset().union(*names) for names in zip(*found, strict=True))
    if (mixed := other_weights(plan.model, plan.head, ComparedWeights(compared, differing))) is not None:
        raise CheckpointError(mixed)


def _check_consistent(digests: Sequence[ConsistencyDigest], own: LoadPlan) -> None:
    """Raise CheckpointError where two ranks read files of different saves; ``digests`` are by rank. Collective.

    Raises UnsupportedError where they differ in values of the optimizer that follow from a rank's part.
    """
    first_of: dict[str, int] = {}  # the first rank of each opaque tensor parallel rank, whose slices are its own
    for rank, digest in enumerate(digests):
        facts = dict(digest)
        first = first_of.setdefault(facts[_TP_RANK], rank)
        for other, compared in ((first, facts.keys()), (0, _SHARED_FACTS)):
            theirs = dict(digests[other])
            mixed = [fact for fact in theirs if fact in compared and facts.get(fact) != theirs[fact]]
            if mixed and only_values(mixed, own.checkpoint.inventory):  # which all ranks found
                values = all_gather((own.checkpoint.tp.rank, own.head.rank, shard_values(own.head)))
                sentence = values_sentence([(saved, found) for tp, saved, found in values if tp == values[rank][0]])
                if sentence is not None:
                    raise UnsupportedError(f"{own.tag_dir}: {sentence}")
            if mixed:
                raise CheckpointError(
                    f"{own.tag_dir}: ranks {other} and {rank} read files that differ in {', '.join(mixed)}. Files of "
                    "two saves are mixed in this directory."
                )


def _check_checksums(plan: LoadPlan) -> int:
    """Compare all payload without a digest with its checksums, and return the bytes that were read.

    Checks every file that this rank uses or reads for others. Raises CheckpointError.
    """
    checkpoint, inventory = plan.checkpoint, plan.checkpoint.inventory
    shards, models = dict(plan.shards), {plan.model.rank: plan.model}
    for rank, path in enumerate(() if inventory.reads_headers else checkpoint.optim_files):
        if inventory.reader(path.name) == inventory.rank:
            shards[rank] = checkpoint.shard(rank)
    for rank, path in enumerate(() if inventory.reads_headers else checkpoint.model_files):
        if inventory.reader(path.name) == inventory.rank:
            models[rank] = checkpoint.model_states(rank)
    own_weights = plan.checkpoint.inventory.own_weights  # which no digest is of
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
        if inventory.reads(path.name):
            with inventory.named_in_errors(path):
                executor = plan.request.options.host_io_engine
                nbytes += check_archive(path, size, digested=np.concatenate(places), executor=executor)
    return nbytes


def _consistency_digest(plan: LoadPlan) -> ConsistencyDigest:
    facts = shard_facts(plan.head)
    if plan.weights_only:
        facts = {what: facts[what] for what in ("format", "save id", "parameters", "sub-groups")}
    facts[_TP_RANK] = str(plan.checkpoint.tp.rank)
    facts["world size"] = str(plan.checkpoint.world_size)
    facts["global step"] = str(plan.model.global_steps)
    frozen = plan.checkpoint.names_frozen, plan.checkpoint.frozen.layout.whole_tensors
    facts["frozen parameters"] = repr(frozen)
    saved = plan.checkpoint.inventory
    facts["commit record"] = f"{saved.save_id} {saved.content_root}"
    return tuple((what, hashlib.sha256(text.encode()).hexdigest()) for what, text in facts.items())
