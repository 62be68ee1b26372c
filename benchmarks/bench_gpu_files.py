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

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, os.fspath(Path(__file__).resolve().parent))

import numpy as np
import torch
from bench_gpu import missing, moved
from bench_kernel import Workload, workloads
from report import describe, machine, spread, table, write_results

from zeroelastic.executors.build_info import describe_build
from zeroelastic.executors.dispatch import (
    CopyTable,
    DigestRows,
    MemoryRanges,
    ReadTable,
    read_segments,
    sum_segments,
    write_segments,
)

HOST_READ, TO_DEVICE = "files -> pinned memory", "pinned memory -> GPU"
HOST_WRITE, FROM_DEVICE = "pinned memory -> file, digest and CRC-32", "GPU -> pinned memory"
READ, READ_DIGEST, READ_TORCH = "read_segments", "read_segments + digest", "read_segments by torch"
WRITE, WRITE_TORCH = "write_segments + digest and CRC-32", "the same by torch"
MEMORY, SUM = "sum() of as many bytes on the GPU", "sum_segments: digests on the GPU"
CEILINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((READ, READ_DIGEST, READ_TORCH), (HOST_READ, TO_DEVICE)),
    **dict.fromkeys((WRITE, WRITE_TORCH), (HOST_WRITE, FROM_DEVICE)),
    SUM: (MEMORY,),
}
TARGETS = {READ: 0.9, SUM: 0.7}
SLOT_BYTES = 16 << 20

Run = Callable[[], object]


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
    sorted_rows = rows.rows(order)
    reads = ReadTable(tuple(paths), *sorted_rows.columns)
    digest = DigestRows(
        seeds=np.arange(num_rows, dtype=np.uint64),
        stream=np.arange(num_rows),
        start=np.arange(num_rows) * 7919,
        itemsize=np.full(num_rows, 4, dtype=np.int64),
    )
    target = torch.zeros(len(work.dst) + skew, device="cuda")[skew:]
    on_host = torch.zeros(len(work.dst), pin_memory=True)
    written = folder / "written.bin"
    written.write_bytes(bytes(on_host.nbytes))
    crc32 = np.zeros(num_rows, dtype=np.uint32)
    # Out of the flat tensor into a file: the destinations of the rows, where they are.
    out = CopyTable(rows.dst, rows.dst_offset, rows.dst, rows.dst_offset, rows.nbytes)
    summed = MemoryRanges(rows.dst, rows.dst_offset, rows.nbytes)
    flat = torch.rand(work.nbytes // 4, device="cuda")
    to_device, from_device = pinned_copies(work.nbytes)
    sums = {"digest": digest, "crc32": crc32}
    compared: dict[str, Run] = {
        HOST_READ: lambda: read_segments(reads, [on_host], executor="native"),
        TO_DEVICE: to_device,
        READ: lambda: read_segments(reads, [target], executor="cuda"),
        READ_DIGEST: lambda: read_segments(reads, [target], digest=digest, executor="cuda"),
        READ_TORCH: lambda: read_segments(reads, [target], executor="torch"),
        HOST_WRITE: lambda: write_segments(out, [on_host], [written], executor="native", **sums),
        FROM_DEVICE: from_device,
        WRITE: lambda: write_segments(out, [target], [written], executor="cuda", **sums),
        WRITE_TORCH: lambda: write_segments(out, [target], [written], executor="torch", **sums),
        MEMORY: lambda: flat.sum(),
        SUM: lambda: sum_segments(summed, [target], digest=digest, executor="cuda"),
    }
    for name in (HOST_READ, READ, READ_DIGEST, READ_TORCH):
        result = on_host if name == HOST_READ else target
        result.zero_()
        compared[name]()
        torch.cuda.synchronize()
        assert np.array_equal(result.cpu().numpy().view(np.uint32), want.view(np.uint32)), f"{name}: bits differ"
    totals = []
    for name in (HOST_WRITE, WRITE, WRITE_TORCH):
        written.write_bytes(bytes(on_host.nbytes))
        totals.append(compared[name]())
        assert written.read_bytes() == want.tobytes(), f"{name}: bytes differ"
        totals.append(crc32.copy())
    totals.append(compared[SUM]())
    assert all(np.array_equal(totals[0], other) for other in (totals[2], totals[4], totals[6])), "digests differ"
    assert all(np.array_equal(totals[1], other) for other in (totals[3], totals[5])), "checksums differ"
    return compared


@dataclass(frozen=True)
class Row:
    """One method on one workload; of three figures, the least, the median and the greatest over rounds."""

    workload: str
    method: str
    gb_per_s: tuple[float, float, float]
    ratio: tuple[float, float, float]
    raw_seconds: list[float]


def measure(work: Workload, rounds: int, folder: Path) -> list[Row]:
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
    rows = []
    for name, _ in compared:
        ceilings = CEILINGS.get(name, (name,))
        limit = [max(values) for values in zip(*(seconds[ceiling] for ceiling in ceilings), strict=True)]
        rows.append(
            Row(
                workload=work.name,
                method=name,
                gb_per_s=spread([work.nbytes / 1e9 / value for value in seconds[name]]),
                ratio=spread([least / own for least, own in zip(limit, seconds[name], strict=True)]),
                raw_seconds=seconds[name],
            )
        )
    return rows


def tables(document: dict[str, Any], rows: Sequence[Row]) -> str:
    """The results as Markdown."""
    lines = [
        "# Between files and a GPU",
        "",
        f"{document['gpu']}, CUDA {document['cuda']}, engine built by {document['engine']}; "
        f"{document['threads']} threads, files in {document['folder']}.",
        "",
        *describe(document["machine"]),
        "",
        "The ratio is to the slower of the ceilings of the same round: files and pinned memory, pinned memory and GPU; "
        "for digests, to reading as much memory on the GPU.",
        "",
        *table(
            ["workload", "method", "GB/s min", "median", "max", "ratio min", "median", "max", "goal"],
            [
                [
                    row.workload,
                    row.method,
                    *(f"{value:.1f}" for value in row.gb_per_s),
                    *(f"{value:.2f}" if row.method in CEILINGS else "" for value in row.ratio),
                    f"{TARGETS[row.method]:.2f}" if row.method in TARGETS else "",
                ]
                for row in rows
            ],
            text_columns=2,
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of all methods")
    parser.add_argument("--workloads", nargs="+", default=["a", "a'"])
    parser.add_argument("--small", action="store_true", help="a few MB: to test the benchmark itself")
    parser.add_argument("--directory", type=Path, help="where the files are put for the time being")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of the results")
    arguments = parser.parse_args()
    reason = missing()
    if reason is not None:
        sys.exit(reason.replace("bench_gpu", "bench_gpu_files"))
    from zeroelastic.executors.engine import default_threads

    made = workloads(0.01 if arguments.small else 1.0)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-gpu-files-", dir=arguments.directory) as folder:
        document: dict[str, Any] = {
            "machine": machine(),
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "engine": describe_build("cuda").compiler,
            "threads": default_threads(),
            "folder": os.fspath(Path(folder).parent),
        }
        for key in arguments.workloads:
            work = made[key]()
            print(work.name, file=sys.stderr, flush=True)
            rows += measure(work, arguments.rounds, Path(folder))
            del work
            gc.collect()
            torch.cuda.empty_cache()
    document["rows"] = [asdict(row) for row in rows]
    write_results(arguments.out, "gpu_files", document, tables(document, rows))


if __name__ == "__main__":
    main()
