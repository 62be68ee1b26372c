"""What a save left behind: the files of a directory, and the log records of a process."""

from __future__ import annotations

import logging
from pathlib import Path


class Kept(logging.Handler):
    """The messages of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("zeroelastic").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def contents(directory: Path) -> dict[str, tuple[int, int]]:
    """Every file but DeepSpeed's scripts: its size and when it was written."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".py"]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
