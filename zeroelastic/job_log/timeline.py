"""The timeline of an elastic job, from its event log: its starts, the steps that each lost, and the restarts' costs.

Times within one start come from the monotonic clock, times between two starts from the wall clocks of the machines
that wrote them, and are as accurate as these clocks agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from zeroelastic.errors import UsageError
from zeroelastic.job_log.event_log import (
    EndEvent,
    EndReason,
    Event,
    EventLog,
    MemoryEvent,
    NodesEvent,
    ResumeEvent,
    SaveEvent,
    StartEvent,
    StepEvent,
)

E = TypeVar("E")

PHASES = ("noticing", "rendezvous", "imports", "engine", "load", "first_step")
"""The phases of a restart, in their order: fields of a ``Restart``."""


class Restart(BaseModel):
    """Seconds from the last kill before a start to its first step, by phase; the phases add up to ``total``.

    ``since_kill``: whether the log has the kill; otherwise the time counts from the last line of the previous start.
    ``noticing`` is the time until a surviving rank failed, None where none logged it (then it is in ``rendezvous``);
    ``rendezvous`` until rank 0's new process began; ``imports`` until it had imported zeroelastic.elastic; ``engine``
    until ``resume`` was called; ``load`` is all of ``resume``, zeroelastic's part; ``first_step`` the rest.
    ``our_share`` is ``load`` as a share of ``total``, 0 to 1.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    since_kill: bool
    noticing: float | None
    rendezvous: float
    imports: float
    engine: float
    load: float
    first_step: float
    total: float
    our_share: float

    @property
    def by_phase(self) -> dict[str, float | None]:
        """The seconds of each phase, in their order."""
        return {phase: getattr(self, phase) for phase in PHASES}


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One start of the job at one world size, to its end. Times are seconds since 1970.

    ``memory`` are those checkpoints in memory that the log has: the first of a start and every fiftieth.
    ``lost_steps``: how many steps the job had trained beyond the step that it resumed at; they were trained again.
    """

    start: StartEvent
    resume: ResumeEvent | None
    steps: tuple[StepEvent, ...]
    saves: tuple[SaveEvent, ...]
    memory: tuple[MemoryEvent, ...]
    ends: tuple[EndEvent, ...]
    lost_steps: int
    restart: Restart | None

    @property
    def last_time(self) -> float:
        """The time of its last event."""
        events = (self.start, self.resume, *self.steps, *self.saves, *self.memory, *self.ends)
        return max(event.time for event in events if event is not None)

    @property
    def end(self) -> EndReason | None:
        """How it ended, from its first end event, an ``EndReason``; None without one, as after SIGKILL."""
        return self.ends[0].reason if self.ends else None

    @property
    def error(self) -> str | None:
        """The first error in its end events."""
        return next((end.error for end in self.ends if end.error), None)


@dataclass(frozen=True, slots=True)
class Timeline:
    """A job from its first start on: its starts and its node changes, by time."""

    incarnations: tuple[Incarnation, ...]
    nodes: tuple[NodesEvent, ...]

    @property
    def began(self) -> float:
        """The time of the first start."""
        return self.incarnations[0].start.time

    @property
    def lost_steps(self) -> int:
        """Steps that were trained more than once, over all restarts."""
        return sum(one.lost_steps for one in self.incarnations)


def make_timeline(log: EventLog) -> Timeline:
    """The timeline of a log. Raises UsageError when there is no start of a job in it."""
    by_run: dict[str, list[Event]] = {}
    nodes: list[NodesEvent] = []
    for event in log.events:
        if isinstance(event, NodesEvent):
            nodes.append(event)
        else:
            by_run.setdefault(event.run, []).append(event)
    starts = {run: _only(events, StartEvent) for run, events in by_run.items()}
    runs = sorted((run for run in by_run if starts[run]), key=lambda run: starts[run][0].time)
    if not runs:
        raise UsageError("the log has no start of a job in it. Give all files of the log, with its beginning.")
    incarnations: list[Incarnation] = []
    reached = 0
    for run in runs:
        one = _incarnation(by_run[run], reached, incarnations, nodes)
        incarnations.append(one)
        reached = _reached(one, reached)
    return Timeline(tuple(incarnations), tuple(nodes))


def _incarnation(
    events: Sequence[Event], reached: int, before: Sequence[Incarnation], nodes: Sequence[NodesEvent]
) -> Incarnation:
    start = _only(events, StartEvent)[0]
    resume = next(iter(_only(events, ResumeEvent)), None)
    steps = tuple(_only(events, StepEvent))
    lost = max(reached - resume.step, 0) if resume is not None else 0
    restart = _restart(start, resume, steps[0], before, nodes) if before and resume is not None and steps else None
    return Incarnation(
        start=start,
        resume=resume,
        steps=steps,
        saves=tuple(_only(events, SaveEvent)),
        memory=tuple(_only(events, MemoryEvent)),
        ends=tuple(_only(events, EndEvent)),
        lost_steps=lost,
        restart=restart,
    )


def _reached(one: Incarnation, before: int) -> int:
    """The step that the job had reached when this start ended."""
    events = (one.resume, *one.steps, *one.saves, *one.memory, *one.ends)
    marks = [(event.time, event.step) for event in events if event is not None and event.step is not None]
    return max(marks)[1] if marks else before  # the latest, not the greatest: a run may be rolled back


def _restart(
    start: StartEvent,
    resume: ResumeEvent,
    first: StepEvent,
    before: Sequence[Incarnation],
    nodes: Sequence[NodesEvent],
) -> Restart:
    """The cost of a restart; it includes starts before it that ended without a step."""
    process = start.time - start.process_seconds
    trained = [one for one in before if one.steps] or list(before)
    kills = [event.time for event in nodes if event.change < 0 and trained[-1].start.time <= event.time <= process]
    ended = [event.time for one in before for event in one.ends if trained[-1].start.time <= event.time <= process]
    began = kills[-1] if kills else min(trained[-1].last_time, process)
    noticed = [time for time in ended if time >= began] if kills else []
    noticing = noticed[0] - began if noticed else None
    resumed = resume.monotonic - start.monotonic
    rest = {
        "rendezvous": process - (began if noticing is None else noticed[0]),
        "imports": max(start.process_seconds - start.import_seconds, 0.0),
        "engine": start.import_seconds + max(resumed - resume.seconds, 0.0),
        "load": resume.seconds,
        "first_step": max(first.monotonic - resume.monotonic, 0.0),
    }
    total = (noticing or 0.0) + sum(rest.values())
    share = resume.seconds / total if total > 0 else 0.0
    return Restart(since_kill=bool(kills), noticing=noticing, **rest, total=total, our_share=share)


def _only(events: Sequence[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]
