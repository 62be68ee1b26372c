"""How fast the CUDA engine copies, converts and digests segments on one GPU, against what else moves them there.

    python benchmarks/bench_gpu.py --out benchmarks/results

needs a CUDA device and the CUDA engine, else it says so and ends. Writes gpu.json (every sample) and gpu.md. The
workloads are those of bench_kernel.py. CUDA events around several runs in a row; methods take turns within a round,
after a warm-up; sets of buffers rotate, so that no run finds its data in the L2 cache. Each method's time is set
against the device-to-device copy of as many contiguous bytes in the same round, that of a digest alone against their
sum. Before the timing, bits are compared with what numpy makes of the same table. GB are 1e9 bytes of source moved.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_kernel import CopyTable, Workload, digests_of, workloads
from report import benchmark_arguments, describe, machine, spread, table, write_results

from zeroelastic.core.digest import digest_range
from zeroelastic.executors.build_info import describe_build

FLAT, FLAT_16 = "flat device copy", "flat bf16.copy_"
NATIVE, NATIVE_DIGEST, NATIVE_16 = "DevicePlan", "DevicePlan + digest", "DevicePlan to bf16"
MEMORY, NATIVE_SUM = "flat sum()", "DevicePlan, digest alone"
FOREACH, FOREACH_16 = "_foreach_copy_", "_foreach_copy_ to bf16"
CEILING = {NATIVE_16: FLAT_16, FOREACH_16: FLAT_16, NATIVE_SUM: MEMORY}
TARGETS = {
    **{(NATIVE, key): goal for key, goal in (("a", 0.9), ("a'", 0.9), ("b", 0.7), ("c", 0.9))},
    **{(NATIVE_DIGEST, key): 0.8 for key in ("a", "a'", "c")},
    **{(NATIVE_SUM, key): 0.8 for key in ("a", "a'", "b", "c")},
}
ROTATED_BYTES = 512 << 20
"""Source bytes of all sets of buffers together: several times any L2 cache."""

Run = Callable[[], object]
Goals = Mapping[tuple[str, str], float]


def missing() -> str | None:
    """Why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return "there is no CUDA device, so nothing is measured."
    engine = describe_build("cuda")
    return None if engine.usable else f"the CUDA engine is not built: {engine.reason}"


@dataclass(frozen=True)
class Buffers:
    """One set: sources, a destination and its 16-bit twin on the device."""

    src: list[torch.Tensor]
    dst: torch.Tensor
    half: torch.Tensor


def on_device(work: Workload) -> Buffers:
    """The workload's buffers on the GPU; the destination begins as far into its memory as on the CPU."""
    skew = work.dst.storage_offset()
    size = len(work.dst) + skew
    return Buffers(
        [tensor.cuda() for tensor in work.src],
        torch.zeros(size, device="cuda")[skew:],
        torch.zeros(size, dtype=torch.bfloat16, device="cuda")[skew:],
    )


