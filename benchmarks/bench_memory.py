"""What checkpoints in memory cost training, and how long a resume from them takes at another size.

    python benchmarks/bench_memory.py --out benchmarks/results

**Steps**: a job of two ranks on two nodes, whose steps wait for a while as for a GPU, so that a processor is to spare.
Blocks of steps with a checkpoint in memory after each step take turns with blocks without any.

**Loads**: four ranks keep a state in memory and save it to the disk; three ranks ``resume`` it, in turns, from memory,
from the disk with its files in the page cache, and from the disk without: at its own speed and, as root, held to that
of a common cloud disk (``blkio.throttle`` of a control group). All ranks are on one node, which sees all of the
memory, with states of several sizes; then so on a system that has pages of 4 KiB only, in memory as in the page
cache; then each rank is on a node of its own, whose disk has the same files as its memory, and gets from others what
its node does not have (each rank mounts the disk of its node, which takes root). For the bounds: plain reads of the
same files, and as many bytes as a rank receives through one TCP connection of this machine. Needs a quiet machine and
20 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch.distributed as dist  # noqa: E402
from nodes import Nodes, can_mount, mount_disk  # noqa: E402
from report import machine  # noqa: E402
from training import Job, build_engine, train_step  # noqa: E402

from zeroelastic.elastic import resume  # noqa: E402
from zeroelastic.io.paths import as_path  # noqa: E402
from zeroelastic.memory import checkpoints, memory_file  # noqa: E402
from zeroelastic.memory.checkpoints import MemoryCheckpoints  # noqa: E402
from zeroelastic.memory.place import Place  # noqa: E402
from zeroelastic.testing import RankPool  # noqa: E402

ONE, SMALL, EACH = "on one node", "on one node, pages of 4 KiB", "on a node each"
ONE_NODE, NODE_EACH = (0, 0, 0, 0), (0, 1, 2, 3)
SMALL_PAGE = 4096
MEMORY, WARM, COLD, HELD = "memory", "warm disk", "cold disk", "cold disk, held"
HELD_TO = 500e6
"""Bytes per second of a disk for all ranks of a node: between the cheapest volumes of clouds (125 MB/s) and 1 GB/s."""
STEP_S = 0.6
RECEIVER = """
import socket, sys
memory = bytearray(8 << 20)
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    while connection.recv_into(memory):
        pass
"""
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


def keep(rows: int, shared: Path, directory: str, nodes: Sequence[int], large_pages: bool) -> int:
    """Train a step, keep it in memory and save it to the disk; the bytes of this rank's files."""
    use_node(shared, nodes[dist.get_rank()])
    engine = build_engine(job_of(rows))
    memory = MemoryCheckpoints(engine, as_path(directory))
    train_step(engine, 0)
    advice = memory_file._MADV_COLLAPSE if large_pages else 1 << 20  # an advice that no system knows
    with mock.patch.object(memory_file, "_MADV_COLLAPSE", advice):
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
    return load(rows, shared, disks.path, NODE_EACH, True, rounds)


def load(
    rows: int, shared: Path, directory: str, nodes: Sequence[int], large_pages: bool, rounds: int
) -> dict[str, Any]:
    """Seconds of resumes from each place, in turns, on the slowest rank, of plain reads, and the bytes received."""
    node = nodes[dist.get_rank()]
    use_node(shared, node)
    engine = build_engine(job_of(rows).other())
    kinds = [MEMORY, WARM, COLD, *([HELD] if group_of(HELD) else [])]
    pages = None if large_pages else SMALL_PAGE
    resumes: dict[str, list[float]] = {kind: [] for kind in kinds}
    reads: dict[str, list[float]] = {kind: [] for kind in kinds}
    received = 0
    saved = sorted((Path(directory) / "tag").glob("*.pt"))
    kept = sorted((shared / f"node{node}").rglob("complete/*/*.pt"))
    sees_own_disk = nodes == NODE_EACH
    for _ in range(rounds + 1):
        for kind in kinds:
            if group := group_of(kind):
                group.write_text(str(os.getpid()))
            prepares = kind != MEMORY and (dist.get_rank() == 0 or sees_own_disk)
            if not sees_own_disk:
                prepare(kind, saved if prepares else (), pages)
                reads[kind].append(read_plainly(kept if kind == MEMORY else saved))
            prepare(kind, saved if prepares else (), pages)
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


