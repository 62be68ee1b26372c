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
        own = weakref.ref(self)
        self._trainer: weakref.ref[Any] | None = None

        def trainer() -> Any:
            callback = own()
            return None if callback is None or callback._trainer is None else callback._trainer()

        def engine() -> Any:
            found = trainer()
            return None if found is None else found.strategy.model

        def log(values: Mapping[str, float]) -> None:
            found = trainer()
            for each in found.loggers if found is not None else ():
                each.log_metrics(dict(values), step=found.global_step)

        self._metrics = JobMetrics(engine, log, events=events)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._trainer = weakref.ref(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._metrics.begin()

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._metrics.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._metrics.end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._metrics.flush()  # of a save in another callback's on_train_end
