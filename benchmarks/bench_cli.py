"""What the command line costs beside the tools that it takes the place of; whole processes, start-up included.

    python benchmarks/bench_cli.py --out benchmarks/results

One checkpoint (the sample model, 4 ranks), warm in the page cache but in the rows that say "cold". Systems that do the
same kind of thing are run in turn, in an order that changes from round to round, after a round that is not measured;
those that take seconds for each run have fewer rounds. Copies and reshards are each followed by a flush (``sync`` of
the file system), which is timed with them. Peak memory is the process's own count at its end (RUSAGE_SELF).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from meter import touch_free_memory
from report import REPOSITORY, benchmark_arguments, describe, machine, spread, table, write_results

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.testing.sample import write_sample

FEW_ROUNDS = 3
"""Rounds of a group with a system that takes seconds."""

LONG = {"zero_to_fp32.py", "diff with itself", "plain reading, cold"}
"""Systems that take seconds."""

Timed = Callable[[], tuple[float, int | None]]
"""Runs a system: its seconds, and its peak memory in bytes where that is known."""

PEAK = (
    "import resource, sys\n"
    "from zeroelastic.cli.app import main\n"
    "try: main()\n"
    "except SystemExit as end: code = end.code\n"
    "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\n"
    "sys.exit(code)"
)
MERGE = (
    "import sys, torch\n"
    "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert\n"
    "convert(sys.argv[1], sys.argv[2])"
)


def run(*command: object, allowed: tuple[int, ...] = (0,)) -> tuple[float, int | None]:
    """Seconds of a process from start to end, and its peak memory in bytes where it says so.

    A shell lies between, so that the peak is not that of the process which started it.
    """
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu"}
    began = time.perf_counter()
    done = subprocess.run(
        ["/bin/sh", "-c", '"$@"', "sh", *map(str, command)],
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    seconds = time.perf_counter() - began
    if done.returncode not in allowed:
        raise RuntimeError(f"{command}: {done.stdout}\n{done.stderr}")
    peaks = [int(line.split()[1]) << 10 for line in done.stderr.splitlines() if line.startswith("peak ")]
    return seconds, peaks[0] if peaks else None


def verb(*arguments: object, allowed: tuple[int, ...] = (0,)) -> tuple[float, int | None]:
    return run(sys.executable, "-c", PEAK, *arguments, allowed=allowed)


def read_all(paths: list[Path], threads: int) -> tuple[float, None]:
    """Plain parallel reading of files, in pieces of 8 MiB."""
    sizes = [path.stat().st_size for path in paths]
    pieces = [(i, at) for i, size in enumerate(sizes) for at in range(0, size, 8 << 20)]
    fds = [os.open(path, os.O_RDONLY) for path in paths]

    def work(first: int) -> None:
        buffer = bytearray(8 << 20)
        for i, at in pieces[first::threads]:
            os.preadv(fds[i], [buffer], at)

    began = time.perf_counter()
    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - began
    for fd in fds:
        os.close(fd)
    return seconds, None


def main() -> None:
    parser = benchmark_arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    about = machine()
    with tempfile.TemporaryDirectory(dir=chosen.directory) as name:
        document = measure(Path(name), repeats=chosen.repeats, small=chosen.small)
    document["machine"] = about
    write_results(chosen.out, "cli", document, "\n".join(page(document)) + "\n")


def measure(directory: Path, *, repeats: int, small: bool) -> dict[str, Any]:
    src = directory / "src"
    hidden, layers = (64, 2) if small else (1536, 8)
    write_sample(src, world_size=4, steps=[1], hidden=hidden, layers=layers, sub_group_size=50_000_000)
    rigid = directory / "rigid"
    verb("reshard", src, rigid, "-n", 4, "--format", "rigid")
    (rigid / "global_step1" / RECORD_NAME).unlink()
    files = sorted((src / "global_step1").glob("*.pt"))
    nbytes = sum(path.stat().st_size for path in files)
    target = directory / "to"
    threads = len(os.sched_getaffinity(0))

    def flushed(action: Timed) -> tuple[float, int | None]:
        """The time of an action and of flushing the file system afterwards."""
        os.sync()
        touch_free_memory(2 * nbytes)
        began = time.perf_counter()
        _, peak = action()
        os.sync()
        return time.perf_counter() - began, peak

    def verify_rate() -> tuple[float, int | None]:
        """What ``verify`` itself says that reading took, its start and the headers apart."""
        command = [sys.executable, "-m", "zeroelastic", "verify", str(src), "--json"]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=True)
        return float(json.loads(done.stdout)["read_seconds"]), None

    def cold(action: Timed) -> Timed:
        """The same after the checkpoint was dropped from the page cache."""

        def run_cold() -> tuple[float, int | None]:
            for path in files:
                with open(path, "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return action()

        return run_cold

    limit = "256MiB"
    groups: list[dict[str, Timed]] = [
        {
            "cp -r, flushed": lambda: flushed(lambda: run("cp", "-r", src, target)),
            "reshard 4 -> 3, flushed": lambda: flushed(
                lambda: verb("reshard", src, target, "-n", 3, "--max-memory", limit)
            ),
        },
        {
            "cp -r of a rigid one, flushed": lambda: flushed(lambda: run("cp", "-r", rigid, target)),
            "reshard 4 -> 3, rigid, without a record, flushed": lambda: flushed(
                lambda: verb("reshard", rigid, target, "-n", 3, "--format", "rigid", "--max-memory", limit)
            ),
        },
        {
            "plain reading": lambda: read_all(files, threads),
            "verify": lambda: verb("verify", src),
            "verify, headers open": verify_rate,
        },
        {
            "plain reading, cold": cold(lambda: read_all(files, threads)),
            "verify, headers open, cold": cold(verify_rate),
        },
        {
            "zero_to_fp32.py": lambda: run(sys.executable, "-c", MERGE, src, target),
            "export": lambda: verb("export", src, target, "--max-memory", limit),
        },
        {"diff with itself": lambda: verb("diff", src, src)},
        {
            "inspect": lambda: verb("inspect", src),
            "plan": lambda: verb("plan", src, "--world-size", 3),
            "--help": lambda: verb("--help"),
        },
    ]
    samples: dict[str, list[float]] = {name: [] for group in groups for name in group}
    peaks: dict[str, int] = {}
    for group in groups:
        names = list(group)
        rounds = min(repeats, FEW_ROUNDS) if LONG & group.keys() else repeats
        for repeat in range(rounds + 1):
            for name in names:
                seconds, peak = group[name]()
                if target.exists():
                    shutil.rmtree(target)
                if repeat:  # the first round warms everything
                    samples[name].append(seconds)
                if peak is not None:
                    peaks[name] = max(peak, peaks.get(name, 0))
            names = names[1:] + names[:1]  # who comes behind whose writes changes with each round
    middle = {name: median(values) for name, values in samples.items()}
    return {
        "nbytes": nbytes,
        "threads": threads,
        "max_memory": limit,
        "raw_seconds": samples,
        "peak_rss": peaks,
        "ratios": {
            "reshard / cp -r": middle["reshard 4 -> 3, flushed"] / middle["cp -r, flushed"],
            "rigid reshard / cp -r": middle["reshard 4 -> 3, rigid, without a record, flushed"]
            / middle["cp -r of a rigid one, flushed"],
            "plain reading / verify": middle["plain reading"] / middle["verify"],
            "plain reading / verify, headers open": middle["plain reading"] / middle["verify, headers open"],
            "plain reading / verify, headers open, cold": middle["plain reading, cold"]
            / middle["verify, headers open, cold"],
            "zero_to_fp32.py / export": middle["zero_to_fp32.py"] / middle["export"],
        },
    }


def page(document: dict[str, Any]) -> list[str]:
    samples, peaks, ratios = document["raw_seconds"], document["peak_rss"], document["ratios"]
    about = document["machine"]
    lines = [
        "# The command line",
        "",
        *describe(about),
        "",
        f"{document['nbytes'] / 1e9:.2f} GB in the files of 4 ranks.",
        "",
    ]
    rows = []
    for name, values in samples.items():
        least, middle, most = spread(values)
        peak = f"{peaks[name] / 2**20:.0f} MiB" if name in peaks else ""
        rows.append([name, f"{middle:.2f}", f"{least:.2f} to {most:.2f}", str(len(values)), peak])
    lines += table(["system", "median s", "range", "runs", "peak memory"], rows)
    lines += ["", *table(["ratio of medians", "value"], [[name, f"{value:.2f}"] for name, value in ratios.items()])]
    return lines


if __name__ == "__main__":
    main()