def prepare(kind: str, saved: Sequence[Path], page_bytes: int | None) -> None:
    """Take files out of the page cache, or into it, in pages of so many bytes or as the system chooses. Collective."""
    for path in saved:
        if kind != WARM:
            evict(path)
        elif page_bytes is None:
            path.read_bytes()
        else:
            write_by_page(path, page_bytes)
    dist.barrier()


def write_by_page(path: Path, nbytes: int) -> None:
    """Write a file's own bytes again, so many at a time: so large are its pages in the page cache then."""
    data = memoryview(path.read_bytes())
    evict(path)
    with open(path, "r+b", buffering=0) as file:
        for at in range(0, len(data), nbytes):
            file.write(data[at : at + nbytes])
        os.fsync(file.fileno())


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


BLKIO = Path("/sys/fs/cgroup/blkio")


def group_of(kind: str) -> Path | None:
    """The list of processes of the control group whose reads have the speed of ``kind``; None without such groups."""
    held = BLKIO / "zeroelastic-bench" / "cgroup.procs"
    if not held.exists():
        return None
    return held if kind == HELD else BLKIO / "cgroup.procs"


@contextmanager
def held_disk(directory: str) -> Iterator[None]:
    """A control group that reads at most ``HELD_TO`` bytes a second of the disk of a directory, if this user may."""
    device = os.stat(directory).st_dev
    group = BLKIO / "zeroelastic-bench"
    try:
        group.mkdir()
        limit = f"{os.major(device)}:{os.minor(device)} {HELD_TO:.0f}"
        (group / "blkio.throttle.read_bps_device").write_text(limit)
    except OSError as error:
        print(f"no disk is held to a speed: {error}", file=sys.stderr)
    try:
        yield
    finally:
        if group.exists():
            group.rmdir()


def send_plainly(nbytes: int) -> float:
    """Seconds in which as many bytes go through a connection from one process of this machine to another."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = subprocess.Popen([sys.executable, "-c", RECEIVER, str(listener.getsockname()[1])])
        connection, _ = listener.accept()
        with connection:
            data, left = bytes(8 << 20), nbytes
            began = time.perf_counter()
            while left > 0:
                connection.sendall(data[:left] if left < len(data) else data)
                left -= len(data)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
            seconds = time.perf_counter() - began
        receiver.wait(60)
    return seconds


def evict(path: Path) -> None:
    """Take a file out of the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    about, stall, loads = result["about"], result["steps"], result["loads"]
    lines = [
        "# What checkpoints in memory cost",
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
        "4 -> 3 ranks, seconds. With a node for each rank, its disk has the same files as its memory, and what other "
        "nodes have comes over the (loopback) network. "
        "Large pages are in memory since Linux 6.1 (MADV_COLLAPSE), and in the page cache since 5.18 with XFS and 6.16 "
        "with ext4; with pages of 4 KiB, a system has neither.",
        "",
        *table(loads, "resumes"),
        "",
        "Plain reads of the same files, by three processes that do nothing with the bytes:",
        "",
        *table([found for found in loads if found["ranks"] != EACH], "reads"),
    ]
    largest = max(loads, key=lambda found: found["gigabytes"])
    gigabytes, each = largest["gigabytes"], next(found for found in loads if found["ranks"] == EACH)
    read, held = (median(largest["reads"].get(kind, [0.0])) for kind in (COLD, HELD))
    received, sent = each["bytes_received"], median(each["one_connection"])
    lines += [
        "",
        f"The targets are: memory / warm at most 1, cold / memory at least {COLD_TARGET:.0f}. This disk gives "
        f"{gigabytes / read:.1f} GB/s"
        + (f", and {gigabytes / held:.1f} GB/s where it is held to {HELD_TO / 1e9:.1f} GB/s." if held else "."),
        "",
        f"With a node for each rank, each rank receives {received / 1e6:,.0f} MB from others, which take {sent:.3f} s "
        "through one TCP connection between two processes of this machine that do nothing else: here all share "
        f"{about['cores']} cores.",
        "",
    ]
    return "\n".join(lines)


