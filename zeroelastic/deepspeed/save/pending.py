"""Saves that go on after ``save_checkpoint`` has returned. An engine has at most one of them.

A thread of ours (``background``) or a decoupled checkpoint engine (``DecoupledSave``) writes such a save. It is
finished before any call that would change or end what is being written: the next save, a load, ``save_16bit_model`` and
``destroy``.

DeepSpeed's decoupled engine writes in a process of its own, and DeepSpeed waits for it at the next optimizer step
(``DeepSpeedEngine._commit_decoupled_checkpoint``, 0.19.8). Our commit waits there too.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import decoupled_checkpoint_engine as ds_decoupled

from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.engine_state import state_of
from zeroelastic.deepspeed.save.barrier import SaveBarrier, store_request
from zeroelastic.distributed.collective import all_or_raise
from zeroelastic.distributed.partners import require_partners
from zeroelastic.errors import SaveError

if TYPE_CHECKING:
    from zeroelastic.deepspeed.save.save import Save

logger = logging.getLogger(__name__)

_TICK_S = 0.1

_unfinished: set[Pending] = set()
"""The saves, of all engines of this process, for which ``at_exit`` is called when the interpreter ends."""


class Pending(ABC):
    """A save that is not committed yet, as far as this rank knows.

    A process that is forked from a rank has copies of the rank's saves. They are not its own: the rank finishes them.
    """

    seconds: float | None = None
    """Seconds from the call of ``save_checkpoint`` to the end of the save, once it is finished. None for a decoupled
    save, which DeepSpeed finishes at the next step."""

    def __init__(self, tag_dir: Path) -> None:
        self.tag_dir, self._process, self._rank = tag_dir, os.getpid(), dist.get_rank()
        _unfinished.add(self)

    def created_by_this_process(self) -> bool:
        """Whether this process began the save."""
        return self._process == os.getpid()

    @abstractmethod
    def is_done(self) -> bool:
        """Whether ``finish`` would not have to wait on this rank."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the save and commit it. Raises its error on every rank. Collective."""

    @abstractmethod
    def drop(self) -> None:
        """Called on this rank alone when ``finish`` will not be called any more."""

    def at_exit(self) -> None:
        """Called when the interpreter ends before the save is finished."""
        self.drop()

    def forget_at_exit(self) -> None:
        """Do not have ``at_exit`` called any more."""
        _unfinished.discard(self)


def unfinished() -> list[Pending]:
    """The saves that this process itself began and for which ``at_exit`` is to be called."""
    return [save for save in list(_unfinished) if save.created_by_this_process()]


@atexit.register
def finish_at_exit() -> None:
    """Call ``at_exit`` of what is unfinished."""
    for save in unfinished():
        save.at_exit()


def pending_of(engine: Engine) -> Pending | None:
    """The pending save of the engine, if this process began it."""
    found = state_of(engine).pending
    assert found is None or isinstance(found, Pending)
    return found if found is not None and found.created_by_this_process() else None


def finish_pending(engine: Engine, *, before: str = "") -> float | None:
    """Finish the pending save, if there is one, and return its seconds on this rank, if known. Collective.

    ``before`` names the call that has to wait. Rank 0 logs it with the seconds waited, as a warning, because training
    stands still. Raises the error of the save on every rank; then its tag is not committed and ``latest`` is unchanged.
    """
    pending = _taken(engine)
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
                "%s waited %.2f s for the save of %s to be finished", before, time.monotonic() - began, pending.tag_dir
            )
    return pending.seconds


def drop_pending(engine: Engine) -> None:
    """Give up a pending save where its ranks can no longer be reached by a collective."""
    pending = _taken(engine)
    if pending is not None:
        pending.drop()


def _taken(engine: Engine) -> Pending | None:
    """Remove and return the pending save of the engine."""
    pending = pending_of(engine)
    state_of(engine).pending = None
    return pending


class DecoupledSave(Pending):
    """A save whose files the checkpoint engine writes later: it is committed when they are written, never before."""

    def __init__(self, engine: Engine, save: Save) -> None:
        super().__init__(save.request.tag_dir)
        self._engine, self._save = weakref.ref(engine), save

    def is_done(self) -> bool:
        """Always: DeepSpeed's own step waits for the writer, so no wait of ours is worth a warning."""
        return True

    def finish(self) -> None:
        """Wait until the engine's writer has written the save, then commit it. Collective.

        Raises SaveError on every rank when a writer has ended: the tag stays uncommitted, ``latest`` as it was.
        """
        self.forget_at_exit()
        engine, save = self._engine(), self._save
        assert engine is not None
        began = time.monotonic()
        barrier = SaveBarrier(self.tag_dir, timeout_s=save.barrier.timeout_s)
        with save.destination.discarded_on_failure(), barrier.attribute_failures():
            try:
                barrier.all_or_raise(lambda: _wait(engine, self.tag_dir), "write")
            except BaseException:
                # DeepSpeed would try to commit it before each step from now on, and leave ranks alone in its
                # barriers.
                engine.checkpoint_engine.commit_info = None
                raise
            all_or_raise(lambda: engine.checkpoint_engine.commit(save.commit_info))
        nbytes = save.destination.commit(save.pending, barrier)
        barrier.close()
        save.after.waited(time.monotonic() - began)
        save.after.committed(nbytes)
        if self._rank == 0:
            logger.info("%s", f"{self.tag_dir}: saved{save.after.note}")

    def drop(self) -> None:
        """Log that it will never be committed."""
        self.forget_at_exit()
        if self._rank == 0:
            logger.error(
                "%s: was saved, but the run ended before it was committed: `latest` does not name it, and it has no "
                "commit record. Call engine.destroy() on every rank at the end of a run whose checkpoints are "
                "decoupled.",
                self.tag_dir,
            )


def check_alive(engine: Engine) -> None:
    """Raise SaveError where the writer process has ended; DeepSpeed would leave the file out. Collective."""

    def look() -> None:
        process = getattr(engine.checkpoint_engine, "ckpt_process", None)
        if process is not None and not process.is_alive():
            raise SaveError(
                f"the checkpoint process {process.pid} of rank {engine.global_rank} has ended (exit code "
                f"{process.exitcode}); nothing was written. Its own output says why. Restart the run to save again."
            )

    all_or_raise(look)


def _wait(engine: Engine, tag_dir: Path) -> None:
    """Wait until DeepSpeed's writer process has emptied its queue; other engines wait in their ``commit``.

    Without this, ``DecoupledCheckpointEngine.commit`` raises on the rank whose process has died while the others
    wait in its barrier; and it gives up after five minutes, however much there is to write.
    """
    writer = engine.checkpoint_engine
    process = getattr(writer, "ckpt_process", None)
    if not isinstance(writer, ds_decoupled.DecoupledCheckpointEngine) or process is None:
        return
    if process.is_alive():
        writer.save_queue.put((None, ds_decoupled.DecoupledEvent.COMMIT_EVENT))
        while not writer.save_event.wait(timeout=_TICK_S):
            if not process.is_alive():
                break
    if not writer.save_event.is_set():
        raise SaveError(
            f"{tag_dir}: the checkpoint process {process.pid} of rank {engine.global_rank} ended (exit "
            f"code {process.exitcode}) before it had written its files. Its own output says why. The tag is not "
            "committed, and `latest` is unchanged."
        )
    writer.save_event.clear()
