"""How fast the native engine copies, converts and digests segments, against what else moves them in memory.

    python benchmarks/bench_kernel.py --out benchmarks/results                 # full size, quiet machine
    python benchmarks/bench_kernel.py --small --rounds 1 --out /tmp/x          # tests the benchmark itself

Writes kernel.json (every sample) and kernel.md (the tables). README.md says how it is measured.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from report import Others, benchmark_arguments, describe, machine, noise, spread, table, write_results
from torch._utils import _flatten_dense_tensors

from zeroelastic.core.digest import digest_range as digest_range_reference
from zeroelastic.core.layout import Param, layout_from_sub_groups
from zeroelastic.core.plan import coalesce, make_plan
from zeroelastic.executors import dispatch
from zeroelastic.executors.dispatch import CopyTable, DigestRows
from zeroelastic.executors.native_executor import digest_range, instruction_set, limit_instruction_set

copy_segments = functools.partial(dispatch.copy_segments, executor="native")
read_segments = functools.partial(dispatch.read_segments, executor="native")


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
    table: CopyTable
    src: list[torch.Tensor]
    dst: torch.Tensor

    @property
    def nbytes(self) -> int:
        return int(self.table.nbytes.sum())

    @property
    def aligned_share(self) -> float:
        """The share of bytes with equal source and destination addresses modulo 16."""
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
    return Workload(name, CopyTable(*columns), [touched(sizes[0]) for _ in ranks], touched(sizes[1] + skew)[skew:])


def even_workload(name: str, numels: np.ndarray, *, shuffled: bool) -> Workload:
    """Segments of these lengths from one buffer to another; the destination keeps their order."""
    rng = np.random.default_rng(0)
    order = rng.permutation(len(numels)) if shuffled else np.arange(len(numels))
    offset = np.empty(len(numels), dtype=np.int64)
    offset[order] = np.cumsum(numels[order]) - numels[order] + np.arange(len(numels))  # one element apart
    zero = np.zeros(len(numels), dtype=np.int64)
    dst_offset = np.cumsum(numels) - numels
    table = CopyTable(zero, offset * 4, zero, dst_offset * 4, numels * 4)
    return Workload(name, table, [touched(int(numels.sum()) + len(numels))], touched(int(numels.sum())))


def digests_of(num_rows: int) -> DigestRows:
    """A digest of each of so many rows of float32: row i with the seed i, from element 7919 i on."""
    numbers = np.arange(num_rows)
    return DigestRows(numbers.astype(np.uint64), numbers, numbers * 7919, np.full(num_rows, 4, dtype=np.int64))


def workloads(scale: float) -> dict[str, Callable[[], Workload]]:
    """The workloads by key, made when called; ``scale`` 1 is the full size."""
    rng = np.random.default_rng(1)
    short = rng.integers(128, 385, max(100, round(100_000 * scale)))
    layers, llama_layers = max(1, round(24 * scale)), max(1, round(16 * scale))
    hidden = 2048 if scale > 0.02 else 128
    huge = np.full(6, round(42_000_000 * scale), dtype=np.int64)
    return {
        "a": lambda: reshard_workload("a: 1.3B, 8 -> 6", gpt_params(layers, hidden), 8, 6, 2),
        "a'": lambda: reshard_workload(
            "a': h = 2048, 4 -> 3",
            llama_params(llama_layers, hidden, 4 * hidden, hidden // 4, 32000 if scale > 0.02 else 500),
            4,
            3,
            1,
            skew=1,
        ),
        "b": lambda: even_workload("b: 100k x 1 KB, in order", short, shuffled=False),
        "b'": lambda: even_workload("b': 100k x 1 KB, shuffled", short, shuffled=True),
        "c": lambda: even_workload("c: 6 x 168 MB", huge, shuffled=True),
    }


FLAT, FLAT_16, READ = "flat copy_", "flat bf16.copy_", "native read (warm files)"
NATIVE, NATIVE_DIGEST, NATIVE_16 = "native", "native + digest", "native to bf16"
MEMCPY = "memcpy per segment, same threads"
READ_DIGEST = "native read + digest"
CEILING = {
    NATIVE_16: FLAT_16,
    "_foreach_copy_ to bf16 (views made before)": FLAT_16,
    READ: READ,
    READ_DIGEST: READ,
}
"""The method to compare a method's time with, if it is not the flat copy."""

