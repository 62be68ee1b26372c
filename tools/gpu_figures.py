"""The figures that gpu_check.sh shows of one part: ``python tools/gpu_figures.py PART DIRECTORY`` prints one line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import median

HELD = ("in the background", "by DeepSpeed's decoupled writer", "in memory")
"""The ways of a save that training waits for, in the results of bench_gpu_saves.py."""


def kernels(results: Path) -> str:
    """Copies and digests, compared with a flat copy on the device."""
    rows = json.loads((results / "gpu.json").read_text())["rows"]
    plain = {row["key"]: row["ratio"][1] for row in rows if row["method"] == "DevicePlan"}
    digest = {row["key"]: row["ratio"][1] for row in rows if row["method"] == "DevicePlan, digest alone"}
    return f"of a flat copy: {_by_key(plain)}; digest alone: {_by_key(digest)}"


def files(results: Path) -> str:
    """Reads from files and writes into them, compared with the slower ceiling."""
    rows = json.loads((results / "gpu_files.json").read_text())["rows"]
    read = {row["key"]: row["ratio"][1] for row in rows if row["method"] == "read_segments"}
    written = {row["key"]: row["ratio"][1] for row in rows if row["method"].startswith("write_segments")}
    return f"of the ceiling: read {_by_key(read)}; write {_by_key(written)}"


def resume(results: Path) -> str:
    """The table's rows: seconds of a later load, compared with plain reading and with DeepSpeed."""
    cells = [line.split(" | ") for line in (results / "gpu_resume.md").read_text().splitlines() if "4 -> 1" in line]
    return "; ".join(f"{row[0].lstrip('| ')}: {row[2]} s, plain {row[4]}, DeepSpeed {row[5]}" for row in cells)


def features(results: Path) -> str:
    """How many features came back exactly from both kinds of files, and which did not."""
    found = json.loads((results / "gpu_features.json").read_text())["results"]
    wrong = [name for name, phases in found.items() if not _exact(phases)]
    return f"{len(found) - len(wrong)} of {len(found)} exact" + (f"; not {', '.join(wrong)}" if wrong else "")


def tests(results: Path) -> str:
    """pytest's last line."""
    found = re.findall(r"\d+ (?:passed|failed|skipped|error).*", (results / "tests.log").read_text())
    return found[-1].strip("= ") if found else ""


def build(results: Path) -> str:
    """What the engines were built by."""
    found = re.findall(r"^(?:native|cuda): .*", (results / "build.log").read_text(), re.MULTILINE)
    return "; ".join(found[-2:])


def ops(results: Path) -> str:
    """Which of DeepSpeed's ops could be compiled, and how long each took."""
    return "; ".join(re.findall(r"^op (.*)", (results / "ops.log").read_text(), re.MULTILINE))


def saves(results: Path) -> str:
    """Median seconds of each kind of save, how long training waits after the first, and what was not measured."""
    found = json.loads((results / "gpu_saves.json").read_text())["parts"]["saves"]
    whole = [f"{name} {median(seconds):.2f} s" for name, seconds in found["seconds"].items()]
    later = {name: about["rounds"][1:] for name, about in found.items() if name in HELD}
    waits = [f"waits {median(one['stall'] for one in rounds):.2f} s {name}" for name, rounds in later.items()]
    return "; ".join([*whole, *waits, *(f"not measured: {name}" for name in found["not_measured"])])


def _by_key(ratios: dict[str, float]) -> str:
    return ", ".join(f"{key} {ratio:.2f}" for key, ratio in ratios.items())


def _exact(phases: dict[str, dict[str, object]]) -> bool:
    loads = [phases.get(name, {}) for name in ("load elastic", "load rigid")]
    return all(load.get("num_different") == 0 for load in loads)


PARTS = {each.__name__: each for each in (build, ops, tests, kernels, files, resume, saves, features)}


def main() -> None:
    try:
        line = PARTS[sys.argv[1]](Path(sys.argv[2])).replace("|", "/")
    except (OSError, ValueError, LookupError) as error:
        line = f"no figures: {type(error).__name__}"
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
