"""How long a resume from checkpoints in memory takes at another size, beside one from the disk.

    python benchmarks/bench_memory.py --out benchmarks/results

Four ranks keep a state in memory and save it to the disk; three ranks ``resume`` it, in turns, from memory, from the
disk with its files in the page cache, and from the disk without. All ranks are on one node, which sees all of the
memory, with states of several sizes; then each rank is on a node of its own, whose disk has the same files as its
memory, and gets from others what its node does not have (each rank mounts the disk of its node, which takes root). For
the bounds: plain reads of the same files. Needs a quiet machine and 20 GB. What training waits for a checkpoint in
memory is measured by bench_gpu_saves.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from meter import cool_down, warm_up
from report import REPOSITORY, describe, machine, table, write_results

sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from saves import Nodes, can_mount, mount_disk  # noqa: E402
from training import Job, build_engine, train_step  # noqa: E402

from zeroelastic.elastic import resume  # noqa: E402
from zeroelastic.elastic.memory import checkpoints  # noqa: E402
from zeroelastic.elastic.memory.checkpoints import MemoryCheckpoints  # noqa: E402
from zeroelastic.elastic.memory.place import JobPlace  # noqa: E402
from zeroelastic.io.paths import as_path  # noqa: E402
from zeroelastic.testing import RankPool  # noqa: E402

ONE, EACH = "on one node", "on a node each"
ONE_NODE, NODE_EACH = (0, 0, 0, 0), (0, 1, 2, 3)
MEMORY, WARM, COLD = KINDS = ("memory", "warm disk", "cold disk")
COLD_TARGET = 5.0


def use_node(shared: Path, number: int) -> None:
    """Let this rank be on a node of its own: a directory in shared memory."""
    place = JobPlace(path=shared / f"node{number}", node=f"node{number}")
    JobPlace.of_this_job = staticmethod(lambda *args, **kwargs: place)  # type: ignore[method-assign, assignment]
    JobPlace.create = lambda self: self.path.mkdir(parents=True, exist_ok=True)  # type: ignore[method-assign, assignment]


def job_of(rows: int, stage: int = 3) -> Job:
    """A model with an embedding of so many rows of 16, and checkpoints in memory with one copy."""
    return Job(tables=(rows,), stage=stage, options={"memory": {"every": 1, "copies": 1}})


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


def load_on_nodes(rows: int, shared: Path, disks: Nodes, rounds: int) -> dict[str, Any]:
    """``load`` by ranks on a node each, whose disks have the files that are in their memory."""
    rank = dist.get_rank()
    (generation,) = (shared / f"node{rank}").rglob("complete/*")
    shutil.copytree(generation, disks.disk(rank) / "tag")
    (disks.disk(rank) / "latest").write_text("tag")
    mount_disk(disks, rank)
    return load(rows, shared, disks.path, NODE_EACH, rounds)


def load(rows: int, shared: Path, directory: str, nodes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Seconds of resumes from each place, in turns, on the slowest rank, of plain reads, and the bytes received."""
    node = nodes[dist.get_rank()]
    use_node(shared, node)
    engine = build_engine(job_of(rows).other())
    resumes: dict[str, list[float]] = {kind: [] for kind in KINDS}
    reads: dict[str, list[float]] = {kind: [] for kind in KINDS}
    received = 0
    saved = sorted((Path(directory) / "tag").glob("*.pt"))
    kept = sorted((shared / f"node{node}").rglob("complete/*/*.pt"))
    sees_own_disk = nodes == NODE_EACH
    for _ in range(rounds + 1):
        for kind in KINDS:
            prepares = kind != MEMORY and (dist.get_rank() == 0 or sees_own_disk)
            if not sees_own_disk:
                prepare(kind, saved if prepares else ())
                reads[kind].append(read_plainly(kept if kind == MEMORY else saved))
            prepare(kind, saved if prepares else ())
            use_node(shared if kind == MEMORY else shared / "without", node)
            dist.barrier()
            began = time.perf_counter()
            resumed = resume(engine, directory, strict=False)
            dist.barrier()
            resumes[kind].append(time.perf_counter() - began)
            assert resumed.tier == ("memory" if kind == MEMORY else "directory"), resumed
            assert resumed.report is not None and resumed.report.root_matches
            received = max(received, resumed.report.bytes_received)
    for seconds in (*resumes.values(), *reads.values()):
        del seconds[:1]  # which makes pages
    return {"resumes": resumes, "reads": reads, "bytes_received": received}


