"""The metrics of saves and loads in the trackers of a Hugging Face Trainer: those that ``report_to`` names."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainerCallback

from zeroelastic.integrations.job_metrics import JobMetrics


class MetricsCallback(TrainerCallback):
    """Logs ``zeroelastic/save/stall_s`` and the other metrics (docs/guides/monitoring.md) through ``Trainer.log``.

    ``elastic(trainer)`` adds it, unless ``"metrics": false`` stands in the ``"zeroelastic"`` block. ``events`` is the
    path of an event log, which rank 0 keeps over all starts of the job. A tracker that fails stops no training::

        trainer.add_callback(MetricsCallback(trainer, events="events.jsonl"))
    """

    def __init__(self, trainer: Trainer, *, events: str | os.PathLike[str] | None = None) -> None:
        self._trainer = own = weakref.ref(trainer)
        self._metrics = JobMetrics(lambda: getattr(own(), "model_wrapped", None), events=events)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._metrics.begin()
        self._metrics.flush(self._log)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._metrics.step()
        self._metrics.flush(self._log)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._metrics.flush(self._log)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._metrics.flush(self._log)
        self._metrics.end()

    def _log(self, values: Mapping[str, float]) -> None:
        trainer = self._trainer()
        if trainer is None:
            return
        # Not trainer.log, which subclasses extend by averages that they begin anew after each call (TRL does). What is
        # logged here does not take the place of the Trainer's own log of this step, which on_log would switch off.
        wanted = trainer.control.should_log
        try:
            Trainer.log(trainer, dict(values))
        finally:
            trainer.control.should_log = wanted
