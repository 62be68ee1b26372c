"""The table of all metrics, by their names in trackers and for Prometheus, and the values that a report gives.

docs/guides/monitoring.md has this table; ``metrics_table`` writes it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from zeroelastic.report import MemoryReport, Report, ResizeReport, ResumeReport, SaveReport

PREFIX = "zeroelastic/"

Kind = Literal["counter", "gauge"]


class Metric(NamedTuple):
    """One metric: its name in a ``tracker`` without ``PREFIX``, and its ``suffix`` for Prometheus after "zeroelastic_".

    Either is None where the metric makes no sense there. ``file``: it is in the file that rank 0 keeps; ``job``: it is
    in ``zeroelastic timeline --prometheus``.
    """

    tracker: str | None
    suffix: str | None
    unit: str
    help: str
    file: bool = True
    job: bool = False

    @property
    def prometheus(self) -> str | None:
        """Its name for Prometheus."""
        return None if self.suffix is None else f"zeroelastic_{self.suffix}"

    @property
    def kind(self) -> Kind:
        """A counter's name ends in "_total", as Prometheus expects."""
        return "counter" if self.suffix is not None and self.suffix.endswith("_total") else "gauge"


METRICS = (
    Metric(None, "saves_total", "saves", "Committed saves.", job=True),
    Metric(
        "save/stall_s", "save_stall_seconds_total", "seconds", "Time that the training loop waited for saves.", job=True
    ),
    Metric("save/seconds", "save_seconds_total", "seconds", "Time from the call of save_checkpoint to the commit."),
    Metric("save/bytes", "save_bytes_total", "bytes", "Size of the saved files of all ranks.", job=True),
    Metric("save/bytes_per_s", None, "bytes per second", "Bytes of a save by the seconds that it took."),
    Metric("save/failed", "save_failures_total", "saves", "Saves that were not committed."),
    Metric("save/removed_tags", "removed_tags_total", "tags", 'Older tags that "keep" has removed.'),
    Metric(None, "last_save_step", "steps", "Optimizer steps at the last committed save."),
    Metric(None, "last_save_timestamp_seconds", "seconds since 1970", "When the last save was committed.", job=True),
    Metric(None, "memory_checkpoints_total", "checkpoints", "Complete checkpoints in memory."),
    Metric(
        "memory/stall_s",
        "memory_stall_seconds_total",
        "seconds",
        "Time that the training loop waited for checkpoints in memory.",
    ),
    Metric("memory/seconds", None, "seconds", "Time from the begin of one to its end on all nodes."),
    Metric("memory/node_bytes", "memory_node_bytes", "bytes", "Shared memory of the fullest node."),
    Metric(
        "memory/network_bytes",
        "memory_network_bytes_total",
        "bytes",
        "Bytes that the rank that sends most has sent to other nodes.",
    ),
    Metric("memory/step", "memory_step", "steps", "Optimizer steps at the last one."),
    Metric("memory/failed", "memory_failures_total", "checkpoints", "Checkpoints in memory that were not completed."),
    Metric(None, "loads_total", "loads", "Checkpoints that were loaded."),
    Metric("load/seconds", "load_seconds_total", "seconds", "Time that loads took.", job=True),
    Metric("load/bytes", "load_bytes_total", "bytes", "Bytes that all ranks read in loads."),
    Metric("load/bytes_per_s", None, "bytes per second", "Bytes of a load by the seconds that it took."),
    Metric("load/from_ranks", "load_from_ranks", "ranks", "Ranks that saved what was loaded last."),
    Metric("load/to_ranks", "load_to_ranks", "ranks", "Ranks that loaded it."),
    Metric(
        None, "resizes_total", "changes", "Changes of size in place, with the state from process to process.", job=True
    ),
    Metric(
        "resize/seconds",
        "resize_seconds_total",
        "seconds",
        "Time from the last step of a world to the first of the next.",
    ),
    Metric(
        "resize/bytes_moved",
        "resize_bytes_total",
        "bytes",
        "State that went to another process, of all ranks.",
        job=True,
    ),
    Metric("resize/from_ranks", None, "ranks", "Ranks before a change of size in place."),
    Metric("resize/to_ranks", None, "ranks", "Ranks after it."),
    Metric("job/resume_s", "resume_seconds_total", "seconds", "Time of resume().", job=True),
    Metric("job/restarts", "restarts_total", "restarts", "Restarts of the job.", job=True),
    Metric("job/lost_steps", "lost_steps_total", "steps", "Steps that were trained again.", job=True),
    Metric(
        None,
        "restart_seconds_total",
        "seconds",
        "Time from the end of a start to the first step of the next, by phase.",
        file=False,
        job=True,
    ),
    Metric(
        None,
        "resumes_total",
        "resumes",
        "Resumes, by tier: in-place, memory, node-local, directory.",
        file=False,
        job=True,
    ),
    Metric(None, "ranks", "ranks", "Ranks of the last start.", file=False, job=True),
    Metric(None, "step", "steps", "The last step in the event log.", file=False, job=True),
    Metric(
        None,
        "start_timestamp_seconds",
        "seconds since 1970",
        "When the job was started for the first time.",
        file=False,
        job=True,
    ),
)


def metrics_of(report: Report) -> dict[str, float]:
    """The metrics of a report by the names that trackers show: ``{"zeroelastic/save/stall_s": 0.8, ...}``.

    A value that is not known is left out.
    """
    found: dict[str, float | None]
    if isinstance(report, SaveReport):
        found = {"save/stall_s": report.stall_seconds, "save/failed": float(report.error is not None)}
        if report.error is None:
            found |= {
                "save/seconds": report.seconds,
                "save/bytes": report.bytes,
                "save/bytes_per_s": _rate(report.bytes, report.seconds),
                "save/removed_tags": len(report.removed),
            }
    elif isinstance(report, ResumeReport):
        found = {
            "load/seconds": report.seconds,
            "load/bytes": report.total_bytes_read,
            "load/bytes_per_s": _rate(report.total_bytes_read, report.seconds),
            "load/from_ranks": report.saved_world_size,
            "load/to_ranks": report.world_size,
        }
    elif isinstance(report, MemoryReport):
        found = {"memory/failed": float(report.error is not None), "memory/stall_s": report.stall_seconds}
        if report.error is None:
            found |= {
                "memory/seconds": report.seconds,
                "memory/node_bytes": report.node_bytes,
                "memory/network_bytes": report.network_bytes,
                "memory/step": report.step,
            }
    elif isinstance(report, ResizeReport):
        found = {
            "resize/seconds": report.seconds,
            "resize/bytes_moved": report.bytes_moved,
            "resize/from_ranks": report.saved_world_size,
            "resize/to_ranks": report.world_size,
        }
    else:
        found = {
            "job/resume_s": report.seconds,
            "job/restarts": report.restarts,
            "job/lost_steps": report.lost_steps,
        }
    return {f"{PREFIX}{name}": float(value) for name, value in found.items() if value is not None}


def metrics_table() -> str:
    """The metrics as the Markdown table of docs/guides/monitoring.md."""
    rows = ["| in a tracker | for Prometheus | unit | what it is |", "|---|---|---|---|"]
    for metric in METRICS:
        tracker = "" if metric.tracker is None else f"`{PREFIX}{metric.tracker}`"
        prometheus = "" if metric.prometheus is None else f"`{metric.prometheus}`"
        rows.append(f"| {tracker} | {prometheus} | {metric.unit} | {metric.help} |")
    return "\n".join(rows) + "\n"


def _rate(nbytes: int, seconds: float) -> float | None:
    return nbytes / seconds if seconds > 0 else None
