"""The event log of an elastic job: a line of JSON for everything that happened, appended by each start of the job.

Lines are only ever appended, each in one write. A killed process leaves at most a torn last line: the reader skips
everything that is not a line of JSON, and the next writer begins a new line. The fields of every event are described in
docs/guides/event-log.md.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from zeroelastic.errors import CheckpointError, UsageError

EVENT_VERSION = 1

_TAIL_BYTES = 1 << 16

EndReason = Literal["done", "stopped", "error"]
Tier = Literal["memory", "node-local", "directory"]
"""Where the state came from: the nodes' memory, their own disks, or a directory or store for all of them."""


class _Event(BaseModel):
    """The fields of every line: its time (seconds since 1970, and of that machine's monotonic clock), and the start of
    the job that it belongs to (``run``)."""

    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="strings")

    version: Literal[1] = 1
    time: float
    monotonic: float
    run: str


class StartEvent(_Event):
    """The job began, or began again, at some world size: the engine is built, nothing is loaded.

    ``process_seconds`` is the age of rank 0's process at this moment, ``import_seconds`` how long ago its imports were
    done; ``job`` and ``restart`` are torchrun's run id and restart count, None without torchrun.
    """

    event: Literal["start"] = "start"
    world_size: int
    num_nodes: int
    host: str
    pid: int
    job: str | None
    restart: int | None
    process_seconds: float
    import_seconds: float


class ResumeEvent(_Event):
    """Where the state of a start came from. ``seconds`` includes ``load_seconds``.

    ``tag`` is the checkpoint that ``resume`` loaded, None for a fresh start. ``lost_steps``: logged steps beyond
    ``step``, which are trained again; None without an earlier start. ``tier`` says where the state was; None for a
    fresh start, and in older logs.
    """

    event: Literal["resume"] = "resume"
    tag: str | None
    step: int
    saved_world_size: int | None
    proved: bool | None
    seconds: float
    load_seconds: float | None
    passed_over: int
    lost_steps: int | None
    tier: Tier | None = None

    @property
    def fresh(self) -> bool:
        """Whether the run began here."""
        return self.tag is None


class StepEvent(_Event):
    """An optimizer step was taken, the ``step``-th of the run; ``loss`` on rank 0, None when it was not given."""

    event: Literal["step"] = "step"
    step: int
    loss: float | None = None


class SaveEvent(_Event):
    """A checkpoint was saved; ``seconds`` is the time from the call to its end on the slowest rank.

    ``stall_seconds``, how long training waited for it, and ``bytes``, of all ranks' files, are None in older logs.
    """

    event: Literal["save"] = "save"
    step: int
    tag: str
    seconds: float
    stall_seconds: float | None = None
    bytes: int | None = None

    @property
    def stalled(self) -> float:
        """Seconds for which training waited for it; in older logs, those that it took."""
        return self.seconds if self.stall_seconds is None else self.stall_seconds


class MemoryEvent(_Event):
    """One of many checkpoints in the memory of the nodes: the fields of ``report.MemoryReport``."""

    event: Literal["memory"] = "memory"
    step: int
    seconds: float
    stall_seconds: float
    node_bytes: int
    network_bytes: int


class EndEvent(_Event):
    """A rank ended: its work done, stopped on request, or by an error, which the first rank of any node writes.

    ``step`` is None where the rank had not resumed yet.
    """

    event: Literal["end"] = "end"
    step: int | None
    rank: int
    reason: EndReason
    error: str | None = None


class NodesEvent(_Event):
    """Nodes left (``change`` < 0) or joined, as their manager noted; ``cause`` is free text."""

    event: Literal["nodes"] = "nodes"
    change: int
    cause: str = ""


Event = StartEvent | ResumeEvent | StepEvent | SaveEvent | MemoryEvent | EndEvent | NodesEvent

_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])
_KINDS = frozenset({"start", "resume", "step", "save", "memory", "end", "nodes"})
SUPERVISOR = ""
"""The ``run`` of events that belong to no start of the job."""


@dataclass(frozen=True, slots=True)
class EventLog:
    """The events of one or more files, by time; ``num_torn`` counts lines that are not a whole event."""

    events: tuple[Event, ...]
    num_torn: int


def append(path: str | os.PathLike[str], event: Event) -> None:
    """Append an event, beginning a new line where a killed writer left half of one. Raises OSError."""
    line = event.model_dump_json().encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def note_nodes(path: str | os.PathLike[str], change: int, cause: str = "") -> None:
    """Log that nodes left (``change`` < 0) or joined just now; for the manager of the nodes. Raises OSError."""
    append(path, NodesEvent(time=time.time(), monotonic=time.monotonic(), run=SUPERVISOR, change=change, cause=cause))


def read_events(paths: Iterable[str | os.PathLike[str]]) -> EventLog:
    """All events in the log files of one job, by time.

    Kinds of event that this version does not know are skipped. Raises UsageError for a file that cannot be read or has
    no event in it, CheckpointError for one that a newer version of the log wrote.
    """
    events: list[Event] = []
    num_torn = 0
    for path in map(Path, paths):
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror}. Give the event log of a job.") from None
        found = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
        num_torn += found.count(None)
        known = [event for event in found if isinstance(event, BaseModel)]
        if not known:
            raise UsageError(
                f"{path}: has no event in it. Give the log that zeroelastic.elastic.events writes for an elastic job."
            )
        events += known
    return EventLog(tuple(sorted(events, key=lambda event: event.time)), num_torn)


def last_step(path: str | os.PathLike[str]) -> int | None:
    """The step in the last line that has one, None without such a line. Reads the end of the file only."""
    try:
        with open(path, "rb") as file:
            end, tail = file.seek(0, os.SEEK_END), b""
            while end:
                nbytes = min(end, _TAIL_BYTES)
                end -= nbytes
                file.seek(end)
                first, *lines = (file.read(nbytes) + tail).split(b"\n")
                for line in reversed(lines if end else [first, *lines]):
                    step = _step(line)
                    if step is not None:
                        return step
                tail = first
    except FileNotFoundError:
        pass
    return None


def _step(line: bytes) -> int | None:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = document.get("step") if isinstance(document, dict) else None
    return step if isinstance(step, int) else None


def _parse(path: Path, number: int, line: bytes) -> Event | Literal["unknown"] | None:
    """The event in a line; None for a line that is not a whole event."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    version = document.get("version")
    if isinstance(version, int) and version > EVENT_VERSION:
        raise CheckpointError(
            f"{path}: line {number} is of version {version} of the event log; this zeroelastic knows up to "
            f"{EVENT_VERSION}. Use the zeroelastic that wrote it, or a newer one.",
            remedy="",
        )
    if "event" in document and document["event"] not in _KINDS:
        return "unknown"
    try:
        return _EVENT.validate_python(document)
    except ValidationError:
        return None
