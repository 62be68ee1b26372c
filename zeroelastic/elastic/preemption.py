"""Save and stop together when a node is about to go, and save in between: agreed by all ranks, at the same step.

A signal handler does nothing but set a flag. At each accumulation boundary one small all-reduce tells every rank
whether any of them was told to stop, and whether a save is due; so a signal to one rank stops all of them at one step,
and a signal that arrives during a save changes nothing about it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from zeroelastic.agree import settle
from zeroelastic.elastic.position import KEY, Position, pack_position, unpack_position
from zeroelastic.errors import CheckpointError, ConfigError, SaveError
from zeroelastic.storage import absolute
from zeroelastic.tag_names import normal

if TYPE_CHECKING:
    from zeroelastic.elastic.events import Events

EXIT_PREEMPTED = 75
"""The exit code of a job that was told to stop and is to be started again (EX_TEMPFAIL of sysexits.h)."""

_MARGIN = 1.2
"""How much longer than the last save the next may take."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Every:
    """When a save is due: so many steps or seconds after the last one, whichever comes first; never, if neither.

    ``background``: whether training goes on while it is written; None leaves that to ``"background_save"``.
    """

    seconds: float | None = None
    steps: int | None = None
    background: bool | None = None

    def __post_init__(self) -> None:
        for what, value in (("seconds", self.seconds), ("steps", self.steps)):
            if value is not None and not value > 0:
                raise ConfigError(f"every: {what} is {value!r}; it has to be more than 0.")

    def due(self, *, seconds: float, steps: int) -> bool:
        """Whether one is due so long after the last."""
        by_time = self.seconds is not None and seconds >= self.seconds
        return by_time or (self.steps is not None and steps >= self.steps)


def every(*, seconds: float | None = None, steps: int | None = None, background: bool | None = None) -> Every:
    """Periodic saves: what a crash costs is at most this much work, and what is in flight.

    ``background`` lets training go on while they are written, or not, whatever ``"background_save"`` says.
    """
    return Every(seconds, steps, background)


