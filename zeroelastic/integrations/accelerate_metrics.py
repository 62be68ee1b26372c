"""The metrics of saves and loads in the trackers of accelerate."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zeroelastic.errors import UnsupportedError
from zeroelastic.integrations.framework_load import is_loaded_here
from zeroelastic.integrations.job_metrics import JobMetrics


class MetricsLogger:
    """Logs ``zeroelastic/save/stall_s`` and the other metrics (docs/guides/monitoring.md) through ``accelerator.log``.

    Make it after ``accelerator.prepare`` and ``init_trackers``, and before ``load_state``; call ``begin`` after that,
    and ``step`` after each optimizer step. ``events`` is the path of an event log, which rank 0 keeps over all starts
    of the job. Raises UnsupportedError where the accelerator has no ZeRO engine::

        metrics = MetricsLogger(accelerator)
        accelerator.load_state(...)
        metrics.begin()
        for batch in loader:
            ...
            metrics.step()
        metrics.end()
    """

    def __init__(self, accelerator: Any, *, events: str | os.PathLike[str] | None = None) -> None:
        engine = next(filter(is_loaded_here, accelerator._models), None)
        if engine is None:
            raise UnsupportedError(
                "MetricsLogger: the accelerator has no ZeRO engine, whose saves and loads it could log. Make it after "
                "accelerator.prepare, with DeepSpeed ZeRO."
            )
        self._began = False

        def log(values: Mapping[str, float]) -> None:
            accelerator.log(dict(values), step=int(engine.global_steps))

        self._metrics = JobMetrics(lambda: engine, log, events=events)

    def begin(self) -> None:
        """Training begins, after the load if there was one. Collective."""
        if not self._began:
            self._began = True
            self._metrics.begin()

    def step(self) -> None:
        """Log what there is, after an optimizer step."""
        self.begin()
        self._metrics.step()

    def end(self) -> None:
        """Log the rest, at the end of training."""
        self._metrics.end()
