"""bench_kernel and those of a GPU at a small size: bits, tables are right; no times."""

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
from engines import REPOSITORY
from environments import run_benchmark
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
    done = run_benchmark("../tests/project/on_fake_gpu.py", script, *more, "--out", os.fspath(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
    assert len(rows) == methods and all(row["raw_seconds"][0] > 0 for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not describe_build("cuda").usable, reason="the benchmark needs the CUDA engine")
@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("gpu", {"DevicePlan", "DevicePlan + digest", "DevicePlan, digest alone", "DevicePlan to bf16"}),
        ("gpu_files", {"read_segments", "read_segments + digest", "sum_segments: digests on the GPU"}),
    ],
)
def test_a_gpu_is_measured_by_every_method(tmp_path: Path, name: str, methods: set[str]) -> None:
    done = run_benchmark(f"bench_{name}.py", "--small", "--rounds", "1", "--out", os.fspath(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
    assert methods < {row["method"] for row in rows}


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
def test_saves_on_a_gpu_are_measured_beside_deepspeeds_own(tmp_path: Path) -> None:
    """Here with gloo and in host memory."""
    more = ("--cpu", "--small", "--rounds", "1", "--writer", "python")
    done = run_benchmark("bench_gpu_saves.py", *more, "--out", os.fspath(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    saves = json.loads((tmp_path / "gpu_saves.json").read_text())["parts"]["saves"]
    assert not saves["not_measured"], saves
    assert len(saves["seconds"]) == 7 and all(len(values) == 1 for values in saves["seconds"].values())
    assert saves["nbytes"] > 12 * saves["numel"]
    ways = ("in the background", "by DeepSpeed's decoupled writer", "in memory")
    assert [len(saves[way]["rounds"]) for way in ways] == [2, 2, 4]
    assert [name.split(",")[0] for name in saves["writers"]] == ["FastCheckpointEngine", "DecoupledCheckpointEngine"]
    assert all(one["snapshot_bytes"] >= 12 * saves["numel"] for one in saves["in the background"]["rounds"])
    text = (tmp_path / "gpu_saves.md").read_text()
    assert "| in memory |" in text and "Not measured" not in text
