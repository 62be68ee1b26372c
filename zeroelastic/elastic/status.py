"""The status line of a job: live on a terminal, one plain line every half minute in a file."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.live import Live

_LIVE_S = 0.25
_PLAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Status:
    """The content of the line; ``saved_at`` is the monotonic time of the last save, ``restart`` torchrun's count."""

    world_size: int
    restart: int | None = None
    step: int = 0
    loss: float | None = None
    saved_at: float | None = None
    save_seconds: float | None = None
    lost_steps: int | None = None

    def text(self, now: float) -> str:
        """The line, at a monotonic time."""
        parts = [f"step {self.step}"]
        parts += [] if self.loss is None else [f"loss {self.loss:.4g}"]
        parts += [f"{self.world_size} rank{'s' if self.world_size != 1 else ''}"]
        if self.saved_at is not None:
            parts += [f"saved {now - self.saved_at:.0f} s ago in {self.save_seconds or 0.0:.1f} s"]
        else:
            parts += ["not saved yet"]
        parts += [] if self.lost_steps is None else [f"{self.lost_steps} steps lost at the last restart"]
        parts += [f"restart {self.restart}"] if self.restart else []
        return " | ".join(parts)


class StatusLine:
    """One line on stderr. Only ``show`` draws it, no thread does, so that a fork is safe at any time."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last: float | None = None
        self._live: Live | None = None

    def due(self) -> bool:
        """Whether it is time to show the line again."""
        return self._last is None or time.monotonic() - self._last >= (_LIVE_S if self._terminal else _PLAIN_S)

    def show(self, status: Status) -> None:
        """Show the line, if it is due."""
        if not self.due():
            return
        self._last = time.monotonic()
        line = status.text(self._last)
        if self._terminal:
            self._draw(line)
        else:
            sys.stderr.write(line + "\n")

    def close(self) -> None:
        """Leave the last line on the terminal and restore its state."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, line: str) -> None:
        from rich.text import Text

        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            # Other output to stdout and stderr goes above the line.
            self._live = Live(console=Console(stderr=True), auto_refresh=False)
            self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
