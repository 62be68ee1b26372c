"""Which files a process opens."""

from __future__ import annotations

import sys


def watch_opens() -> list[str]:
    """A list that every open of this process is appended to from now on."""
    opened: list[str] = []
    sys.addaudithook(
        lambda event, arguments: (
            opened.append(arguments[0]) if event == "open" and isinstance(arguments[0], str) else None
        )
    )
    return opened
