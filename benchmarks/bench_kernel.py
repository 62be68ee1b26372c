"""How fast the native engine copies, converts and digests segments, against what else moves them in memory.

Every method moves the same segments between the same touched buffers; rounds are interleaved (A B C, A B C, ...), and
each method's time is set against the flat ``Tensor.copy_`` of the same bytes with the same threads in the same round.
Results are checked bit for bit before the timing.

    python benchmarks/bench_kernel.py --rounds 9 --json benchmarks/results/kernel.json

Workloads: (a) one rank's fp32 state of a 1.3B model, 8 -> 6 ranks; (a') of another model, 4 -> 3 ranks, where source
and destination are misaligned to each other almost everywhere; (b) 100,000 segments of about 1 KB, in order and
shuffled; (c) a few huge segments. GB are 1e9 bytes of source moved, not of memory traffic.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch._utils import _flatten_dense_tensors

from zeroelastic.digest import digest_range_reference
from zeroelastic.executors import DigestRows
from zeroelastic.executors.build_info import describe_build
from zeroelastic.executors.native_executor import SegmentTable, copy_segments, digest_range, instruction_set
from zeroelastic.layout import Param, layout_from_sub_groups
from zeroelastic.plan import coalesce, make_plan

REPOSITORY = Path(__file__).resolve().parent.parent


def machine() -> dict[str, object]:
    """What the figures were taken on."""
    cpu = platform.processor()
    with open("/proc/cpuinfo") as lines:
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    with open("/proc/meminfo") as lines:
        memory_kib = int(next(line for line in lines if line.startswith("MemTotal")).split()[1])

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "native": describe_build("native").compiler,
        "instruction_set": instruction_set(),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain")),
        "load_average_before": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "command": " ".join(sys.argv),
    }


def gpt_params(num_layers: int, hidden: int, vocab: int = 50304, positions: int = 2048) -> list[Param]:
    """The parameters of a GPT-style model in the order of its modules."""
    params = [Param("wte", (vocab, hidden)), Param("wpe", (positions, hidden))]
    shapes = {
        "ln_1.weight": (hidden,),
        "ln_1.bias": (hidden,),
        "attn.qkv.weight": (3 * hidden, hidden),
        "attn.qkv.bias": (3 * hidden,),
        "attn.proj.weight": (hidden, hidden),
        "attn.proj.bias": (hidden,),
        "ln_2.weight": (hidden,),
        "ln_2.bias": (hidden,),
        "mlp.fc.weight": (4 * hidden, hidden),
        "mlp.fc.bias": (4 * hidden,),
        "mlp.proj.weight": (hidden, 4 * hidden),
        "mlp.proj.bias": (hidden,),
    }
    for layer in range(num_layers):
        params += [Param(f"h.{layer}.{name}", shape) for name, shape in shapes.items()]
    return [*params, Param("ln_f.weight", (hidden,)), Param("ln_f.bias", (hidden,))]


def llama_params(num_layers: int, hidden: int, ffn: int, kv: int, vocab: int) -> list[Param]:
    """The parameters of a Llama-3 model."""
    params = [Param("embed", (vocab, hidden))]
    shapes = {
        "q": (hidden, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, hidden),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
        "input_norm": (hidden,),
        "post_norm": (hidden,),
    }
    for layer in range(num_layers):
        params += [Param(f"layers.{layer}.{name}", shape) for name, shape in shapes.items()]
    return [*params, Param("norm", (hidden,)), Param("head", (vocab, hidden))]


@dataclass(frozen=True)
class Workload:
    """Segments between float32 source buffers and one float32 destination."""

    name: str
    table: SegmentTable
    src: list[torch.Tensor]
    dst: torch.Tensor

    @property
    def nbytes(self) -> int:
        return int(self.table.nbytes.sum())

    @property
    def aligned_share(self) -> float:
        """Share of the bytes whose source and destination agree modulo 16."""
        bases = np.array([tensor.data_ptr() for tensor in self.src])
        src = bases[self.table.src] + self.table.src_offset
        same = (src - self.table.dst_offset - self.dst.data_ptr()) % 16 == 0
        return float(self.table.nbytes[same].sum() / self.nbytes)


def touched(numel: int) -> torch.Tensor:
    return torch.rand(max(numel, 1))


def reshard_workload(
    name: str, params: list[Param], src_size: int, dst_size: int, rank: int, *, skew: int = 0
) -> Workload:
    """What one rank of ``dst_size`` takes from the flat buffers of ``src_size`` ranks.

    The destination begins ``skew`` elements into its memory.
    """
    src, dst = layout_from_sub_groups([params], src_size), layout_from_sub_groups([params], dst_size)
    plan = make_plan(src, dst, rank)
    ranks = {r: i for i, r in enumerate(plan.source_ranks)}
    file = np.array([ranks[int(r)] for r in plan.src_rank], dtype=np.int64)
    columns = coalesce(file, plan.src_offset * 4, np.zeros_like(file), plan.dst_offset * 4, plan.length * 4)
    sizes = int(src.sub_group_numel[0]), int(dst.sub_group_numel[0])
    return Workload(name, SegmentTable(*columns), [touched(sizes[0]) for _ in ranks], touched(sizes[1] + skew)[skew:])


def even_workload(name: str, numels: np.ndarray, *, shuffled: bool) -> Workload:
    """Segments of these lengths from one buffer to another; the destination keeps their order."""
    rng = np.random.default_rng(0)
    order = rng.permutation(len(numels)) if shuffled else np.arange(len(numels))
    offset = np.empty(len(numels), dtype=np.int64)
    offset[order] = np.cumsum(numels[order]) - numels[order] + np.arange(len(numels))  # one element apart
    zero = np.zeros(len(numels), dtype=np.int64)
    dst_offset = np.cumsum(numels) - numels
    table = SegmentTable(zero, offset * 4, zero, dst_offset * 4, numels * 4)
    return Workload(name, table, [touched(int(numels.sum()) + len(numels))], touched(int(numels.sum())))


def workloads(params_scale: float) -> dict[str, Callable[[], Workload]]:
    rng = np.random.default_rng(1)
    short = rng.integers(128, 385, 100_000)
    layers, llama_layers = max(1, round(24 * params_scale)), max(1, round(16 * params_scale))
    huge = np.full(6, round(42_000_000 * params_scale), dtype=np.int64)
    return {
        "a": lambda: reshard_workload("a: 1.3B, 8 -> 6", gpt_params(layers, 2048), 8, 6, 2),
        "a'": lambda: reshard_workload(
            "a': h = 2048, 4 -> 3", llama_params(llama_layers, 2048, 8192, 512, 32000), 4, 3, 1, skew=1
        ),
        "b": lambda: even_workload("b: 100k x 1 KB, in order", short, shuffled=False),
        "b'": lambda: even_workload("b': 100k x 1 KB, shuffled", short, shuffled=True),
        "c": lambda: even_workload("c: 6 x 168 MB", huge, shuffled=True),
    }


def methods(work: Workload, threads: int) -> dict[str, Callable[[], object]]:
    """What is compared: each callable moves the workload once."""
    table, src = work.table, work.src
    src_bytes = [tensor.view(torch.uint8).numpy() for tensor in src]
    dst_bytes = work.dst.view(torch.uint8).numpy()
    half = torch.zeros(len(work.dst), dtype=torch.bfloat16)
    half_bytes = half.view(torch.uint8).numpy()
    half_table = SegmentTable(table.src, table.src_offset, table.dst, table.dst_offset // 2, table.nbytes)
    rows = len(table.nbytes)
    digest = DigestRows(
        seeds=np.arange(rows, dtype=np.uint64),
        stream=np.arange(rows),
        start=np.arange(rows) * 7919,
        itemsize=np.full(rows, 4, dtype=np.int64),
    )
    flat_src, flat_dst = torch.cat([t[: work.nbytes // 4] for t in src])[: work.nbytes // 4], touched(work.nbytes // 4)
    flat_half = torch.zeros(work.nbytes // 4, dtype=torch.bfloat16)
    views = [
        (src[s][so // 4 : (so + n) // 4], work.dst[do // 4 : (do + n) // 4], half[do // 4 : (do + n) // 4])
        for s, so, do, n in zip(
            table.src.tolist(),
            table.src_offset.tolist(),
            table.dst_offset.tolist(),
            table.nbytes.tolist(),
            strict=True,
        )
    ]
    from_views, to_views, half_views = (list(column) for column in zip(*views, strict=True))

    def check() -> None:
        work.dst.zero_()
        totals = copy_segments(table, src_bytes, [dst_bytes], digest=digest, threads=threads)
        assert totals is not None
        copy_segments(half_table, src_bytes, [half_bytes], cast="float32->bfloat16", threads=threads)
        for i, (source, target, small) in enumerate(views):
            assert torch.equal(source, target) and torch.equal(source.bfloat16(), small), f"segment {i} differs"
            if i % 997 == 0:
                data = source.view(torch.uint8).numpy()
                assert totals[i] == digest_range_reference(data, 4, seed=i, start=i * 7919), f"digest {i} differs"

    check()
    return {
        "flat copy_": lambda: flat_dst.copy_(flat_src),
        "native": lambda: copy_segments(table, src_bytes, [dst_bytes], threads=threads),
        "native + digest": lambda: copy_segments(table, src_bytes, [dst_bytes], digest=digest, threads=threads),
        "_foreach_copy_ (views made before)": lambda: torch._foreach_copy_(to_views, from_views),
        "cat(out=) (views made before)": lambda: torch.cat(from_views, out=flat_dst),
        "_flatten_dense_tensors (fresh memory)": lambda: _flatten_dense_tensors(from_views),
        "flat bf16.copy_": lambda: flat_half.copy_(flat_src),
        "native to bf16": lambda: copy_segments(
            half_table, src_bytes, [half_bytes], cast="float32->bfloat16", threads=threads
        ),
        "_foreach_copy_ to bf16 (views made before)": lambda: torch._foreach_copy_(half_views, from_views),
        "native digest of flat memory": lambda: digest_range(
            flat_src.view(torch.uint8).numpy(), 4, seed=1, start=0, threads=threads
        ),
    }


CEILING = {"native to bf16": "flat bf16.copy_", "_foreach_copy_ to bf16 (views made before)": "flat bf16.copy_"}


@dataclass(frozen=True)
class Row:
    """One method on one workload: GB/s by the clock and per second of processor time, and against its ceiling."""

    workload: str
    threads: int
    method: str
    gb_per_s: tuple[float, float, float]
    gb_per_cpu_s: float
    ceiling: str
    ratio: tuple[float, float, float]
    cpu_ratio: float
    raw_seconds: list[float]
    raw_cpu_seconds: list[float]


def spread(values: list[float]) -> tuple[float, float, float]:
    return round(min(values), 3), round(median(values), 3), round(max(values), 3)


def measure(work: Workload, threads: int, rounds: int) -> list[Row]:
    torch.set_num_threads(threads)
    compared = methods(work, threads)
    wall: dict[str, list[float]] = {name: [] for name in compared}
    cpu: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(rounds):
        for name, run in compared.items():
            gc.disable()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            run()
            cpu[name].append(time.process_time() - cpu_begin)
            wall[name].append(time.perf_counter() - begin)
            gc.enable()
    rows = []
    for name in compared:
        ceiling = CEILING.get(name, "flat copy_")
        ratios = [flat / own for flat, own in zip(wall[ceiling], wall[name], strict=True)]
        rows.append(
            Row(
                workload=work.name,
                threads=threads,
                method=name,
                gb_per_s=spread([work.nbytes / 1e9 / seconds for seconds in wall[name]]),
                gb_per_cpu_s=round(median(work.nbytes / 1e9 / max(seconds, 1e-9) for seconds in cpu[name]), 3),
                ceiling=ceiling,
                ratio=spread(ratios),
                cpu_ratio=round(median(cpu[ceiling]) / median(cpu[name]), 3),
                raw_seconds=wall[name],
                raw_cpu_seconds=cpu[name],
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="interleaved repeats of each method")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, min(8, len(os.sched_getaffinity(0)))])
    parser.add_argument("--workloads", nargs="+", default=["a", "a'", "b", "b'", "c"])
    parser.add_argument("--scale", type=float, default=1.0, help="size of workloads a and c against the full one")
    parser.add_argument("--json", type=Path, help="where raw figures go")
    arguments = parser.parse_args()
    about = machine()
    made = workloads(arguments.scale)
    rows: list[Row] = []
    described: dict[str, dict[str, object]] = {}
    for key in arguments.workloads:
        work = made[key]()
        described[work.name] = {
            "segments": len(work.table.nbytes),
            "bytes": work.nbytes,
            "aligned_share": round(work.aligned_share, 4),
        }
        print(f"\n{work.name}: {described[work.name]}")
        print(
            f"{'method':44}{'thr':>4}{'GB/s min':>10}{'median':>8}{'max':>8}{'ratio':>7}{'per cpu-s':>10}{'ratio':>7}"
        )
        for threads in dict.fromkeys(arguments.threads):
            for row in measure(work, threads, arguments.rounds):
                rows.append(row)
                low, middle, high = row.gb_per_s
                print(
                    f"{row.method:44}{row.threads:4}{low:10.2f}{middle:8.2f}{high:8.2f}{row.ratio[1]:7.2f}"
                    f"{row.gb_per_cpu_s:10.2f}{row.cpu_ratio:7.2f}",
                    flush=True,
                )
        del work
        gc.collect()
    if arguments.json:
        about["load_average_after"] = os.getloadavg()[0]
        document = {"machine": about, "workloads": described, "rows": [asdict(row) for row in rows]}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
