"""bench_load and bench_save on a small model: what they count is right, what was saved is live and loaded; no times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from environments import made_once, run_benchmark

from zeroelastic.executors.dispatch import describe_build

SAVE_RANKS, LOAD_RANKS = 4, 3
HEADERS = 320 * 1024  # zip directories, pickles, the module states, and what gloo receives

Rows = dict[str, dict[str, Any]]
"""Rows by system: of the first loads, or of later ones, all of files that the page cache does not have."""

SYSTEMS = ("ceiling", "tensors", "elastic-read", "rigid", "dcp", "universal", "stock", "same")
SAVE_SYSTEMS = {"plain", "reserved", "file", "file-digests", "torch", "elastic", "rigid", "stock", "dcp"}
OURS = {"elastic-read", "rigid", "same"}
LONG = {"universal-convert", "universal-load", "universal"}

pytestmark = pytest.mark.skipif(not describe_build("native").usable, reason="the benchmarks need the native engine")


def measured(factory: pytest.TempPathFactory, name: str, *arguments: str) -> dict[str, Any]:
    """What a benchmark writes of a run of one repeat; its page is ``text``."""

    def measure(out: Path) -> None:
        places = ("--out", str(out), "--directory", str(factory.mktemp("checkpoints")))
        done = run_benchmark(f"bench_{name}.py", "--small", "--repeats", "1", *arguments, *places)
        assert done.returncode == 0, done.stdout + done.stderr

    out = made_once(factory, f"bench_{name}", measure)
    return json.loads((out / f"{name}.json").read_text()) | {"text": (out / f"{name}.md").read_text()}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(tmp_path_factory, "load", "--caches", "cold", "--systems", *SYSTEMS)


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(tmp_path_factory, "save", "--ranks", "2")


@pytest.fixture(scope="module")
def rows(document: dict[str, Any]) -> Rows:
    return {row["system"]: row for row in document["rows"] if row["first"]}


@pytest.fixture(scope="module")
def later(document: dict[str, Any]) -> Rows:
    return {row["system"]: row for row in document["rows"] if not row["first"]}


def test_every_system_loads_what_was_saved(document: dict[str, Any], rows: Rows, later: Rows) -> None:
    assert set(rows) == {*SYSTEMS, "universal-convert", "universal-load"}
    assert [sample for sample in document["samples"] if sample["wrong"]] == []
    assert set(later) == set(rows) - LONG
    assert all(row["verified"] for row in (*rows.values(), *later.values()))
    ranks = {"universal-convert": 1, "stock": SAVE_RANKS, "same": SAVE_RANKS}
    assert all(row["ranks"] == ranks.get(system, LOAD_RANKS) for system, row in rows.items())


def test_a_first_load_makes_the_memory_that_a_later_one_has(rows: Rows, later: Rows) -> None:
    for system in ("elastic-read", "stock", "ceiling", "tensors", "dcp"):
        made = rows[system]["owned_bytes"] * 2 // 3  # the moments
        assert rows[system]["extra_rss"] > 0.9 * made, system
        assert later[system]["extra_rss"] < rows[system]["extra_rss"], system
    assert all((row["reported"] is None) == (row["system"] not in OURS) for row in rows.values())
    assert all(row["reported_of_call"][1] <= 1 for row in rows.values() if row["system"] in OURS)


def test_zeroelastic_reads_every_byte_once(rows: Rows) -> None:
    for system in ("tensors", "elastic-read", "rigid", "same"):
        row = rows[system]
        assert row["owned_bytes"] <= row["rank_bytes"] <= 1.01 * row["owned_bytes"] + HEADERS, system
        assert 1.0 <= row["amplification"] < 1.03, system


def test_what_the_others_read_is_seen(rows: Rows) -> None:
    """Mapped pages and the converter's worker processes included; the figures follow from what each system does."""
    found = {system: row["amplification"] for system, row in rows.items()}
    assert 1.0 <= found["stock"] < 1.03  # every rank, its own file
    assert 1.0 <= found["ceiling"] < 1.03
    assert 1.2 < found["dcp"] < LOAD_RANKS  # whole saved chunks
    assert 2.0 <= found["universal-convert"] < 3.0  # the files, then the fragments
    assert found["universal-load"] >= LOAD_RANKS  # every rank, every parameter


def test_the_results_are_written(document: dict[str, Any], rows: Rows, saves: dict[str, Any]) -> None:
    assert document["text"].count("\n| ") >= len(rows) and "**NO**" not in document["text"] + saves["text"]
    assert saves["text"].count("| yes |") == 4 * len(SAVE_SYSTEMS) - 2


def test_every_system_saves_the_live_state(saves: dict[str, Any]) -> None:
    rows = {(row["system"], row["durable"], row["first"]): row for row in saves["rows"]}
    assert set(rows) == {
        (system, durable, first)
        for system in SAVE_SYSTEMS
        for durable in (False, True)
        for first in (True, False)
        if first or system != "dcp"
    }
    assert [sample for sample in saves["samples"] if sample["wrong"]] == []
    assert all(row["verified"] for row in rows.values())


def test_nothing_is_written_twice(saves: dict[str, Any]) -> None:
    """Files hold the state once, and ours are no larger than stock's by more than their tables."""
    written = {row["system"]: row["written"] for row in saves["rows"]}
    for system in SAVE_SYSTEMS - {"dcp"}:
        assert 1.0 <= written[system] < 1.02, system
    for sample in saves["samples"]:
        if sample["system"] in ("file", "file-digests", "elastic"):
            assert sample["cost"]["written_bytes"] < 1.05 * saves["state"]["state_bytes"] / saves["ranks"] + (1 << 20)
