"""The report of a load: its cost over all ranks, and the state that is exact, re-derived or reset."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zeroelastic.checkpoint.contradictions import steps_note
from zeroelastic.checkpoint.model_states import client_state_keys
from zeroelastic.checkpoint.optimizer_file import FP32
from zeroelastic.checkpoint.topology import expert_sizes
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.load.base_model import base_notes
from zeroelastic.deepspeed.load.load_plan import LoadPlan
from zeroelastic.deepspeed.load.module_states import ModuleKeys
from zeroelastic.deepspeed.load.restore import Restored
from zeroelastic.deepspeed.load.verify import Verification
from zeroelastic.deepspeed.run_objects import not_restored
from zeroelastic.distributed.collective import all_gather_mostly_equal, maximum_and_total
from zeroelastic.errors import StrictError, counted, rank_list, some
from zeroelastic.report import ResumeReport


def gather_costs(load_plan: LoadPlan, restored: Restored, verification: Verification) -> tuple[bool, dict[str, int]]:
    """Whether ``verification`` has failed on any rank, and what the load cost: of any rank the most, by the report's
    names. Collective.
    """
    checkpoint = load_plan.checkpoint
    module, payload = restored.module, restored.payload
    bytes_read = restored.bytes_read + payload.bytes_read
    own = {
        "bytes_owned": restored.bytes_owned,
        "bytes_read": bytes_read,
        "header_bytes": checkpoint.header_bytes
        + load_plan.checked_bytes
        + _module_bytes(load_plan)
        + module.bytes_read,
        "files_opened": len({*checkpoint.opened, *restored.files, *module.files, *payload.files}),
        "bytes_sent": module.sent + payload.sent,
        "bytes_received": module.received + payload.received,
    }
    (any_failed, *most), total_read = maximum_and_total((verification.failed, *own.values()), bytes_read)
    return bool(any_failed), {**dict(zip(own, most, strict=True)), "total_bytes_read": total_read}


def load_report(
    engine: Engine,
    load_plan: LoadPlan,
    restored: Restored,
    verification: Verification,
    costs: dict[str, int],
    keys: ModuleKeys,
    *,
    warnings: list[str],
    module_notes: list[str],
    batch_changed: bool,
) -> ResumeReport:
    """The report, the same on every rank, without its seconds: these are known at the end of the call.

    ``warnings`` are notes from before the engine was touched.
    """
    live, request, checkpoint = load_plan.live, load_plan.request, load_plan.checkpoint
    texts = [*warnings, *restored.notes]
    if not checkpoint.inventory.reads_payload:
        partial = checkpoint.inventory.partial_ranks
        few = f"{counted(len(partial), 'rank')} of {dist.get_world_size()} ({some(map(str, partial))})"
        texts.append(f"node-local disks: {few} did not see all files, and had them read and sent by ranks that did")
    texts += module_notes
    exact, rederived, reset = _inventory(engine, load_plan, restored)
    if live.trains and not request.load_module_only:
        with_scheduler = request.load_lr_scheduler_states
        reset = (*reset, *not_restored(engine, load_plan.model.values, with_scheduler=with_scheduler))
    if checkpoint.stale_files:
        texts.append(f"ignored {len(checkpoint.stale_files)} files of an older save in this directory")
    if verification.note is not None:
        texts.append(verification.note)
    if live.tp.size > 1:
        texts.append(
            f"each of {live.tp.size} tensor parallel ranks: the ranks above are those of its data parallel group"
        )
    return ResumeReport(
        path=str(load_plan.tag_dir),
        format=load_plan.head.format,
        saved_world_size=checkpoint.world_size,
        world_size=live.layout.world_size,
        seconds=0.0,
        saved_root=verification.saved_root,
        loaded_root=verification.loaded_root,
        root_matches=verification.matches,
        exact=exact,
        rederived=rederived,
        reset=(*reset, *restored.lost),
        notes=tuple(texts),
        changed=_changes(load_plan, keys),
        batch_changed=batch_changed,
        verify=request.options.verify,
        topology=topology_text(load_plan),
        **costs,
    )


def log_report(logger: logging.Logger, report: ResumeReport, *, warn: bool) -> None:
    """Log a report on rank 0: as a warning where something changed or ``warn`` asks for it.

    Else its first line has level INFO, and the rest DEBUG.
    """
    if dist.get_rank() != 0:
        return
    if report.changed or warn:
        logger.warning("%s", report.text())
    else:
        line, _, details = report.text().partition("\n")
        logger.info("%s", line)
        logger.debug("%s", details)


def log_batch(logger: logging.Logger, engine: Engine, report: ResumeReport, saved: int | None) -> None:
    """Tell, on rank 0, that a resume at another size has the saved global batch; a changed one is in the report."""
    if dist.get_rank() != 0 or report.saved_world_size == report.world_size or report.batch_changed:
        return
    batch, accumulation = engine.train_batch_size(), engine.gradient_accumulation_steps()
    micro = engine.train_micro_batch_size_per_gpu()
    copies = counted(batch // (micro * accumulation), "rank")
    before = "as before" if saved is not None else "(the checkpoint does not record its own)"
    logger.info(
        "%s",
        f"resumed on {counted(report.world_size, 'rank')} from {report.saved_world_size}: global batch {batch} "
        f"{before} (micro batch {micro} x {copies} x {accumulation} accumulated)",
    )


def notes_of_modules(load_plan: LoadPlan) -> list[str]:
    """Notes about whose file of the whole module each rank took, where every node of the save has its own. Collective.

    The nodes of a save at stage 1 or 2 each write one, with buffers and client state of their own.
    """
    model, checkpoint = load_plan.model, load_plan.checkpoint
    if checkpoint.inventory.reads_payload:
        return []
    taken = all_gather_mostly_equal((model.path.name, model.directory, not checkpoint.inventory.reads(model.path.name)))
    if not checkpoint.whole_model:
        return []
    notes: list[str] = []
    if len({(name, directory) for name, directory, _ in taken}) > len({name for name, _, _ in taken}):
        notes.append(
            f"{model.path.name} differs between the nodes: each rank took buffers and client state from its own node's"
        )
    if without := [str(rank) for rank, (_, _, is_remote) in enumerate(taken) if is_remote]:
        notes.append(
            f"no {model.path.name} of this save on the nodes of {counted(len(without), 'rank')} ({some(without)}): "
            "buffers and client state are another node's there"
        )
    return notes


def _has_hyper_parameters(load_plan: LoadPlan) -> bool:
    """Whether hyper-parameters were saved; DeepSpeed leaves them out at stages 1 and 2 with elastic_checkpoint."""
    groups = load_plan.head.groups
    return not groups or any(group.options.keys() - {"step"} for group in groups)


def notes_before_load(engine: Engine, load_plan: LoadPlan, pending: int) -> tuple[list[str], bool]:
    """Return what a load will not do as one may expect, and whether it changes the global batch.

    ``pending`` are the micro batches that the engine has accumulated. Raises StrictError for another batch, or base.
    """
    live, request, record = load_plan.live, load_plan.request, load_plan.record
    micro = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
    batch = check_batch(
        load_plan.train_batch_size if live.trains else None,
        engine.train_batch_size(),
        engine.train_batch_size() // micro,  # copies of the model: ranks that share a sequence take one batch
        strict=request.options.refuses_other_batch,
    )
    if request.load_module_only:
        batch = None
    notes = [batch, *base_notes(load_plan), steps_note(load_plan.model, load_plan.head, record)]
    if request.custom_load_fn is not None:
        notes.append(
            "custom_load_fn decides about buffers and other module state only: after it, each parameter gets the "
            "value that the checkpoint has under its name. To keep another value, set it after the load"
        )
    if load_plan.weights_only:
        return list(filter(None, notes)), batch is not None
    if not _has_hyper_parameters(load_plan):
        notes.append(
            "HYPER-PARAMETERS NOT SAVED: lr, betas, weight_decay and the others are this run's own. DeepSpeed writes "
            "none at stages 1 and 2 with elastic_checkpoint"
        )
    if (names := live.common_state()) and load_plan.model.global_steps > 0:
        notes.append(
            f"STATE NOT SAVED: {type(live.base).__name__} keeps {some(map(repr, names))} beside the state of its "
            "parameters. The checkpoint has none of it, and it begins anew"
        )
    if record is not None and record.lost_micro_batches:
        notes.append(
            f"LOST: the gradients of {counted(record.lost_micro_batches, 'micro batch')} that were accumulated when "
            "this was saved; accumulation begins anew"
        )
    if pending:
        notes.append(
            f"NOT LOST, though it should be: the gradients of {counted(pending, 'micro batch')} "
            "that this engine accumulated before the load go into its next optimizer step"
        )
    return list(filter(None, notes)), batch is not None


def optimizer_options(engine: Engine, live: LiveOptimizer) -> list[dict[str, str]]:
    """The hyper-parameters of each optimizer group as text, without what a scheduler sets while it trains."""
    names = {"initial_lr", *live.base.defaults}
    if engine.lr_scheduler is not None:
        names -= {"lr", "betas", "momentum"}
    return [
        {name: _in_digits(group[name]) for name in sorted(names & group.keys())} for group in live.base.param_groups
    ]


def replaced_options_notes(before: Sequence[Mapping[str, str]], now: Sequence[Mapping[str, str]]) -> list[str]:
    """A note that lists the hyper-parameters which a load has set to other values than the run was configured with."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for g, (was, is_now) in enumerate(zip(before, now, strict=True)):
        for name in was.keys() & is_now.keys():
            if was[name] != is_now[name]:
                found.setdefault((name, was[name], is_now[name]), []).append(g)
    phrases = [
        f"{name} of optimizer {rank_list(groups).replace('rank', 'group', 1)}: {was} configured, {value} now"
        for (name, was, value), groups in sorted(found.items())
    ]
    if not phrases:
        return []
    return [
        f"CONFIGURED VALUES NOT USED, the checkpoint has others: {some(phrases, separator='; ')}. To train with the "
        "configured ones, set them in engine.optimizer.param_groups after load_checkpoint"
    ]


