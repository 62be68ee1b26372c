"""Progress of an engine: it reports the bytes that are done, on the caller's thread, about every 50 ms."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

ProgressFunction: TypeAlias = Callable[[int], None]
"""Called with the bytes of the sources that are done since the last call; an exception in it ends the operation."""

INTERVAL = 0.05
"""Seconds between two calls, at the least."""


class Progress:
    """Counts for the engines in Python; does nothing without a function."""

    def __init__(self, function: ProgressFunction | None) -> None:
        self._function = function
        self._done = 0
        self._last = time.monotonic()

    @property
    def wanted(self) -> bool:
        """Whether there is a progress function."""
        return self._function is not None

    def add(self, nbytes: int) -> None:
        """Count bytes that are done."""
        self._done += nbytes
        if self._function is not None and time.monotonic() - self._last >= INTERVAL:
            self.finish()

    def finish(self) -> None:
        """Report what is done since the last report; in the end, the rest."""
        if self._function is not None:
            done, self._done, self._last = self._done, 0, time.monotonic()
            self._function(done)
