"""OpenTelemetry spans: a tree for each save and load where the SDK is set up, and nothing imported where it is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from training import Job, build_engine, train_step

import zeroelastic
from zeroelastic.elastic import resume
from zeroelastic.testing import RankPool


def traced(directory: str, background: bool) -> list[tuple[str, str | None, str]]:
    """Name, name of the parent, and status of each span of a save, a failed save and a resume."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    engine = build_engine(Job(options={"async_save": background}))
    train_step(engine, 0)
    engine.save_checkpoint(directory)
    zeroelastic.wait_for_save(engine)
    resume(engine, directory, strict=False)
    with pytest.raises(zeroelastic.UsageError):
        engine.save_checkpoint(directory, tag=f"rank{dist.get_rank()}")  # the ranks disagree
    spans = exporter.get_finished_spans()
    names = {span.context.span_id: span.name for span in spans}
    assert all(key.startswith("zeroelastic.") for span in spans for key in span.attributes)
    return sorted((s.name, names[s.parent.span_id] if s.parent else None, s.status.status_code.name) for s in spans)


@pytest.mark.parametrize("background", [False, True])
def test_a_save_and_a_resume_are_trees_of_spans(rank_pool: RankPool, tmp_path: Path, background: bool) -> None:
    for found in rank_pool.run(traced, 2, str(tmp_path), background):
        parent = "zeroelastic.save.background" if background else "zeroelastic.save"
        wanted: list[tuple[str, Any, str]] = [
            ("zeroelastic.load", "zeroelastic.resume", "UNSET"),
            ("zeroelastic.load.check", "zeroelastic.load", "UNSET"),
            ("zeroelastic.load.restore", "zeroelastic.load", "UNSET"),
            ("zeroelastic.load.verify", "zeroelastic.load", "UNSET"),
            ("zeroelastic.resume", None, "UNSET"),
            ("zeroelastic.save", None, "ERROR"),
            ("zeroelastic.save", None, "UNSET"),
            ("zeroelastic.save.commit", parent, "UNSET"),
            ("zeroelastic.save.wait", "zeroelastic.save", "UNSET"),
            ("zeroelastic.save.wait", "zeroelastic.save", "UNSET"),
            ("zeroelastic.save.write", "zeroelastic.save", "UNSET"),
        ]
        if background:
            wanted += [
                ("zeroelastic.save.background", "zeroelastic.save", "UNSET"),
                ("zeroelastic.save.write", "zeroelastic.save.background", "UNSET"),
            ]
        assert found == sorted(wanted)


def test_a_span_imports_nothing() -> None:
    code = (
        "import sys; from zeroelastic.monitoring.spans import continued, current_context, span\n"
        "with span('save', step=1), continued(current_context()): pass\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