def _in_digits(value: object) -> str:
    """A value as text, without the noise of a float32."""
    if isinstance(value, torch.Tensor):
        return _in_digits(value.tolist())
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_in_digits, value))})"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


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
        raise StrictError(
            f'{message}. ("strict": false in the "zeroelastic" block, without "keep_global_batch", allows it.)'
        )
    return message


def _module_bytes(load_plan: LoadPlan) -> int:
    """Return how many bytes DeepSpeed reads of the module states file: all but the parameters."""
    if not load_plan.reads_model:
        return 0
    model = load_plan.model
    return model.size - sum(nbytes for _, nbytes in model.fragments()) - int(model.weights[:, 1].sum())


def _inventory(
    engine: Engine, load_plan: LoadPlan, restored: Restored
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    membership = load_plan.membership
    exact = [counted(len(membership.restored), "parameter")]
    rederived: list[str] = []
    reset: list[str] = []
    states = sorted({key for keys in load_plan.head.tensor_keys for key in keys} - {FP32})
    scalars = sorted({key for entry in load_plan.head.scalars for key in entry})
    if restored.own_weights:
        exact.append("the weights of the model, which are not what the master weights are cast to")
    elif not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        pass  # the master weights are the weights
    elif engine.zero_load_from_fp32_weights():
        rederived.append("16-bit weights from the fp32 master weights")
    else:
        rederived.append("fp32 master weights from 16-bit copies (load_from_fp32_weights is off)")
    if load_plan.weights_only:
        scale = " and loss scale" if engine.fp16_enabled() else ""
        reset.append(f"optimizer state{',' if scale else ' and'} hyper-parameters{scale} (not asked for)")
    else:
        exact.append(f"optimizer state ({', '.join((*states, *scalars)) or 'none was saved'})")
        matched = sum(match.source is not None for match in membership.groups)
        what = f"hyper-parameters of {counted(matched, 'group')}"
        if _has_hyper_parameters(load_plan):
            exact.append(what)
        else:
            reset.append(f"{what} (the checkpoint has none)")
    if membership.frozen:
        exact.append(counted(len(membership.frozen), "frozen parameter"))
    kept = [name for name in membership.excluded if name not in load_plan.other_frozen]
    if kept and load_plan.keeps_frozen:
        exact.append(f"{counted(len(kept), 'frozen parameter')} (the run's own, whose digests are those of the save)")
    elif kept:
        reset.append(f"{counted(len(kept), 'frozen parameter')} (excluded from the save): {', '.join(kept)}")
    if others := load_plan.other_frozen:
        reset.append(f"{counted(len(others), 'frozen parameter')} (not those of the save): {', '.join(others)}")
    topologies = load_plan.checkpoint.topology, load_plan.live.topology
    saved, current = (topology.data_size for topology in topologies)
    kind = "data parallel " if any(topology.tensor_size > 1 for topology in topologies) else ""
    # At stages 1 and 2 rank 0 saves them for all ranks.
    each = "" if load_plan.checkpoint.whole_model else _kept_by_each_rank(engine, restored.loaded[1])
    if each and current > saved:
        rederived.append(f"{each} of {kind}{rank_list(range(saved, current))} from saved {kind}rank 0")
    if each and current < saved:
        reset.append(f"{each} of saved {kind}{rank_list(range(current, saved))} (no longer there)")
    return tuple(exact), tuple(rederived), tuple(reset)


def _kept_by_each_rank(engine: Engine, client_state: Any) -> str:
    """Name the state that each rank saves for itself; empty where there is none."""
    users = set(client_state_keys(client_state or {})) - {"zeroelastic"}  # the position in the data, the same on all
    there = {"buffers": bool(engine._get_buffer_names()), "client state": bool(users)}
    return " and ".join(what for what, is_there in there.items() if is_there)


def topology_text(load_plan: LoadPlan) -> str | None:
    """How many ranks share what, then and now; None for a save and a run without slices."""
    live = load_plan.live
    sides = ((load_plan.layout, load_plan.checkpoint.topology), (live.whole, live.topology))
    if all(layout.slices is None for layout, _ in sides):
        return None
    sizes = [
        (topology.data_size, topology.tensor_size, " and ".join(map(str, expert_sizes(layout, topology))) or "1")
        for layout, topology in sides
    ]
    parts = [
        f"{what} parallel {saved} -> {now}"
        for what, saved, now in zip(("data", "tensor", "expert"), *sizes, strict=True)
        if what == "data" or {str(saved), str(now)} != {"1"}
    ]
    return ", ".join(parts)


def _changes(load_plan: LoadPlan, keys: ModuleKeys) -> tuple[str, ...]:
    """The differences between the save and the run, by name, and how each was loaded: sentences for the report."""
    membership = load_plan.membership
    # parameters have sentences of their own
    known = frozenset((*membership.dropped, *load_plan.renamed.values()))
    params = {name for name, _ in load_plan.live.module.named_parameters(remove_duplicate=False)}
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
                "under another name in the checkpoint, for an adapter or because they are tied, weights from there",
                [f"{name} (saved as {before})" for name, before in load_plan.renamed.items()],
            ),
            (
                "buffers and other module state not in the checkpoint, as this run made them",
                [name for name in keys.missing if name not in params],
            ),
            (
                "module state of the checkpoint that the model does not have, ignored",
                [name for name in keys.unexpected if name not in known],
            ),
        )
        if names
    ]
    if not load_plan.weights_only:
        lines += _state_lines(load_plan)
        lines += _group_lines(load_plan)
    return tuple(lines)


def _state_lines(load_plan: LoadPlan) -> list[str]:
    live = load_plan.live
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
                f"optimizer state ({', '.join(tensors) or 'none'}) as before a first step, but{at} the "
                f"{live.buffer_kind} of restored parameters"
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
