"""Observers: functions that get an event for every save, upload, load, resume and stop of a job, on rank 0 only.

The event of a save in the background, and of an upload, comes from the thread that wrote it; all others come from the
thread that trains. An observer cannot stop a run: an exception of it is logged once.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

logger = logging.getLogger(__name__)

Tier = Literal["memory", "node-local", "directory"]
"""Where a checkpoint is: in the nodes' memory, on their own disks, or in a directory or store that all ranks share."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint was committed, ``seconds`` after the call; training stood still for ``stall_seconds`` of them."""

    tag: str
    path: str
    step: int
    world_size: int
    bytes: int
    seconds: float
    stall_seconds: float
    background: bool
    tier: Tier


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The files of the committed checkpoint at ``path`` were copied to ``url``."""

    tag: str
    path: str
    url: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint was loaded; ``bytes`` are those that all ranks read. ``zeroelastic.last_report`` has more."""

    path: str
    format: str
    step: int
    saved_world_size: int
    world_size: int
    bytes: int
    seconds: float
    root_matches: bool | None


@dataclass(frozen=True, slots=True)
class Resumed:
    """``zeroelastic.elastic.resume`` has returned; ``tag`` and ``tier`` are None for a fresh start."""

    tag: str | None
    tier: Tier | None
    step: int
    world_size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Stopping:
    """``zeroelastic.elastic.preemption`` stops all ranks after ``step``, because of the signal in ``reason``."""

    reason: str
    step: int


Event = Saved | Uploaded | Loaded | Resumed | Stopping
Observer = Callable[[Event], object]

_observers: dict[object, Observer] = {}
_failed: set[object] = set()


def subscribe(observer: Observer) -> Callable[[], object]:
    """Call ``observer`` with every event from now on; returns a function that ends this::

    unsubscribe = zeroelastic.subscribe(lambda event: print(event))
    """
    key = object()
    _observers[key] = observer
    return partial(_observers.pop, key, None)


def publish(event: Event) -> None:
    """Give an event to every observer; called on rank 0. Never raises."""
    for key, observer in tuple(_observers.items()):
        try:
            observer(event)
        except Exception:
            if key not in _failed:
                _failed.add(key)
                logger.warning("an observer failed; training goes on: %r", observer, exc_info=True)


def jsonl(path: str | os.PathLike[str]) -> Observer:
    """Return an observer that appends each event, with its name and the time, to a file as one line of JSON."""
    path = os.path.abspath(path)

    def append(event: Event) -> None:
        line = json.dumps({"event": type(event).__name__, "time": time.time(), **asdict(event)}) + "\n"
        with open(path, "a+b") as file:
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":  # of a process that was killed
                line = "\n" + line
            os.write(file.fileno(), line.encode())

    return append