def table(loads: Sequence[dict[str, Any]], what: str) -> list[str]:
    """Medians of each kind, and their ratios, as rows of Markdown."""
    kinds = list(loads[0][what])
    ratios = ["memory / warm", *(f"{kind.replace(' disk', '')} / memory" for kind in kinds[2:])]
    lines = [
        f"| ranks | GB | {' | '.join((*kinds, *ratios))} |",
        "|---|--:" + "|--:" * (len(kinds) + len(ratios)) + "|",
    ]
    for found in loads:
        memory, warm, *cold = (median(found[what][kind]) for kind in kinds)
        cells = [f"{seconds:.3f}" for seconds in (memory, warm, *cold)]
        cells += [f"{memory / warm:.2f}", *(f"{seconds / memory:.1f}" for seconds in cold)]
        lines += [f"| {found['ranks']} | {found['gigabytes']:.2f} | {' | '.join(cells)} |"]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-rows", type=int, default=400_000)
    parser.add_argument(
        "--load-rows",
        type=int,
        nargs="+",
        default=[25_000_000, 12_500_000, 5_000_000],
        help="of each state; the last one is also loaded from small pages, and by ranks on several nodes",
    )
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--block", type=int, default=10, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=5, help="of loads")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if not can_mount():
        parser.error("takes root: each rank mounts the disk of its node")
    about = machine()
    checkpoints.start_reaper = lambda *args: None  # type: ignore[assignment]
    with (
        tempfile.TemporaryDirectory() as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        RankPool(4) as pool,
        held_disk(disk),
    ):
        shared = Path(memory)
        ranks = pool.run(steps, 2, chosen.step_rows, shared / "steps", chosen.blocks, chosen.block, timeout=500)
        with_s, without_s = (median(x for rank in ranks for x in rank["seconds"][kind]) for kind in ("with", "without"))
        stall = {
            "params_m": chosen.step_rows * 16 / 1e6,
            "node_bytes": ranks[0]["node_bytes"],
            "with_s": with_s,
            "without_s": without_s,
            "longer": with_s / without_s - 1,
            "stall_s": median(ranks[0]["stall"]),
            "processor_s": median(x for rank in ranks for x in rank["processor"]),
            "complete_s": median(ranks[0]["complete"]),
            "ranks": ranks,
        }
        *_, last = chosen.load_rows
        cases = [(ONE, ONE_NODE, rows) for rows in chosen.load_rows]
        loads: list[dict[str, Any]] = []
        for number, (name, nodes, rows) in enumerate([*cases, (SMALL, ONE_NODE, last), (EACH, NODE_EACH, last)]):
            place, run, large_pages = shared / str(number), f"{disk}/{number}", name != SMALL
            disks = Nodes(Path(run))
            directory = disks.path if name == EACH else run  # memory is found again by the directory of the run
            nbytes = pool.run(keep, 4, rows, place, directory, nodes, large_pages, timeout=500)[0]
            if name == EACH:
                found = pool.run(load_on_nodes, 3, rows, place, disks, chosen.rounds, timeout=500)[0]
            else:
                found = pool.run(load, 3, rows, place, run, nodes, large_pages, chosen.rounds, timeout=500)[0]
            loads.append({"ranks": name, "gigabytes": nbytes / 1e9, **found})
            shutil.rmtree(place)
            shutil.rmtree(run)
        loads[-1]["one_connection"] = [send_plainly(loads[-1]["bytes_received"]) for _ in range(chosen.rounds)]
    result = {"about": about, "steps": stall, "loads": loads}
    print(page(result))
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "memory.json").write_text(json.dumps(result, indent=1) + "\n")
        (chosen.out / "memory.md").write_text(page(result))


if __name__ == "__main__":
    main()
