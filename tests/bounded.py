"""Limits of what code may take that reads files which nobody trusts."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator

MOST_BYTES = 128 << 20
MOST_SECONDS = 20


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """What runs in it takes little memory and little of the processor's time."""

    def too_long(number: int, frame: object) -> None:
        raise TimeoutError(f"took more than {MOST_SECONDS} s")

    before = signal.signal(signal.SIGVTALRM, too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10 < MOST_BYTES
