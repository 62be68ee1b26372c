"""bench_kernel, bench_plan and those of a GPU at a small size: bits, tables are right; no times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_runs import run_benchmark
from engines import REPOSITORY
from support_table import COLLECTED
from warm_python import executable

from zeroelastic.executors.dispatch import describe_build

native = pytest.mark.skipif(not describe_build("native").usable, reason="the benchmark needs the native engine")


def results(script: str, name: str, out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    done = run_benchmark(script, "--small", "--out", os.fspath(out), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / f"{name}.json").read_text()), (out / f"{name}.md").read_text()


@native
def test_every_method_moves_every_workload(tmp_path: Path) -> None:
    document, text = results("bench_kernel.py", "kernel", tmp_path, "--rounds", "2", "--threads", "1", "2")
    rows = {(row["key"], row["threads"], row["method"]): row for row in document["rows"]}
    memory = {
        "native",
        "native + digest",
        "native to bf16",
        "flat copy_",
        "flat bf16.copy_",
        "native digest of flat memory",
    }
    files = {"native read (warm files)", "native read + digest"}
    for key in ("a", "a'", "b", "b'", "c"):
        for threads in (1, 2):
            found = {method for k, t, method in rows if (k, t) == (key, threads)}
            assert found >= memory | (files if key[0] == "a" else set())
    assert all(len(row["raw_seconds"]) == 2 for row in rows.values())
    assert all((row["over_native"] is None) == ("+ digest" not in row["method"]) for row in rows.values())
    assert text.count("\n| ") >= len(rows)
    segments = {about["segments"] for about in document["workloads"].values()}
    assert min(segments) == 6 and max(segments) == 1000


def test_plans_of_every_case_are_measured(tmp_path: Path) -> None:
    document, text = results("bench_plan.py", "plan", tmp_path, "--samples", "3")
    assert [row["num_segments"] > row["num_params"] for row in document["rows"]] == [True] * 3
    assert all(row["plan_peak_bytes"] >= row["plan_bytes"] > 0 for row in document["rows"])
    assert all(row["all_ranks_measured"] for row in document["rows"]) and "~0" not in text


def test_plans_and_reading_of_slices_are_measured(tmp_path: Path) -> None:
    arguments = ("--samples", "2", "--rounds", "2", "--directory", os.fspath(tmp_path))
    document, text = results("bench_topology.py", "topology", tmp_path, *arguments)
    assert len(document["plans"]) == 6 and len(document["reads"]) == 8
    assert all(row["bytes_read"] == row["nbytes"] and row["num_runs"] > row["num_rows"] for row in document["reads"])
    assert text.count("\n| tiny") == 0 and text.count("\n| Llama tiny") == 8


def test_what_takes_too_long_is_marked_as_not_measured(tmp_path: Path) -> None:
    document, text = results("bench_plan.py", "plan", tmp_path, "--samples", "1", "--whole-seconds", "0")
    assert not any(row["all_ranks_measured"] for row in document["rows"])
    assert text.count("| ~") == len(document["rows"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("name", ["bench_gpu", "bench_gpu_files", "bench_gpu_resume", "bench_gpu_saves"])
def test_without_a_gpu_the_benchmarks_of_it_say_so(tmp_path: Path, name: str) -> None:
    done = run_benchmark(f"{name}.py", "--out", os.fspath(tmp_path))
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == f"{name}: there is no CUDA device, so nothing is measured."
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "more", "methods"),
    [("gpu", ("--workloads", "b", "--repeats", "1"), 9), ("gpu_files", ("--workloads", "a"), 11)],
)
def test_the_benchmarks_of_a_gpu_run_on_the_fake_one(
    tmp_path: Path, name: str, more: tuple[str, ...], methods: int
) -> None:
    """They check what they move; what they time means nothing here."""
    script = os.fspath(REPOSITORY / "benchmarks" / f"bench_{name}.py")
    more = ("--small", "--rounds", "1", *more)
    done = run_benchmark("../tests/on_fake_gpu.py", script, *more, "--out", os.fspath(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
    assert len(rows) == methods and all(row["raw_seconds"][0] > 0 for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not describe_build("cuda").usable, reason="the benchmark needs the CUDA engine")
def test_every_method_moves_every_workload_on_a_gpu(tmp_path: Path) -> None:
    done = run_benchmark("bench_gpu.py", "--small", "--rounds", "1", "--out", os.fspath(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {row["method"] for row in rows} >= {
        "DevicePlan",
        "DevicePlan + digest",
        "DevicePlan, digest alone",
        "DevicePlan to bf16",
        "flat device copy",
    }


@pytest.mark.gpu
@pytest.mark.skipif(not describe_build("cuda").usable, reason="the benchmark needs the CUDA engine")
def test_files_reach_a_gpu_and_a_gpu_files_by_every_way(tmp_path: Path) -> None:
    done = run_benchmark("bench_gpu_files.py", "--small", "--rounds", "1", "--out", os.fspath(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu_files.json").read_text())["rows"]
    methods = {row["method"] for row in rows}
    assert {"read_segments", "read_segments + digest", "sum_segments: digests on the GPU"} < methods


@native
def test_whole_loads_and_saves_of_one_rank_are_measured_beside_deepspeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, where the state of one rank and of four is right or not as it is on a GPU."""
    monkeypatch.setenv("PYTHON_EXEC", executable())
    done = run_benchmark("bench_gpu_resume.py", "--small", "--cpu", "--stages", "2", "--out", os.fspath(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    about, *samples = map(json.loads, (tmp_path / "gpu_resume.jsonl").read_text().splitlines())
    assert about["num_params"] > 0
    found = {sample["system"] for sample in samples if sample["stage"] == 2 and "seconds" in sample}
    assert found == {"elastic-read", "elastic-full", "rigid-read", "stock", "save-elastic", "save-stock"}
    rows = [line for line in (tmp_path / "gpu_resume.md").read_text().splitlines() if line.endswith(" yes |")]
    assert len(rows) == 6, "masters and moments are those that were saved"


def test_features_of_a_gpu_are_tried_and_what_cannot_be_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", executable())
    features = ("cpu-2", "qwz")
    done = run_benchmark("gpu_features.py", "--small", "--cpu", "--only", *features, "--out", os.fspath(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpu_features.json").read_text())["results"]
    assert [results["cpu-2"][f"load {kind}"]["num_different"] for kind in ("elastic", "rigid")] == [0, 0]
    assert results["cpu-2"]["load elastic"]["num_compared"] > 10
    assert "not been implemented on CPU" in results["qwz"]["ops"]["error"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_the_check_of_a_borrowed_gpu_goes_on_after_a_part_that_fails(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Without a GPU: parts fail by name, others run; a part or an option that is not known is refused.

    Where this run has all tests, each that needs a GPU is among those that the check runs.
    """
    script = os.fspath(REPOSITORY / "tools" / "gpu_check.sh")
    out = tmp_path / "out"
    environment = os.environ | {"PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [script, "--cpu", "--wheels", os.fspath(tmp_path), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)

    done = run("--out", os.fspath(out), "--only", "kernels,tests", "--archive")
    assert done.returncode == 1
    summary = (out / "summary.md").read_text()
    assert "| kernels | **failed**, exit code 1 |" in summary and "| tests | passed |" in summary
    assert sorted(path.name for path in out.iterdir()) == ["results.tar.gz", "summary.md"]
    with tarfile.open(out / "results.tar.gz") as archive:
        log = archive.extractfile("results/kernels.log")
        assert log is not None and b"there is no CUDA device" in log.read()
        log = archive.extractfile("results/tests.log")
        assert log is not None
        places = [REPOSITORY / place for place in log.readline().decode().removeprefix("tests in ").split()]
    on_gpu = {item.path for item in request.config.stash[COLLECTED] if item.get_closest_marker("gpu")}
    missed = {path for path in on_gpu if not any(path.is_relative_to(place) for place in places)}
    assert on_gpu and not missed, "tests that need a GPU, and that tools/gpu_check.sh does not run"
    for wrong in (("--only", "nothing"), ("--outt", "x"), ()):
        done = run(*(wrong if wrong == () else ("--out", os.fspath(out), *wrong)))
        assert done.returncode == 2 and "gpu_check: " in done.stderr


@native
def test_the_command_line_is_measured_beside_every_other_tool(tmp_path: Path) -> None:
    done = run_benchmark(
        "bench_cli.py", "--small", "--repeats", "1", "--out", os.fspath(tmp_path), "--directory", os.fspath(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "cli.json").read_text())
    assert {"cp -r, flushed", "reshard 4 -> 3, flushed", "verify", "export"} <= set(document["raw_seconds"])
    assert all(len(values) == 1 and values[0] > 0 for values in document["raw_seconds"].values())
    limit = (256 + 150) << 20
    assert all(0 < peak < limit for peak in document["peak_rss"].values()) and len(document["peak_rss"]) >= 6
    text = (tmp_path / "cli.md").read_text()
    assert all(f"| {name} |" in text for name in [*document["raw_seconds"], *document["ratios"]])


@native
def test_saves_on_a_gpu_are_measured_beside_deepspeeds_own(tmp_path: Path) -> None:
    """Here with gloo and in host memory."""
    more = ("--cpu", "--small", "--rounds", "1", "--writer", "python")
    done = run_benchmark("bench_gpu_saves.py", *more, "--out", os.fspath(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    saves = json.loads((tmp_path / "gpu_saves.json").read_text())["parts"]["saves"]
    assert not saves["not_measured"], saves
    assert len(saves["seconds"]) == 7 and all(len(values) == 1 for values in saves["seconds"].values())
    assert saves["nbytes"] > 12 * saves["numel"] and len(saves["phases"]) == 2
    ways = ("in the background", "by DeepSpeed's decoupled writer", "in memory")
    assert [len(saves[way]["rounds"]) for way in ways] == [2, 2, 4]
    assert [name.split(",")[0] for name in saves["writers"]] == ["FastCheckpointEngine", "DecoupledCheckpointEngine"]
    assert all(one["snapshot_bytes"] >= 12 * saves["numel"] for one in saves["in the background"]["rounds"])
    text = (tmp_path / "gpu_saves.md").read_text()
    assert "| in memory |" in text and "payload: written" in text and "Not measured" not in text


@pytest.mark.slow
def test_bench_phases_accounts_for_the_whole_time(tmp_path: Path) -> None:
    done = run_benchmark(
        "bench_phases.py", "--small", "--repeats", "1", "--save-ranks", "2", "--load-ranks", "1", "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / "phases.json").read_text())["parts"]
    assert [len(ranks) for ranks in parts.values()] == [2, 1, 1, 1, 1]
    for title, ranks in parts.items():
        for (seconds,) in ranks:
            wanted = {"payload: written"} if "save" in title else {"payload: read", "headers: read and checked"}
            assert wanted < seconds.keys() and all(value >= 0 for value in seconds.values())
    page = (tmp_path / "phases.md").read_text()
    assert page.count("| **all** |") == 5 and "persistent parameters gathered" in page
