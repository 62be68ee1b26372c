"""Which files a process opens, by their own paths: a checkpoint's are opened through its pinned directory."""

from __future__ import annotations

import os
import re
import sys

_THROUGH = re.compile(r"(/proc/self/fd/\d+)(/.*)?", re.DOTALL)


def through_path(opened: str) -> str:
    """The path of a file that is opened through the descriptor of its directory."""
    through = _THROUGH.fullmatch(opened)
    return opened if through is None else os.readlink(through[1]) + (through[2] or "")


def watch_opens() -> list[str]:
    """A list that every open of this process is appended to from now on."""
    opened: list[str] = []
    sys.addaudithook(
        lambda event, arguments: (
            opened.append(through_path(arguments[0])) if event == "open" and isinstance(arguments[0], str) else None
        )
    )
    return opened
