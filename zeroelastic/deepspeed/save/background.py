"""Asynchronous saves: a thread writes and commits the snapshot of a save while training goes on.

The thread writes the files, makes them durable, and commits them together with the threads of the other ranks, as a
synchronous save does. Its collectives have a process group of their own, so that they do not come between the
collectives of training. It uses one processor at a low priority.

An engine has at most one such save. It is finished before any call that would change its files or end the thread: the
next save, a load, ``save_16bit_model`` and ``destroy``.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch.distributed as dist

from zeroelastic.deepspeed.engine import Engine, options_of
from zeroelastic.deepspeed.engine_state import state_of
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.patching import patched
from zeroelastic.deepspeed.save.barrier import SaveBarrier, store_request
from zeroelastic.deepspeed.save.save import Save
from zeroelastic.deepspeed.save.shard_writer import HostMemory, writes_with_torch
from zeroelastic.distributed.collective import all_or_raise, collectives_over, end_group
from zeroelastic.distributed.partners import require_partners
from zeroelastic.errors import SaveError, UnsupportedError, ZeroElasticError

logger = logging.getLogger(__name__)

_NICER = 19

_unfinished: set[BackgroundSave] = set()
"""The saves, of all engines of this process, that are waited for when the interpreter ends."""


@contextmanager
def saving_in_background(engine: Engine, wish: bool | None) -> Iterator[None]:
    """Within this context, saves of an engine are asynchronous, or are not; None leaves that to the options."""
    with patched(state_of(engine), async_save=wish):
        yield


def wants_background(engine: Engine) -> bool:
    wish = state_of(engine).async_save
    return options_of(engine).async_save if wish is None else wish


def refuse_background(engine: Engine) -> None:
    """Raise UnsupportedError for a checkpoint engine other than torch's, which has its own way to save asynchronously.

    While an engine is being built it has no checkpoint engine yet: then its configuration decides.
    """
    config, writer = engine._config, engine.checkpoint_engine
    if writer is not None:
        name = "" if writes_with_torch(writer) else type(writer).__name__
    elif config.checkpoint_config.get("writer") is not None:
        name = "the writer that its configuration names"
    else:
        datastates = getattr(config, "datastates_config", None)
        name = "DataStates" if datastates is not None and datastates.enabled else ""
    if name:
        raise UnsupportedError(
            f'"async_save" needs DeepSpeed\'s default checkpoint engine; this run saves with {name}, which saves in '
            "the background in another way, or not at all. Leave out one of the two."
        )


@dataclass(frozen=True, slots=True)
class Background:
    """The process group and the snapshot memory that the background saves of one engine share."""

    group: dist.ProcessGroup
    memory: HostMemory = field(default_factory=HostMemory)


def background_for(engine: Engine, live: LiveOptimizer) -> Background | None:
    """Return the ``Background`` for the next save of an engine, or None for a synchronous save. Collective.

    Why a save has to be synchronous all the same is the same on every rank, and logged once. Raises UnsupportedError
    for a checkpoint engine with its own background.
    """
    if not wants_background(engine):
        return None
    all_or_raise(lambda: refuse_background(engine))
    if live.on_nvme:
        reason = "a snapshot of state on NVMe would take as much host memory as the offload saves"
    elif live.layout.world_size != dist.get_world_size():
        reason = "tensor parallelism is not supported yet"
    else:
        return background_of(engine)
    state = state_of(engine)
    if dist.get_rank() == 0 and not state.warned_of_waiting:
        logger.warning("saves are not in the background: %s", reason)
    state.warned_of_waiting = True
    return None


def background_of(engine: Engine) -> Background:
    """Return the Background of an engine, made at the first call. Collective then."""
    state = state_of(engine)
    if state.background is None:
        state.background = Background(dist.new_group(backend="gloo"))
    assert isinstance(state.background, Background)
    return state.background


def forget_background(engine: Engine) -> None:
    """End the process group of an engine's saves, and free their memory. An unfinished save keeps the group."""
    found, state_of(engine).background = state_of(engine).background, None
    if isinstance(found, Background) and not any(save.group is found.group for save in unfinished()):
        end_group(found.group)