def prepare(kind: str, saved: Sequence[Path]) -> None:
    """Take files out of the page cache, or into it. Collective."""
    (warm_up if kind == WARM else cool_down)(saved)
    dist.barrier()


def read_plainly(paths: Sequence[Path]) -> float:
    """Seconds in which all ranks together read files, and do nothing with the bytes."""
    memory = memoryview(bytearray(8 << 20))
    dist.barrier()
    began = time.perf_counter()
    for path in paths:
        size = path.stat().st_size
        share = -(-size // dist.get_world_size())
        at, end = dist.get_rank() * share, min(size, (dist.get_rank() + 1) * share)
        with open(path, "rb", buffering=0) as file:
            while at < end:
                at += os.preadv(file.fileno(), [memory[: end - at]], at)
    dist.barrier()
    return time.perf_counter() - began


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    about, loads = result["about"], result["loads"]
    lines = [
        "# Loads from checkpoints in memory",
        "",
        *describe(about),
        "",
        "Medians.",
        "",
        "## Loads",
        "",
        "4 -> 3 ranks, seconds. With a node for each rank, its disk has the same files as its memory, and what other "
        "nodes have comes over the (loopback) network.",
        "",
        *medians(loads, "resumes"),
        "",
        "Plain reads of the same files, by three processes that do nothing with the bytes:",
        "",
        *medians([found for found in loads if found["ranks"] != EACH], "reads"),
    ]
    largest = max(loads, key=lambda found: found["gigabytes"])
    lines += [
        "",
        f"The targets are: memory / warm at most 1, cold / memory at least {COLD_TARGET:.0f}. This disk gives "
        f"{largest['gigabytes'] / median(largest['reads'][COLD]):.1f} GB/s.",
        "",
    ]
    return "\n".join(lines)


def medians(loads: Sequence[dict[str, Any]], what: str) -> list[str]:
    """Medians of each kind, and their ratios, as rows of Markdown."""
    kinds = list(loads[0][what])
    ratios = ["memory / warm", *(f"{kind.replace(' disk', '')} / memory" for kind in kinds[2:])]
    rows = []
    for found in loads:
        memory, warm, *cold = (median(found[what][kind]) for kind in kinds)
        cells = [f"{seconds:.3f}" for seconds in (memory, warm, *cold)]
        cells += [f"{memory / warm:.2f}", *(f"{seconds / memory:.1f}" for seconds in cold)]
        rows.append([found["ranks"], f"{found['gigabytes']:.2f}", *cells])
    return table(["ranks", "GB", *kinds, *ratios], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--load-rows",
        type=int,
        nargs="+",
        default=[25_000_000, 12_500_000, 5_000_000],
        help="of each state; the last one is also loaded by ranks on several nodes",
    )
    parser.add_argument("--rounds", type=int, default=5, help="of loads")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    if not can_mount():
        parser.error("takes root: each rank mounts the disk of its node")
    about = machine()
    checkpoints.start_reaper = lambda *args: None  # type: ignore[assignment]
    with (
        tempfile.TemporaryDirectory() as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        RankPool() as pool,
    ):
        shared = Path(memory)
        *_, last = chosen.load_rows
        cases = [(ONE, ONE_NODE, rows) for rows in chosen.load_rows]
        loads: list[dict[str, Any]] = []
        for number, (name, nodes, rows) in enumerate([*cases, (EACH, NODE_EACH, last)]):
            place, run = shared / str(number), f"{disk}/{number}"
            disks = Nodes(Path(run))
            directory = disks.path if name == EACH else run  # memory is found again by the directory of the run
            nbytes = pool.run(keep, 4, rows, place, directory, nodes, timeout=500)[0]
            if name == EACH:
                found = pool.run(load_on_nodes, 3, rows, place, disks, chosen.rounds, timeout=500)[0]
            else:
                found = pool.run(load, 3, rows, place, run, nodes, chosen.rounds, timeout=500)[0]
            loads.append({"ranks": name, "gigabytes": nbytes / 1e9, **found})
            shutil.rmtree(place)
            shutil.rmtree(run)
    result = {"about": about, "loads": loads}
    write_results(chosen.out, "memory", result, page(result))


if __name__ == "__main__":
    main()
