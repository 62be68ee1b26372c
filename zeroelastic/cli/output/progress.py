"""A progress bar on stderr, with bytes, rate and time left, for work that takes longer than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_DELAY_S = 1.0


@contextmanager
def progress_bar(what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """A bar of ``nbytes`` bytes. It appears after a second, only on a terminal, and is removed at the end."""
    if not sys.stderr.isatty():
        yield _nothing
        return
    shown: list[Progress] = []
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


def _nothing(more: int) -> None:
    pass


def _start(what: str, nbytes: int, done: int) -> Progress:
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
