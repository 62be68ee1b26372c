"""bench_save on a small model: every system saves the live state. Times are not looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import run_benchmark
from made_once import made_once

from zeroelastic.executors.dispatch import describe_build

SYSTEMS = {"plain", "reserved", "file", "file-digests", "torch", "elastic", "rigid", "stock", "dcp"}

pytestmark = pytest.mark.skipif(not describe_build("native").usable, reason="the benchmarks need the native engine")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")

    def measure(out: Path) -> None:
        places = ("--out", str(out), "--directory", str(directory))
        done = run_benchmark("bench_save.py", "--small", "--repeats", "1", *places)
        assert done.returncode == 0, done.stdout + done.stderr

    return made_once(tmp_path_factory, "bench_save", measure)


@pytest.fixture(scope="module")
def document(results: Path) -> dict[str, Any]:
    return json.loads((results / "save.json").read_text())


def test_every_system_saves_the_live_state(document: dict[str, Any]) -> None:
    rows = {(row["system"], row["durable"], row["first"]): row for row in document["rows"]}
    assert set(rows) == {
        (system, durable, first)
        for system in SYSTEMS
        for durable in (False, True)
        for first in (True, False)
        if first or system != "dcp"
    }
    assert [sample for sample in document["samples"] if sample["wrong"]] == []
    assert all(row["verified"] for row in rows.values())


def test_nothing_is_written_twice(document: dict[str, Any]) -> None:
    """Files hold the state once, and ours are no larger than stock's by more than their tables."""
    written = {row["system"]: row["written"] for row in document["rows"]}
    for system in SYSTEMS - {"dcp"}:
        assert 1.0 <= written[system] < 1.02, system
    for sample in document["samples"]:
        if sample["system"] in ("file", "file-digests", "elastic"):
            assert sample["cost"]["written_bytes"] < 1.05 * document["state"]["state_bytes"] / document["ranks"] + (
                1 << 20
            )


def test_the_results_are_written(results: Path) -> None:
    text = (results / "save.md").read_text()
    assert text.count("| yes |") == 4 * len(SYSTEMS) - 2 and "**NO**" not in text
