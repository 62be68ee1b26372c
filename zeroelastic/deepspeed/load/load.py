"""One load from beginning to end: choose a tag, check it on all ranks, restore it, verify it, report it.

What is not ours to load (stage 0, universal checkpoints, no tag at all, and what ``choose_loader`` leaves) is
DeepSpeed's own ``load_checkpoint``. A tag that was saved again while it was read is an error that says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from zeroelastic import observers
from zeroelastic.checkpoint.commit_record import CommitRecord
from zeroelastic.checkpoint.one_save import was_saved_again
from zeroelastic.checkpoint.tag_files import SAVE_ID
from zeroelastic.deepspeed.client_state import changing_values
from zeroelastic.deepspeed.engine import Engine, accumulated_micro_batches, agree_on_options, options_of, refuse_merged
from zeroelastic.deepspeed.engine_state import begin_change, changing, refuse_damaged, state_of
from zeroelastic.deepspeed.live.kinds import kind_of
from zeroelastic.deepspeed.load.fallback import load_newest
from zeroelastic.deepspeed.load.module_states import ModuleKeys, buffer_casts
from zeroelastic.deepspeed.load.preflight import preflight
from zeroelastic.deepspeed.load.report import (
    gather_costs,
    load_report,
    log_batch,
    log_report,
    notes_before_load,
    notes_of_modules,
    optimizer_options,
    replaced_options_notes,
)
from zeroelastic.deepspeed.load.restore import restore
from zeroelastic.deepspeed.load.stock import check_left, choose_loader
from zeroelastic.deepspeed.load.tag_choice import choose_tag, nothing_to_load
from zeroelastic.deepspeed.load.verify import raise_mismatch, verify
from zeroelastic.deepspeed.options import LoadRequest
from zeroelastic.distributed.collective import all_or_raise, any_rank, is_raised_on_all_ranks
from zeroelastic.distributed.partners import require_partners
from zeroelastic.errors import SavedAgainError, UnsupportedError, ZeroElasticError
from zeroelastic.io.paths import FilePath, absolute, local_path
from zeroelastic.io.remote import retrying
from zeroelastic.report import ResumeReport
from zeroelastic.runs.tag_directory import open_tag
from zeroelastic.runs.tags import about_newer
from zeroelastic.torch_file.safe_unpickler import allow_globals

logger = logging.getLogger(__name__)

Loaded = tuple[Any, Any]
"""What ``load_checkpoint`` returns: the path that was loaded, or None, and the client state."""

OnLoad = Callable[[CommitRecord | None, Any], None]
"""Called after a load that sets the engine's counters, with the record of the checkpoint and the client state."""


class Call:
    """One call of ``load_checkpoint``: the engine, DeepSpeed's own method, bound to it, and when the call began.

    ``pending_micro_batches`` are those that the engine has accumulated before; a load may set its counters to others.
    ``configured`` are the hyper-parameters that the engine had before, if it has not trained. ``log`` logs the report
    of a load; it is None until a tag is loaded, and where DeepSpeed alone loads.
    """

    def __init__(self, engine: Engine, original: Callable[..., Loaded], loaded: OnLoad, began: float) -> None:
        self.engine, self.original, self.loaded, self.began = engine, original, loaded, began
        self.pending_micro_batches = 0
        self.configured: list[dict[str, str]] | None = None
        self.log: Callable[[ResumeReport], None] | None = None

    def timed_report(self) -> ResumeReport:
        """The engine's report, whose seconds are now those since the call began."""
        report = replace(self.engine.zeroelastic_report, seconds=time.perf_counter() - self.began)
        self.engine.zeroelastic_report = report
        return report


def load(
    engine: Engine, request: LoadRequest, original: Callable[..., Loaded], loaded: OnLoad, *, began: float
) -> Loaded:
    """A load at any world size; ``original`` is DeepSpeed's own method, bound to the engine. Collective.

    The call ``began`` at a time of ``time.perf_counter``, from which the report counts its seconds.
    """
    call = Call(engine, original, loaded, began)
    request = replace(request, load_dir=absolute(request.load_dir))
    with changing(engine, whole=not request.weights_only and request.load_lr_scheduler_states):
        outcome = _load_by_either(call, request)
        state_of(engine).returned = changing_values(outcome[1])
    if call.log is not None:
        call.timed_report()
    return outcome


def _load_by_either(call: Call, request: LoadRequest) -> Loaded:
    """Load through DeepSpeed alone what is not ours (stage 0, Universal checkpoints), and all else here. Collective."""
    engine = call.engine
    if engine.load_universal_checkpoint():
        return _load_by_deepspeed(call, request)
    if kind_of(engine.optimizer, to_load=True) is None:
        check_left(engine, request)
        return _load_by_deepspeed(call, request)
    require_partners()
    agree_on_options(engine)
    request = replace(request, options=options_of(engine))
    engine.__dict__.pop("zeroelastic_report", None)  # of an earlier load
    call.pending_micro_batches = accumulated_micro_batches(engine)
    with retrying(request.options.retries), allow_globals(request.options.allow_globals):
        outcome = _load_newest_or_named(call, request)
        if call.log is not None:
            if dist.get_rank() == 0:
                observers.publish(_loaded_event(engine, call.timed_report()))
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