def moved(work: Workload) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The destination as numpy fills it: row by row."""
    filled = np.zeros(len(work.dst), dtype=np.float32)
    sources = [tensor.numpy() for tensor in work.src]
    rows = work.table
    columns = (rows.src, rows.src_offset // 4, rows.dst_offset // 4, rows.nbytes // 4)
    for src, begin, to, numel in zip(*(column.tolist() for column in columns), strict=True):
        filled[to : to + numel] = sources[src][begin : begin + numel]
    return filled


def check_digests(work: Workload, found: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
    """A sample of the digests of rows, whose seeds are their numbers."""
    rows = work.table
    for i in range(0, len(rows.nbytes), 997):
        data = work.src[int(rows.src[i])].view(torch.uint8).numpy()[int(rows.src_offset[i]) :][: int(rows.nbytes[i])]
        assert int(found[i]) == digest_range(data, 4, seed=i, start=i * 7919), f"digest {i} differs"


def methods(work: Workload, stack: ExitStack, rotated: int) -> dict[str, list[Run]]:
    """The methods to compare, each with one callable per set of buffers, or for one of them, that moves the workload.

    ``rotated`` are the source bytes of all sets together.
    """
    from zeroelastic.executors.cuda_executor import DeviceBuffer, DevicePlan

    def range_of(tensor: torch.Tensor) -> DeviceBuffer:
        return DeviceBuffer(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    rows = work.table
    num_rows, numel = len(rows.nbytes), work.nbytes // 4
    half_table = CopyTable(rows.src, rows.src_offset, rows.dst, rows.dst_offset // 2, rows.nbytes)
    digest = digests_of(num_rows)
    device = torch.cuda.current_device()
    keep: list[object] = []
    stack.callback(keep.clear)
    runs: dict[str, list[Run]] = {}
    want = moved(work)
    want_16 = torch.from_numpy(want).bfloat16()
    for number in range(max(1, math.ceil(rotated / work.nbytes))):
        buffers = on_device(work)
        totals = torch.zeros(num_rows, dtype=torch.int64, device="cuda")
        flat_src = torch.rand(numel, device="cuda")
        flat_dst, flat_half = torch.zeros_like(flat_src), torch.zeros_like(flat_src, dtype=torch.bfloat16)
        keep += [buffers, totals, flat_src, flat_dst, flat_half]
        src, dst, half = [range_of(tensor) for tensor in buffers.src], [range_of(buffers.dst)], [range_of(buffers.half)]
        sums = {"digest": digest, "totals": range_of(totals)}
        plain = stack.enter_context(DevicePlan(rows, src, dst, device=device))
        summed = stack.enter_context(DevicePlan(rows, src, dst, device=device, **sums))
        alone = stack.enter_context(DevicePlan(rows, src, None, device=device, **sums))
        cast = stack.enter_context(DevicePlan(half_table, src, half, device=device, cast="float32->bfloat16"))

        def on_stream(plan: DevicePlan) -> Run:
            return lambda: plan.run(torch.cuda.current_stream().cuda_stream)

        here: dict[str, Run] = {
            FLAT: lambda dst=flat_dst, src=flat_src: dst.copy_(src),
            NATIVE: on_stream(plain),
            NATIVE_DIGEST: on_stream(summed),
            MEMORY: lambda src=flat_src: src.sum(),
            NATIVE_SUM: on_stream(alone),
            FLAT_16: lambda dst=flat_half, src=flat_src: dst.copy_(src),
            NATIVE_16: on_stream(cast),
        }
        if number == 0:  # of one set: the views of 100,000 rows take longer to make than all that is measured
            columns = (rows.src, rows.src_offset // 4, rows.dst_offset // 4, rows.nbytes // 4)
            cut = list(zip(*(column.tolist() for column in columns), strict=True))
            from_views = [buffers.src[s][begin : begin + n] for s, begin, _, n in cut]
            to_views = [buffers.dst[to : to + n] for _, _, to, n in cut]
            half_views = [buffers.half[to : to + n] for _, _, to, n in cut]
            here[FOREACH] = partial(torch._foreach_copy_, to_views, from_views)
            here[FOREACH_16] = partial(torch._foreach_copy_, half_views, from_views)
        for name, run in here.items():
            runs.setdefault(name, []).append(run)
            if number > 0 or name in (FLAT, FLAT_16, MEMORY):
                continue
            buffers.dst.zero_()
            buffers.half.zero_()
            totals.zero_()
            run()
            torch.cuda.synchronize()
            if name in (NATIVE_DIGEST, NATIVE_SUM):
                check_digests(work, totals.cpu().numpy().view(np.uint64))
            if name == NATIVE_SUM:
                continue
            if name in (NATIVE_16, FOREACH_16):
                assert torch.equal(buffers.half.cpu(), want_16), f"{name}: bits differ"
            else:
                assert np.array_equal(buffers.dst.cpu().numpy().view(np.uint32), want.view(np.uint32)), name
    return runs


@dataclass(frozen=True)
class Row:
    """One method on one workload; of three figures, the least, the median and the greatest over rounds."""

    key: str
    workload: str
    method: str
    gb_per_s: tuple[float, float, float]
    ratio: tuple[float, float, float]
    raw_seconds: list[float]


def rows_of(
    key: str, work: Workload, seconds: Mapping[str, list[float]], ceilings: Mapping[str, tuple[str, ...]]
) -> list[Row]:
    """A row for each method, compared with the slowest of its ``ceilings`` in the same round."""
    rows = []
    for name, values in seconds.items():
        limit = [max(round_) for round_ in zip(*(seconds[ceiling] for ceiling in ceilings[name]), strict=True)]
        gb_per_s = spread([work.nbytes / 1e9 / value for value in values])
        ratio = spread([least / own for least, own in zip(limit, values, strict=True)])
        rows.append(Row(key, work.name, name, gb_per_s, ratio, values))
    return rows


def gpu_document() -> dict[str, Any]:
    """The machine, its GPU and the CUDA engine; ends the process where there is no such thing."""
    reason = missing()
    if reason is not None:
        sys.exit(f"{Path(sys.argv[0]).stem}: {reason}")
    return {
        "machine": machine(),
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "engine": describe_build("cuda").compiler,
    }


def chosen_workloads(arguments: argparse.Namespace) -> Iterator[tuple[str, Workload]]:
    """The workloads that the command line names, one after the other; the memory of each is freed before the next."""
    made = workloads(0.01 if arguments.small else 1.0)
    for key in arguments.workloads:
        work = made[key]()
        print(work.name, file=sys.stderr, flush=True)
        yield key, work
        del work
        gc.collect()
        torch.cuda.empty_cache()


def page(title: str, document: Mapping[str, Any], text: Sequence[str], rows: Sequence[Row], goals: Goals) -> str:
    """The results as Markdown; ``text`` comes before the table, ``goals`` are by method and workload."""
    cells = [
        [
            row.workload,
            row.method,
            *(f"{value:.1f}" for value in row.gb_per_s),
            *(f"{value:.2f}" for value in row.ratio),
            f"{goals[row.method, row.key]:.2f}" if (row.method, row.key) in goals else "",
        ]
        for row in rows
    ]
    head = ["workload", "method", "GB/s min", "median", "max", "ratio min", "median", "max", "goal"]
    engine = f"{document['gpu']}, CUDA {document['cuda']}, engine built by {document['engine']}."
    about = [f"# {title}", "", engine, "", *describe(document["machine"]), "", *text]
    return "\n".join([*about, *table(head, cells, text_columns=2)]) + "\n"


def measure(key: str, work: Workload, rounds: int, repeats: int, rotated: int) -> list[Row]:
    with ExitStack() as stack:
        compared = methods(work, stack, rotated)
        seconds: dict[str, list[float]] = {name: [] for name in compared}
        for number in range(rounds + 2):  # two to warm up
            for name, sets in compared.items():
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                count = max(repeats, len(sets))
                torch.cuda.synchronize()
                begin.record()
                for i in range(count):
                    sets[i % len(sets)]()
                end.record()
                end.synchronize()
                if number >= 2:
                    seconds[name].append(begin.elapsed_time(end) / 1e3 / count)
        torch.cuda.synchronize()
    return rows_of(key, work, seconds, {name: (CEILING.get(name, FLAT),) for name in seconds})


def main() -> None:
    parser = benchmark_arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds of all methods")
    parser.add_argument("--repeats", type=int, default=5, help="runs in a row between two events")
    parser.add_argument("--workloads", nargs="+", default=["a", "a'", "b", "b'", "c"])
    arguments = parser.parse_args()
    document, rows = gpu_document(), []
    for key, work in chosen_workloads(arguments):
        rotated = 2 * work.nbytes if arguments.small else ROTATED_BYTES
        rows += measure(key, work, arguments.rounds, arguments.repeats, rotated)
    document["rows"] = [asdict(row) for row in rows]
    write_results(arguments.out, "gpu", document, page("Moving segments on a GPU", document, [], rows, TARGETS))


if __name__ == "__main__":
    main()