class BackgroundSave:
    """A save that a thread writes and commits, collectively over ``group``; the thread begins at once.

    It raises the same error on every rank. Where it cannot, because a rank has died or the group is gone, each rank has
    its own, and ``finish`` raises on all. A process that is forked from a rank has copies of the rank's saves, which
    are not its own: the rank finishes them.
    """

    seconds: float | None = None
    """Seconds from the call of ``save_checkpoint`` to the end of the save, once it is finished."""

    def __init__(self, save: Save, group: dist.ProcessGroup) -> None:
        self.tag_dir, self.group, self._process, self._rank = save.request.tag_dir, group, os.getpid(), dist.get_rank()
        self._save, self._barrier = save, save.barrier
        self.failure: ZeroElasticError | None = None
        _unfinished.add(self)
        self._thread = threading.Thread(target=self._run, name="zeroelastic-save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        _lower_priority()
        try:
            with collectives_over(self.group):
                self._save.commit()
            if self._save.note:
                logger.info("%s: saved%s", self.tag_dir, self._save.note)
            if self._rank == 0:
                seconds = self._save.seconds
                logger.info("%s", f"{self.tag_dir}: saved in the background, {seconds:.2f} s after it began")
        except ZeroElasticError as error:
            self._fail(error)
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            if not dist.is_initialized():
                why = (
                    "the process groups were destroyed before it was finished. Call engine.destroy() or "
                    "zeroelastic.wait_for_save(engine) first"
                )
            self._fail(
                SaveError(
                    f"{self.tag_dir}: the save in the background ended on rank {self._rank}: {why}. It is not "
                    "committed unless `latest` names it."
                )
            )
        finally:
            self.seconds = self._save.seconds
            del self._save
            _unfinished.discard(self)

    def _fail(self, error: ZeroElasticError) -> None:
        self.failure = error
        if self._rank == 0:
            logger.error("the next save, load or destroy() will raise this: %s", error)

    def created_by_this_process(self) -> bool:
        return self._process == os.getpid()

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the thread; raises on every rank the error that any of them ended with. Collective."""
        self.wait()
        self._barrier.close()
        last = SaveBarrier(self.tag_dir, timeout_s=self._barrier.timeout_s)
        last.outcome_note = "Unless `latest` names it, it is not committed."
        last.all_or_raise(self.raise_failure, "end")
        last.close()

    def wait(self) -> None:
        """Wait for the thread on this rank."""
        self._thread.join()

    def raise_failure(self) -> None:
        """Raise the error that it ended with, if any."""
        if self.failure is not None:
            raise self.failure


def unfinished() -> list[BackgroundSave]:
    """Return the saves that this process itself began and that are not finished."""
    return [save for save in list(_unfinished) if save.created_by_this_process()]


def finish_at_exit() -> None:
    """Wait for the unfinished saves at the end of the interpreter, on each rank alone."""
    for save in unfinished():
        logger.warning(
            "%s: the process waits for this save before it exits; call engine.destroy() at the end of the script",
            save.tag_dir,
        )
        save.wait()
        if save.failure is not None:
            logger.error("%s", save.failure)


# ``upload`` registers its own wait first. Calls run in reverse order, so these saves are finished before it uploads.
getattr(threading, "_register_atexit", atexit.register)(finish_at_exit)


def finish_all() -> None:
    """Wait for all saves of this process, without the other ranks. Raises the error of the first that failed."""
    saves = unfinished()
    for save in saves:
        save.wait()
    for save in saves:
        save.raise_failure()


def pending_of(engine: Engine) -> BackgroundSave | None:
    """Return the save of the engine that this rank does not know to be committed, if this process began it."""
    found = state_of(engine).pending
    assert found is None or isinstance(found, BackgroundSave)
    return found if found is not None and found.created_by_this_process() else None


def finish_pending(engine: Engine, *, before: str = "") -> float | None:
    """Finish the pending save, if there is one, and return its seconds on this rank, if known. Collective.

    ``before`` names the call that has to wait. Rank 0 logs it with the seconds waited, as a warning, because training
    stands still. Raises the error of the save on every rank; then its tag is not committed and ``latest`` is unchanged.
    """
    pending = drop_pending(engine)
    if pending is None:
        return None
    outcome = "Unless `latest` names it, it is not committed."
    store_request(require_partners, pending.tag_dir, outcome, patience_s=0.0)
    waits, began = not pending.is_done(), time.monotonic()
    try:
        pending.finish()
    finally:
        if before and waits and dist.get_rank() == 0:
            logger.warning(
                "%s waited %.2f s for the save of %s to finish", before, time.monotonic() - began, pending.tag_dir
            )
    return pending.seconds


def drop_pending(engine: Engine) -> BackgroundSave | None:
    """Forget the pending save of the engine and return it. The end of the process waits for its thread."""
    pending = pending_of(engine)
    state_of(engine).pending = None
    return pending


def _lower_priority() -> None:
    """Lower the priority of this thread alone, which Linux can."""
    with suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICER))
