"""``save_checkpoint``: DeepSpeed's own save, into a hidden directory, then the commit record, the tag and ``latest``.

It checks the state to be saved, chooses the destination, and who commits the save, and when: this call, or a thread
(``background``).
"""

from __future__ import annotations

import functools
import logging
import os
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.deepspeed.client_state import checked_client_state
from zeroelastic.deepspeed.engine import Engine, agree_on_options, options_of, ordinary_tensors, saves_elastic
from zeroelastic.deepspeed.engine_state import state_of
from zeroelastic.deepspeed.live.kinds import in_rigid_form, is_without_optimizer, kind_of
from zeroelastic.deepspeed.options import SaveRequest
from zeroelastic.deepspeed.save.background import BackgroundSave, background_for, finish_pending
from zeroelastic.deepspeed.save.barrier import SaveBarrier, store_request
from zeroelastic.deepspeed.save.checks import prepare
from zeroelastic.deepspeed.save.commit import as_save_error, new_save_id
from zeroelastic.deepspeed.save.directory import SaveDirectory
from zeroelastic.deepspeed.save.save import Method, Save
from zeroelastic.distributed.collective import all_gather_or_raise, all_or_raise, broadcast
from zeroelastic.distributed.partners import require_partners
from zeroelastic.errors import UnsupportedError, UsageError, ZeroElasticError
from zeroelastic.io.paths import absolute
from zeroelastic.runs.names import normal, save_directory, stock_saves

logger = logging.getLogger(__name__)


