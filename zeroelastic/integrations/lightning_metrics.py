"""The metrics of saves and loads in the loggers of a Lightning Trainer."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from zeroelastic.integrations.job_metrics import JobMetrics

_PACKAGE = "lightning.pytorch" if "pytorch_lightning" not in sys.modules else "pytorch_lightning"
"""Lightning has two names; a Trainer of one takes callbacks of that one only."""

Callback: Any = import_module("lightning.pytorch" if "lightning.pytorch" in sys.modules else _PACKAGE).Callback


class MetricsCallback(Callback):
    """Logs ``zeroelastic/save/stall_s`` and the other metrics of docs/guides/monitoring.md to the Trainer's loggers.

    ``events`` is the path of an event log, which rank 0 keeps over all starts of the job. A logger that fails stops no
    training::

        Trainer(callbacks=[MetricsCallback()], logger=[...])
    """

    def __init__(self, *, events: str | os.PathLike[str] | None = None) -> None:
        self._trainer: weakref.ref[Any] | None = None
        self._metrics = JobMetrics(_engine_of(weakref.ref(self)), events=events)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._trainer = weakref.ref(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._metrics.begin()
        self._flush(trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._metrics.step()
        self._flush(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._flush(trainer)
        self._metrics.end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._flush(trainer)  # of a save in another callback's on_train_end

    def _flush(self, trainer: Any) -> None:
        def log(values: Mapping[str, float]) -> None:
            for each in trainer.loggers:
                each.log_metrics(dict(values), step=trainer.global_step)

        self._metrics.flush(log)


def _engine_of(callback: weakref.ref[MetricsCallback]) -> Any:
    def engine() -> Any:
        own = callback()
        trainer = own._trainer() if own is not None and own._trainer is not None else None
        return None if trainer is None else trainer.strategy.model

    return engine
