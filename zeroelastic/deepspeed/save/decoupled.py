"""Saves that a decoupled checkpoint engine writes later: they are committed when it has finished, never before.

DeepSpeed's decoupled engine writes in a process of its own, and DeepSpeed waits for it at the next optimizer step
(``DeepSpeedEngine._commit_decoupled_checkpoint``, 0.19.8). Our commit waits there too, and where ``pending`` says.
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any

from deepspeed.runtime.checkpoint_engine import decoupled_checkpoint_engine as ds_decoupled

from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.notices import notice
from zeroelastic.deepspeed.save.after_save import AfterSave, removal_note
from zeroelastic.deepspeed.save.barrier import SaveBarrier
from zeroelastic.deepspeed.save.commit import PendingCommit
from zeroelastic.deepspeed.save.mode import Destination, SaveMode
from zeroelastic.deepspeed.save.pending import Pending, track
from zeroelastic.distributed.collective import all_or_raise
from zeroelastic.errors import SaveError
from zeroelastic.io.paths import FilePath
from zeroelastic.monitoring.spans import span

logger = logging.getLogger(__name__)

_TICK_S = 0.1


class DecoupledMode(SaveMode):
    """A save whose files the checkpoint engine writes after ``save_checkpoint`` has returned."""

    asks_for_latest = True

    def finish(self, engine: Engine) -> None:
        """Have the save committed at the next optimizer step, or before whatever ``pending`` names. Collective."""
        with self.destination.discarded_on_failure():
            self.add_contents(engine.device)
        self.after.returns()
        timeout_s = self.barrier.timeout_s
        save = DecoupledSave(engine, self.save, self.destination, self.commit_info, self.after, timeout_s=timeout_s)
        track(engine, save)
        self.barrier.close()


class DecoupledSave(Pending):
    """A save that the checkpoint engine writes later, and its pending commit."""

    def __init__(
        self,
        engine: Engine,
        save: PendingCommit,
        destination: Destination,
        commit_info: Any,
        after: AfterSave,
        *,
        timeout_s: float,
    ) -> None:
        super().__init__(destination.tag_dir)
        self._engine, self._save, self._destination = weakref.ref(engine), save, destination
        self._commit_info, self._after = commit_info, after
        self._timeout_s, self._rank = timeout_s, engine.global_rank
        self.keep_until_exit()

    def is_done(self) -> bool:
        """Always: DeepSpeed's own step waits for the writer, so no wait of ours is worth a warning."""
        return True

    def finish(self) -> None:
        """Wait until the engine's writer has written the save, then commit it. Collective.

        Raises SaveError on every rank when a writer has ended: the tag stays uncommitted, ``latest`` as it was.
        """
        self.forget_at_exit()
        engine = self._engine()
        assert engine is not None
        began = time.monotonic()
        with self._after.failures(), self._after.below_its_span(), span("save.commit"):
            nbytes = self._commit(engine)
        self._after.waited(time.monotonic() - began)
        self._after.committed(nbytes)
        if self._rank == 0:
            notice(logger, f"{self.tag_dir}: saved{removal_note(self._after.removed)}")

    def _commit(self, engine: Engine) -> int:
        """Wait for the writer, and commit; returns the bytes of the files, as ``commit``."""
        barrier = SaveBarrier(self.tag_dir, timeout_s=self._timeout_s)
        with self._destination.discarded_on_failure(), barrier.attribute_failures():
            try:
                barrier.all_or_raise(lambda: _wait(engine, self.tag_dir), "write")
            except BaseException:
                # DeepSpeed would try to commit it before each step from now on, and leave ranks alone in its barriers.
                engine.checkpoint_engine.commit_info = None
                raise
            all_or_raise(lambda: engine.checkpoint_engine.commit(self._commit_info))
        nbytes = self._destination.commit(self._save, barrier)
        barrier.close()
        return nbytes

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

    def at_exit(self) -> None:
        """The ranks can no longer commit it."""
        self.drop()


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


def _wait(engine: Engine, tag_dir: FilePath) -> None:
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
