"""Every fuzzer for some minutes each, and what came of it: ``make fuzz`` (FUZZ_SECONDS, FUZZ_TARGETS, FUZZ_SEED).

The readers run under atheris, the C++ engine's tables under libFuzzer with the address and undefined
behaviour sanitizers. Results go to ``--out`` as fuzz.json and fuzz.md; what was found is left beside the corpus in
``--work``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
READERS = ("archive", "pickle", "record", "tags", "checkpoint", "universal", "dcp")
ENGINE = {"table": "table"}
"""The targets of the C++ engine, and the source of each in csrc/tests/fuzz."""
MOST_MIB = 256


def main() -> int:
    """Run the campaign; 1 where something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", default="", help="names, separated by spaces; all by default")
    parser.add_argument("--work", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    path = options.out / "fuzz.json"
    results = json.loads(path.read_text())["targets"] if path.exists() else {}
    for name in options.targets.split() or (*READERS, *ENGINE):
        results[name] = fuzz(name, options.seconds, options.seed, options.work.resolve())
        print(name, json.dumps(results[name]), flush=True)
        write(options.out, results)
    return int(any(result["findings"] for result in results.values()))


def fuzz(name: str, seconds: int, seed: int, work: Path) -> dict[str, object]:
    """One target: inputs run, coverage, memory, findings."""
    corpus, found = work / f"corpus-{name}", work / f"found-{name}"
    for folder in (corpus, found):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    command = (
        [str(engine_fuzzer(ENGINE[name], work))] if name in ENGINE else [sys.executable, str(HERE / "run.py"), name]
    )
    limits = [f"-max_total_time={seconds}", f"-seed={seed}", f"-rss_limit_mb={MOST_MIB}", "-timeout=30"]
    limits += ["-max_len=8192", "-print_final_stats=1", f"-artifact_prefix={found}/"]
    env = {**os.environ, "ASAN_OPTIONS": "quarantine_size_mb=8", "PYTHONPATH": str(HERE.parents[1])}
    began = time.monotonic()
    done = subprocess.run(
        [*command, str(corpus), *limits], capture_output=True, text=True, errors="replace", env=env,
        timeout=seconds + 300, check=False,
    )  # fmt: skip
    took = time.monotonic() - began
    (work / f"{name}.log").write_text(done.stderr + done.stdout)
    return {
        **figures(done.stderr + done.stdout),
        "seconds": round(took),
        "seed": seed,
        "corpus_files": sum(1 for _ in corpus.iterdir()),
        "findings": sorted(file.name for file in found.iterdir()) or ([] if done.returncode == 0 else ["see the log"]),
    }


def figures(log: str) -> dict[str, object]:
    """What libFuzzer prints in the end."""
    stats = {key: int(value) for key, value in re.findall(r"stat::(\w+):\s+(\d+)", log)}
    coverage = re.findall(r"cov: (\d+) ft: (\d+)", log)
    return {
        "inputs": stats.get("number_of_executed_units", 0),
        "edges": int(coverage[-1][0]) if coverage else 0,
        "features": int(coverage[-1][1]) if coverage else 0,
        "peak_mib": stats.get("peak_rss_mb", 0),
        "slowest_s": stats.get("slowest_unit_time_sec", 0),
    }


def engine_fuzzer(name: str, work: Path) -> Path:
    """A fuzzer of the C++ engine, built by clang: CLANGXX, or the newest there is."""
    names = [os.environ.get("CLANGXX", ""), "clang++", *(f"clang++-{version}" for version in range(22, 14, -1))]
    compiler = next((name for name in names if name and shutil.which(name)), None)
    if compiler is None:
        sys.exit("the engine's fuzzer needs clang 15 or newer (Debian: apt-get install clang-19 libclang-rt-19-dev).")
    subprocess.run(["make", "-C", str(CSRC), "fuzz", f"BUILD={work}", f"CLANGXX={compiler}"], check=True)
    return work / f"fuzz-{name}"


def write(out: Path, results: dict[str, dict[str, object]]) -> None:
    """fuzz.json and fuzz.md."""
    document = {"python": platform.python_version(), "limit_mib": MOST_MIB, "targets": results}
    (out / "fuzz.json").write_text(json.dumps(document, indent=1) + "\n")
    keys = ("inputs", "seconds", "edges", "features", "peak_mib", "slowest_s")
    rows = [
        f"| {name} | " + " | ".join(f"{result[key]:,}" for key in keys) + f" | {len(result['findings'])} |"  # type: ignore[arg-type]
        for name, result in results.items()
    ]
    text = [
        "# Fuzzing",
        "",
        "`make fuzz`: readers under atheris, the C++ engine (`table`) under libFuzzer with ASan and UBSan;",
        f"{MOST_MIB} MiB is the limit of a whole process. A finding ends the run of its target.",
        "",
        "| target | inputs | seconds | edges | features | peak MiB | slowest input, s | findings |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        *rows,
    ]
    (out / "fuzz.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    sys.exit(main())