class Preemption:
    """What ``preemption`` gives: call it after each ``engine.step()``, on every rank.

    ``saves`` are the tags saved so far, the last of which may still be on its way in the background; ``stopped``
    whether the run was told to stop; ``save_seconds`` how long the last whole save took on the slowest rank, None
    before the first. What a save in the background ended with is raised by the next save, or where the block ends.

    A load within the block, a rollback, is noticed: steps are counted from the one it led to, and the position in the
    data and the generators are those of the checkpoint, if it has them.
    """

    def __init__(
        self,
        engine: Any,
        directory: str | os.PathLike[str],
        *,
        data: Position | None,
        saving: Every,
        grace: float,
        signals: Sequence[signal.Signals],
        client_state: Callable[[], Mapping[str, Any]] | None,
        log: Events | None = None,
    ) -> None:
        self.saves: list[str] = []
        self.stopped = False
        self.save_seconds: float | None = None
        self._engine, self._directory, self._data = engine, Path(absolute(directory)), data
        self._saving, self._grace, self._signals, self._client_state = saving, grace, tuple(signals), client_state
        self._log = log
        self._told_at: float | None = None
        self._timer: threading.Timer | None = None
        self._old: dict[signal.Signals, Any] = {}
        self._group: dist.ProcessGroup | None = None
        self._last_time = time.monotonic()
        self._last_step = self._seen_step = int(engine.global_steps)
        self._saved_step: int | None = None  # of the last commit of this block, unless a load came after it

    def __call__(self) -> bool:
        """Whether to leave the training loop; saves first, if one is due or the run has to stop. Collective.

        Advances the data by the global batches that were trained on. Within an accumulation it answers without asking
        anybody: a save there would lose gradients.
        """
        step = int(self._engine.global_steps)
        if self.stopped or step == self._seen_step:
            return self.stopped
        if step < self._seen_step:  # set by hand, or by a load that is not of zeroelastic
            self._count_from(step)
        advance = getattr(self._data, "advance", None)
        if advance is not None and step > self._seen_step:
            advance(step - self._seen_step)
        self._seen_step = step
        due = self._saving.due(seconds=time.monotonic() - self._last_time, steps=step - self._last_step)
        told, due, left = self._agree(due)
        if told:
            self.stopped = True
            if self._log is not None:
                self._log.stopping()
            self._stop(step, left)
        elif due and step != self._last_step:
            self.save(background=self._saving.background)
        return self.stopped

    @property
    def told(self) -> bool:
        """Whether this rank got a signal. ``stopped`` follows with the next call, on all ranks."""
        return self._told_at is not None

    def _count_from(self, step: int) -> None:
        """The run is at this step, which nothing says is saved as its newest."""
        self._last_time, self._last_step, self._seen_step, self._saved_step = time.monotonic(), step, step, None

    def _loaded(self, client_state: Mapping[str, Any]) -> None:
        """A checkpoint was loaded: go to its place in the data. Collective."""
        from zeroelastic.stage3.fallback import UnusableError

        entry = client_state.get(KEY)
        self._count_from(int(self._engine.global_steps))
        if self._data is not None and (entry is None or entry.get("data") is None) and dist.get_rank() == 0:
            logger.warning("the checkpoint that was loaded has no position in the data: set it yourself")
        if entry is not None:
            unpack = partial(
                unpack_position,
                entry,
                self._data,
                identity=f"{self._engine.global_steps}",
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                device=self._engine.device,
                strict=False,
            )
            try:
                settle(unpack)
            except CheckpointError as error:
                raise UnusableError(str(error)) from None

    def _stop(self, step: int, left: float) -> None:
        """Finish the save that is being written, then save once more, if there is something new and time for it."""
        from zeroelastic.stage3.pending import has_pending

        if has_pending(self._engine):
            try:
                self._finish("stopping")
            except SaveError as error:
                logger.error("the save in the background failed: %s", error)
            _, _, left = self._agree(False)
        if step == self._saved_step:
            logger.info("stopping at step %d, which is saved already", step)
        elif self.save_seconds is not None and self.save_seconds * _MARGIN > left:
            logger.warning(
                "stopping at step %d without a save: the last one took %.1f s, and %.1f s are left",
                *(step, self.save_seconds, left),
            )
        else:
            self.save(background=False)
            self._finish()  # of a decoupled engine: there is no next step that would

    def save(self, tag: str | None = None, *, background: bool | None = None) -> str:
        """Save now, with the position in the data and the random generators. Collective. Returns the tag.

        ``background`` as of ``every``. Waits for the save before this one, and raises what that ended with.
        """
        from zeroelastic.stage3.background import saving_in_background
        from zeroelastic.stage3.pending import has_pending

        engine = self._engine
        chosen = normal(tag) if tag is not None else f"global_step{engine.global_steps}"
        self._finish(f"the save of {chosen}")
        own = dict(self._client_state()) if self._client_state is not None else {}
        entry = pack_position(self._data, rank=dist.get_rank(), world_size=dist.get_world_size(), device=engine.device)
        began = time.monotonic()
        with saving_in_background(engine, background):
            engine.save_checkpoint(str(self._directory), tag=chosen, client_state={**own, KEY: entry})
        if not has_pending(engine):
            self._note_seconds(time.monotonic() - began)
        self.saves.append(chosen)
        self._last_time, self._last_step = time.monotonic(), int(engine.global_steps)
        self._saved_step = self._last_step
        if not has_pending(engine):
            self._log_saved(chosen)
        return chosen

    def _finish(self, before: str = "") -> None:
        """Wait for what is still being written, and commit it. Raises on every rank what it ended with."""
        from zeroelastic.stage3.pending import flush, pending_of

        pending = pending_of(self._engine)
        try:
            seconds = flush(self._engine, before=before)
        except SaveError:
            if pending is not None and os.path.relpath(pending.tag_dir, self._directory) in self.saves[-1:]:
                self.saves.pop()
                self._last_step, self._saved_step = -1, None  # nothing that could be resumed from
            raise
        if pending is not None and seconds is not None:
            self._note_seconds(seconds)
            self._log_saved(os.path.relpath(pending.tag_dir, self._directory))

    def _log_saved(self, tag: str) -> None:
        if self._log is not None and self.save_seconds is not None:
            self._log.saved(tag, self.save_seconds)

    def _note_seconds(self, seconds: float) -> None:
        took = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX, group=self._group)
        self.save_seconds = float(took)

    def exit(self) -> NoReturn:
        """End this process with ``EXIT_PREEMPTED``, so that whatever started it knows to start it again."""
        sys.exit(EXIT_PREEMPTED)

    def __enter__(self) -> Preemption:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("preemption() sets signal handlers, which only the main thread can do.")
        from zeroelastic.stage3.lineage import lineage_of

        self._group = dist.new_group(backend="gloo") if dist.get_backend() != "gloo" else None
        for number in self._signals:
            self._old[number] = signal.signal(number, self._handle)
        lineage_of(self._engine).on_load.append(self._loaded)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        from zeroelastic.stage3.lineage import lineage_of

        lineage_of(self._engine).on_load.remove(self._loaded)
        ended = False
        try:
            if kind is None:
                self._finish("the end of the training loop")
                ended = self.stopped
        finally:
            for number, handler in self._old.items():
                with contextlib.suppress(TypeError):  # a handler that was not set from Python cannot be set again
                    # Until a stopped process has ended: the interpreter takes Python's handlers away before it ends.
                    signal.signal(number, signal.SIG_IGN if ended else handler)
            self._old.clear()
            if self._timer is not None:
                self._timer.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._told_at is None:
            self._told_at = time.monotonic()
            self._timer = threading.Timer(self._grace, _give_up)
            self._timer.daemon = True
            self._timer.start()
        old = self._old.get(signal.Signals(number))
        if callable(old) and old is not signal.default_int_handler:
            old(number, frame)

    def _agree(self, due: bool) -> tuple[bool, bool, float]:
        """Whether any rank was told to stop, whether any has a save due, and the seconds left on the worst one."""
        since = time.monotonic() - self._told_at if self._told_at is not None else 0.0
        asked = torch.tensor([float(self._told_at is not None), float(due), since], dtype=torch.float64)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self._group)
        return bool(asked[0]), bool(asked[1]), self._grace - float(asked[2])


