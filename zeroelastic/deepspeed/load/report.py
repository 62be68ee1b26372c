"""The report of a load: its cost over all ranks, and the state that is exact, re-derived or reset."""

from __future__ import annotations

import logging

from zeroelastic.checkpoint.optimizer_file import FP32
from zeroelastic.checkpoint.topology import expert_sizes
from zeroelastic.core.layout import are_whole
from zeroelastic.deepspeed.client_state import not_restored
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.load.load_plan import LoadPlan
from zeroelastic.deepspeed.load.notes import LoadNotes
from zeroelastic.deepspeed.load.verify import Verification
from zeroelastic.deepspeed.node_local.peers import LoadCost
from zeroelastic.distributed.collective import maximum_and_total
from zeroelastic.errors import counted, rank_list
from zeroelastic.report import ResumeReport


def gather_costs(load_plan: LoadPlan, cost: LoadCost, failed: bool) -> tuple[bool, dict[str, int]]:
    """Return whether any rank has ``failed``, and the largest cost of any rank by the report's names. Collective."""
    checkpoint = load_plan.checkpoint
    own = {
        "bytes_owned": cost.bytes_owned,
        "bytes_read": cost.bytes_read,
        "header_bytes": checkpoint.header_bytes
        + load_plan.checked_bytes
        + _module_bytes(load_plan)
        + cost.header_bytes,
        "files_opened": len({*checkpoint.opened, *cost.files}),
        "bytes_sent": cost.bytes_sent,
        "bytes_received": cost.bytes_received,
    }
    (any_failed, *most), total_read = maximum_and_total((failed, *own.values()), cost.bytes_read)
    return bool(any_failed), {**dict(zip(own, most, strict=True)), "total_bytes_read": total_read}


def load_report(
    engine: Engine, load_plan: LoadPlan, notes: LoadNotes, verification: Verification, costs: dict[str, int]
) -> ResumeReport:
    """Return the report, the same on every rank, without its seconds: these are known at the end of the call."""
    live, request, checkpoint = load_plan.live, load_plan.request, load_plan.checkpoint
    texts = [*notes.warnings, *notes.texts]
    exact, rederived, reset = _inventory(engine, load_plan, notes)
    if live.trains and not request.load_module_only:
        with_scheduler = request.load_lr_scheduler_states
        reset += not_restored(engine, load_plan.model.values, with_scheduler=with_scheduler)
    if checkpoint.stale_files:
        texts.append(f"ignored {len(checkpoint.stale_files)} files of an older save in this directory")
    if verification.note is not None:
        texts.append(verification.note)
    if live.tp.size > 1:
        texts.append(
            f"ranks are counted in one data parallel group, of which there are {live.tp.size}: one for each tensor "
            "parallel rank"
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
        exact=tuple(exact),
        rederived=tuple(rederived),
        reset=(*reset, *notes.lost),
        notes=tuple(texts),
        changed=_changes(load_plan, notes),
        batch_changed=notes.batch_changed,
        verify=request.options.verify,
        topology=topology_text(load_plan),
        **costs,
    )


def log_report(logger: logging.Logger, report: ResumeReport, *, warn: bool) -> None:
    """Log a report: as a warning if something changed or ``warn``, else its first line as INFO, the rest as DEBUG."""
    if report.changed or warn:
        logger.warning("%s", report.text())
    else:
        line, _, details = report.text().partition("\n")
        logger.info("%s", line)
        logger.debug("%s", details)


def log_batch(logger: logging.Logger, engine: Engine, report: ResumeReport, saved: int | None) -> None:
    """Log that a resume at another size has the saved global batch; a changed one is in the report."""
    if report.saved_world_size == report.world_size or report.batch_changed:
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


def _module_bytes(load_plan: LoadPlan) -> int:
    """Return how many bytes DeepSpeed reads of the module states file: all but the parameters."""
    if not load_plan.reads_model:
        return 0
    model = load_plan.model
    return model.size - sum(nbytes for _, nbytes in model.fragments()) - int(model.weights[:, 1].sum())


