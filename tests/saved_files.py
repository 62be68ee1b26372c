"""What code leaves behind and takes: the files of a save; what a process logs, the files it opens, its memory."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zeroelastic.checkpoint.commit_record import RECORD_NAME, CommitRecord, read_record, record_text
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import directory_digest


def contents(directory: Path) -> dict[str, tuple[int, int]]:
    """Every file but DeepSpeed's scripts: its size and when it was written."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".py"]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def file_bytes(directory: Path) -> dict[str, bytes]:
    """The bytes of every file below a directory, by its path there."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def logged(of: str | logging.Logger, level: int = logging.INFO, *, levels: bool = False) -> list[str]:
    """What a logger, given by its name below "zeroelastic" or itself, and those below it log from now on.

    With ``levels``, each text begins with its level.
    """
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(  # type: ignore[method-assign]
        f"{record.levelname} {record.getMessage()}" if levels else record.getMessage()
    )
    logger = of if isinstance(of, logging.Logger) else logging.getLogger(f"zeroelastic.{of}".rstrip("."))
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return said


def committed(directory: str | Path, tag: str) -> bool:
    return (Path(directory) / tag / RECORD_NAME).exists()


def latest(directory: str | Path) -> str | None:
    path = Path(directory) / "latest"
    return path.read_text() if path.exists() else None


def tag_of(directory: str | Path) -> Path:
    """The directory of the tag of a step, of which there is one."""
    return next(Path(directory).glob("global_step*"))


def record_of(tag_dir: FilePath) -> CommitRecord:
    """The commit record of a tag, which has one."""
    record = read_record(tag_dir)
    assert record is not None
    return record


def record_again(tag_dir: Path) -> None:
    """Let the commit record state the files as they are now; what is in them may be another thing."""
    record, files = record_of(tag_dir), sorted(path for path in tag_dir.iterdir() if path.suffix == ".pt")
    there = [path for path in files if path.name in record.files]
    digests = {path.name: directory_digest(path) for path in there}
    update = {
        "files": {path.name: path.stat().st_size for path in there},
        "directories": {name: digest for name, digest in digests.items() if digest is not None},
    }
    (tag_dir / RECORD_NAME).write_bytes(record_text(record.model_copy(update=update)))


def flip(path: Path, offset: int | None = None, mask: int = 1) -> None:
    """Turn bits of one byte of a file, of the one in the middle by default, as a disk does it: size and time stay."""
    found = path.stat()
    at = found.st_size // 2 if offset is None else offset
    with open(path, "r+b") as file:  # in place: somebody may have it mapped
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def swap(one: Path, other: Path) -> None:
    """Let two files change places."""
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def state_bytes(directory: Path) -> int:
    """Bytes of state, padding excluded, from the commit record alone."""

    record = record_of(next(directory.glob("global_step*")))
    width = {"float32": 4, "bfloat16": 2}
    return sum(
        content.param.numel * width[dtype] for content in record.contents() for dtype, _ in content.tensors.values()
    )


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
