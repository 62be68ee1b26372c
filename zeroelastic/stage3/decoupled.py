"""Saves that a decoupled checkpoint engine finishes later: committed when it has, never before.

DeepSpeed's engine writes in a process of its own and is waited for at the next optimizer step
(``DeepSpeedEngine._commit_decoupled_checkpoint``, 0.19.8). Ours waits there too, and wherever else ``pending`` says.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.checkpoint_engine import decoupled_checkpoint_engine as ds_decoupled

from zeroelastic.agree import settle
from zeroelastic.errors import SaveError
from zeroelastic.notices import notice
from zeroelastic.stage3.options import Options
from zeroelastic.stage3.pending import Pending, abandon, pending_of
from zeroelastic.stage3.roll_call import RollCall
from zeroelastic.stage3.save import Uncommitted, commit, discarded_on_failure

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_engines: weakref.WeakSet[Any] = weakref.WeakSet()


class DecoupledSave(Pending):
    """A save that was handed over: its record to be, what DeepSpeed announced of it, and how ``latest`` is written."""

    def __init__(
        self,
        engine: Any,
        save: Uncommitted,
        commit_info: Any,
        *,
        options: Options,
        point_latest: Callable[[], None] | None,
    ) -> None:
        super().__init__(save.tag_dir)
        self._engine, self._save, self._commit_info = weakref.ref(engine), save, commit_info
        self._options, self._point_latest, self._rank = options, point_latest, engine.global_rank
        _engines.add(engine)

    def is_done(self) -> bool:
        """It is the engine's business; what waits for it is DeepSpeed's own step."""
        return True

    def finish(self) -> None:
        """Wait until the engine's writer has written the save, then commit it. Collective.

        Raises SaveError on every rank when a writer has ended: the tag stays uncommitted, ``latest`` as it was.
        """
        engine = self._engine()
        assert engine is not None
        roll_call = RollCall(self.tag_dir, timeout_s=self._options.save_timeout_s)
        with discarded_on_failure(self._save.making, acts=self._save.acts), roll_call.naming_the_lost():
            try:
                roll_call.settle(lambda: _wait(engine, self._save), "its files were written")
            except BaseException:
                # DeepSpeed would try to commit it before each step from now on, and leave ranks alone in its barriers.
                engine.checkpoint_engine.commit_info = None
                raise
            settle(lambda: engine.checkpoint_engine.commit(self._commit_info))
        commit(self._save, roll_call, fsync=self._options.fsync)
        if self._point_latest is not None:
            roll_call.settle(self._point_latest, "`latest` was written")
        roll_call.end()
        if self._rank == 0:
            notice(logger, f"{self.tag_dir}: saved")

    def abandon(self) -> None:
        """Say that it will never be committed."""
        if self._rank == 0:
            logger.error(
                "%s: was saved, but the run ended before it was committed: `latest` does not name it, and it has no "
                "commit record. Call engine.destroy() on every rank at the end of a run whose checkpoints are "
                "decoupled.",
                self.tag_dir,
            )


def check_alive(engine: Any) -> None:
    """Refuse to hand over to a writer that has ended; DeepSpeed's engine would leave the file out. Collective."""

    def look() -> None:
        process = getattr(engine.checkpoint_engine, "ckpt_process", None)
        if process is not None and not process.is_alive():
            raise SaveError(
                f"the checkpoint process {process.pid} of rank {engine.global_rank} has ended (exit code "
                f"{process.exitcode}); nothing was written. Its own output says why. Restart the run to save again."
            )

    settle(look)


def _wait(engine: Any, save: Uncommitted) -> None:
    """Until DeepSpeed's writer process is through its queue; other engines wait in their ``commit``.

    Without this, ``DecoupledCheckpointEngine.commit`` raises on the rank whose process has died while the others wait
    in a barrier of its; and it gives up after five minutes, however much there is to write.
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
            f"{save.tag_dir}: the checkpoint process {process.pid} of rank {engine.global_rank} ended (exit "
            f"code {process.exitcode}) before it had written its files. Its own output says why. The tag is not "
            "committed, and `latest` is unchanged."
        )
    writer.save_event.clear()


def _at_exit() -> None:
    for engine in list(_engines):
        if isinstance(pending_of(engine), DecoupledSave):
            abandon(engine)


atexit.register(_at_exit)
