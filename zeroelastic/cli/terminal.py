"""The terminal: text, tables and progress, with control characters in names from files escaped.

Progress on stderr is for work that takes long, with bytes, rate and time left: a bar on a terminal, after a second, and
a line every 10 s where there is none.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from zeroelastic.byte_sizes import format_size

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from zeroelastic.verbs.interface import Progress, Report

_WIDE = 1 << 20
_DELAY_S = 1.0
LINE_S = 10.0
"""Seconds between two lines, where stderr is no terminal."""


def printable(text: str) -> str:
    """The text with every unprintable character except newlines escaped: names in files are hostile input."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign == "\n" else repr(sign)[1:-1] for sign in text)


def print_line(text: str) -> None:
    """One line on stdout."""
    typer.echo(printable(text))


def log_line(text: str) -> None:
    """One line on stderr."""
    typer.echo(printable(text), err=True)


def print_styled(*parts: str | tuple[str, str]) -> None:
    """Print one line made of plain text and (text, style) pairs; a style is a colour, "bold", or both."""
    line = ""
    for part in parts:
        if isinstance(part, str):
            line += printable(part)
        elif words := part[1].split():
            colour = next((word for word in words if word != "bold"), None)
            line += typer.style(printable(part[0]), fg=colour, bold="bold" in words or None)
        else:
            line += printable(part[0])
    typer.echo(line, color=_coloured())


def print_wrapped(text: str, *, first: str, rest: str, style: str = "") -> None:
    """Print text in lines of the terminal's width, never within a word; elsewhere in one line, which grep finds whole.

    ``first`` begins the first line and ``rest`` the others; ``style`` is that of ``print_styled``.
    """
    width = shutil.get_terminal_size((_WIDE, 0)).columns
    lines = textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    for line in lines or [first]:
        print_styled((line.rstrip(), style))


def _coloured() -> bool | None:
    """Return whether to print colours; None: where stdout is a terminal."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    return True if os.environ.get("FORCE_COLOR") else None


def print_written(report: Path | None) -> None:
    """Say where the report of ``--html`` is, if there is one."""
    if report is not None:
        print_styled(("Report: ", "bold"), str(report))


def print_report(report: Report) -> None:
    """Print the document of a report; its values are strict JSON already."""
    typer.echo(json.dumps(report.to_json(), indent=2))


def progress_of(*, quiet: bool) -> Progress:
    """How a verb shows its progress: not at all if ``quiet``."""
    from zeroelastic.verbs.interface import no_progress

    return no_progress if quiet else progress_bar


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
        rate = f"{format_size(round(done / max(time.monotonic() - began, 1e-9)))}/s"
        if shown:
            shown[0].update(shown[0].task_ids[0], completed=done, rate=rate)
        elif time.monotonic() - began > _DELAY_S:
            shown.append(_start_bar(what, nbytes, done, rate))

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
    left = f", {_time_left((nbytes - done) / rate)} left" if rate and nbytes > done else ""
    return f"{what}: {share:.0%} of {format_size(nbytes)}, {format_size(round(rate))}/s{left}"


def _time_left(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _start_bar(what: str, nbytes: int, done: int, rate: str) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[rate]}"),  # of rich's own columns, those of sizes and of rates differ in their units
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task(what, total=nbytes, completed=done, rate=rate)
    bar.start()
    return bar
