"""The common parts of results files: the machine and the commit, Markdown tables, and the share of noise."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from meter import _busy_cpu_seconds

from zeroelastic.executors.build_info import describe_build

REPOSITORY = Path(__file__).resolve().parent.parent
NOISY = 0.07
"""If other processes use more than this share of the processors, a figure is not reliable."""


def commit_of(checkout: Path) -> str:
    """The commit that is checked out, or nothing outside a repository."""
    return _git(checkout, "rev-parse", "HEAD")


def _git(checkout: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=checkout, capture_output=True, text=True, check=False).stdout.strip()


def machine() -> dict[str, object]:
    """The machine, the versions and the commit of the measurement."""
    cpu = platform.processor()
    with open("/proc/cpuinfo") as lines:
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    with open("/proc/meminfo") as lines:
        memory_kib = int(next(line for line in lines if line.startswith("MemTotal")).split()[1])
    native = describe_build("native")

    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "native": native.compiler,
        "instruction_set": _instruction_set() if native.usable else "none",
        "commit": commit_of(REPOSITORY),
        "uncommitted_changes": bool(_git(REPOSITORY, "status", "--porcelain", "--", ".", ":!benchmarks/results")),
        "load_average_before": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "command": " ".join(sys.argv),
    }


def benchmark_arguments(description: str | None) -> argparse.ArgumentParser:
    """What every benchmark takes; its own arguments come on top."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a few MB: to test the benchmark itself")
    parser.add_argument("--directory", type=Path, help="where files are put for the time being; not in memory")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of the results")
    return parser


def _instruction_set() -> str:
    from zeroelastic.executors.native_executor import instruction_set

    return instruction_set()


def describe(about: Mapping[str, object]) -> list[str]:
    """The lines of Markdown about the machine and the commit."""
    changed = " with uncommitted changes" if about["uncommitted_changes"] else ""
    return [
        f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, Linux {about['kernel']}; torch "
        f"{about['torch']}, numpy {about['numpy']}, {about['native']}, {about['instruction_set']} in use; "
        f"{about['time']}, commit {str(about['commit'])[:12] or 'unknown'}{changed}.",
        "",
        f"`{about['command']}`",
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> list[str]:
    """A Markdown table; its first columns are text, the others figures."""
    marks = ["---"] * text_columns + ["--:"] * (len(head) - text_columns)
    return [f"| {' | '.join(head)} |", f"|{'|'.join(marks)}|", *(f"| {' | '.join(row)} |" for row in rows)]


def write_result(directory: Path | None, name: str, document: object) -> None:
    """Print the raw result, and write it to NAME.json where there is a directory for it."""
    text = json.dumps(document, indent=1)
    print(text)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.json").write_text(text + "\n")


def write_results(directory: Path, name: str, document: object, text: str, *, shown: bool = True) -> None:
    """The raw result as NAME.json and its tables as NAME.md, which are printed as well if ``shown``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    (directory / f"{name}.md").write_text(text)
    if shown:
        print(text)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Least, median and greatest."""
    return min(values), median(values), max(values)


def append_line(path: Path, *words: object) -> None:
    """Append a line in one write, which a kill cannot cut in two."""
    with open(path, "ab", buffering=0) as file:
        file.write((" ".join(map(str, words)) + "\n").encode())


def words_of_lines(path: Path) -> list[list[str]]:
    """The words of each line of a file that processes append to; none where it is not there yet."""
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def noise(shares: Sequence[float]) -> list[str]:
    """The lines of Markdown about rows in which other processes, or the kernel for these, used so much."""
    noisy = sum(share > NOISY for share in shares)
    where = f"{noisy} of {len(shares)} rows: their seconds are too high"
    return ["", f"Other processes used more than {NOISY:.0%} of the processors during {where}."] if noisy else []


class Others:
    """The share of the processors that other processes used, from its creation to ``share``."""

    def __init__(self) -> None:
        self._busy, self._own, self._clock = _busy_cpu_seconds(), time.process_time(), time.perf_counter()

    def share(self) -> float:
        """A value from 0 to 1."""
        busy, own = _busy_cpu_seconds() - self._busy, time.process_time() - self._own
        seconds = (time.perf_counter() - self._clock) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, busy - own) / seconds) if seconds else 0.0


def without_paths(text: str) -> str:
    """A traceback whose files are named from the checkout, or from the folder that Python imports them from."""
    here = os.fspath(Path(__file__).resolve().parent.parent)
    for folder in sorted({here, *filter(None, sys.path)}, key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    return text
