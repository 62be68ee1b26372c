"""A save: DeepSpeed's own, into a hidden directory, then the commit record, the tag and ``latest``.

``save_checkpoint`` checks what is to be saved and chooses the mode and the destination; ``mode`` does the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_head
from zeroelastic.deepspeed.client_state import checked_client_state, saved_step
from zeroelastic.deepspeed.engine import Engine, agree_on_options, options_of, saves_elastic
from zeroelastic.deepspeed.engine_state import lineage_of, refuse_to_save, state_of
from zeroelastic.deepspeed.live.kinds import covered_live, kind_of, listed_by_optimizer
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.replicated import difference, replicated_facts, token_of
from zeroelastic.deepspeed.notices import notice
from zeroelastic.deepspeed.save.after_save import AfterSave, remove_old_tags
from zeroelastic.deepspeed.save.background import BackgroundMode, background_for
from zeroelastic.deepspeed.save.barrier import SaveBarrier
from zeroelastic.deepspeed.save.commit import new_save_id
from zeroelastic.deepspeed.save.decoupled import DecoupledMode, check_alive
from zeroelastic.deepspeed.save.mode import Destination, SaveMode, SaveRequest
from zeroelastic.deepspeed.save.pending import finish_pending, unfinished
from zeroelastic.deepspeed.save.plain import Directory, PlainMode
from zeroelastic.deepspeed.save.store import StoreMode, StoreTarget, refuse_in_store
from zeroelastic.deepspeed.storage_rules import directory_leaders, refuse_unwritable, saves_nothing
from zeroelastic.distributed.collective import all_gather_of_or_raise, all_or_raise
from zeroelastic.distributed.partners import require_partners
from zeroelastic.errors import (
    CheckpointError,
    SaveError,
    UnreadableError,
    UnsupportedError,
    UsageError,
    ZeroElasticError,
    printable,
)
from zeroelastic.io.paths import FilePath, RemotePath, absolute, as_path, is_url
from zeroelastic.monitoring.spans import span
from zeroelastic.runs.names import normal, stock_saves, why_not_saved

logger = logging.getLogger(__name__)

Method = Callable[..., Any]


def save_checkpoint(
    original: Method,
    self: Engine,
    save_dir: Any,
    tag: Any = None,
    client_state: Any = {},  # noqa: B006  DeepSpeed's own default, passed on unchanged
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> Any:
    """DeepSpeed's save, the commit record, the tag, ``latest``: in that order, each durable before the next."""
    if kind_of(self.optimizer) is None or not save_dir:
        if is_url(save_dir):
            raise UnsupportedError(
                f"{save_dir}: this save would be DeepSpeed's own, which writes to no URLs. To object stores "
                "zeroelastic saves at ZeRO stages 1 to 3. Save to a directory, and copy it."
            )
        return original(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
    tag = normal(f"global_step{self.global_steps}" if tag is None else str(tag))
    began = time.monotonic()
    named = str(as_path(save_dir) / tag)
    save_dir = absolute(save_dir)
    require_partners()
    agree_on_options(self)
    _warn_without_memory(self)
    finish_pending(self, before=f"the save of {tag}")
    after = AfterSave(self, as_path(save_dir) / tag, tag, began=began)
    with span("save", tag=tag, step=int(self.global_steps), ranks=dist.get_world_size()), after.failures():
        barrier = SaveBarrier(as_path(save_dir) / tag, timeout_s=options_of(self).save_timeout_s)
        barrier.leave_note(new_save_id())
        with span("save.wait"):
            barrier.wait("begin")
        with barrier.attribute_failures():
            request = SaveRequest(save_dir, tag, named, client_state, save_latest, exclude_frozen_parameters, began)
            return _save(self, original, request, barrier, after, save_id=barrier.note_of(0))


def _save(
    engine: Engine, original: Method, request: SaveRequest, barrier: SaveBarrier, after: AfterSave, *, save_id: str
) -> Any:
    """The save itself, when all ranks have come to it. Collective."""
    if engine.checkpoint_engine.is_decoupled():
        engine._commit_decoupled_checkpoint()  # a save before this one that is not ours
    elastic = saves_elastic(engine)
    prepared = _prepare(engine, request, elastic=elastic)
    if isinstance(prepared, ZeroElasticError):
        if elastic or not isinstance(request.tag_dir, Path) or not stock_saves(request.tag):
            raise prepared
        return _save_by_deepspeed_alone(engine, original, request, prepared)
    live, client_state = prepared
    request = replace(request, client_state=client_state)
    # DeepSpeed's own files of stages 1 and 2 have all that another size needs.
    mode = _mode(engine, request, live, barrier, after, save_id=save_id, elastic=elastic and live.per_param)
    done = mode.write(engine, original)
    mode.finish(engine)
    return done


def _mode(
    engine: Engine,
    request: SaveRequest,
    live: LiveOptimizer,
    barrier: SaveBarrier,
    after: AfterSave,
    *,
    save_id: str,
    elastic: bool,
) -> SaveMode:
    """How this save is written and committed, by the options and the checkpoint engine. Collective."""
    options, is_decoupled = options_of(engine), engine.checkpoint_engine.is_decoupled()
    if is_decoupled:
        check_alive(engine)
    background = background_for(engine, live, options.async_save)
    destination = _destination(engine, request, save_id)
    if destination.is_leader:
        over_nodes = any(destination.leaders)
        after.remove_old = partial(remove_old_tags, destination.run_dir, request.tag, options, over_nodes=over_nodes)
    kind: Callable[..., SaveMode]
    if background is not None:
        kind = partial(BackgroundMode, background)
    elif isinstance(destination, StoreTarget):
        kind = StoreMode
    else:
        kind = DecoupledMode if is_decoupled else PlainMode
    return kind(request, destination, live, options, barrier, after, save_id=save_id, elastic=elastic)


def _destination(engine: Engine, request: SaveRequest, save_id: str) -> Destination:
    """Where the save goes. Collective."""
    options, directory = options_of(engine), request.directory
    if isinstance(directory, RemotePath):
        target = partial(StoreTarget, directory, request.tag, save_id, options, save_latest=request.save_latest)
        return all_or_raise(target)
    leaders: tuple[int, ...] = (0,) * dist.get_world_size()
    if engine.use_node_local_storage():
        leaders = directory_leaders(directory / request.tag)
    return Directory(directory, request.tag, save_id, leaders, save_latest=request.save_latest, fsync=options.fsync)


def _save_by_deepspeed_alone(engine: Engine, original: Method, request: SaveRequest, why: ZeroElasticError) -> Any:
    """DeepSpeed's own save, without a commit record. Collective."""
    tag_dir = request.tag_dir
    assert isinstance(tag_dir, Path)
    if dist.get_rank() == 0:
        notice(logger, f"{tag_dir}: saved by DeepSpeed alone; no commit record is written: {why}")
    done = request.call_deepspeed(original, engine)
    record = tag_dir / RECORD_NAME
    all_or_raise(lambda: record.unlink(missing_ok=True))  # of a save that this one has overwritten
    return done


def _prepare(
    engine: Engine, request: SaveRequest, *, elastic: bool
) -> tuple[LiveOptimizer, dict[str, Any]] | ZeroElasticError:
    """The live state of this rank, read once for the whole save, and the client state to save. Collective.

    Or the error that says why the save gets no commit record, the same on all ranks.
    """

    def look() -> tuple[LiveOptimizer, dict[str, Any], dict[str, str]]:
        local = isinstance(request.directory, Path)  # in a store one rank asks for all
        with saves_nothing(request.tag_dir):
            problem = why_not_saved(request.directory, request.tag) if local or dist.get_rank() == 0 else None
        if problem is not None:
            raise UsageError(
                f"{request.directory}: nothing can be saved under the tag {printable(request.tag)}: {problem}. Nothing "
                "was written; pass another tag."
            )
        if dist.get_rank() == 0:
            _refuse_tag_of_another(engine, request.tag_dir)
        refuse_to_save(engine, request.tag_dir)
        live = covered_live(engine, engine.optimizer)
        refuse_unwritable(engine, live)
        if not local:
            refuse_in_store(engine, live)
        facts = replicated_facts(live)
        with listed_by_optimizer(engine, live.trained):
            client_state = checked_client_state(engine, request.client_state)
        return live, client_state, facts | {"the step to save": str(saved_step(engine, client_state))}

    try:
        (live, client_state, facts), outcomes = all_gather_of_or_raise(
            look, lambda found: (token_of(found[2], found[0].tp.rank), request.named)
        )
        different = difference(facts, [token for token, _ in outcomes])
    except (UnsupportedError, UsageError) as error:
        return error
    if different is not None:
        return different
    lost = None if elastic else live.lost_in_stock_files()
    if lost is not None:
        return UnsupportedError(
            f"DeepSpeed's own files lack {lost}. Save with elastic_checkpoint on to have all of it."
        )
    places = sorted({named for _, named in outcomes})
    if len(places) > 1:
        return UsageError(
            f"the ranks save to different places ({', '.join(places[:3])}{' ...' if len(places) > 3 else ''}). A "
            "checkpoint has one tag and one directory, which all ranks share: pass the same ones everywhere."
        )
    return live, client_state


def _refuse_tag_of_another(engine: Engine, tag_dir: FilePath) -> None:
    """Raise SaveError where another engine saves under the same tag: one that is at work as long as this one is."""
    problem = "is being saved by another engine" if any(save.tag_dir == tag_dir for save in unfinished()) else None
    lineage = lineage_of(engine)
    try:
        head = read_head(tag_dir / RECORD_NAME)
    except (CheckpointError, UnreadableError):  # there is none, or it is damaged
        head = {}
    run, committed_at = head.get("run"), head.get("committed_at")
    if run not in (None, lineage.run) and isinstance(committed_at, float) and committed_at > lineage.made_at:
        problem = f"was saved by another engine at its step {head.get('global_steps')}, since this one was made"
    if problem is not None:
        raise SaveError(
            f"{tag_dir}: {problem}. Nothing was written. Two engines cannot save under one tag: give each tags, or a "
            "directory, of its own."
        )


def _warn_without_memory(engine: Engine) -> None:
    """Say once that ``"memory"`` has no effect in a loop that does not make checkpoints in memory."""
    state = state_of(engine)
    if state.memory is None and options_of(engine).memory is not None:
        state.memory = True
        if dist.get_rank() == 0:
            logger.warning(
                '"memory" is in the "zeroelastic" block, and no checkpoints in memory are made: the training loop is '
                "not within zeroelastic.elastic.preemption(). Put it there, or leave the option out."
            )
