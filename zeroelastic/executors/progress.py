"""What an engine tells its caller while it works: bytes that are done, on the caller's thread, about every 50 ms."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

ProgressFunction: TypeAlias = Callable[[int], None]
"""Called with the bytes of the sources that are done since it was called last; what it raises ends the operation."""

INTERVAL = 0.05
"""Seconds between two calls, at the least."""


class Progress:
    """Counts for the engines in Python; does nothing where nobody is to be told."""

    def __init__(self, function: ProgressFunction | None) -> None:
        self._function = function
        self._done = 0
        self._last = time.monotonic()

    @property
    def wanted(self) -> bool:
        """Whether there is somebody to tell."""
        return self._function is not None

    def add(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self._done += nbytes
        if self._function is not None and time.monotonic() - self._last >= INTERVAL:
            self.finish()

    def finish(self) -> None:
        """Tell what is done since the last time: the rest, in the end."""
        if self._function is not None:
            done, self._done, self._last = self._done, 0, time.monotonic()
            self._function(done)
