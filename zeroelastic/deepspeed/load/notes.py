"""The facts that a load notes for its report where they arise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from zeroelastic.checkpoint.contradictions import steps_note
from zeroelastic.checkpoint.inventory import Inventory
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.load.load_plan import LoadPlan
from zeroelastic.deepspeed.node_local.peers import LoadCost
from zeroelastic.distributed.collective import all_gather_mostly_equal
from zeroelastic.errors import StrictError, counted, rank_list, some

LOAD_BASE_FIRST = "Before deepspeed.initialize, load the base model of the saved run"


@dataclass(slots=True)
class LoadNotes:
    """The facts of one load that its report states in addition to the plan.

    The report is logged as a warning if there are ``warnings``; ``texts`` are its other notes. ``lost`` is optimizer
    state that was not restored, ``kept_by_rank`` names the state that each rank saves for itself. ``missing`` are
    entries of the module's state that the checkpoint lacks, ``unexpected`` the reverse. ``own_weights``: the model has
    weights that are not the master weights, cast, as it had when it was saved.
    """

    warnings: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    kept_by_rank: str = ""
    own_weights: bool = False
    batch_changed: bool = False
    cost: LoadCost = field(default_factory=LoadCost)


def note_before_load(engine: Engine, load_plan: LoadPlan, pending: int, notes: LoadNotes) -> None:
    """Note what a user may not expect of the load, and whether it changes the global batch.

    ``pending`` are the micro batches that the engine has accumulated. Raises StrictError for another batch, or base.
    """
    live, request, saved = load_plan.live, load_plan.request, load_plan.checkpoint.inventory
    micro = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
    batch = check_batch(
        load_plan.train_batch_size if live.trains else None,
        engine.train_batch_size(),
        engine.train_batch_size() // micro,  # copies of the model: ranks that share a sequence take one batch
        strict=request.options.refuses_other_batch,
    )
    if batch is not None and not request.load_module_only:
        notes.batch_changed = True
        notes.warnings.append(batch)
    if others := load_plan.other_frozen:
        what = other_base(others, saved)
        notes.warnings.append(f"OTHER BASE MODEL: {what}, and stay the run's own. {LOAD_BASE_FIRST}")
    notes.warnings += filter(None, [steps_note(load_plan.model, load_plan.head, saved)])
    if request.custom_load_fn is not None:
        notes.warnings.append(
            "custom_load_fn sets only buffers and other module state: after it, each parameter gets the value that the "
            "checkpoint has under its name. To keep another value, set it after the load"
        )
    if load_plan.weights_only:
        return
    if not load_plan.has_hyper_parameters:
        notes.warnings.append(
            "HYPER-PARAMETERS NOT SAVED: lr, betas, weight_decay and the others are this run's own. DeepSpeed writes "
            "none at stages 1 and 2 with elastic_checkpoint"
        )
    if (names := live.common_state()) and load_plan.model.global_steps > 0:
        notes.warnings.append(
            f"STATE NOT SAVED: {type(live.base).__name__} keeps {some(map(repr, names))} beside the state of its "
            "parameters. The checkpoint has none of it, and it begins anew"
        )
    if saved.lost_micro_batches:
        notes.warnings.append(
            f"LOST: the gradients of {counted(saved.lost_micro_batches, 'micro batch')} that were accumulated when "
            "this was saved; accumulation begins anew"
        )
    if pending:
        notes.warnings.append(
            f"GRADIENTS KEPT: those of {counted(pending, 'micro batch')} that this engine accumulated before the load "
            "go into its next optimizer step, although they are not part of the checkpoint"
        )


def other_base(names: tuple[str, ...], saved: Inventory) -> str:
    """The sentence on frozen weights of the run that are not those of a save, which has only their digests."""
    return (
        f"{counted(len(names), 'frozen parameter')} of the run differ from those of the save in dtype, shape or digest "
        f"({some(names)}); the checkpoint has only their digests ({saved.excluded_how})"
    )


def check_batch(saved: int | None, current: int, world_size: int, *, strict: bool) -> str | None:
    """Return a warning if a resume would change the global batch; raise StrictError if ``strict``."""
    if saved is None or saved == current:
        return None
    keep = [m for m in range(1, saved // world_size + 1) if saved % (m * world_size) == 0]
    how = (
        f"train_micro_batch_size_per_gpu {keep[-1]} with gradient_accumulation_steps {saved // (keep[-1] * world_size)}"
        if keep
        else f"no micro batch fits on {world_size} ranks; use a world size that divides {saved}"
    )
    if keep and len(keep) > 1:
        how += f", or {keep[0]} with {saved // (keep[0] * world_size)}"
    message = f"GLOBAL BATCH CHANGED from {saved} to {current}; to keep it: {how}"
    if strict:
        raise StrictError(
            f'{message}. (To allow it, set "strict": false in the "zeroelastic" block, without "keep_global_batch".)'
        )
    return message


def note_module_files(load_plan: LoadPlan, notes: LoadNotes) -> None:
    """Note whose file of the whole module each rank took, where every node of the save has its own. Collective.

    The nodes of a save at stage 1 or 2 each write one, with buffers and client state of their own.
    """
    model, checkpoint = load_plan.model, load_plan.checkpoint
    if checkpoint.inventory.reads_payload:
        return
    partial = checkpoint.inventory.partial_ranks
    taken = all_gather_mostly_equal((model.path.name, model.directory, not checkpoint.inventory.reads(model.path.name)))
    few = f"{counted(len(partial), 'rank')} of {len(taken)} ({some(map(str, partial))})"
    notes.texts.append(f"node-local disks: {few} did not see all files; ranks that did read and sent them")
    if not checkpoint.whole_model:
        return
    if len({(name, directory) for name, directory, _ in taken}) > len({name for name, _, _ in taken}):
        notes.texts.append(
            f"{model.path.name} differs between the nodes: each rank took buffers and client state from its own node's"
        )
    if without := [str(rank) for rank, (_, _, is_remote) in enumerate(taken) if is_remote]:
        notes.texts.append(
            f"the nodes of {counted(len(without), 'rank')} ({some(without)}) have no {model.path.name} of this save: "
            "these ranks took buffers and client state from another node's"
        )


def optimizer_options(engine: Engine, live: LiveOptimizer) -> list[dict[str, str]]:
    """Return the hyper-parameters of each optimizer group as text, without those that a scheduler sets."""
    names = {"initial_lr", *live.base.defaults}
    if engine.lr_scheduler is not None:
        names -= {"lr", "betas", "momentum"}
    return [
        {name: _in_digits(group[name]) for name in sorted(names & group.keys())} for group in live.base.param_groups
    ]


def note_options(before: Sequence[Mapping[str, str]], now: Sequence[Mapping[str, str]], notes: LoadNotes) -> None:
    """Note the hyper-parameters that a load has set to other values than the run was configured with."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for g, (was, is_now) in enumerate(zip(before, now, strict=True)):
        for name in was.keys() & is_now.keys():
            if was[name] != is_now[name]:
                found.setdefault((name, was[name], is_now[name]), []).append(g)
    phrases = [
        f"{name} of optimizer {rank_list(groups).replace('rank', 'group', 1)}: {was} configured, {value} now"
        for (name, was, value), groups in sorted(found.items())
    ]
    if phrases:
        notes.warnings.append(
            f"CONFIGURED VALUES NOT USED, the checkpoint has others: {some(phrases, separator='; ')}. To train with "
            "the configured ones, set them in engine.optimizer.param_groups after load_checkpoint"
        )


def _in_digits(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return _in_digits(value.tolist())
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_in_digits, value))})"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
