"""Prometheus text, held to the parser of prometheus_client: names, types, units, labels; and the file of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import run_command
from places import ROOT
from prometheus_client.parser import text_string_to_metric_families

from zeroelastic.monitoring import MemoryReport, ResizeReport, ResumeReport, SaveReport, StartReport
from zeroelastic.monitoring.metrics import METRICS, metrics_table
from zeroelastic.monitoring.prometheus import MetricsFile, Sample, prometheus_text
from zeroelastic.testing.sample_events import write_sample_events

SAVED = SaveReport("/run/t", "t", 7, 4, True, 0.5, 2.0, bytes=100, removed=("a", "b"))
LOADED = ResumeReport(
    "/run/t", "elastic", 4, 3, 10, 10, 1, 2, 30, 1.5, None, None, None, (), (), (), ()
)  # fmt: skip
FAILED = SaveReport("/run/u", "u", 8, 4, False, 0.25, 0.25, error="the disk is full")
STARTED = StartReport("t", 7, 3, 1.75, 2, 5)
KEPT = MemoryReport(
    step=9, world_size=3, num_nodes=3, stall_seconds=0.25, seconds=0.5, node_bytes=500, network_bytes=40
)
RESIZED = ResizeReport(
    step=11, saved_world_size=3, world_size=2, root=None, bytes_kept=70, bytes_moved=30,
    teardown_seconds=0.25, engine_seconds=0.5, move_seconds=0.125,
)  # fmt: skip
NOT_KEPT = MemoryReport(step=10, world_size=3, num_nodes=3, stall_seconds=0.25, seconds=0.5, error="SaveError: full")


def parsed(text: str) -> dict[str, float]:
    """The samples by name and labels, after the checks that hold for all of our text."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith(".") and family.type in ("counter", "gauge")
        for sample in family.samples:
            assert (family.type == "counter") is sample.name.endswith("_total"), sample.name
            key = ",".join([sample.name, *(f"{name}={value}" for name, value in sample.labels.items())])
            assert key not in found
            found[key] = sample.value
    return found


def test_names_follow_the_conventions() -> None:
    names = [metric.prometheus for metric in METRICS if metric.prometheus is not None]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        if metric.prometheus is not None:
            assert re.fullmatch(r"zeroelastic_[a-z_]+", metric.prometheus)
            for unit in ("seconds", "bytes"):
                base = metric.prometheus.removesuffix("_total")
                assert base.endswith(f"_{unit}") is metric.unit.startswith(unit), metric


def test_a_file_of_a_run_adds_up_its_reports(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / 'pre"train.prom')
    file.write()
    assert set(parsed((tmp_path / 'pre"train.prom').read_text()).values()) == {0}
    for report in (LOADED, STARTED, SAVED, SAVED, FAILED, KEPT, KEPT, NOT_KEPT, RESIZED, RESIZED):
        file(report, None)
    found = parsed((tmp_path / 'pre"train.prom').read_text())
    assert all(key.endswith(',run=pre"train') for key in found)
    values = {key.partition(",")[0].removeprefix("zeroelastic_"): value for key, value in found.items()}
    assert values.pop("last_save_timestamp_seconds") > 1.7e9
    assert values == {
        "saves_total": 2, "save_stall_seconds_total": 1.25, "save_seconds_total": 4, "save_bytes_total": 200,
        "save_failures_total": 1, "removed_tags_total": 4, "last_save_step": 7, "loads_total": 1,
        "load_seconds_total": 1.5, "load_bytes_total": 30, "load_from_ranks": 4, "load_to_ranks": 3,
        "memory_checkpoints_total": 2, "memory_stall_seconds_total": 0.75, "memory_failures_total": 1,
        "memory_network_bytes_total": 80, "memory_node_bytes": 500, "memory_step": 9,
        "resizes_total": 2, "resize_seconds_total": 1.75, "resize_bytes_total": 60,
        "resume_seconds_total": 1.75, "restarts_total": 2, "lost_steps_total": 5,
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ['pre"train.prom']  # no temporary file is left


def test_every_metric_of_the_table_is_in_one_of_the_two_texts(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "run.prom")
    for report in (LOADED, STARTED, SAVED, KEPT):
        file(report, None)
    write_sample_events(tmp_path / "events.jsonl")
    job = run_command("timeline", tmp_path / "events.jsonl", "--prometheus").stdout
    of_file, of_job = (
        {key.partition(",")[0] for key in parsed(text)} for text in ((tmp_path / "run.prom").read_text(), job)
    )
    named = [metric for metric in METRICS if metric.prometheus is not None]
    assert of_file == {metric.prometheus for metric in named if metric.file}
    assert of_job == {metric.prometheus for metric in named if metric.job}


def test_a_job_is_told_from_its_event_log(tmp_path: Path) -> None:
    write_sample_events(tmp_path / "events.jsonl")
    found = parsed(run_command("timeline", tmp_path / "events.jsonl", "--prometheus").stdout)
    shown = run_command("timeline", tmp_path / "events.jsonl").stdout
    assert f"{int(found['zeroelastic_lost_steps_total'])} steps lost" in shown
    assert f"{int(found['zeroelastic_restarts_total']) + 1} starts" in shown
    assert found["zeroelastic_restart_seconds_total,phase=load"] > 0


@pytest.mark.parametrize("other", ["--json", "--plot"])
def test_prometheus_text_is_the_only_output(tmp_path: Path, other: str) -> None:
    write_sample_events(tmp_path / "events.jsonl")
    more = ["--json"] if other == "--json" else ["--plot", tmp_path / "x.svg"]
    done = run_command("timeline", tmp_path / "events.jsonl", "--prometheus", *more)
    assert done.returncode == 2 and f"--prometheus and {other}" in done.stderr


def test_labels_and_help_are_escaped() -> None:
    text = prometheus_text([Sample("zeroelastic_ranks", 1, {"run": 'a\\b"c\nd'})])
    (family,) = text_string_to_metric_families(text)
    assert family.samples[0].labels == {"run": 'a\\b"c\nd'}


def test_the_page_has_the_table() -> None:
    """After a change: put the output of ``metrics_table()`` into docs/guides/monitoring.md."""
    assert metrics_table() in (ROOT / "docs/guides/monitoring.md").read_text()