def _inventory(engine: Engine, load_plan: LoadPlan, notes: LoadNotes) -> tuple[list[str], list[str], list[str]]:
    """Return phrases for exact state, state that was derived from other state, and state that was not restored."""
    diff = load_plan.diff
    exact = [counted(len(diff.restored), "parameter")]
    rederived: list[str] = []
    reset: list[str] = []
    states = sorted({key for keys in load_plan.head.tensor_keys for key in keys} - {FP32})
    scalars = sorted({key for entry in load_plan.head.scalars for key in entry})
    if notes.own_weights:
        exact.append("the weights of the model, which differ from the cast master weights")
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
        matched = sum(match.source is not None for match in diff.groups)
        what = f"hyper-parameters of {counted(matched, 'group')}"
        if load_plan.has_hyper_parameters:
            exact.append(what)
        else:
            reset.append(f"{what} (the checkpoint has none)")
    if diff.frozen:
        exact.append(counted(len(diff.frozen), "frozen parameter"))
    kept = [name for name in diff.excluded if name not in load_plan.other_frozen]
    if kept and load_plan.keeps_frozen:
        exact.append(f"{counted(len(kept), 'frozen parameter')} (the run's own; their digests match the save)")
    elif kept:
        reset.append(f"{counted(len(kept), 'frozen parameter')} (excluded from the save): {', '.join(kept)}")
    if others := load_plan.other_frozen:
        reset.append(f"{counted(len(others), 'frozen parameter')} (not those of the save): {', '.join(others)}")
    topologies = load_plan.checkpoint.topology, load_plan.live.topology
    saved, current = (topology.data_size for topology in topologies)
    kind = "data parallel " if any(topology.tensor_size > 1 for topology in topologies) else ""
    if notes.kept_by_rank and current > saved:
        rederived.append(f"{notes.kept_by_rank} of {kind}{rank_list(range(saved, current))} from saved {kind}rank 0")
    if notes.kept_by_rank and current < saved:
        reset.append(f"{notes.kept_by_rank} of saved {kind}{rank_list(range(current, saved))} (no longer there)")
    return exact, rederived, reset


def topology_text(load_plan: LoadPlan) -> str | None:
    """Return the parallel sizes, then and now; None for a save and a run without slices."""
    live = load_plan.live
    sides = ((load_plan.layout, load_plan.checkpoint.topology), (live.whole, live.topology))
    if are_whole(load_plan.layout, live.whole):
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


def _changes(load_plan: LoadPlan, notes: LoadNotes) -> tuple[str, ...]:
    """Return sentences that name the differences between the save and the run, and how each was loaded."""
    diff = load_plan.diff
    # parameters have sentences of their own
    known = frozenset((*diff.dropped, *load_plan.renamed.values()))
    params = {name for name, _ in load_plan.live.module.named_parameters(remove_duplicate=False)}
    lines = [
        f"{text}: {', '.join(names)}"
        for text, names in (
            ("not in the checkpoint, weights as this run made them", diff.added_trained),
            ("frozen and not in the checkpoint, weights as this run made them", diff.added_frozen),
            ("frozen in the checkpoint and trained now, weights from the checkpoint", diff.unfrozen),
            (
                "trained in the checkpoint and frozen now, weights from the saved master weights, "
                "saved optimizer state dropped",
                diff.newly_frozen,
            ),
            ("in the checkpoint and not in the model, ignored", diff.dropped),
            (
                "saved under another name, because of an adapter or a tie, weights from the checkpoint",
                [f"{name} (saved as {before})" for name, before in load_plan.renamed.items()],
            ),
            (
                "buffers and other module state not in the checkpoint, as this run made them",
                [name for name in notes.missing if name not in params],
            ),
            (
                "module state of the checkpoint that the model does not have, ignored",
                [name for name in notes.unexpected if name not in known],
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
    new = {*load_plan.diff.added_trained, *load_plan.diff.unfrozen}
    for param, sub_group in zip(live.layout.params, live.layout.sub_group.tolist(), strict=True):
        if param.name not in new:
            continue
        state = load_plan.states[sub_group]
        tensors = [key for key in state.keys if key != FP32]
        if state.source is None or not (tensors or state.scalars):
            text = "optimizer state not created yet, as before a first step"
        else:
            step = state.scalars.get("step")
            at = f" at step {step.value}," if step is not None else ""
            text = (
                f"optimizer state ({', '.join(tensors) or 'none'}) as before a first step, but{at} in the "
                f"{live.buffer_kind} of restored parameters"
            )
        names.setdefault(text, []).append(param.name)
    return [f"{text}: {', '.join(members)}" for text, members in names.items()]


def _group_lines(load_plan: LoadPlan) -> list[str]:
    diff, saved = load_plan.diff, load_plan.head.groups
    if diff.same_groups:
        return []
    lines: list[str] = []
    for g, match in enumerate(diff.groups):
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
            lines.append(
                f"hyper-parameters of optimizer group {g} are the run's own: none of its parameters was restored"
            )
        elif match.source != g or len(match.shared) > 1:
            listed = " and ".join(map(str, match.shared))
            lines.append(f"hyper-parameters of optimizer group {g} are those of saved group {listed}")
    used = {s for match in diff.groups for s in match.shared}
    ignored = [str(s) for s in range(len(saved)) if s not in used]
    if ignored:
        lines.append(
            f"hyper-parameters of saved group {' and '.join(ignored)} ignored: this run trains none of its parameters"
        )
    return lines
