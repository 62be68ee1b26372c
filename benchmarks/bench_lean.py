"""What lean saves take on a disk and in seconds, beside full saves of the same state.

    python benchmarks/bench_lean.py --out benchmarks/results

Two ranks save ten tags of runs that train 1 % of a model (LoRA) and of runs that train all of it, in turns into two
directories: full, and with "lean". Files are made durable, and the seconds are of the slowest rank.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from report import REPOSITORY, benchmark_arguments, describe, machine, table, write_results

sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from training import Job, build_engine, train_step  # noqa: E402

from zeroelastic.testing import RankPool  # noqa: E402

TAGS = 10
CASES = {
    "LoRA, 1 % trained, stage 3": (3, True),
    "LoRA, 1 % trained, stage 2": (2, True),
    "everything trained, stage 3": (3, False),
    "everything trained, stage 2": (2, False),
}


def job_of(stage: int, rows: int, *, lora: bool) -> Job:
    """A model of ``16 * rows`` parameters, all of them trained or one in a hundred."""
    tables, frozen = ((rows // 100,), rows - rows // 100) if lora else ((rows,), 0)
    return Job(stage=stage, tables=tables, frozen_table=frozen, frozen=lora, sub_group_size=10**12)


def save_in_turns(job: Job, directory: str) -> dict[str, list[float]]:
    """Seconds of each save, of the slowest rank."""
    engine = build_engine(job)
    seconds: dict[str, list[float]] = {"full": [], "lean": []}
    for step in range(TAGS):
        train_step(engine, step)
        for kind, options in (("full", {}), ("lean", {"lean": True})):
            engine._config._param_dict["zeroelastic"] = options
            dist.barrier()
            began = time.perf_counter()
            engine.save_checkpoint(f"{directory}/{kind}")
            took = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds[kind].append(float(took))
    return seconds


def nbytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = []
    for name, found in result["cases"].items():
        full, lean = found["full"], found["lean"]
        shared = lean["run_bytes"] - TAGS * lean["tag_bytes"]
        cells = [full["tag_bytes"], lean["tag_bytes"], max(0, shared), full["run_bytes"], lean["run_bytes"]]
        seconds = [median(full["seconds"][1:]), lean["seconds"][0], median(lean["seconds"][1:])]
        ratio = lean["run_bytes"] / full["run_bytes"]
        rows.append([name, *(f"{cell / 1e6:,.0f}" for cell in cells), f"{ratio:.2f}", *(f"{s:.2f}" for s in seconds)])
    head = ["MB", "full tag", "lean tag", "once", f"{TAGS} full", f"{TAGS} lean", "of full"]
    head += ["s, full save", "s, first lean save", "s, later ones"]
    lines = ["# Lean saves", "", *describe(result["about"]), "", "MB are 1e6 bytes; seconds are medians.", ""]
    return "\n".join([*lines, *table(head, rows), ""])


def main() -> None:
    chosen = benchmark_arguments(__doc__).parse_args()
    rows = 20_000 if chosen.small else 6_000_000
    cases: dict[str, Any] = {}
    about = machine()
    with tempfile.TemporaryDirectory(dir=chosen.directory) as made, RankPool(2) as pool:
        for name, (stage, lora) in CASES.items():
            job = job_of(stage, rows if lora else rows // 3, lora=lora)
            seconds = pool.run(save_in_turns, 2, job, made, timeout=900)[0]
            cases[name] = {
                kind: {
                    "tag_bytes": nbytes(Path(made) / kind / f"global_step{TAGS}"),
                    "run_bytes": nbytes(Path(made) / kind),
                    "seconds": seconds[kind],
                }
                for kind in seconds
            }
            for kind in seconds:
                shutil.rmtree(Path(made) / kind)
    result = {"about": about, "cases": cases}
    write_results(chosen.out, "lean", result, page(result))


if __name__ == "__main__":
    main()
