"""What checkpoints in memory cost training, and how long a resume from them takes at another size.

    python benchmarks/bench_memory.py --out benchmarks/results

**Steps**: a job of two ranks on two nodes, whose steps wait for a while as for a GPU, so that a processor is to spare.
Blocks of steps with a checkpoint in memory after each step take turns with blocks without any.

**Loads**: four ranks keep a state in memory and save it to the disk; three ranks load it, in turns, from memory, from
the disk with its files in the page cache, and from the disk without. Once all ranks are on one node, which sees all of
the memory, and once each is on a node of its own, which gets most of it from others. Needs a quiet machine and 8 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch.distributed as dist  # noqa: E402
from report import machine  # noqa: E402
from training import Job, build_engine, train_step  # noqa: E402

from zeroelastic.io.paths import as_path  # noqa: E402
from zeroelastic.memory import checkpoints  # noqa: E402
from zeroelastic.memory.checkpoints import MemoryCheckpoints  # noqa: E402
from zeroelastic.memory.place import Place  # noqa: E402
from zeroelastic.memory.resume import MemoryTier  # noqa: E402
from zeroelastic.testing import RankPool  # noqa: E402

PLACED = {"on one node": (0, 0, 0, 0), "on a node each": (0, 1, 2, 3)}
STEP_S = 0.6
STALL_TARGET, COLD_TARGET = 0.05, 5.0


def use_node(shared: Path, number: int) -> None:
    """Let this rank be on a node of its own: a directory in shared memory."""
    place = Place(path=shared / f"node{number}", node=f"node{number}")
    Place.of_this_job = staticmethod(lambda *args, **kwargs: place)  # type: ignore[method-assign, assignment]
    Place.create = lambda self: self.path.mkdir(parents=True, exist_ok=True)  # type: ignore[method-assign, assignment]


def job_of(rows: int, stage: int = 3) -> Job:
    """A model with an embedding of so many rows of 16, and checkpoints in memory with one copy."""
    return Job(tables=(rows,), stage=stage, options={"memory": {"every": 1, "copies": 1}})


def steps(rows: int, shared: Path, blocks: int, block: int) -> dict[str, Any]:
    """Seconds of each step with and without checkpoints in memory, on this rank, and what they reported."""
    use_node(shared, dist.get_rank())
    engine = build_engine(job_of(rows))
    memory = MemoryCheckpoints(engine, as_path(str(shared / "ckpt")))
    train_step(engine, 0)
    for _ in range(2):  # the pages of both generations
        memory.capture({})
        memory.wait()
    found: dict[str, list[float]] = {"with": [], "without": []}
    stalls, processor, ends = [], [], []
    for number in range(blocks):
        kind = ("with", "without")[number % 2]
        memory.wait()
        for step in range(block):
            dist.barrier()
            began = time.perf_counter()
            train_step(engine, number * block + step)
            time.sleep(max(0.0, STEP_S - (time.perf_counter() - began)))
            if kind == "with":
                used = time.thread_time()
                memory.capture({})
                processor.append(time.thread_time() - used)
            found[kind].append(time.perf_counter() - began)
            if kind == "with" and dist.get_rank() == 0 and memory.last is not None:
                stalls.append(memory.last.stall_seconds)
                ends.append(memory.last.seconds)
    memory.close()
    nbytes = 0 if memory.last is None else memory.last.node_bytes
    return {"seconds": found, "stall": stalls, "complete": ends, "processor": processor, "node_bytes": nbytes}


def keep(rows: int, shared: Path, directory: str, nodes: Sequence[int]) -> int:
    """Train a step, keep it in memory and save it to the disk; the bytes of this rank's files."""
    use_node(shared, nodes[dist.get_rank()])
    engine = build_engine(job_of(rows))
    memory = MemoryCheckpoints(engine, as_path(directory))
    train_step(engine, 0)
    memory.capture({})
    memory.close()
    engine.save_checkpoint(directory, tag="tag")
    return sum(path.stat().st_size for path in (Path(directory) / "tag").glob("*.pt")) if dist.get_rank() == 0 else 0


