"""Where people watch a job: observers of saves and loads, the metrics made of them, Prometheus text, spans.

    observers    ``subscribe``: functions that get the report of every save, load and start of a job
    metrics      the table of all metrics, and the values that a report gives
    prometheus   the Prometheus text of a job's event log, and the file that rank 0 keeps for a textfile collector
    job_report   the report of ``zeroelastic timeline``, of a job over all its starts
    spans        OpenTelemetry spans, where the program has set up OpenTelemetry

The figures come from ``zeroelastic.report`` and the event log; nothing here measures anything. Imports neither
torch nor deepspeed. Read ``observers``, then ``metrics``.
"""

from __future__ import annotations

from zeroelastic.monitoring.metrics import metrics_of
from zeroelastic.monitoring.observers import subscribe
from zeroelastic.report import MemoryReport, Report, ResizeReport, ResumeReport, SaveReport, StartReport

__all__ = [
    "MemoryReport",
    "Report",
    "ResizeReport",
    "ResumeReport",
    "SaveReport",
    "StartReport",
    "metrics_of",
    "subscribe",
]
