"""Limits of what code may take that reads files which nobody trusts."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path


def process_status(key: str) -> int:
    """A line of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


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
