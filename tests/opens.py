"""The files that a process opens: counted, and with an action before one of them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def watch_opens() -> list[str]:
    """A list that every open of this process is appended to from now on."""
    opened: list[str] = []
    sys.addaudithook(
        lambda event, arguments: (
            opened.append(arguments[0]) if event == "open" and isinstance(arguments[0], str) else None
        )
    )
    return opened


class Opens:
    """Calls an action before this thread opens the n-th file below a directory, and counts the opens."""

    def __init__(self) -> None:
        self.directory, self.at, self.count = "", -2, 0
        self.action: Callable[[], object] = lambda: None
        self.thread = threading.get_ident()
        sys.addaudithook(self._hook)

    def arm(self, directory: Path, at: int, action: Callable[[], object]) -> None:
        """Count from here; at -1 nothing is done."""
        self.directory, self.at, self.count, self.action = str(directory), at, 0, action

    def stop(self) -> None:
        self.at = -2

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.at < -1 or event != "open" or threading.get_ident() != self.thread:
            return
        if isinstance(arguments[0], str) and arguments[0].startswith(self.directory):
            self.count += 1
            if self.count - 1 == self.at:
                self.stop()  # opens of the action do not count
                self.action()