def preemption(
    engine: Any,
    directory: str | os.PathLike[str],
    *,
    data: Position | None = None,
    saving: Every | None = None,
    grace: float = 30.0,
    signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
    client_state: Callable[[], Mapping[str, Any]] | None = None,
    log: Events | None = None,
) -> Preemption:
    """Stop all ranks together at one step, with a checkpoint, when any of them gets one of ``signals``.

    ``grace``: seconds from the signal to the end; what is not done by then is given up (``os._exit`` with
    ``EXIT_PREEMPTED``), and a save that took longer than what is left is not begun. ``saving`` adds periodic saves;
    ``client_state`` gives what to save of the caller's own. ``data``, if it has ``advance`` as our samplers do, is
    advanced with every optimizer step. ``log`` is told of saves and of the stop. Handlers that were there are called
    too, and put back at the end; after a stop further signals are ignored instead, so that the process ends with the
    exit code that it chooses::

        with preemption(engine, "ckpt", data=sampler, saving=every(seconds=600)) as stop:
            for batch in loader:
                engine.backward(engine(batch))
                engine.step()
                if stop():
                    break
        if stop.stopped:
            stop.exit()
    """
    return Preemption(
        engine,
        directory,
        data=data,
        saving=saving if saving is not None else Every(),
        grace=grace,
        signals=signals,
        client_state=client_state,
        log=log,
    )


def _give_up() -> None:
    logger.error("the time to stop is over; what was not saved by now is given up")
    os._exit(EXIT_PREEMPTED)
