"""One load from beginning to end: choose a tag, prepare a plan on all ranks, restore it, verify it, report it.

DeepSpeed's own ``load_checkpoint`` loads the rest: stage 0, universal checkpoints, no tag at all, and what
``choose_loader`` leaves to it. A tag that was saved again while it was read is an error that says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from zeroelastic import observers
from zeroelastic.checkpoint.tag_files import SAVE_ID, was_saved_again
from zeroelastic.deepspeed.client_state import changing_values
from zeroelastic.deepspeed.engine import Engine, accumulated_micro_batches, agree_on_options, options_of, refuse_merged
from zeroelastic.deepspeed.engine_state import begin_change, changing, note_load, refuse_damaged, state_of
from zeroelastic.deepspeed.load.notes import LoadNotes, note_before_load, note_options, optimizer_options
from zeroelastic.deepspeed.load.preflight import preflight
from zeroelastic.deepspeed.load.report import gather_costs, load_report, log_batch, log_report
from zeroelastic.deepspeed.load.restore import restore
from zeroelastic.deepspeed.load.stock import choose_loader, is_left_to_deepspeed
from zeroelastic.deepspeed.load.tag_choice import choose_tag, load_newest, nothing_to_load
from zeroelastic.deepspeed.load.verify import raise_mismatch, verify
from zeroelastic.deepspeed.options import LoadRequest
from zeroelastic.distributed.collective import all_or_raise, any_rank, is_raised_on_all_ranks
from zeroelastic.distributed.partners import require_partners
from zeroelastic.errors import SavedAgainError, UnsupportedError
from zeroelastic.io.paths import FilePath, absolute, local_path
from zeroelastic.io.retries import retrying
from zeroelastic.report import ResumeReport
from zeroelastic.runs.tag_directory import open_tag
from zeroelastic.runs.tags import about_newer
from zeroelastic.torch_file.safe_unpickler import allow_globals

logger = logging.getLogger(__name__)

Loaded = tuple[Any, Any]
"""What ``load_checkpoint`` returns: the path that was loaded, or None, and the client state."""


@dataclass(eq=False, slots=True)
class LoadCall:
    """One call of ``load_checkpoint``: the engine, DeepSpeed's own method, bound to it, and when the call began.

    ``pending_micro_batches`` and ``configured``, the hyper-parameters of an engine that has not trained, are those from
    before the load. ``log`` logs the report; it is None until a tag is loaded here.
    """

    engine: Engine
    original: Callable[..., Loaded]
    began: float
    pending_micro_batches: int = 0
    configured: list[dict[str, str]] | None = None
    log: Callable[[ResumeReport], None] | None = None

    def by_deepspeed(self, request: LoadRequest) -> Loaded:
        """Load through DeepSpeed alone. Collective."""
        engine = self.engine
        if local_path(request.directory) is None:
            raise UnsupportedError(
                f"{request.load_dir}: only DeepSpeed can load this, and it reads no URLs. From object stores "
                "zeroelastic loads at ZeRO stages 1 to 3, but no Universal checkpoints. Load this from a local copy."
            )
        before = state_of(engine).damage
        begin_change(engine, "The engine may hold a part of the checkpoint: do not train on it.")
        path, client_state = self.original(request.load_dir, request.tag, **request.flags())
        if path is None:  # DeepSpeed has warned that there is nothing, and changed nothing
            state_of(engine).damage = before
            refuse_damaged(engine)
            return path, client_state
        if not request.load_module_only:
            note_load(engine, None, client_state)
        client_state.pop(SAVE_ID, None)
        return path, client_state

    def timed_report(self) -> ResumeReport:
        """The engine's report, whose seconds are now those since the call began."""
        report = replace(self.engine.zeroelastic_report, seconds=time.perf_counter() - self.began)
        self.engine.zeroelastic_report = report
        return report


def load(engine: Engine, request: LoadRequest, original: Callable[..., Loaded], *, began: float) -> Loaded:
    """Load a checkpoint at any world size; ``original`` is DeepSpeed's own method, bound to the engine. Collective.

    The report counts its seconds from ``began``, a time of ``time.perf_counter``.
    """
    call = LoadCall(engine, original, began)
    request = replace(request, load_dir=absolute(request.load_dir))
    with changing(engine, whole=not request.weights_only and request.load_lr_scheduler_states):
        if is_left_to_deepspeed(engine, request):
            outcome = call.by_deepspeed(request)
        else:
            outcome = _load_newest_or_named(call, request)
        state_of(engine).returned = changing_values(outcome[1])
    if call.log is not None:
        call.timed_report()
    return outcome


