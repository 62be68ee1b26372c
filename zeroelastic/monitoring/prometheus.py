"""Metrics in the Prometheus text format (version 0.0.4): of a whole job, from the timeline of its event log, and of a
run, in the file that rank 0 keeps for a textfile collector.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroelastic.io.atomic import write_atomically
from zeroelastic.io.paths import absolute
from zeroelastic.job_log.timeline import PHASES, Timeline
from zeroelastic.monitoring.metrics import METRICS, PREFIX, metrics_of
from zeroelastic.report import MemoryReport, Report, ResizeReport, ResumeReport, SaveReport

_BY_TRACKER = {metric.tracker: metric for metric in METRICS if metric.tracker is not None}
_BY_NAME = {metric.prometheus: metric for metric in METRICS if metric.prometheus is not None}


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric, with the labels that tell it from others of the same name."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def prometheus_text(samples: Iterable[Sample]) -> str:
    """Samples of ``METRICS`` as text, grouped by metric, each metric with its HELP and TYPE line."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    lines: list[str] = []
    for name, metric in _BY_NAME.items():
        found = by_name.get(name, ())
        if found:
            lines += [f"# HELP {name} {_escaped(metric.help)}", f"# TYPE {name} {metric.kind}"]
            lines += [_line(sample) for sample in found]
    return "".join(f"{line}\n" for line in lines)


def _line(sample: Sample) -> str:
    labels = ",".join(f'{key}="{_escaped(value, quoted=True)}"' for key, value in sample.labels.items())
    value = int(sample.value) if float(sample.value).is_integer() else float(sample.value)
    return f"{sample.name}{{{labels}}} {value}" if labels else f"{sample.name} {value}"


def _escaped(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quoted else text


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


class MetricsFile:
    """An observer that keeps a file of the metrics of this process, for node_exporter's textfile collector.

    Each report replaces the file by one rename. Counters begin at 0 with each start of the job, as Prometheus expects
    of a process. All samples have the label ``run``, the name of the file, so that the files of two runs on one machine
    do not have the same samples. Raises OSError where the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(absolute(path))
        self._labels = {"run": self._path.stem}
        self._values = {
            metric.prometheus: 0.0
            for metric in METRICS
            if metric.file and metric.kind == "counter" and metric.prometheus is not None
        }
        self._lock = threading.RLock()

    def __call__(self, report: Report, engine: Any) -> None:
        with self._lock:
            self._add(report)
            self.write()

    def write(self) -> None:
        """Write the file as it is now. Raises OSError."""
        with self._lock:
            text = prometheus_text(Sample(name, value, self._labels) for name, value in self._values.items())
            write_atomically(self._path, text.encode(), sync=False)

    def _add(self, report: Report) -> None:
        for name, value in metrics_of(report).items():
            metric = _BY_TRACKER[name.removeprefix(PREFIX)]
            if metric.prometheus == "zeroelastic_restarts_total":  # it is a count already
                self._values[metric.prometheus] = value
            elif metric.prometheus is not None:
                before = self._values.get(metric.prometheus, 0.0) if metric.kind == "counter" else 0.0
                self._values[metric.prometheus] = before + value
        if isinstance(report, SaveReport) and report.error is None:
            self._values["zeroelastic_saves_total"] += 1
            self._values["zeroelastic_last_save_step"] = float(report.step)
            self._values["zeroelastic_last_save_timestamp_seconds"] = round(time.time(), 3)
        elif isinstance(report, ResumeReport):
            self._values["zeroelastic_loads_total"] += 1
        elif isinstance(report, MemoryReport) and report.error is None:
            self._values["zeroelastic_memory_checkpoints_total"] += 1
        elif isinstance(report, ResizeReport):
            self._values["zeroelastic_resizes_total"] += 1
