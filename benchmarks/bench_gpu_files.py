"""How fast files reach a GPU and a GPU's memory reaches files, against what the bus and the file system allow.

    python benchmarks/bench_gpu_files.py --out benchmarks/results

needs a CUDA device and the CUDA engine, else it says so and ends. Writes gpu_files.json (every sample) and
gpu_files.md. The workloads are a and a' of bench_kernel.py: what one rank takes of other ranks' flat fp32 buffers, here
from files in the page cache into one tensor on the GPU; and the same rows from the GPU into one file. Wall clock, from
an idle device until it is idle again; methods take turns within a round, after one that is not timed. Each is set
against the slower of two ceilings of its own round: the same rows between files and pinned host memory, by the native
engine, and as many bytes between pinned host memory and the device. Results are compared with what numpy makes of the
same table before the timing. GB are 1e9 bytes.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from bench_gpu import Row, Run, chosen_workloads, gpu_document, moved, page, rows_of
from bench_kernel import Workload, digests_of
from report import benchmark_arguments, write_results

from zeroelastic.executors.dispatch import (
    CopyTable,
    Ranges,
    read_segments,
    sum_segments,
    write_segments,
)
from zeroelastic.executors.tables import default_threads

HOST_READ, TO_DEVICE = "files -> pinned memory", "pinned memory -> GPU"
HOST_WRITE, FROM_DEVICE = "pinned memory -> file, digest and CRC-32", "GPU -> pinned memory"
READ, READ_DIGEST, READ_STAGED = "read_segments", "read_segments + digest", "read_segments through host memory"
WRITE, WRITE_STAGED = "write_segments + digest and CRC-32", "the same through host memory"
MEMORY, SUM = "sum() of as many bytes on the GPU", "sum_segments: digests on the GPU"
CEILINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((READ, READ_DIGEST, READ_STAGED), (HOST_READ, TO_DEVICE)),
    **dict.fromkeys((WRITE, WRITE_STAGED), (HOST_WRITE, FROM_DEVICE)),
    SUM: (MEMORY,),
}
TARGETS = {READ: 0.9, SUM: 0.7}
SLOT_BYTES = 16 << 20


def pinned_copies(nbytes: int) -> tuple[Run, Run]:
    """Copies of so many bytes to the GPU, and from it, in pieces of a slot."""
    host = torch.empty(SLOT_BYTES, dtype=torch.uint8, pin_memory=True).zero_()
    device = torch.zeros(SLOT_BYTES, dtype=torch.uint8, device="cuda")
    sizes = [min(SLOT_BYTES, nbytes - at) for at in range(0, nbytes, SLOT_BYTES)]

    def to_device() -> None:
        for size in sizes:
            device[:size].copy_(host[:size], non_blocking=True)

    def from_device() -> None:
        for size in sizes:
            host[:size].copy_(device[:size], non_blocking=True)

    return to_device, from_device


def methods(work: Workload, folder: Path) -> dict[str, Run]:
    """What is compared: each callable moves the workload once; what it makes is checked here."""
    rows, want = work.table, moved(work)
    num_rows, skew = len(rows.nbytes), work.dst.storage_offset()
    paths = []
    for number, tensor in enumerate(work.src):
        paths.append(folder / f"{number}.bin")
        tensor.numpy().tofile(paths[-1])
    order = np.lexsort((rows.src_offset, rows.src))
    reads = rows.rows(order)
    digest = digests_of(num_rows)
    target = torch.zeros(len(work.dst) + skew, device="cuda")[skew:]
    on_host = torch.zeros(len(work.dst), pin_memory=True)
    written = folder / "written.bin"
    written.write_bytes(bytes(on_host.nbytes))
    crc32 = np.zeros(num_rows, dtype=np.uint32)
    # Out of the flat tensor into a file: the destinations of the rows, where they are.
    out = CopyTable(rows.dst, rows.dst_offset, rows.dst, rows.dst_offset, rows.nbytes)
    summed = Ranges(rows.dst, rows.dst_offset, rows.nbytes)
    flat = torch.rand(work.nbytes // 4, device="cuda")
    to_device, from_device = pinned_copies(work.nbytes)
    sums = {"digest": digest, "crc32": crc32}
    compared: dict[str, Run] = {
        HOST_READ: lambda: read_segments(reads, paths, [on_host], executor="native"),
        TO_DEVICE: to_device,
        READ: lambda: read_segments(reads, paths, [target], executor="cuda"),
        READ_DIGEST: lambda: read_segments(reads, paths, [target], digest=digest, executor="cuda"),
        READ_STAGED: lambda: read_segments(reads, paths, [target], executor="native"),
        HOST_WRITE: lambda: write_segments(out, [on_host], [written], executor="native", **sums),
        FROM_DEVICE: from_device,
        WRITE: lambda: write_segments(out, [target], [written], executor="cuda", **sums),
        WRITE_STAGED: lambda: write_segments(out, [target], [written], executor="native", **sums),
        MEMORY: lambda: flat.sum(),
        SUM: lambda: sum_segments(summed, [target], digest=digest, executor="cuda"),
    }
    for name in (HOST_READ, READ, READ_DIGEST, READ_STAGED):
        result = on_host if name == HOST_READ else target
        result.zero_()
        compared[name]()
        torch.cuda.synchronize()
        assert np.array_equal(result.cpu().numpy().view(np.uint32), want.view(np.uint32)), f"{name}: bits differ"
    totals = []
    for name in (HOST_WRITE, WRITE, WRITE_STAGED):
        written.write_bytes(bytes(on_host.nbytes))
        totals.append(compared[name]())
        assert written.read_bytes() == want.tobytes(), f"{name}: bytes differ"
        totals.append(crc32.copy())
    totals.append(compared[SUM]())
    assert all(np.array_equal(totals[0], other) for other in (totals[2], totals[4], totals[6])), "digests differ"
    assert all(np.array_equal(totals[1], other) for other in (totals[3], totals[5])), "checksums differ"
    return compared


def measure(key: str, work: Workload, rounds: int, folder: Path) -> list[Row]:
    seconds: dict[str, list[float]] = {}
    compared = list(methods(work, folder).items())
    for number in range(rounds + 1):
        turn = number % len(compared)
        for name, run in compared[turn:] + compared[:turn]:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if number > 0:
                seconds.setdefault(name, []).append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return rows_of(key, work, seconds, {name: CEILINGS.get(name, (name,)) for name, _ in compared})


def main() -> None:
    parser = benchmark_arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of all methods")
    parser.add_argument("--workloads", nargs="+", default=["a", "a'"])
    arguments = parser.parse_args()
    document, rows = gpu_document(), []
    with tempfile.TemporaryDirectory(prefix="bench-gpu-files-", dir=arguments.directory) as folder:
        document |= {"threads": default_threads(), "folder": os.fspath(Path(folder).parent)}
        for key, work in chosen_workloads(arguments):
            rows += measure(key, work, arguments.rounds, Path(folder))
    document["rows"] = [asdict(row) for row in rows]
    text = [
        f"{document['threads']} threads, files in {document['folder']}. The ratio is to the slower of the ceilings of "
        "the same round: files and pinned memory, pinned memory and GPU; for digests, to reading as much memory on the "
        "GPU.",
        "",
    ]
    goals = {(method, row.key): goal for method, goal in TARGETS.items() for row in rows}
    write_results(arguments.out, "gpu_files", document, page("Between files and a GPU", document, text, rows, goals))


if __name__ == "__main__":
    main()