def _load_by_deepspeed(call: Call, request: LoadRequest) -> Loaded:
    if local_path(request.directory) is None:
        raise UnsupportedError(
            f"{request.load_dir}: this load would be DeepSpeed's own, which reads no URLs. From object stores "
            "zeroelastic loads at ZeRO stages 1 to 3, and no Universal checkpoints: load this from a local copy."
        )
    before = state_of(call.engine).damage
    begin_change(call.engine, "The engine may hold a part of the checkpoint: do not train on it.")
    path, client_state = call.original(request.load_dir, request.tag, **request.flags())
    if path is None:  # DeepSpeed has warned that there is nothing, and changed nothing
        state_of(call.engine).damage = before
        refuse_damaged(call.engine)
    elif not request.load_module_only:
        call.loaded(None, client_state)
    if path is not None:
        client_state.pop(SAVE_ID, None)
    return path, client_state


def _load_newest_or_named(call: Call, request: LoadRequest) -> Loaded:
    """Load the tag of the request, or that of ``latest``; with ``"fallback"`` the newest that loads. Collective."""
    if request.options.fallback and request.tag is None:
        found = load_newest(
            request.directory,
            lambda directory, tag: _load_one_save(call, replace(request, load_dir=directory, tag=tag)),
            call.engine,
        )
        if found is not None:
            return found[0]
    return _load_one_save(call, request)


def _load_one_save(call: Call, request: LoadRequest) -> Loaded:
    """Load a tag. Collective.

    Raises SavedAgainError, alike on all ranks, where the load failed because the tag was saved again meanwhile.
    """
    opened: list[FilePath] = []
    try:
        return _load(call, request, opened)
    except Exception as error:
        if not is_of_all_ranks(error) or not any_rank(any(map(was_saved_again, opened))):
            raise
        raise SavedAgainError(
            f"{opened[0]}: was saved again, or written to, while it was loaded. Load it again when that save is "
            f"complete, or a tag that is not being saved. The load ended with: {error}"
        ) from error


def _load(call: Call, request: LoadRequest, opened: list[FilePath]) -> Loaded:
    """One attempt to load one tag; ``opened`` gets its directory, watched. Collective."""
    engine = call.engine
    tag, newer = choose_tag(request.directory, request.tag)
    if tag is None:
        nothing_to_load(engine, request.directory, required=request.options.required)
        return (None, None) if local_path(request.directory) is None else _load_by_deepspeed(call, request)
    tag_dir = open_tag(request.directory / tag)
    opened.append(tag_dir)
    all_or_raise(lambda: refuse_merged(engine.module, f"{tag_dir} cannot be loaded"))
    loader = choose_loader(engine, tag_dir, request)
    if loader.live is None:
        if dist.get_rank() == 0:
            logger.warning("loading through DeepSpeed alone: %s", loader.reason)
        return _load_by_deepspeed(call, request)
    plan = preflight(engine, loader.live, replace(loader.request, tag=tag), tag_dir)
    notes, batch_changed = notes_before_load(engine, plan, call.pending_micro_batches)
    warnings = [*about_newer(request.directory, tag, newer), *notes]
    if call.configured is None and not engine.global_steps:
        call.configured = optimizer_options(engine, plan.live)
    keys = ModuleKeys()
    restored = restore(engine, plan, keys)
    verified = verify(engine, plan, restored)
    module_notes = [*buffer_casts(engine, plan), *notes_of_modules(plan)]
    failed, costs = gather_costs(plan, restored, verified)
    if failed:
        raise_mismatch(verified, plan)
    if call.configured is not None and not plan.weights_only:
        warnings += replaced_options_notes(call.configured, optimizer_options(engine, plan.live))
    report = load_report(
        engine,
        plan,
        restored,
        verified,
        costs,
        keys,
        warnings=warnings,
        module_notes=module_notes,
        batch_changed=batch_changed,
    )
    if not request.load_module_only:
        call.loaded(plan.record, restored.loaded[1])
    engine.zeroelastic_report = report
    saved_batch, module_only = plan.train_batch_size, request.load_module_only  # the plan is let go of before the log

    def log(report: ResumeReport) -> None:
        log_report(logger, report, warn=bool(warnings))
        if not module_only:
            log_batch(logger, engine, report, saved_batch)

    call.log = log
    return restored.loaded


def is_of_all_ranks(error: Exception) -> bool:
    """Whether every rank raises an error here; else the others are elsewhere."""
    return isinstance(error, ZeroElasticError) or is_raised_on_all_ranks(error)
