"""The event log of a running job: rank 0 appends what happens to a file that outlives every start of the job.

Nothing here is collective and nothing can stop a run: a log that cannot be written is given up with a warning.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from zeroelastic.agree import broadcast
from zeroelastic.elastic.status import Status, StatusLine
from zeroelastic.event_log import (
    EndEvent,
    Event,
    EventLog,
    ResumeEvent,
    SaveEvent,
    StartEvent,
    StepEvent,
    append,
    last_step,
    note_nodes,
    read_events,
)
from zeroelastic.storage import absolute

__all__ = ["EventLog", "Events", "events", "note_nodes", "read_events"]

_IMPORTED = time.monotonic()
"""When the imports of this process were done, near enough: what a script imports of ours it imports last."""

logger = logging.getLogger(__name__)


class Events:
    """What ``events`` gives. Give it to ``resume`` and ``preemption``, and tell it the steps with ``step``.

    Every rank has one; rank 0 writes. Other ranks write one line only: the first rank of a node, when it ends by an
    error, since rank 0 may be the one that was lost.
    """

    def __init__(self, engine: Any, path: str | os.PathLike[str] | None, *, steps: int, status: bool) -> None:
        self.lost_steps: int | None = None
        self.run = broadcast(uuid.uuid4().hex[:12])
        self._engine, self._path, self._every = engine, None if path is None else Path(absolute(path)), steps
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._first_of_node = self._rank == 0 or os.environ.get("LOCAL_RANK") == "0"
        self._seen_step = int(engine.global_steps)
        self._steps_logged = 0
        self._stopped = self._placed = False
        self._before: int | None = None
        self._status = StatusLine() if status and self._rank == 0 else None
        self._state = Status(world_size=self._world_size, restart=_environment_number("TORCHELASTIC_RESTART_COUNT"))
        if self._rank == 0 and self._path is not None:
            self._before = _last_step(self._path)
            self._write(self._start())

    def step(self, loss: float | torch.Tensor | None = None) -> None:
        """After each ``engine.step()``: takes note of an optimizer step that was taken, and of its loss on rank 0.

        ``loss`` is looked at only where a line is written, so a tensor on a GPU is waited for no more often.
        """
        step = int(self._engine.global_steps)
        if step == self._seen_step:
            return
        self._seen_step, self._placed = step, True
        if self._rank != 0:
            return
        logged = self._steps_logged == 0 or step % self._every == 0
        shown = self._status is not None and self._status.due()
        if not logged and not shown:
            return
        value = None if loss is None else float(loss)
        if logged:
            self._steps_logged += 1
            self._write(StepEvent(**self._when(), step=step, loss=value))
        self._show(step=step, loss=value)

    def resumed(
        self, *, tag: str | None, saved_world_size: int | None, proved: bool | None, seconds: float,
        load_seconds: float | None, passed_over: int,
    ) -> None:  # fmt: skip
        """``resume`` is done; it calls this itself."""
        step = int(self._engine.global_steps)
        self._seen_step, self._placed = step, True
        if self._rank != 0:
            return
        self.lost_steps = None if self._before is None else max(self._before - step, 0)
        self._write(
            ResumeEvent(
                **self._when(), tag=tag, step=step, saved_world_size=saved_world_size, proved=proved,
                seconds=seconds, load_seconds=load_seconds, passed_over=passed_over, lost_steps=self.lost_steps,
            )
        )  # fmt: skip
        self._show(step=step, lost_steps=self.lost_steps)

    def saved(self, tag: str, seconds: float) -> None:
        """A checkpoint was saved; ``preemption`` calls this itself. ``seconds``: what it held training up."""
        if self._rank == 0:
            self._write(SaveEvent(**self._when(), step=int(self._engine.global_steps), tag=tag, seconds=seconds))
            self._show(saved_at=time.monotonic(), save_seconds=seconds)

    def stopping(self) -> None:
        """The run was told to stop; ``preemption`` calls this itself."""
        self._stopped = True

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.close()
        failed = value is not None and not isinstance(value, SystemExit)
        if self._rank == 0 or (failed and self._first_of_node):
            error = f"{type(value).__name__}: {value}".splitlines()[0][:300] if failed else None
            self._write(
                EndEvent(
                    **self._when(), step=int(self._engine.global_steps) if self._placed else None, rank=self._rank,
                    reason="error" if failed else "stopped" if self._stopped else "done", error=error,
                )
            )  # fmt: skip

    def _start(self) -> StartEvent:
        local = _environment_number("LOCAL_WORLD_SIZE")
        return StartEvent(
            **self._when(),
            world_size=self._world_size,
            num_nodes=_environment_number("GROUP_WORLD_SIZE") or -(-self._world_size // (local or self._world_size)),
            host=socket.gethostname(),
            pid=os.getpid(),
            job=os.environ.get("TORCHELASTIC_RUN_ID"),
            restart=_environment_number("TORCHELASTIC_RESTART_COUNT"),
            process_seconds=_process_seconds(),
            import_seconds=time.monotonic() - _IMPORTED,
        )

    def _when(self) -> dict[str, Any]:
        return {"time": time.time(), "monotonic": time.monotonic(), "run": self.run}

    def _write(self, event: Event) -> None:
        if self._path is None:
            return
        try:
            append(self._path, event)
        except OSError as error:
            logger.warning("no more events are logged: %s cannot be written: %s", self._path, error)
            self._path = None

    def _show(self, **changed: Any) -> None:
        if self._status is not None:
            self._state = self._state.with_(**changed)
            self._status.show(self._state)


def events(engine: Any, path: str | os.PathLike[str] | None, *, steps: int = 1, status: bool = False) -> Events:
    """Keep the event log of a job at ``path``, on storage that outlives the nodes. Collective.

    Every start of the job appends to the same file. The first optimizer step of a start is logged and every
    ``steps``-th: what a kill costs is known to within as many. ``path`` None keeps no log. ``status`` shows a line on
    rank 0's stderr with step, loss, ranks, last save, lost steps and restarts: a live one on a terminal, one in half a
    minute elsewhere::

        with events(engine, "events.jsonl", status=True) as log:
            start = resume(engine, "ckpt", data=sampler, log=log)
            with preemption(engine, "ckpt", data=sampler, log=log) as stop:
                for batch in loader:
                    loss = engine(batch)
                    engine.backward(loss)
                    engine.step()
                    log.step(loss)
                    if stop():
                        break

    ``zeroelastic timeline events.jsonl`` shows what became of the job. Raises ValueError when ``steps`` is less than 1.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; every how many steps are logged has to be 1 or more.")
    return Events(engine, path, steps=steps, status=status)


def _last_step(path: Path) -> int | None:
    try:
        return last_step(path)
    except OSError:  # what is wrong will be told when it is written to
        return None


def _process_seconds() -> float:
    """The age of this process, from the kernel's own note of its start (proc(5), stat, field 22)."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rsplit(b")", 1)[1].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _environment_number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None
