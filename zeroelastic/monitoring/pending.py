"""Metrics of one engine, kept until the thread that trains logs them: few trackers may be called from any thread."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from zeroelastic.monitoring.metrics import metrics_of
from zeroelastic.monitoring.observers import subscribe
from zeroelastic.report import Report


class PendingMetrics:
    """Collects the metrics of the engine that ``engine`` returns, from now on; ``take`` returns them and forgets them.

    ``engine`` is called when a report comes. It must not keep this object alive, which ends the subscription with its
    own end.
    """

    def __init__(self, engine: Callable[[], Any]) -> None:
        self._values: deque[Mapping[str, float]] = deque()
        values = self._values

        def observe(report: Report, of: Any) -> None:
            if of is engine():
                values.append(metrics_of(report))

        weakref.finalize(self, subscribe(observe)).atexit = False

    def take(self) -> list[Mapping[str, float]]:
        """The metrics of each report since the last call, the oldest first."""
        taken: list[Mapping[str, float]] = []
        while self._values:
            taken.append(self._values.popleft())
        return taken
