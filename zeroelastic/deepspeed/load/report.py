"""The report of a load: what it cost over all ranks, what is exact, and what is not."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from zeroelastic.checkpoint.model_states import client_state_keys
from zeroelastic.checkpoint.optimizer_file import FP32
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.load.preflight import LoadPlan
from zeroelastic.deepspeed.load.request import LoadRequest
from zeroelastic.deepspeed.load.restore import Restored
from zeroelastic.deepspeed.load.verify import Verification
from zeroelastic.deepspeed.notices import notice
from zeroelastic.distributed.collective import all_gather_alike, maximum_and_total
from zeroelastic.errors import rank_list, some
from zeroelastic.io.paths import RemotePath
from zeroelastic.report import Note, ResumeReport


class Figures(NamedTuple):
    """What a load cost: of any rank the most, of ``total_bytes_read`` the sum; whether it ``failed`` (1) on any."""

    failed: int
    bytes_owned: int
    bytes_read: int
    header_bytes: int
    files_opened: int
    bytes_sent: int
    bytes_received: int
    nanoseconds: int
    total_bytes_read: int


def gather_figures(load_plan: LoadPlan, restored: Restored, *, failed: bool, began: float) -> Figures:
    """The figures of a call that ``began`` at a time (``time.perf_counter``) and ``failed`` here or not. Collective."""
    checkpoint = load_plan.checkpoint
    filled, module, payload = restored.filled, restored.module, restored.payload
    bytes_read = filled.bytes_read + payload.bytes_read
    own: tuple[int, ...] = (
        failed,
        filled.bytes_owned,
        bytes_read,
        checkpoint.header_bytes + load_plan.checked_bytes + _module_bytes(load_plan) + module.bytes_read,
        len({*checkpoint.opened, *filled.files, *module.files, *payload.files}),
        module.sent + payload.sent,
        module.received + payload.received,
        int((time.perf_counter() - began) * 1e9),
    )
    most, total_read = maximum_and_total(own, bytes_read)
    return Figures._make([*most, total_read])


def load_report(
    engine: Engine,
    live: LiveOptimizer,
    load_plan: LoadPlan,
    request: LoadRequest,
    restored: Restored,
    verification: Verification,
    figures: Figures,
    *,
    notes: list[Note],
    module_notes: list[str],
    changed: tuple[str, ...],
    batch_changed: bool,
) -> ResumeReport:
    """The report, the same on every rank. ``notes`` are those from before the engine was touched."""
    checkpoint = load_plan.checkpoint
    texts = [*(note.text for note in notes), *restored.notes]
    if load_plan.visibility is not None and not load_plan.visibility.in_store:
        partial = load_plan.visibility.partial_ranks
        few = f"{count(len(partial), 'rank')} of {dist.get_world_size()} ({some(map(str, partial), 8)})"
        texts.append(f"node-local disks: {few} did not see all files, and had them read and sent by ranks that did")
    texts += module_notes
    exact, rederived, reset = _inventory(engine, live, load_plan, restored.loaded[1], weights_only=request.weights_only)
    if checkpoint.stale_files:
        texts.append(f"ignored {len(checkpoint.stale_files)} files of an older save in this directory")
    if verification.note is not None:
        texts.append(verification.note)
    if live.tp.size > 1:
        texts.append(
            f"each of {live.tp.size} tensor parallel ranks: the ranks above are those of its data parallel group"
        )
    return ResumeReport(
        path=str(checkpoint.tag_dir),
        format=load_plan.format,
        saved_world_size=checkpoint.world_size,
        world_size=live.layout.world_size,
        bytes_owned=figures.bytes_owned,
        bytes_read=figures.bytes_read,
        header_bytes=figures.header_bytes,
        files_opened=figures.files_opened,
        total_bytes_read=figures.total_bytes_read,
        seconds=figures.nanoseconds / 1e9,
        saved_root=verification.saved_root,
        loaded_root=verification.loaded_root,
        root_matches=verification.matches,
        exact=exact,
        rederived=rederived,
        reset=(*reset, *restored.lost),
        notes=tuple(texts),
        changed=changed,
        bytes_sent=figures.bytes_sent,
        bytes_received=figures.bytes_received,
        batch_changed=batch_changed,
        verify=request.options.verify,
    )


def log_report(logger: logging.Logger, report: ResumeReport, notes: Sequence[Note]) -> None:
    """Log a report on rank 0: as a warning where something changed or a note asks for it, else as a notice."""
    if dist.get_rank() != 0:
        return
    if report.changed or any(note.level >= logging.WARNING for note in notes):
        logger.warning("%s", report.text())
    else:
        line, _, details = report.text().partition("\n")
        notice(logger, line, details=f"\n{details}")


def log_batch(logger: logging.Logger, engine: Engine, report: ResumeReport, saved: int | None) -> None:
    """Tell, on rank 0, that a resume at another size has the saved global batch; a changed one is in the report."""
    if dist.get_rank() != 0 or report.saved_world_size == report.world_size or report.batch_changed:
        return
    batch, accumulation = engine.train_batch_size(), engine.gradient_accumulation_steps()
    micro = engine.train_micro_batch_size_per_gpu()
    before = "as before" if saved is not None else "(the checkpoint does not record its own)"
    notice(
        logger,
        f"resumed on {count(report.world_size, 'rank')} from {report.saved_world_size}: global batch {batch} {before} "
        f"(micro batch {micro} x {count(batch // (micro * accumulation), 'rank')} x {accumulation} accumulated)",
    )


def notes_of_modules(load_plan: LoadPlan) -> list[str]:
    """Notes about whose file of the whole module each rank took, where every node of the save has its own. Collective.

    The nodes of a save at stage 1 or 2 each write one, with buffers and client state of their own.
    """
    model, checkpoint = load_plan.model, load_plan.checkpoint
    if load_plan.visibility is None or load_plan.visibility.in_store:
        return []
    taken = all_gather_alike((model.directory, model.path.name in checkpoint.remote_files))
    if not checkpoint.whole_model:
        return []
    notes: list[str] = []
    if len({directory for directory, _ in taken}) > 1:
        notes.append(
            f"{model.path.name} differs between the nodes: each rank took buffers and client state from its own node's"
        )
    if without := [str(rank) for rank, (_, is_remote) in enumerate(taken) if is_remote]:
        notes.append(
            f"no {model.path.name} of this save on the nodes of {count(len(without), 'rank')} ({some(without, 8)}): "
            "buffers and client state are another node's there"
        )
    return notes


def _has_hyper_parameters(load_plan: LoadPlan) -> bool:
    """With elastic_checkpoint DeepSpeed saves none at stages 1 and 2, but the step of its own optimizers."""
    groups = load_plan.head.groups
    return not groups or any(group.options.keys() - {"step"} for group in groups)


def hyper_parameter_notes(load_plan: LoadPlan) -> list[Note]:
    """A note where the optimizer goes on with the hyper-parameters of the run, because none were saved."""
    if _has_hyper_parameters(load_plan):
        return []
    return [
        Note(
            logging.WARNING,
            "HYPER-PARAMETERS NOT SAVED: lr, betas, weight_decay and the others are this run's own. DeepSpeed writes "
            "none at stages 1 and 2 with elastic_checkpoint",
        )
    ]


def micro_batch_notes(load_plan: LoadPlan, pending: int) -> list[Note]:
    """Notes about gradients of micro batches that the save lost, and of the ``pending`` ones of this engine."""
    record = load_plan.checkpoint.record
    lost = record.lost_micro_batches if record is not None else 0
    notes: list[Note] = []
    if lost:
        notes.append(
            Note(
                logging.WARNING,
                f"LOST: the gradients of {count(lost, 'micro batch', 'micro batches')} that were accumulated when this "
                "was saved; accumulation begins anew",
            )
        )
    if pending:
        notes.append(
            Note(
                logging.WARNING,
                f"NOT LOST, though it should be: the gradients of {count(pending, 'micro batch', 'micro batches')} "
                "that this engine accumulated before the load go into its next optimizer step",
            )
        )
    return notes


def _module_bytes(load_plan: LoadPlan) -> int:
    """What DeepSpeed reads of the module states file: all of it but the parameters, whose payload is only mapped."""
    if isinstance(load_plan.model.path, RemotePath) or (load_plan.model.path.name in load_plan.checkpoint.remote_files):
        return 0
    model = load_plan.model
    return model.size - sum(nbytes for _, nbytes in model.fragments()) - int(model.weights[:, 1].sum())


def _inventory(
    engine: Engine, live: LiveOptimizer, load_plan: LoadPlan, client_state: Any, *, weights_only: bool
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    membership = load_plan.membership
    exact = [count(len(membership.restored), "parameter")]
    rederived: list[str] = []
    reset: list[str] = []
    states = sorted({key for keys in load_plan.head.tensor_keys for key in keys} - {FP32})
    scalars = sorted({key for entry in load_plan.head.scalars for key in entry})
    if not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        pass  # the master weights are the weights
    elif engine.zero_load_from_fp32_weights():
        rederived.append("16-bit weights from the fp32 master weights")
    else:
        rederived.append("fp32 master weights from 16-bit copies (load_from_fp32_weights is off)")
    if weights_only:
        scale = " and loss scale" if engine.fp16_enabled() else ""
        reset.append(f"optimizer state{',' if scale else ' and'} hyper-parameters{scale} (not asked for)")
    else:
        exact.append(f"optimizer state ({', '.join((*states, *scalars)) or 'none was saved'})")
        matched = sum(match.source is not None for match in membership.groups)
        what = f"hyper-parameters of {count(matched, 'group')}"
        if _has_hyper_parameters(load_plan):
            exact.append(what)
        else:
            reset.append(f"{what} (the checkpoint has none)")
    if membership.frozen:
        exact.append(count(len(membership.frozen), "frozen parameter"))
    if membership.excluded:
        named = ", ".join(membership.excluded)
        reset.append(f"{count(len(membership.excluded), 'frozen parameter')} (excluded from the save): {named}")
    saved, current = load_plan.checkpoint.world_size, live.layout.world_size
    # At stages 1 and 2 rank 0 saves them for all ranks.
    each = "" if load_plan.checkpoint.whole_model else _kept_by_each_rank(engine, client_state)
    if each and current > saved:
        rederived.append(f"{each} of {rank_list(range(saved, current))} from saved rank 0")
    if each and current < saved:
        reset.append(f"{each} of saved {rank_list(range(current, saved))} (no longer there)")
    return tuple(exact), tuple(rederived), tuple(reset)


def _kept_by_each_rank(engine: Engine, client_state: Any) -> str:
    """What there is that each rank saves for itself, in words; empty where there is nothing."""
    users = set(client_state_keys(client_state or {})) - {"zeroelastic"}  # the position in the data, the same on all
    there = {"buffers": bool(engine._get_buffer_names()), "client state": bool(users)}
    return " and ".join(what for what, is_there in there.items() if is_there)


def count(number: int, what: str, several: str = "") -> str:
    """A number and the noun for it: "1 rank", "2 ranks"."""
    return f"{number} {what}" if number == 1 else f"{number} {several or what + 's'}"
