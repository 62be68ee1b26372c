"""What planning costs: time and memory of one rank's plan, and of the plans of a whole offline reshard.

    python benchmarks/bench_plan.py --out benchmarks/results
    python benchmarks/bench_plan.py --small --out /tmp/x  # tests the benchmark itself

Writes plan.json (every sample) and plan.md (the table). What is measured and how is in PLAN.md.
"""

from __future__ import annotations

import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from bench_kernel import gpt_params, llama_params
from report import Others, benchmark_arguments, describe, machine, noise, spread, table, write_results

from zeroelastic.core.layout import Layout, Param, layout_from_sub_groups, pack_sub_groups
from zeroelastic.core.plan import Plan, check_plan, make_plan


def mixture_params() -> list[Param]:
    """A 671B mixture of experts: 61 layers, 256 routed experts in 58 of them, low-rank attention."""
    hidden, ffn, expert, experts, vocab = 7168, 18432, 2048, 256, 129280
    q_rank, kv_rank, heads = 1536, 512, 128
    params = [Param("embed", (vocab, hidden))]
    for layer in range(61):
        shapes: dict[str, tuple[int, ...]] = {
            "q_a": (q_rank, hidden),
            "q_a_norm": (q_rank,),
            "q_b": (heads * 192, q_rank),
            "kv_a": (kv_rank + 64, hidden),
            "kv_a_norm": (kv_rank,),
            "kv_b": (heads * 256, kv_rank),
            "o": (hidden, heads * 128),
            "input_norm": (hidden,),
            "post_norm": (hidden,),
        }
        if layer < 3:
            mlps = {"mlp": ffn}
        else:
            mlps = {"shared": expert, **{f"experts.{e}": expert for e in range(experts)}}
            shapes["router"] = (experts, hidden)
            shapes["router_bias"] = (experts,)
        for name, inner in mlps.items():
            shapes |= {
                f"{name}.gate": (inner, hidden),
                f"{name}.up": (inner, hidden),
                f"{name}.down": (hidden, inner),
            }
        params += [Param(f"layers.{layer}.{name}", shape) for name, shape in shapes.items()]
    return [*params, Param("norm", (hidden,)), Param("head", (vocab, hidden))]


def many_params(count: int) -> list[Param]:
    """``count`` parameters of 1 to about a million elements."""
    rng = np.random.default_rng(0)
    numel = np.exp(rng.uniform(0, np.log(1e6), count)).astype(np.int64)
    return [Param(f"p{i}", (int(n),)) for i, n in enumerate(numel)]


@dataclass(frozen=True)
class Case:
    """A model and two world sizes."""

    name: str
    params: Callable[[], list[Param]]
    src_size: int
    dst_size: int


CASES = (
    Case("GPT 1.3B, 8 -> 6", lambda: gpt_params(24, 2048), 8, 6),
    Case("Llama-3 70B, 512 -> 480", lambda: llama_params(80, 8192, 28672, 1024, 128256), 512, 480),
    Case("Llama-3 405B, 16384 -> 12288", lambda: llama_params(126, 16384, 53248, 1024, 128256), 16384, 12288),
    Case("671B mixture of experts, 2048 -> 1536", mixture_params, 2048, 1536),
    Case("1,000,000 parameters, 64 -> 48", lambda: many_params(1_000_000), 64, 48),
)
SMALL = (
    Case("GPT 1.3B, 8 -> 6", lambda: gpt_params(24, 2048), 8, 6),
    Case("Llama-3 70B, 512 -> 480", lambda: llama_params(80, 8192, 28672, 1024, 128256), 512, 480),
    Case("5,000 parameters, 64 -> 48", lambda: many_params(5000), 64, 48),
)
MOST_SECONDS = 1.0
"""The limit for the plan of one rank."""


@dataclass(frozen=True)
class Row:
    """One case. Seconds of one rank's plan are min, median, max over its samples; so are seconds of its processor time.

    ``plan_bytes`` is the size of the middle rank's plan, ``plan_peak_bytes`` what is allocated at the peak of making
    it, the plan included. ``all_ranks_s`` is the time of all ranks' plans, one after the other; where it is not
    measured, the median times the ranks. ``match_s``: the same plan when no parameter is the same object in both
    layouts, as after reading one from a file.
    """

    case: str
    num_params: int
    numel: int
    src_size: int
    dst_size: int
    layouts_s: float
    num_segments: int
    source_files: int
    plan_s: tuple[float, float, float]
    plan_cpu_s: tuple[float, float, float]
    match_s: float
    plan_bytes: int
    plan_peak_bytes: int
    all_ranks_s: float
    all_ranks_measured: bool
    other_cpu: float