@ordinary_tensors()
def save_checkpoint(
    original: Method,
    self: Engine,
    save_dir: Any,
    tag: Any = None,
    client_state: Any = {},  # noqa: B006  DeepSpeed's own default, passed on unchanged
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> Any:
    """Save by DeepSpeed, write the commit record, publish the tag, then ``latest``: each durable before the next."""
    directory = save_directory(save_dir) if save_dir else None
    if is_without_optimizer(self.optimizer):
        raise UnsupportedError(
            f"{save_dir}: a ZeRO-3 engine without an optimizer is not saved: DeepSpeed has no way to. Give "
            "deepspeed.initialize() an optimizer, or gather the weights with deepspeed.zero.GatheredParameters and "
            "save them."
        )
    if kind_of(self.optimizer) is None or directory is None or _writes_after_return(self):
        if save_dir and dist.get_rank() == 0:
            _warn_of_own_save(self, save_dir)
        with in_rigid_form(self.optimizer):
            save_dir = absolute(save_dir) if save_dir else save_dir
            return original(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
    tag = normal(f"global_step{self.global_steps}" if tag is None else str(tag))
    began = time.monotonic()
    named, save_dir = str(directory / tag), absolute(save_dir)
    tag_dir = Path(save_dir) / tag
    store_request(require_partners, tag_dir, "Nothing was written.", patience_s=0.0)
    agree_on_options(self)
    _warn_without_memory(self)
    finish_pending(self, before=f"the save of {tag}")
    barrier = SaveBarrier(tag_dir, timeout_s=options_of(self).save_timeout_s)
    barrier.wait("begin")
    with barrier.attribute_failures():
        by_argument: Literal["argument"] | None = "argument" if exclude_frozen_parameters else None
        excluded_by = "option" if options_of(self).frozen == "exclude" else by_argument
        request = SaveRequest(save_dir, tag, named, client_state, save_latest, excluded_by)
        return _save(self, original, request, barrier, began)


def _writes_after_return(engine: Engine) -> bool:
    """Return whether a decoupled checkpoint engine writes the save after it has returned, which is DeepSpeed's alone.

    Raises UnsupportedError where the save is to be elastic.
    """
    writer = engine.checkpoint_engine
    if not writer.is_decoupled():
        return False
    name = type(writer).__name__
    if saves_elastic(engine):
        raise UnsupportedError(
            f"{name} is a decoupled checkpoint engine, which writes after save_checkpoint has returned: it cannot "
            'write elastic checkpoints. Use "async_save": true in the "zeroelastic" block instead, or save '
            'with "format": "rigid".'
        )
    if dist.get_rank() == 0:
        _say_decoupled(name)
    return True


@functools.cache
def _say_decoupled(name: str) -> None:
    logger.warning(
        "DeepSpeed alone saves this run, rigid and without a commit record: %s writes after save_checkpoint has "
        'returned. For elastic saves in the background, use "async_save": true in the "zeroelastic" block',
        name,
    )


def _save(engine: Engine, original: Method, request: SaveRequest, barrier: SaveBarrier, began: float) -> Any:
    """Check and write, then commit now or leave that to a thread; all ranks are here. Collective."""
    kind = kind_of(engine.optimizer)
    elastic = saves_elastic(engine) and kind is not None and kind.has_elastic_form
    try:
        live, client_state = prepare(engine, request, elastic=elastic)
    except (UnsupportedError, UsageError) as error:
        asked = request.excludes_frozen  # DeepSpeed's own save records no digests of frozen weights
        refuses = elastic or (saves_elastic(engine) and (asked or isinstance(error, UsageError)))
        if refuses or not stock_saves(request.tag):
            raise
        return _save_by_deepspeed_alone(engine, original, request, error)
    request = replace(request, client_state=client_state)
    background, save_id = background_for(engine, live), broadcast(new_save_id())
    save = Save(
        request,
        _destination(engine, request, save_id),
        live,
        barrier,
        options_of(engine),
        save_id,
        elastic,
        memory=None if background is None else background.memory,
        tier="node-local" if engine.use_node_local_storage() else "directory",
        step=int(engine.global_steps),
        began=began,
    )
    done = save.write(engine, original)
    if background is not None:
        save.stalled = save.seconds
        state_of(engine).pending = BackgroundSave(save, background.group)
    else:
        save.commit()
        barrier.close()
        if dist.get_rank() == 0:
            logger.info("%s", f"{request.tag_dir}: saved in {save.seconds:.2f} s{save.note}")
    return done


def _destination(engine: Engine, request: SaveRequest, save_id: str) -> SaveDirectory:
    options, directory = options_of(engine), request.directory
    leaders: tuple[int, ...] = (0,) * dist.get_world_size()
    if engine.use_node_local_storage():
        leaders = _leaders(directory / request.tag)
    return SaveDirectory(directory, request.tag, save_id, leaders, save_latest=request.save_latest, fsync=options.fsync)


def _leaders(tag_dir: Path) -> tuple[int, ...]:
    """Return for each rank the first rank that sees the same parent directory of the tag. Collective.

    The ranks create files there for a moment to find out. A rank that does not see the one of rank 0 lists the
    directory, which has the files of its node. Raises SaveError on every rank if any rank cannot.
    """
    stem = f".zeroelastic.{broadcast(uuid.uuid4().hex)}."
    place, rank = tag_dir.parent, dist.get_rank()
    probe = place / f"{stem}{rank}"

    def make() -> None:
        with as_save_error(tag_dir):
            place.mkdir(parents=True, exist_ok=True)
            probe.touch()

    def leader() -> int:
        if (place / f"{stem}0").exists():
            return 0
        with as_save_error(tag_dir):
            seen = [name.removeprefix(stem) for name in os.listdir(place) if name.startswith(stem)]
        return min([rank, *map(int, seen)])

    all_or_raise(make)
    try:
        return tuple(all_gather_or_raise(leader)[1])
    finally:
        probe.unlink(missing_ok=True)


def _save_by_deepspeed_alone(engine: Engine, original: Method, request: SaveRequest, why: ZeroElasticError) -> Any:
    """DeepSpeed's own save, without a commit record. Collective."""
    if saves_elastic(engine):
        all_or_raise(lambda: checked_client_state(engine, request.client_state))  # no load would take it
    tag_dir = request.tag_dir
    without = "no commit record is written" + (", and nothing is uploaded" if options_of(engine).upload else "")
    state, line = state_of(engine), f"{tag_dir}: saved by DeepSpeed alone; {without}: {why}"
    warns = saves_elastic(engine) and not state.warned_of_rigid_saves
    state.warned_of_rigid_saves = True
    if dist.get_rank() == 0 and warns:
        logger.warning('%s The files are rigid in spite of "format": "elastic".', line)
    elif dist.get_rank() == 0:
        logger.info("%s", line)
    with in_rigid_form(engine.optimizer):
        done = request.call_deepspeed(original, engine)
    record = tag_dir / RECORD_NAME
    all_or_raise(lambda: record.unlink(missing_ok=True))  # of a save that this one has overwritten
    return done


def _warn_of_own_save(engine: Engine, place: object) -> None:
    """Say what is wrong with a save that is DeepSpeed's own: it has frozen weights, or an engine that is damaged."""
    if options_of(engine).frozen == "exclude":
        logger.warning('%s: "frozen": "exclude" has no effect on this save, which is DeepSpeed\'s own.', place)
    if (damage := state_of(engine).damage) is not None:
        logger.warning(
            "%s: DeepSpeed saves the engine although a load of it failed: %s Load a whole checkpoint into it first, or "
            "remove this save.",
            *(place, damage),
        )


def _warn_without_memory(engine: Engine) -> None:
    """Say once that ``"memory"`` has no effect in a loop that does not make checkpoints in memory."""
    state = state_of(engine)
    if state.memory is None and options_of(engine).memory is not None:
        state.memory = True
        if dist.get_rank() == 0:
            logger.warning(
                '"memory" in the "zeroelastic" block has no effect: the training loop is not within '
                "zeroelastic.elastic.preemption(). Put it there, or leave the option out."
            )
