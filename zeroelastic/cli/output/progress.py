"""Progress on stderr, with bytes, rate and time left: a bar on a terminal, and a line every 10 s where there is none.

Both are for work that takes long: the bar appears after a second, the first line after 10.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.output.show import log_line

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from zeroelastic.verbs.options import Progress

_DELAY_S = 1.0
LINE_S = 10.0
"""Seconds between two lines, where stderr is no terminal."""


def progress_of(*, quiet: bool, rank: int = 0) -> Progress:
    """How a verb shows its progress: not at all if ``quiet``, nor where another process shows that of all."""
    return _no_progress if quiet or rank else progress_bar


@contextmanager
def _no_progress(what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    yield lambda more: None


@contextmanager
def progress_bar(what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """The progress of ``nbytes`` bytes: a bar that is removed at the end, or lines in a log, which stay."""
    if not sys.stderr.isatty():
        yield _Lines(what, nbytes).advance
        return
    shown: list[RichProgress] = []
    began, done = time.monotonic(), 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        if shown:
            shown[0].update(shown[0].task_ids[0], completed=done)
        elif time.monotonic() - began > _DELAY_S:
            shown.append(_start(what, nbytes, done))

    try:
        yield advance
    finally:
        for bar in shown:
            bar.stop()


class _Lines:
    """A line of progress every ``LINE_S`` seconds, written when there is progress; no thread writes them."""

    def __init__(self, what: str, nbytes: int) -> None:
        self._what, self._nbytes, self._done = what, nbytes, 0
        self._began = self._last = time.monotonic()

    def advance(self, more: int) -> None:
        self._done += more
        now = time.monotonic()
        if now - self._last >= LINE_S:
            self._last = now
            log_line(progress_line(self._what, self._done, self._nbytes, now - self._began))


def progress_line(what: str, done: int, nbytes: int, seconds: float) -> str:
    """One line: the share that is done, of how much, the rate, and the time that is left at this rate.

    Example::

        progress_line("verify", 3 << 30, 12 << 30, 30.0)    # "verify: 25% of 12 GiB, 102 MiB/s, 90 s left"
    """
    rate = done / seconds if seconds > 0 else 0.0
    share = min(done / nbytes, 1.0) if nbytes else 1.0
    left = f", {_time((nbytes - done) / rate)} left" if rate and nbytes > done else ""
    return f"{what}: {share:.0%} of {format_size(nbytes)}, {format_size(round(rate))}/s{left}"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _start(what: str, nbytes: int, done: int) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task(what, total=nbytes, completed=done)
    bar.start()
    return bar
