"""The report of ``zeroelastic timeline``: the starts of a job, from the timeline of its event log."""

from __future__ import annotations

import os
from pathlib import Path

from zeroelastic.job_log import timeline
from zeroelastic.job_log.event_log import EndReason, Tier
from zeroelastic.verbs.report import Number, Part, Report

_MOST_POINTS = 4000


class Point(Part):
    time: float
    step: int
    loss: Number | None


class Start(Part):
    time: float
    ended: float
    world_size: int
    nodes: int
    host: str
    restart_count: int | None
    tag: str | None
    tier: Tier | None
    resumed_at: int | None
    proved: bool | None
    last_step: int | None
    lost_steps: int
    saves: int
    save_seconds: float
    save_times: list[float]
    memory_stall_seconds: float | None
    memory_bytes: int | None
    points: list[Point]
    end: EndReason | None
    error: str | None
    restart: timeline.Restart | None


class NodeChange(Part):
    time: float
    change: int
    cause: str


class Timeline(Report):
    began: float
    lost_steps: int
    torn_lines: int
    plot: str | None
    starts: list[Start]
    nodes: list[NodeChange]


def timeline_report(made: timeline.Timeline, *, num_torn: int, plot: Path | None) -> Timeline:
    """The report of a timeline, with at most 4000 steps of all starts together; the log has them all."""
    most = max(_MOST_POINTS // len(made.incarnations), 2)
    return Timeline(
        ok=True,
        began=made.began,
        lost_steps=made.lost_steps,
        torn_lines=num_torn,
        plot=None if plot is None else os.path.abspath(plot),
        starts=[_start(one, most) for one in made.incarnations],
        nodes=[NodeChange(time=one.time, change=one.change, cause=one.cause) for one in made.nodes],
    )


def _start(one: timeline.Incarnation, most: int) -> Start:
    resume = one.resume
    steps = (one.steps[i] for i in spread(len(one.steps), most))
    return Start(
        time=one.start.time,
        ended=one.last_time,
        world_size=one.start.world_size,
        nodes=one.start.num_nodes,
        host=one.start.host,
        restart_count=one.start.restart,
        tag=None if resume is None else resume.tag,
        tier=None if resume is None else resume.tier,
        resumed_at=None if resume is None else resume.step,
        proved=None if resume is None else resume.proved,
        last_step=one.steps[-1].step if one.steps else None,
        lost_steps=one.lost_steps,
        saves=len(one.saves),
        save_seconds=sum(save.stalled for save in one.saves),
        save_times=[one.saves[i].time for i in spread(len(one.saves), most)],
        memory_stall_seconds=one.memory[-1].stall_seconds if one.memory else None,
        memory_bytes=one.memory[-1].node_bytes if one.memory else None,
        points=[Point(time=event.time, step=event.step, loss=event.loss) for event in steps],
        end=one.end,
        error=one.error,
        restart=one.restart,
    )


def spread(count: int, most: int) -> list[int]:
    """At most ``most``, which is 2 or more, of ``range(count)``, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [i * (count - 1) // (most - 1) for i in range(most)]