def _load_newest_or_named(call: LoadCall, request: LoadRequest) -> Loaded:
    """Load the tag of the request, or that of ``latest``; with ``"fallback"`` the newest that loads. Collective."""
    engine = call.engine
    require_partners()
    agree_on_options(engine)
    request = replace(request, options=options_of(engine))
    engine.__dict__.pop("zeroelastic_report", None)  # of an earlier load
    call.pending_micro_batches = accumulated_micro_batches(engine)
    with retrying(request.options.retries), allow_globals(request.options.allow_globals):
        outcome = None
        if request.options.fallback and request.tag is None:
            outcome = load_newest(
                request.directory,
                lambda directory, tag: _load_chosen_tag(call, replace(request, load_dir=directory, tag=tag)),
                engine,
            )
        if outcome is None:
            outcome = _load_chosen_tag(call, request)
        if call.log is not None:
            report = call.timed_report()
            if dist.get_rank() == 0:
                observers.publish(_loaded_event(engine, report))
                call.log(call.timed_report())
    return outcome


def _loaded_event(engine: Engine, report: ResumeReport) -> observers.Loaded:
    return observers.Loaded(
        path=report.path,
        format=report.format,
        step=int(engine.global_steps),
        saved_world_size=report.saved_world_size,
        world_size=report.world_size,
        bytes=report.total_bytes_read,
        seconds=report.seconds,
        root_matches=report.root_matches,
    )


def _load_chosen_tag(call: LoadCall, request: LoadRequest) -> Loaded:
    """Choose a tag and load it. Raises SavedAgainError, on all ranks, if it was saved again meanwhile. Collective."""
    tag, newer = choose_tag(request.directory, request.tag)
    if tag is None:
        nothing_to_load(call.engine, request.directory, required=request.options.required)
        is_url = local_path(request.directory) is None  # DeepSpeed, which reads none, warns in its own way of the rest
        return (None, None) if is_url else call.by_deepspeed(request)
    tag_dir = open_tag(request.directory / tag)
    try:
        return _load_tag(
            call, replace(request, tag=tag), tag_dir, LoadNotes(about_newer(request.directory, tag, newer))
        )
    except Exception as error:
        if not is_raised_on_all_ranks(error) or not any_rank(was_saved_again(tag_dir)):
            raise
        raise SavedAgainError(
            f"{tag_dir}: was saved again, or written to, while it was loaded. Load it again when that save is "
            f"complete, or a tag that is not being saved. The load ended with: {error}"
        ) from error


def _load_tag(call: LoadCall, request: LoadRequest, tag_dir: FilePath, notes: LoadNotes) -> Loaded:
    """Load one tag; ``tag_dir`` is from ``open_tag``, which remembers the state of its files. Collective."""
    engine = call.engine
    all_or_raise(lambda: refuse_merged(engine.module, f"{tag_dir} cannot be loaded"))
    loader = choose_loader(engine, tag_dir, request)
    if loader.live is None:
        if dist.get_rank() == 0:
            logger.warning("loading through DeepSpeed alone: %s", loader.reason)
        return call.by_deepspeed(request)
    plan = preflight(engine, loader.live, loader.request, tag_dir)
    note_before_load(engine, plan, call.pending_micro_batches, notes)
    if call.configured is None and not engine.global_steps:
        call.configured = optimizer_options(engine, plan.live)
    restored = restore(engine, plan, notes)
    verified = verify(engine, plan, restored)
    failed, costs = gather_costs(plan, notes.cost, verified.failed)
    if failed:
        raise_mismatch(verified, plan)
    if call.configured is not None and not plan.weights_only:
        note_options(call.configured, optimizer_options(engine, plan.live), notes)
    report = load_report(engine, plan, notes, verified, costs)
    if not request.load_module_only:
        note_load(engine, plan.record, restored.loaded[1])
    engine.zeroelastic_report = report
    warn, module_only = bool(notes.warnings), request.load_module_only
    saved_batch = plan.train_batch_size  # the plan is let go of before the log

    def log(report: ResumeReport) -> None:
        log_report(logger, report, warn=warn)
        if not module_only:
            log_batch(logger, engine, report, saved_batch)

    call.log = log
    return restored.loaded
