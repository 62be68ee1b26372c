"""The metrics of a whole job, over all starts, from the timeline of the event log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from zeroelastic.job_log.timeline import RestartCost, Timeline
from zeroelastic.monitoring.prometheus import Sample

PHASES = tuple(field.name for field in fields(RestartCost) if field.name != "since_kill")
"""The phases of a restart."""


def job_samples(timeline: Timeline) -> Iterator[Sample]:
    """The samples of ``zeroelastic timeline --prometheus``."""
    starts = timeline.incarnations
    saves = [save for one in starts for save in one.saves]
    resumes = [one.resume for one in starts if one.resume is not None]
    costs = [one.restart for one in starts if one.restart is not None]
    marks = [(step.time, step.step) for one in starts for step in one.steps]
    yield Sample("zeroelastic_saves_total", len(saves))
    yield Sample("zeroelastic_save_stall_seconds_total", sum(save.stalled for save in saves))
    yield Sample("zeroelastic_save_bytes_total", sum(save.bytes or 0 for save in saves))
    if saves:
        yield Sample("zeroelastic_last_save_timestamp_seconds", max(save.time for save in saves))
    yield Sample("zeroelastic_load_seconds_total", sum(resume.load_seconds or 0.0 for resume in resumes))
    yield Sample("zeroelastic_resume_seconds_total", sum(resume.seconds for resume in resumes))
    yield Sample("zeroelastic_restarts_total", sum(not one.start.in_place for one in starts[1:]))
    yield Sample("zeroelastic_resizes_total", sum(resume.tier == "in-place" for resume in resumes))
    yield Sample("zeroelastic_resize_bytes_total", sum(resume.moved_bytes or 0 for resume in resumes))
    yield Sample("zeroelastic_lost_steps_total", timeline.lost_steps)
    for phase in PHASES:
        seconds = sum(getattr(cost, phase) or 0.0 for cost in costs)
        yield Sample("zeroelastic_restart_seconds_total", seconds, {"phase": phase})
    for tier in sorted({resume.tier for resume in resumes if resume.tier is not None}):
        number = sum(resume.tier == tier for resume in resumes)
        yield Sample("zeroelastic_resumes_total", number, {"tier": tier})
    yield Sample("zeroelastic_ranks", starts[-1].start.world_size)
    if marks:
        yield Sample("zeroelastic_step", max(marks)[1])
    yield Sample("zeroelastic_start_timestamp_seconds", timeline.began)
