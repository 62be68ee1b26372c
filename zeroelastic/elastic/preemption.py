"""Save and stop all ranks at the same step when a node is about to be taken away, and save periodically.

The signal handler only sets a flag. At each accumulation boundary one small all-reduce tells every rank whether any
rank got a signal and whether a save is due. So a signal to one rank stops all ranks at one step, and a signal that
arrives during a save does not disturb it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from zeroelastic.distributed.collective import collective_device, end_group
from zeroelastic.elastic.leaving import EXIT_PREEMPTED, SIGNALS, Notice
from zeroelastic.elastic.position import KEY, Position, different_positions, pack_position, unpack_position
from zeroelastic.errors import ConfigError, SaveError, brief, some
from zeroelastic.io.paths import absolute, relative_name
from zeroelastic.observers import Stopping, publish
from zeroelastic.runs.names import normal, save_directory

if TYPE_CHECKING:
    from zeroelastic.elastic.memory.checkpoints import MemoryCheckpoints

_MARGIN = 1.2
"""The next save may take this many times as long as the last one."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """When a periodic save is due: this many steps or seconds after the last one, whichever comes first.

    A crash then costs at most this much work, and the steps in flight: what was trained before the loop began, in an
    earlier loop of the engine, or in a start whose checkpoint in memory was resumed, counts. With neither,
    no save is ever due. ``background`` says whether training goes on while the save is written; None leaves that to the
    ``"async_save"`` option.
    """

    seconds: float | None = None
    steps: int | None = None
    background: bool | None = None

    def __post_init__(self) -> None:
        for what, value in (("seconds", self.seconds), ("steps", self.steps)):
            if value is not None and not value > 0:
                raise ConfigError(f"every: {what} is {value!r}; it has to be more than 0.")

    def due(self, *, seconds: float, steps: int) -> bool:
        """Whether a save is due this many seconds and steps after the last one."""
        by_time = self.seconds is not None and seconds >= self.seconds
        return by_time or (self.steps is not None and steps >= self.steps)


every = Every


class Preemption:
    """Stops all ranks together at one step, with a checkpoint, when any of them gets one of ``signals``.

    A context manager; call it after each ``engine.step()``, on every rank::

        with preemption(engine, "ckpt", data=sampler, saving=every(seconds=600)) as stop:
            for batch in loader:
                engine.backward(engine(batch))
                engine.step()
                if stop():
                    break
        if stop.stopped:
            stop.exit()

    Arguments: ``grace`` is the number of seconds from the signal to the end of the process: work that is not done by
    then is given up (``os._exit`` with ``EXIT_PREEMPTED``), and a save is not begun when the last one took longer than
    the time that is left. ``saving`` adds periodic saves. ``client_state`` returns the caller's own entries of the
    client state. ``data`` is saved with each checkpoint; if it has ``advance``, as our samplers do, it is advanced with
    every optimizer step.

    Attributes: ``saves`` are the tags saved so far; the last one may still be being written in the background.
    ``stopped`` says whether the run was asked to stop. ``save_seconds`` is how long the last complete save took on the
    slowest rank, None before the first. An error of a save in the background is raised by the next save, or at the end
    of the block.

    Signal handlers that were set before are called too, and restored at the end; after a stop further signals are
    ignored instead, so that the process ends with its own exit code.

    With ``"memory"`` in the "zeroelastic" block, the state is also kept in the memory of the nodes, every few steps;
    ``resume`` finds it there (docs/guides/elastic.md).

    A load inside the block (a rollback) is noticed: steps are counted from the step that was loaded, and the position
    in the data and the random generators are restored from the checkpoint, if it has them.
    """

    def __init__(
        self,
        engine: Any,
        directory: str | os.PathLike[str],
        *,
        data: Position | None = None,
        saving: Every | None = None,
        grace: float = 30.0,
        signals: Sequence[signal.Signals] = SIGNALS,
        client_state: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self.saves: list[str] = []
        self.stopped = False
        self.save_seconds: float | None = None
        self._engine, self._directory, self._data = engine, Path(absolute(save_directory(directory))), data
        self._saving = saving if saving is not None else Every()
        self._notice = Notice(grace, signals)
        self._client_state = client_state
        self._group: dist.ProcessGroup | None = None
        self._last_time = time.monotonic()
        self._last_step = self._seen_step = int(engine.global_steps)
        self._memory: MemoryCheckpoints | None = None
        self._compared = False
        self._saved_step: int | None = None  # the step of the last commit of this block, unless a load came after it

    def __call__(self) -> bool:
        """Whether to leave the training loop; saves first if a save is due or the run has to stop. Collective.

        Advances the data by the global batches that were trained on. Between accumulation boundaries it returns at
        once, without communication: a save there would lose gradients.
        """
        step = int(self._engine.global_steps)
        if self.stopped or step == self._seen_step:
            return self.stopped
        if step < self._seen_step:  # set by hand, or by a load that bypassed zeroelastic
            self._count_from(step)
        advance = getattr(self._data, "advance", None)
        if advance is not None and step > self._seen_step:
            advance(step - self._seen_step)
        self._seen_step = step
        due = self._saving.due(seconds=time.monotonic() - self._last_time, steps=step - self._last_step)
        signalled, due, is_broken, left = self._agree(due)
        if is_broken:
            self._renew_memory()
        if self._memory is not None and (signalled or self._memory.due(step)):
            self._capture(self._memory)  # before a save to the disk, which takes longer
        if signalled:
            self.stopped = True
            if dist.get_rank() == 0:
                publish(Stopping(signal.Signals(signalled).name, step))
            self._stop(step, left)
            return True
        if due and step != self._last_step:
            self.save(background=self._saving.background)
        return self.stopped

    @property
    def signalled(self) -> bool:
        """Whether this rank got a signal. ``stopped`` becomes true on all ranks with the next call."""
        return self._notice.at is not None

    def _count_from(self, step: int) -> None:
        """Count steps and seconds from here; the state of this step is not known to be saved."""
        self._last_time, self._last_step, self._seen_step, self._saved_step = time.monotonic(), step, step, None

    def _loaded(self, client_state: Mapping[str, Any]) -> None:
        """Restore the position in the data after a checkpoint was loaded. Collective."""
        entry = client_state.get(KEY)
        self._count_from(int(self._engine.global_steps))
        if self._memory is not None:
            self._memory.forget()  # the run continues from another state
        if self._data is not None and (entry is None or entry.get("data") is None) and dist.get_rank() == 0:
            logger.warning("the checkpoint that was loaded has no position in the data: set it yourself")
        if entry is not None:
            identity = f"{self._engine.global_steps}"
            notes = unpack_position(entry, self._data, self._engine.device, identity=identity, strict=False)
            if notes and dist.get_rank() == 0:
                logger.info("what was loaded: %s", "; ".join(notes))

    def _stop(self, step: int, left: float) -> None:
        """Finish the save that is being written, then save the last step, if it is not saved and there is time."""
        from zeroelastic.deepspeed.save.background import pending_of

        if pending_of(self._engine) is not None:
            try:
                self._finish("stopping")
            except SaveError as error:
                logger.error("the save in the background failed: %s", error)
            *_, left = self._agree(False)
        if step == self._saved_step:
            logger.info("stopping at step %d, which is saved already", step)
        elif self.save_seconds is not None and self.save_seconds * _MARGIN > left:
            logger.warning(
                "stopping at step %d without a save: the last one took %.1f s, and %.1f s are left",
                *(step, self.save_seconds, left),
            )
        else:
            self.save(background=False)
            self._finish()

    def save(self, tag: str | None = None, *, background: bool | None = None) -> str:
        """Save now, with the position in the data and the random generators. Collective. Returns the tag.

        ``background`` is that of ``every``. Waits for the previous save, and raises its error.
        """
        from zeroelastic.deepspeed.save.background import pending_of, saving_in_background

        engine = self._engine
        chosen = normal(tag) if tag is not None else f"global_step{engine.global_steps}"
        self._finish(f"the save of {chosen}")
        client_state = self.state()
        began = time.monotonic()
        with saving_in_background(engine, background):
            engine.save_checkpoint(str(self._directory), tag=chosen, client_state=client_state)
        if pending_of(engine) is None:
            self._note_seconds(time.monotonic() - began)
        self.saves.append(chosen)
        self._last_time, self._last_step = time.monotonic(), int(engine.global_steps)
        self._saved_step = self._last_step
        return chosen

    def state(self) -> dict[str, Any]:
        """The client state: the caller's own entries, the position in the data and the generators. Collective."""
        own = dict(self._client_state()) if self._client_state is not None else {}
        one_for_all = self._engine.zero_optimization_stage() < 3  # files of stages 1 and 2 have that of one rank
        if one_for_all and not self._compared:
            self._compared = True
            if (positions := different_positions(self._data)) and dist.get_rank() == 0:
                logger.warning(
                    "POSITIONS IN THE DATA are not the same on all ranks (%s), and that of rank 0 is kept for all of "
                    "them: samples will be left out or come again. ElasticDistributedSampler has one for all ranks",
                    some(map(brief, positions)),
                )
        return {**own, KEY: pack_position(self._data, self._engine.device, for_all_ranks=one_for_all)}

    def _capture(self, memory: MemoryCheckpoints) -> None:
        """Keep the state of now in memory. Collective."""
        from zeroelastic.deepspeed.client_state import saving_sampler

        with saving_sampler(self._engine):
            memory.capture(self.state())

    def _renew_memory(self) -> None:
        """Begin memory checkpoints anew, with a process group that works: a rank has lost the last one. Collective."""
        from zeroelastic.elastic.memory.checkpoints import MemoryCheckpoints

        failed = self._memory
        assert failed is not None
        failed.close()
        self._memory = MemoryCheckpoints(self._engine, self._directory, after=failed)

    def _finish(self, before: str = "") -> None:
        """Wait for the save that is still being written, and commit it. Raises its error on every rank."""
        from zeroelastic.deepspeed.save.background import finish_pending, pending_of

        pending = pending_of(self._engine)
        try:
            seconds = finish_pending(self._engine, before=before)
        except SaveError:
            if pending is not None and relative_name(pending.tag_dir, self._directory) in self.saves[-1:]:
                self.saves.pop()
                self._last_step, self._saved_step = -1, None  # there is nothing to resume from
            raise
        if pending is not None and seconds is not None:
            self._note_seconds(seconds)

    def _note_seconds(self, seconds: float) -> None:
        took = torch.tensor([seconds], dtype=torch.float64, device=collective_device(self._group))
        dist.all_reduce(took, op=dist.ReduceOp.MAX, group=self._group)
        self.save_seconds = float(took)

    def exit(self) -> NoReturn:
        """End this process with ``EXIT_PREEMPTED``, which asks the launcher to start it again."""
        sys.exit(EXIT_PREEMPTED)

    def __enter__(self) -> Preemption:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("preemption() sets signal handlers, which only the main thread can do. Enter it there.")
        from zeroelastic.deepspeed.engine import options_of
        from zeroelastic.deepspeed.engine_state import last_save_of, state_of

        last_save, is_first = last_save_of(self._engine), False
        if hasattr(self._engine, "_config") and options_of(self._engine).memory is not None:
            from zeroelastic.elastic.memory.checkpoints import MemoryCheckpoints

            is_first = state_of(self._engine).memory is None
            self._memory = MemoryCheckpoints(self._engine, self._directory)
        self._group = dist.new_group(backend="gloo") if dist.get_backend() != "gloo" else None
        self._notice.begin()
        self._last_step, self._last_time = (
            self._seen_step - last_save.unsaved_steps,
            time.monotonic() - last_save.unsaved_seconds,
        )
        state_of(self._engine).on_load.append(self._loaded)
        if self._memory is not None and is_first and last_save.unsaved_steps > 0:
            self._capture(self._memory)  # copies were lost
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        from zeroelastic.deepspeed.engine_state import state_of

        state = state_of(self._engine)
        state.on_load.remove(self._loaded)
        ended = False
        try:
            if self._memory is not None:
                self._memory.close(failed=kind is not None)
            if kind is None:
                self._finish("the end of the training loop")
                ended = self.stopped
        finally:
            state.last_save.unsaved_steps = int(self._engine.global_steps) - self._last_step
            state.last_save.unsaved_seconds = time.monotonic() - self._last_time
            self._notice.end(ignoring=ended)
            group, self._group = self._group, None
            end_group(group)

    def _agree(self, due: bool) -> tuple[int, bool, bool, float]:
        """Agree on what happens after this step. Collective.

        Returns the number of a signal that a rank got, 0 if none did; whether any rank has a save due, has lost the
        process group of memory; and the fewest seconds left.
        """
        is_broken = self._memory is not None and self._memory.is_broken
        flags = (float(self._notice.number), float(due), float(is_broken), self._notice.seconds)
        state = torch.tensor(flags, dtype=torch.float64, device="cpu")
        dist.all_reduce(state, op=dist.ReduceOp.MAX, group=self._group)
        *seen, seconds = state.tolist()
        number, (due, is_broken) = int(seen[0]), map(bool, seen[1:])
        return number, due, is_broken, self._notice.grace - seconds


preemption = Preemption