def load(rows: int, shared: Path, directory: str, nodes: Sequence[int], rounds: int) -> dict[str, list[float]]:
    """Seconds of loads from each place, in turns, on the slowest rank."""
    use_node(shared, nodes[dist.get_rank()])
    engine = build_engine(job_of(rows).other())
    found: dict[str, list[float]] = {"memory": [], "warm disk": [], "cold disk": []}
    for _ in range(rounds + 1):
        for kind, seconds in found.items():
            if dist.get_rank() == 0:
                for path in (Path(directory) / "tag").iterdir():
                    evict(path) if kind == "cold disk" else path.read_bytes() if kind == "warm disk" else None
            dist.barrier()
            began = time.perf_counter()
            if kind == "memory":
                tier = MemoryTier(as_path(directory))
                result, passed = tier.load_newest(engine, tier.generations, lambda tag, state: tag, strict=False)
                assert result is not None, passed
            else:
                engine.load_checkpoint(directory, tag="tag")
            dist.barrier()
            seconds.append(time.perf_counter() - began)
            assert engine.zeroelastic_report.root_matches
    return {kind: seconds[1:] for kind, seconds in found.items()}  # the first makes pages


def evict(path: Path) -> None:
    """Take a file out of the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    about, stall, loads = result["about"], result["steps"], result["loads"]
    lines = [
        "# Checkpoints in memory",
        "",
        f"`{about['command']}`, {about['cpu']}, {about['cores']} cores, torch {about['torch']}, commit "
        f"{about['commit'][:10]}, {about['time']}. Medians.",
        "",
        "## Steps",
        "",
        f"Two ranks on two nodes, {stall['params_m']:.0f}M parameters, {stall['node_bytes'] / 2**20:,.0f} MiB of "
        "shared memory on a node. The bytes are real, the waiting for a GPU is played.",
        "",
        "| step without, s | step with, s | longer by | waited, ms | processor time, ms | complete after, s |",
        "|--:|--:|--:|--:|--:|--:|",
        f"| {stall['without_s']:.4f} | {stall['with_s']:.4f} | {stall['longer']:.1%} (at most {STALL_TARGET:.0%}) | "
        f"{1e3 * stall['stall_s']:.0f} | {1e3 * stall['processor_s']:.0f} | {stall['complete_s']:.2f} |",
        "",
        "## Loads",
        "",
        f"4 -> 3 ranks, {loads['gigabytes']:.2f} GB of files, seconds. With a node for each rank, what lies on other "
        "nodes comes over the (loopback) network.",
        "",
        "| ranks | memory | warm disk | cold disk | memory / warm | cold / memory |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, seconds in loads["seconds"].items():
        memory, warm, cold = (seconds[kind] for kind in ("memory", "warm disk", "cold disk"))
        lines += [
            f"| {name} | {memory:.3f} | {warm:.3f} | {cold:.3f} | {memory / warm:.2f} (at most 1) | "
            f"{cold / memory:.1f} (at least {COLD_TARGET:.0f}) |"
        ]
    lines += [""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-rows", type=int, default=400_000)
    parser.add_argument("--load-rows", type=int, default=5_000_000)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--block", type=int, default=10, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=5, help="of loads")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    about = machine()
    checkpoints.start_reaper = lambda *args: None  # type: ignore[assignment]
    with (
        tempfile.TemporaryDirectory() as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        RankPool(4) as pool,
    ):
        shared = Path(memory)
        found = pool.run(steps, 2, chosen.step_rows, shared / "steps", chosen.blocks, chosen.block, timeout=500)
        with_s, without_s = (median(x for rank in found for x in rank["seconds"][kind]) for kind in ("with", "without"))
        stall = {
            "params_m": chosen.step_rows * 16 / 1e6,
            "node_bytes": found[0]["node_bytes"],
            "with_s": with_s,
            "without_s": without_s,
            "longer": with_s / without_s - 1,
            "stall_s": median(found[0]["stall"]),
            "processor_s": median(x for rank in found for x in rank["processor"]),
            "complete_s": median(found[0]["complete"]),
            "ranks": found,
        }
        seconds: dict[str, dict[str, list[float]]] = {}
        for name, nodes in PLACED.items():
            place, run = shared / name, f"{disk}/{name}"
            nbytes = pool.run(keep, 4, chosen.load_rows, place, run, nodes, timeout=500)[0]
            seconds[name] = pool.run(load, 3, chosen.load_rows, place, run, nodes, chosen.rounds, timeout=500)[0]
            shutil.rmtree(place)
        loads = {
            "gigabytes": nbytes / 1e9,
            "seconds": {
                name: {kind: median(values) for kind, values in found.items()} for name, found in seconds.items()
            },
            "all": seconds,
        }
    result = {"about": about, "steps": stall, "loads": loads}
    print(page(result))
    if chosen.out is not None:
        (chosen.out / "memory.json").write_text(json.dumps(result, indent=1) + "\n")
        (chosen.out / "memory.md").write_text(page(result))


if __name__ == "__main__":
    main()
