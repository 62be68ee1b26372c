"""What checkpoints in memory cost training, and how long a resume from them takes at another size.

    python benchmarks/bench_memory.py --out benchmarks/results

**Steps**: a job of two ranks on two nodes, whose steps wait for a while as for a GPU, so that a processor is to spare.
Blocks of steps with a checkpoint in memory after each step take turns with blocks without any.

**Loads**: four ranks keep a state in memory and save it to the disk; three ranks ``resume`` it, in turns, from memory,
from the disk with its files in the page cache, and from the disk without. Once all ranks are on one node, which sees
all of the memory, once so with memory in pages of 2 MiB where this user may mount a tmpfs, and once each is on a node
of its own, which gets from others what it does not see. For the bounds: plain reads of the same files, and as many
bytes as a rank receives through one TCP connection of this machine. Needs a quiet machine and 8 GB.
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
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch.distributed as dist  # noqa: E402
from report import machine  # noqa: E402
from training import Job, build_engine, train_step  # noqa: E402

from zeroelastic.elastic import resume  # noqa: E402
from zeroelastic.io.paths import as_path  # noqa: E402
from zeroelastic.memory import checkpoints  # noqa: E402
from zeroelastic.memory.checkpoints import MemoryCheckpoints  # noqa: E402
from zeroelastic.memory.place import Place  # noqa: E402
from zeroelastic.testing import RankPool  # noqa: E402

ONE, LARGE, EACH = "on one node", "on one node, memory in 2 MiB pages", "on a node each"
NODES = {ONE: (0, 0, 0, 0), LARGE: (0, 0, 0, 0), EACH: (0, 1, 2, 3)}
KINDS = ("memory", "warm disk", "cold disk")
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


def load(rows: int, shared: Path, directory: str, nodes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Seconds of resumes from each place, in turns, on the slowest rank, of plain reads, and the bytes received."""
    use_node(shared, nodes[dist.get_rank()])
    engine = build_engine(job_of(rows).other())
    resumes: dict[str, list[float]] = {kind: [] for kind in KINDS}
    reads: dict[str, list[float]] = {kind: [] for kind in KINDS}
    received = 0
    saved = sorted((Path(directory) / "tag").glob("*.pt"))
    kept = sorted((shared / "node0").rglob("complete/*/*.pt"))
    for _ in range(rounds + 1):
        for kind in KINDS:
            prepare(kind, saved)
            reads[kind].append(read_plainly(kept if kind == "memory" else saved))
            prepare(kind, saved)
            use_node(shared if kind == "memory" else shared / "without", nodes[dist.get_rank()])
            dist.barrier()
            began = time.perf_counter()
            resumed = resume(engine, directory, strict=False)
            dist.barrier()
            resumes[kind].append(time.perf_counter() - began)
            assert resumed.tier == ("memory" if kind == "memory" else "directory"), resumed
            assert resumed.report is not None and resumed.report.root_matches
            received = max(received, resumed.report.bytes_received)
    for seconds in (*resumes.values(), *reads.values()):
        del seconds[0]  # which makes pages
    return {"resumes": resumes, "reads": reads, "bytes_received": received}


def prepare(kind: str, saved: Sequence[Path]) -> None:
    """Take the saved files out of the page cache, or into it."""
    if dist.get_rank() == 0 and kind != "memory":
        for path in saved:
            evict(path) if kind == "cold disk" else path.read_bytes()
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


@contextmanager
def large_pages() -> Iterator[Path | None]:
    """A tmpfs of pages of 2 MiB; None where this user may not mount one."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["mount", "-t", "tmpfs", "-o", "huge=within_size,mode=700", "tmpfs", directory]
        if os.geteuid() != 0 or subprocess.run(command, check=False).returncode != 0:
            yield None
            return
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", "--lazy", directory], check=True)


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
    gigabytes = result["gigabytes"]
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
        f"4 -> 3 ranks, {gigabytes:.2f} GB of files, seconds. With a node for each rank, what lies on other "
        "nodes comes over the (loopback) network.",
        "",
        "| ranks | memory | warm disk | cold disk | memory / warm | cold / memory |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, found in loads.items():
        memory, warm, cold = (median(found["resumes"][kind]) for kind in KINDS)
        lines += [
            f"| {name} | {memory:.3f} | {warm:.3f} | {cold:.3f} | {memory / warm:.2f} (at most 1) | "
            f"{cold / memory:.1f} (at least {COLD_TARGET:.0f}) |"
        ]
    lines += ["", "Plain reads of the same files, by three processes that do nothing with the bytes:", ""]
    lines += ["| | memory | warm disk | cold disk | memory / warm | cold / memory |", "|---|--:|--:|--:|--:|--:|"]
    for name in filter(loads.__contains__, (ONE, LARGE)):
        memory, warm, cold = (median(loads[name]["reads"][kind]) for kind in KINDS)
        lines += [
            f"| {name} | {memory:.3f} | {warm:.3f} | {cold:.3f} | {memory / warm:.2f} | {cold / memory:.1f} |",
        ]
    resumed, read = (median(loads[ONE][what][kind]) for what, kind in (("resumes", "memory"), ("reads", "cold disk")))
    received, sent = loads[EACH]["bytes_received"], median(loads[EACH]["one_connection"])
    lines += [
        "",
        f"This disk gives {gigabytes / read:.1f} GB/s: to read the files alone takes {read / resumed:.1f} times as "
        f"long as a resume from memory. It takes {COLD_TARGET:.0f} times as long from a disk that gives "
        f"{gigabytes / resumed / COLD_TARGET:.1f} GB/s to all ranks together.",
        "",
        f"With a node for each rank, one rank receives {received / 1e6:,.0f} MB, which take {sent:.3f} s through one "
        "TCP connection between two processes of this machine that do nothing else.",
        "",
    ]
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
        loads: dict[str, dict[str, Any]] = {}
        for name, nodes in NODES.items():
            with large_pages() if name == LARGE else nullcontext(shared) as root:
                if root is None:
                    continue
                place, run = root / name, f"{disk}/{name}"
                nbytes = pool.run(keep, 4, chosen.load_rows, place, run, nodes, timeout=500)[0]
                loads[name] = pool.run(load, 3, chosen.load_rows, place, run, nodes, chosen.rounds, timeout=500)[0]
                shutil.rmtree(place)
        loads[EACH]["one_connection"] = [send_plainly(loads[EACH]["bytes_received"]) for _ in range(chosen.rounds)]
    result = {"about": about, "steps": stall, "gigabytes": nbytes / 1e9, "loads": loads}
    print(page(result))
    if chosen.out is not None:
        (chosen.out / "memory.json").write_text(json.dumps(result, indent=1) + "\n")
        (chosen.out / "memory.md").write_text(page(result))


if __name__ == "__main__":
    main()
