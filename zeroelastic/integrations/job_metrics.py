"""What the callbacks of all front ends share: the metrics of one engine, and the event log of the job."""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeroelastic.elastic.events import Events, restart_count
from zeroelastic.elastic.resume import Resumed
from zeroelastic.monitoring.metrics import metrics_of
from zeroelastic.monitoring.observers import publish, subscribe
from zeroelastic.report import Report, ResumeReport, SaveReport, StartReport

logger = logging.getLogger(__name__)

Log = Callable[[Mapping[str, float]], None]


class JobMetrics:
    """The metrics of the engine that ``engine`` returns, from now on, and the job's event log at ``events``, if given.

    The event log (``zeroelastic.elastic.events``) tells after a restart how many steps were lost, and is what
    ``zeroelastic timeline`` reads. ``engine`` is called whenever there is a report; it may return None. ``log`` gets
    the metrics of each report, in the thread that trains: few trackers may be called from any thread. What it raises is
    logged once. ``engine`` must not keep this object alive, which ends the subscription with its own end.
    """

    def __init__(self, engine: Callable[[], Any], log: Log, *, events: str | os.PathLike[str] | None = None) -> None:
        self._engine, self._log, self._path = engine, log, events
        self._events: Events | None = None
        self._has_failed = False
        self._unsubscribe: Callable[[], None] = lambda: None
        pending = self._pending = deque[Mapping[str, float]]()

        def observe(report: Report, of: Any) -> None:
            if of is engine():
                pending.append(metrics_of(report))

        weakref.finalize(self, subscribe(observe)).atexit = False

    def begin(self) -> None:
        """Training begins: the engine is built and loaded. Collective."""
        engine = self._engine()
        if engine is not None and hasattr(engine, "global_steps"):  # a run with DeepSpeed
            self._begin(engine)
        self.flush()

    def _begin(self, engine: Any) -> None:
        report: ResumeReport | None = getattr(engine, "zeroelastic_report", None)
        seconds = 0.0 if report is None else report.seconds
        tag = None if report is None else Path(report.path).name
        lost: int | None = None
        if self._path is not None:
            self._events = Events(engine, self._path)
            self._events.resumed(Resumed(tag, int(engine.global_steps), {}, report, (), ()), seconds=seconds)
            self._unsubscribe, lost = subscribe(self._note_save), self._events.lost_steps
        if dist.get_rank() == 0:
            step = int(engine.global_steps)
            publish(StartReport(tag, step, dist.get_world_size(), seconds, restart_count(), lost), engine)

    def step(self) -> None:
        """An optimizer step may have been taken."""
        if self._events is not None:
            self._events.step()
        self.flush()

    def end(self) -> None:
        """Training has ended as it was meant to."""
        self.flush()
        self._unsubscribe()
        if self._events is not None:
            self._events.__exit__(None, None, None)
            self._events = None

    def flush(self) -> None:
        """Log the metrics of each report since the last call, the oldest first."""
        while self._pending:
            try:
                self._log(self._pending.popleft())
            except Exception:
                if not self._has_failed:
                    self._has_failed = True
                    logger.warning(
                        "the metrics of saves and loads could not be logged; training goes on", exc_info=True
                    )

    def _note_save(self, report: Report, engine: Any) -> None:
        if self._events is None or engine is not self._engine():
            return
        if isinstance(report, SaveReport) and report.error is None:
            self._events.saved(report.tag, report.seconds, report)
