"""Loads in which the job ended, by tag: begun, and not taken back, because a process died in them.

A signal from outside is no fault of a checkpoint, and torchrun sends SIGTERM at each change of membership. So every
rank notes such a signal in a file that they share, at once and from C (``faulthandler``), whatever the process is
doing: an end that all ranks noted does not count, nor does one before a change of the world size or a day ago.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeroelastic.agree import settle
from zeroelastic.commit_order import Tag
from zeroelastic.record import write_atomically

ATTEMPTS_NAME = ".zeroelastic-attempts.json"
"""Loads that were begun and not finished, by tag; only while there are any."""

_SIGNALS_NAME = ".zeroelastic-attempts.signals"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_NOTE = b"most recent call first"
_MOST_ENDS = 2
_DAY_S = 86400.0


@dataclass(slots=True)
class _Loads:
    """Of one save of a tag: when the job ended in it, and the load that was begun last: its time and world size."""

    save: str
    ended: list[float] = field(default_factory=list)
    begun: tuple[float, int] | None = None


class Attempts:
    """What ``ATTEMPTS_NAME`` of a directory says; rank 0 reads and writes it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._loads = _judged(root) if dist.get_rank() == 0 else {}

    def postpone(self, tag: Tag) -> str | None:
        """Why a tag is tried after all others: the job has died in loads of it. None where it has not."""
        loads = self._loads.get(self._key(Path(str(tag.tag_dir))))
        if loads is None or loads.save != _save(tag) or len(loads.ended) < _MOST_ENDS:
            return None
        last = datetime.fromtimestamp(loads.ended[-1], timezone.utc).isoformat(" ", "seconds")
        return (
            f"the job ended {len(loads.ended)} times while it was being loaded, last at {last}: it is tried after all "
            f"others. If that was not the checkpoint's fault, remove {self._root / ATTEMPTS_NAME}"
        )

    @contextmanager
    def of(self, tag_dir: Path, find: Callable[[], Tag]) -> Iterator[None]:
        """A load of a tag, which ``find`` knows on rank 0; an error that we live to see is no end. Collective."""
        key = self._key(tag_dir)

        def begin() -> None:
            if dist.get_rank() == 0:
                found = self._loads.get(key)
                if found is None or found.save != _save(find()):
                    found = self._loads[key] = _Loads(_save(find()))
                found.begun = (time.time(), dist.get_world_size())
                self._root.mkdir(parents=True, exist_ok=True)  # a node that is new to the job
                (self._root / _SIGNALS_NAME).write_bytes(b"")
                self._write()

        def end() -> None:
            if dist.get_rank() == 0:
                self._loads.pop(key, None)
                (self._root / _SIGNALS_NAME).unlink(missing_ok=True)
                self._write()

        settle(begin)
        try:
            with _noting_signals(self._root / _SIGNALS_NAME):
                yield
        finally:
            with suppress(OSError):
                end()

    def _key(self, tag_dir: Path) -> str:
        return os.path.relpath(tag_dir, self._root)

    def _write(self) -> None:
        if self._loads:
            text = json.dumps({key: asdict(loads) for key, loads in self._loads.items()}, indent=1)
            write_atomically(self._root / ATTEMPTS_NAME, text.encode())
        else:
            (self._root / ATTEMPTS_NAME).unlink(missing_ok=True)


def _save(tag: Tag) -> str:
    return tag.save_id or f"of {tag.modified_at}"


def _judged(root: Path) -> dict[str, _Loads]:
    """What the file says, with an end for each load that was begun, as far as the checkpoint may be the cause."""
    try:
        found = json.loads((root / ATTEMPTS_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    try:
        signalled = (root / _SIGNALS_NAME).read_bytes().count(_NOTE)
    except OSError:
        signalled = 0
    judged: dict[str, _Loads] = {}
    for key, entry in found.items() if isinstance(found, dict) else ():
        loads = _parsed(entry)
        if loads is None:
            continue
        if loads.begun is not None:
            began, world_size = loads.begun
            if world_size == dist.get_world_size() and signalled < world_size:
                loads.ended.append(began)
            loads.begun = None
        loads.ended = [ended for ended in loads.ended if 0 <= time.time() - ended < _DAY_S]
        if loads.ended:
            judged[key] = loads
    return judged


def _parsed(entry: Any) -> _Loads | None:
    """None for what is not ours, or of an older version, which counted without saying when."""
    try:
        begun = entry["begun"]
        return _Loads(
            str(entry["save"]),
            [float(ended) for ended in entry["ended"]],
            None if begun is None else (float(begun[0]), int(begun[1])),
        )
    except (KeyError, TypeError, ValueError, IndexError):
        return None


@contextmanager
def _noting_signals(path: Path) -> Iterator[None]:
    """While it lasts, a signal that ends this process leaves a note in ``path``, if that is there, and then ends it."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:  # on another node, or a directory that cannot be written: then the end counts
        yield
        return
    try:
        for number in _SIGNALS:
            faulthandler.register(number, fd, all_threads=False, chain=True)
        yield
    finally:
        for number in _SIGNALS:
            faulthandler.unregister(number)
        os.close(fd)
