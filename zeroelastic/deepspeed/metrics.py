"""The metrics of an engine's saves and loads, in DeepSpeed's own monitor and in the file of ``"metrics_file"``."""

from __future__ import annotations

import logging
import weakref
from functools import partial
from typing import Any

from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.options import Options
from zeroelastic.io.paths import absolute
from zeroelastic.monitoring.metrics import metrics_of
from zeroelastic.monitoring.observers import subscribe
from zeroelastic.monitoring.prometheus import MetricsFile
from zeroelastic.report import Report

logger = logging.getLogger(__name__)

_files: dict[str, MetricsFile] = {}
"""The metrics files of this process by path: engines that name the same one share it."""


def watch(engine: Engine, options: Options) -> None:
    """Log the metrics of an engine to its monitor and to its metrics file, as the options say; for rank 0.

    The monitor (``deepspeed.monitor.monitor.MonitorMaster``, 0.19.8) writes what the DeepSpeed configuration names:
    TensorBoard, W&B, Comet or CSV files. The subscriptions end with the engine.
    """
    own = weakref.ref(engine)
    if options.metrics:
        _until_the_end_of(engine, partial(_log_to_monitor, own))
    if options.metrics_file is not None:
        path = absolute(options.metrics_file)
        file = _files.setdefault(path, MetricsFile(path))
        try:
            file.write()
        except OSError as error:
            logger.warning(
                '"metrics_file": %s cannot be written: %s. Training goes on without it.', path, error.strerror
            )
            return
        _until_the_end_of(engine, partial(_add_to_file, own, file))


def _until_the_end_of(engine: Engine, observer: Any) -> None:
    weakref.finalize(engine, subscribe(observer)).atexit = False


def _log_to_monitor(own: weakref.ref[Any], report: Report, of: Any) -> None:
    engine = own()
    if engine is None or of is not engine or not engine.monitor.enabled:
        return
    # The place on the x axis is that of DeepSpeed's own metrics.
    engine.monitor.write_events([(name, value, engine.global_samples) for name, value in metrics_of(report).items()])


def _add_to_file(own: weakref.ref[Any], file: MetricsFile, report: Report, of: Any) -> None:
    if of is own():
        file(report, of)
