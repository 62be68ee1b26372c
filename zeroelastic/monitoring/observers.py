"""Observers: functions that get the report of every save, load and start of a job, on rank 0.

An observer cannot stop a run: what it raises is logged once, and training goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from zeroelastic.report import Report

logger = logging.getLogger(__name__)

Observer = Callable[[Report, Any], None]
"""Takes a report and the DeepSpeed engine that it is about."""


_observers: dict[object, Observer] = {}
_failed: set[object] = set()
"""The keys of observers of which an exception was logged."""


def subscribe(observer: Observer) -> Callable[[], None]:
    """Call ``observer(report, engine)`` for every save, load and start of a job; returns a function that ends this.

    Reports are made on rank 0 only. That of a save in the background comes from the thread that wrote it, and so does
    the call; everything else comes from the thread that trains. An exception of the observer is logged once::

        from zeroelastic.monitoring import SaveReport, subscribe

        def watch(report, engine):
            if isinstance(report, SaveReport):
                print(report.tag, report.stall_seconds, report.bytes)

        stop = subscribe(watch)
    """
    key = object()
    _observers[key] = observer

    def unsubscribe() -> None:
        _observers.pop(key, None)
        _failed.discard(key)

    return unsubscribe


def publish(report: Report, engine: Any) -> None:
    """Give a report to every observer. Never raises."""
    for key, observer in tuple(_observers.items()):
        try:
            observer(report, engine)
        except Exception:
            if key not in _failed:
                _failed.add(key)
                logger.warning("an observer of saves and loads failed; training goes on: %r", observer, exc_info=True)