TARGETS = {"a": 0.92, "a'": 0.92, "b": 0.75, "c": 0.95}
MOST_DIGEST, LEAST_CAST = 0.10, 1.0


def methods(work: Workload, threads: int, directory: Path | None) -> dict[str, Callable[[], object]]:
    """What is compared: each callable moves the workload once, with files in ``directory`` where there is one."""
    table, src = work.table, work.src
    src_bytes = [tensor.view(torch.uint8).numpy() for tensor in src]
    dst_bytes = work.dst.view(torch.uint8).numpy()
    half = torch.zeros(len(work.dst), dtype=torch.bfloat16)
    half_bytes = half.view(torch.uint8).numpy()
    half_table = CopyTable(table.src, table.src_offset, table.dst, table.dst_offset // 2, table.nbytes)
    digest = digests_of(len(table.nbytes))
    numel = work.nbytes // 4
    flat_src, flat_dst = torch.cat([t[:numel] for t in src])[:numel].clone(), touched(numel)
    flat_half = torch.zeros(numel, dtype=torch.bfloat16)
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

    def memcpy() -> None:
        best = instruction_set()
        limit_instruction_set("plain")
        copy_segments(table, src_bytes, [dst_bytes], threads=threads)
        limit_instruction_set(best)

    def check(totals: Any, what: str) -> None:
        assert totals is not None
        for i, (source, target, _) in enumerate(views):
            assert torch.equal(source, target), f"{what}: segment {i} differs"
            if i % 997 == 0:
                data = source.view(torch.uint8).numpy()
                assert totals[i] == digest_range_reference(data, 4, seed=i, start=i * 7919), f"{what}: digest {i}"
        work.dst.zero_()

    work.dst.zero_()
    check(copy_segments(table, src_bytes, [dst_bytes], digest=digest, threads=threads), NATIVE_DIGEST)
    copy_segments(half_table, src_bytes, [half_bytes], cast="float32->bfloat16", threads=threads)
    for i, (source, _, small) in enumerate(views):
        assert torch.equal(source.bfloat16(), small), f"{NATIVE_16}: segment {i} differs"

    compared: dict[str, Callable[[], object]] = {
        FLAT: lambda: flat_dst.copy_(flat_src),
        NATIVE: lambda: copy_segments(table, src_bytes, [dst_bytes], threads=threads),
        NATIVE_DIGEST: lambda: copy_segments(table, src_bytes, [dst_bytes], digest=digest, threads=threads),
        MEMCPY: memcpy,
        "_foreach_copy_ (views made before)": lambda: torch._foreach_copy_(to_views, from_views),
        "cat(out=) (views made before)": lambda: torch.cat(from_views, out=flat_dst),
        "_flatten_dense_tensors (fresh memory)": lambda: _flatten_dense_tensors(from_views),
        FLAT_16: lambda: flat_half.copy_(flat_src),
        NATIVE_16: lambda: copy_segments(
            half_table, src_bytes, [half_bytes], cast="float32->bfloat16", threads=threads
        ),
        "_foreach_copy_ to bf16 (views made before)": lambda: torch._foreach_copy_(half_views, from_views),
        "native digest of flat memory": lambda: digest_range(
            flat_src.view(torch.uint8).numpy(), 4, seed=1, start=0, threads=threads
        ),
    }
    if directory is not None:
        paths = tuple(directory / f"source-{i}" for i in range(len(src)))
        for path, data in zip(paths, src_bytes, strict=True):
            if not path.exists():
                data.tofile(path)
        by_file = np.lexsort((table.src_offset, table.src))
        reads = table.rows(by_file)
        sums = DigestRows(digest.seeds, digest.stream[by_file], digest.start[by_file], digest.itemsize)
        check(read_segments(reads, paths, [dst_bytes], digest=sums, threads=threads).digests, READ_DIGEST)
        compared[READ] = lambda: read_segments(reads, paths, [dst_bytes], threads=threads)
        compared[READ_DIGEST] = lambda: read_segments(reads, paths, [dst_bytes], digest=sums, threads=threads)
    return compared


@dataclass(frozen=True)
class Row:
    """One method on one workload: GB/s by the clock and per second of processor time, and against its ceiling.

    Of three figures, the least, the median and the greatest over rounds. ``over_native`` is the time beyond the same
    method's without a digest, as a share.
    """

    key: str
    workload: str
    threads: int
    method: str
    gb_per_s: tuple[float, float, float]
    gb_per_cpu_s: float
    ceiling: str
    ratio: tuple[float, float, float]
    cpu_ratio: float
    over_native: tuple[float, float, float] | None
    other_cpu: float
    raw_seconds: list[float]
    raw_cpu_seconds: list[float]


SETTLE_S = 0.02
"""A pause before each timing: OpenMP's threads go on spinning for a while after torch's copies, on the processors that
the next method needs."""


def measure(key: str, work: Workload, threads: int, rounds: int, directory: Path | None) -> list[Row]:
    torch.set_num_threads(threads)
    compared = methods(work, threads, directory)
    wall: dict[str, list[float]] = {name: [] for name in compared}
    cpu: dict[str, list[float]] = {name: [] for name in compared}
    for run in compared.values():
        run()
    others = Others()
    order = list(compared)
    for number in range(rounds):
        begin_with = number % len(order)
        for name in order[begin_with:] + order[:begin_with]:
            run = compared[name]
            gc.disable()
            time.sleep(SETTLE_S)
            begin, cpu_begin = time.perf_counter(), time.process_time()
            run()
            cpu[name].append(time.process_time() - cpu_begin)
            wall[name].append(time.perf_counter() - begin)
            gc.enable()
    other_cpu = others.share()
    rows = []
    for name in compared:
        ceiling = CEILING.get(name, FLAT)
        without = {NATIVE_DIGEST: NATIVE, READ_DIGEST: READ}.get(name)
        over = [own / plain - 1 for own, plain in zip(wall[name], wall[without], strict=True)] if without else None
        rows.append(
            Row(
                key=key,
                workload=work.name,
                threads=threads,
                method=name,
                gb_per_s=spread([work.nbytes / 1e9 / seconds for seconds in wall[name]]),
                gb_per_cpu_s=median(work.nbytes / 1e9 / max(seconds, 1e-9) for seconds in cpu[name]),
                ceiling=ceiling,
                ratio=spread([flat / own for flat, own in zip(wall[ceiling], wall[name], strict=True)]),
                cpu_ratio=median(cpu[ceiling]) / max(median(cpu[name]), 1e-9),
                over_native=spread(over) if over else None,
                other_cpu=other_cpu,
                raw_seconds=wall[name],
                raw_cpu_seconds=cpu[name],
            )
        )
    return rows


def tables(document: dict[str, Any], rows: Sequence[Row]) -> str:
    """The results as Markdown."""
    found = {(row.key, row.threads, row.method): row for row in rows}
    cases = list(dict.fromkeys((row.key, row.workload, row.threads) for row in rows))
    goals = []
    for key, workload, threads in cases:
        native, digested, cast = (found[key, threads, name] for name in (NATIVE, NATIVE_DIGEST, NATIVE_16))
        read = found.get((key, threads, READ_DIGEST))
        assert digested.over_native is not None

        def judged(value: float, good: bool | None, text: str) -> str:
            return f"{value:{text}}" if good is None else f"{value:{text}} {'yes' if good else 'no'}"

        goal = TARGETS.get(key)
        cells = [
            judged(native.ratio[1], None if goal is None else native.ratio[1] >= goal, ".2f"),
            "" if goal is None else f"{goal:.2f}",
            f"{found[key, threads, MEMCPY].ratio[1]:.2f}",
            judged(digested.over_native[1], digested.over_native[1] <= MOST_DIGEST, "+.1%"),
            "",
            judged(cast.ratio[1], cast.ratio[1] >= LEAST_CAST, ".2f"),
        ]
        if read is not None and read.over_native is not None:
            cells[4] = judged(read.over_native[1], read.over_native[1] <= MOST_DIGEST, "+.1%")
        goals.append([workload, str(threads), *cells, f"{native.other_cpu:.0%}"])
    lines = [
        "# Moving segments in memory",
        "",
        *describe(document["machine"]),
        "",
        "## The goals",
        "",
        f"Medians over {document['rounds']} rounds, each against the ceiling of its own round, and whether that meets "
        f"the goal: a digest adds at most {MOST_DIGEST:.0%}, a conversion is as fast as a flat one.",
        "",
        *table(
            ["workload", "threads", "copy / flat copy_", "goal", "memcpy loop / flat", "digest adds to a copy",
             "to a read", "to bf16 / flat", "others' cpu"],
            goals,
        ),
    ]  # fmt: skip
    head = ["method", "threads", "GB/s min", "median", "max", "ratio min", "median", "max", "GB per cpu-s", "ratio"]
    for key, workload, _ in dict.fromkeys((key, workload, 0) for key, workload, _ in cases):
        about = document["workloads"][workload]
        lines += [
            "",
            f"## {workload}",
            "",
            f"{about['segments']:,} segments, {about['bytes'] / 1e6:,.0f} MB; source and destination agree modulo "
            f"16 for {about['aligned_share']:.0%} of the bytes.",
            "",
            *table(
                head,
                [
                    [row.method, str(row.threads), *(f"{x:.2f}" for x in (*row.gb_per_s, *row.ratio)),
                     f"{row.gb_per_cpu_s:.2f}", f"{row.cpu_ratio:.2f}"]
                    for row in rows if row.key == key
                ],
            ),
        ]  # fmt: skip
    lines += noise([row.other_cpu for row in rows])
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = benchmark_arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved repeats of each method")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, min(8, len(os.sched_getaffinity(0)))])
    parser.add_argument("--workloads", nargs="+", default=["a", "a'", "b", "b'", "c"])
    arguments = parser.parse_args()
    about = machine()
    made = workloads(0.01 if arguments.small else 1.0)
    rows: list[Row] = []
    described: dict[str, dict[str, object]] = {}
    for key in arguments.workloads:
        work = made[key]()
        described[work.name] = {
            "segments": len(work.table.nbytes),
            "bytes": work.nbytes,
            "aligned_share": round(work.aligned_share, 4),
        }
        # Reads of short segments are a matter of system calls: bench_load measures files.
        with tempfile.TemporaryDirectory(prefix="bench-kernel-", dir=arguments.directory) as directory:
            for threads in dict.fromkeys(arguments.threads):
                print(f"{work.name}, threads: {threads}", file=sys.stderr, flush=True)
                rows += measure(key, work, threads, arguments.rounds, Path(directory) if key[0] == "a" else None)
        del work
        gc.collect()
    about["load_average_after"] = os.getloadavg()[0]
    document = {
        "machine": about,
        "rounds": arguments.rounds,
        "workloads": described,
        "rows": [asdict(row) for row in rows],
    }
    write_results(arguments.out, "kernel", document, tables(document, rows))


if __name__ == "__main__":
    main()