def layout(params: list[Param], world_size: int, sub_group_size: int) -> Layout:
    sub_groups = pack_sub_groups([params], world_size=world_size, sub_group_size=sub_group_size)
    return layout_from_sub_groups(sub_groups, world_size)


def plan_bytes(plan: Plan) -> int:
    """The size of a plan's columns."""
    columns = [getattr(plan, field.name) for field in fields(plan)]
    return sum(column.nbytes for column in columns if isinstance(column, np.ndarray))


def measure(case: Case, sub_group_size: int, samples: int, whole_s: float) -> Row:
    params = case.params()
    others = Others()
    begin = time.perf_counter()
    src, dst = (layout(params, size, sub_group_size) for size in (case.src_size, case.dst_size))
    layouts_s = time.perf_counter() - begin
    seconds: list[float] = []
    cpu_seconds: list[float] = []

    def timed(rank: int) -> Plan:
        begin, cpu_begin = time.perf_counter(), time.process_time()
        plan = make_plan(src, dst, rank)
        cpu_seconds.append(time.process_time() - cpu_begin)
        seconds.append(time.perf_counter() - begin)
        return plan

    for rank in sorted({i * case.dst_size // samples for i in range(samples)}):
        check_plan(timed(rank))
    plan_s, plan_cpu_s = spread(seconds), spread(cpu_seconds)
    total = plan_s[1] * case.dst_size
    measured = total <= whole_s
    if measured:
        begin = time.perf_counter()
        for rank in range(case.dst_size):
            make_plan(src, dst, rank)
        total = time.perf_counter() - begin
    other_cpu = others.share()
    copied = layout([Param(param.name, param.shape) for param in params], case.src_size, sub_group_size)
    begin = time.perf_counter()
    make_plan(copied, dst, 0)
    match_s = time.perf_counter() - begin
    tracemalloc.start()
    plan = make_plan(src, dst, case.dst_size // 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    check_plan(plan)
    return Row(
        case=case.name,
        num_params=len(params),
        numel=int(src.numel.sum()),
        src_size=case.src_size,
        dst_size=case.dst_size,
        layouts_s=layouts_s,
        num_segments=plan.num_segments,
        source_files=len(plan.source_ranks),
        plan_s=plan_s,
        plan_cpu_s=plan_cpu_s,
        match_s=match_s,
        plan_bytes=plan_bytes(plan),
        plan_peak_bytes=peak,
        all_ranks_s=total,
        all_ranks_measured=measured,
        other_cpu=other_cpu,
    )


def tables(document: dict[str, Any], rows: Sequence[Row]) -> str:
    """The results as Markdown."""
    mib = 1 << 20
    lines = [
        "# Planning",
        "",
        *describe(document["machine"]),
        "",
        "A rank's plan, in milliseconds; everything else in seconds and MiB. A `~` marks what was not measured but "
        "multiplied from the median.",
        "",
        *table(
            ["case", "parameters", "segments", "files", "ms min", "median", "max", "cpu ms", "other objects, ms",
             "plan MiB", "peak MiB", "both layouts s", "all ranks s", "others' cpu"],
            [
                [row.case, f"{row.num_params:,}", f"{row.num_segments:,}", str(row.source_files),
                 *(f"{1e3 * seconds:.2f}" for seconds in row.plan_s), f"{1e3 * row.plan_cpu_s[1]:.2f}",
                 f"{1e3 * row.match_s:.2f}", f"{row.plan_bytes / mib:.1f}", f"{row.plan_peak_bytes / mib:.1f}",
                 f"{row.layouts_s:.3f}", f"{'' if row.all_ranks_measured else '~'}{row.all_ranks_s:.2f}",
                 f"{row.other_cpu:.0%}"]
                for row in rows
            ],
        ),
        "",
        f"The goal is less than {MOST_SECONDS:.0f} s for the plan of one rank of a million parameters.",
    ]  # fmt: skip
    lines += noise([row.other_cpu for row in rows])
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = benchmark_arguments(__doc__)
    parser.add_argument("--samples", type=int, default=9, help="ranks whose plan is timed alone and checked")
    parser.add_argument("--whole-seconds", type=float, default=60.0, help="plan all ranks where that takes no longer")
    parser.add_argument("--sub-group-size", type=int, default=10**9)
    arguments = parser.parse_args()
    about = machine()
    rows = []
    for case in SMALL if arguments.small else CASES:
        print(case.name, file=sys.stderr, flush=True)
        rows.append(measure(case, arguments.sub_group_size, arguments.samples, arguments.whole_seconds))
    about["load_average_after"] = os.getloadavg()[0]
    document = {"machine": about, "rows": [asdict(row) for row in rows]}
    write_results(arguments.out, "plan", document, tables(document, rows))


if __name__ == "__main__":
    main()
