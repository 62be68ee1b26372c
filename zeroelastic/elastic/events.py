"""The event log of a running job: rank 0 appends events to a file that is kept over all starts of the job.

A log cannot stop a run: when it cannot be written, a warning is logged and logging ends. ``StatusLine`` is the status
line of the job: live on a terminal, one plain line every half minute in a file.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zeroelastic.distributed.collective import broadcast
from zeroelastic.io.paths import absolute
from zeroelastic.job_log.event_log import (
    EndEvent,
    EndReason,
    Event,
    EventLog,
    MemoryEvent,
    ResumeEvent,
    SaveEvent,
    StartEvent,
    StepEvent,
    append,
    last_step,
    note_nodes,
    read_events,
)

if TYPE_CHECKING:
    from rich.live import Live

    from zeroelastic.elastic.resume import Resumed
    from zeroelastic.observers import Saved
    from zeroelastic.report import MemoryReport

__all__ = ["EventLog", "Events", "events", "note_nodes", "read_events"]

_LIVE_S = 0.25
_PLAIN_S = 30.0

_IMPORTED = time.monotonic()
"""About the time at which this process had finished its imports: scripts import this module late."""

logger = logging.getLogger(__name__)


class Events:
    """The event log of a job at ``path``, on storage that outlives the nodes. Making one is collective.

    Every start of the job appends to the same file. The first optimizer step of a start is logged and then every
    ``steps``-th, so the steps that a kill costs are known to within ``steps``. With ``path`` None no log is kept.
    ``status`` shows a line on rank 0's stderr with step, loss, ranks, last save, lost steps and restarts: live on a
    terminal, otherwise one line every half minute::

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

    ``zeroelastic timeline events.jsonl`` shows the history of the job. Rank 0 writes. The first rank of another node
    writes one line when it ends by an error, since rank 0 may be lost. Raises ValueError when ``steps`` is below 1.
    """

    def __init__(
        self,
        engine: Any,
        path: str | os.PathLike[str] | None,
        *,
        steps: int = 1,
        status: bool = False,
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps is {steps}; every how many steps are logged has to be 1 or more.")
        self.lost_steps: int | None = None
        self.run = broadcast(uuid.uuid4().hex[:12])
        self._engine, self._path, self._every = engine, None if path is None else Path(absolute(path)), steps
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._first_of_node = self._rank == 0 or os.environ.get("LOCAL_RANK") == "0"
        self._seen_step = int(engine.global_steps)
        self._steps_logged = 0
        self._reason: EndReason = "done"
        self._placed = False
        self._before: int | None = None
        self._status = StatusLine() if status and self._rank == 0 else None
        self._state = Status(world_size=self._world_size, restart=restart_count())
        if self._rank == 0 and self._path is not None:
            self._before = _last_step(self._path)
            self._write(self._start())

    def step(self, loss: float | torch.Tensor | None = None) -> None:
        """Call it after each ``engine.step()``: logs an optimizer step and its loss, on rank 0.

        ``loss`` is read only when a line is written, so a tensor on a GPU is not waited for at other steps.
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

    def resumed(self, resumed: Resumed, *, seconds: float) -> None:
        """Log the end of ``resume``, which calls this itself; ``seconds`` is how long it took."""
        step, report = int(self._engine.global_steps), resumed.report
        self._seen_step, self._placed = step, True
        if self._rank != 0:
            return
        self.lost_steps = None if self._before is None else max(self._before - step, 0)
        proved = report.root_matches if report is not None else None
        load_seconds = report.seconds if report is not None else None
        self._write(
            ResumeEvent(
                **self._when(),
                tag=resumed.tag,
                step=step,
                saved_world_size=report.saved_world_size if report is not None else None,
                proved=proved,
                seconds=seconds,
                load_seconds=load_seconds,
                passed_over=len(resumed.passed_over),
                lost_steps=self.lost_steps,
                tier=resumed.tier,
            )
        )
        self._show(step=step, lost_steps=self.lost_steps)

    def saved(self, tag: str, seconds: float, report: Saved | None = None) -> None:
        """Log a save, as ``preemption`` does itself. ``seconds`` is how long it took; ``report`` has more about it."""
        if self._rank == 0:
            step = int(self._engine.global_steps)
            stall, nbytes = (None, None) if report is None else (report.stall_seconds, report.bytes)
            self._write(
                SaveEvent(**self._when(), step=step, tag=tag, seconds=seconds, stall_seconds=stall, bytes=nbytes)
            )
            self._show(saved_at=time.monotonic(), save_seconds=seconds)

    def memory(self, report: MemoryReport) -> None:
        """Log a checkpoint in memory, as ``preemption`` does itself for one of many."""
        if self._rank == 0:
            self._write(MemoryEvent(**{**asdict(report), **self._when()}))

    def stopping(self) -> None:
        """Note that the run is stopping; ``preemption`` calls this itself."""
        self._reason = "stopped"

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
                    reason="error" if failed else self._reason, error=error,
                )
            )  # fmt: skip

    def _start(self) -> StartEvent:
        age = _process_seconds()
        local = _environment_number("LOCAL_WORLD_SIZE")
        return StartEvent(
            **self._when(),
            world_size=self._world_size,
            num_nodes=_environment_number("GROUP_WORLD_SIZE") or -(-self._world_size // (local or self._world_size)),
            host=socket.gethostname(),
            pid=os.getpid(),
            job=os.environ.get("TORCHELASTIC_RUN_ID"),
            restart=restart_count(),
            process_seconds=age,
            import_seconds=min(time.monotonic() - _IMPORTED, age),
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
            self._state = replace(self._state, **changed)
            self._status.show(self._state)


events = Events


@dataclass(frozen=True, slots=True)
class Status:
    """The content of the line; ``saved_at`` is the monotonic time of the last save, ``restart`` torchrun's count."""

    world_size: int
    restart: int | None = None
    step: int = 0
    loss: float | None = None
    saved_at: float | None = None
    save_seconds: float | None = None
    lost_steps: int | None = None

    def text(self, now: float) -> str:
        """The line, at a monotonic time."""
        parts = [f"step {self.step}"]
        parts += [] if self.loss is None else [f"loss {self.loss:.4g}"]
        parts += [f"{self.world_size} rank{'s' if self.world_size != 1 else ''}"]
        if self.saved_at is not None:
            parts += [f"saved {now - self.saved_at:.0f} s ago in {self.save_seconds or 0.0:.1f} s"]
        else:
            parts += ["not saved yet"]
        parts += [] if self.lost_steps is None else [f"{self.lost_steps} steps lost at the last restart"]
        parts += [f"restart {self.restart}"] if self.restart else []
        return " | ".join(parts)


class StatusLine:
    """One line on stderr. Only ``show`` draws it, no thread does, so that a fork is safe at any time."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last: float | None = None
        self._live: Live | None = None

    def due(self) -> bool:
        """Whether it is time to show the line again."""
        return self._last is None or time.monotonic() - self._last >= (_LIVE_S if self._terminal else _PLAIN_S)

    def show(self, status: Status) -> None:
        """Show the line, if it is due."""
        if not self.due():
            return
        self._last = time.monotonic()
        line = status.text(self._last)
        if self._terminal:
            self._draw(line)
        else:
            sys.stderr.write(line + "\n")

    def close(self) -> None:
        """Leave the last line on the terminal and restore its state."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, line: str) -> None:
        from rich.text import Text

        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            # Other output to stdout and stderr goes above the line.
            self._live = Live(console=Console(stderr=True), auto_refresh=False)
            self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)


def _last_step(path: Path) -> int | None:
    try:
        return last_step(path)
    except OSError:  # the first write reports the problem
        return None


def _process_seconds() -> float:
    """The age of this process, by the kernel's start time (proc(5), stat, field 22)."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rsplit(b")", 1)[1].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def restart_count() -> int | None:
    """How often torchrun has restarted this job; None without torchrun."""
    return _environment_number("TORCHELASTIC_RESTART_COUNT")


def _environment_number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None
