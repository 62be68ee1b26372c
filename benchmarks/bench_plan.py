"""What planning costs: time and memory of one rank's plan, and of the plans of a whole offline reshard.

    python benchmarks/bench_plan.py --json benchmarks/results/plan.json

A rank plans once per load, from parameter shapes alone; nothing is communicated. Memory is what numpy allocates at
its peak, the plan included. Every plan that is timed is checked afterwards: each owned element exactly once.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from bench_kernel import gpt_params, llama_params, machine

from zeroelastic.layout import Layout, Param, layout_from_sub_groups, pack_sub_groups
from zeroelastic.plan import check_plan, make_plan


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
    name: str
    params: Callable[[], list[Param]]
    src_size: int
    dst_size: int
    whole: bool = False  # plan every rank, not a sample


CASES = (
    Case("GPT 1.3B, 8 -> 6", lambda: gpt_params(24, 2048), 8, 6, whole=True),
    Case("Llama-3 70B, 512 -> 480", lambda: llama_params(80, 8192, 28672, 1024, 128256), 512, 480, whole=True),
    Case("Llama-3 405B, 16384 -> 12288", lambda: llama_params(126, 16384, 53248, 1024, 128256), 16384, 12288),
    Case("671B mixture of experts, 2048 -> 1536", mixture_params, 2048, 1536),
    Case("1,000,000 parameters, 64 -> 48", lambda: many_params(1_000_000), 64, 48),
)


@dataclass(frozen=True)
class Result:
    """Seconds are min, median, max; ``plan_cpu_s`` is the median of processor time.

    ``all_ranks_s`` is measured where ``all_ranks_measured``, else extrapolated from the median.
    """

    case: str
    num_params: int
    numel: int
    layouts_s: float
    num_segments: int
    source_files: int
    plan_s: tuple[float, float, float]
    plan_cpu_s: float
    plan_peak_bytes: int
    all_ranks_s: float
    all_ranks_measured: bool


def layout(params: list[Param], world_size: int, sub_group_size: int) -> Layout:
    sub_groups = pack_sub_groups([params], world_size=world_size, sub_group_size=sub_group_size)
    return layout_from_sub_groups(sub_groups, world_size)


def measure(case: Case, *, sub_group_size: int, sample: int) -> Result:
    params = case.params()
    begin = time.perf_counter()
    src, dst = (layout(params, size, sub_group_size) for size in (case.src_size, case.dst_size))
    layouts_s = time.perf_counter() - begin
    ranks = range(case.dst_size) if case.whole else sorted({i * case.dst_size // sample for i in range(sample)})
    seconds, cpu_seconds = [], []
    for rank in ranks:
        begin, cpu_begin = time.perf_counter(), time.process_time()
        plan = make_plan(src, dst, rank)
        cpu_seconds.append(time.process_time() - cpu_begin)
        seconds.append(time.perf_counter() - begin)
        if rank % max(1, case.dst_size // 5) == 0:
            check_plan(plan)
    middle = case.dst_size // 2
    tracemalloc.start()
    plan = make_plan(src, dst, middle)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    check_plan(plan)
    total = sum(seconds) if case.whole else median(seconds) * case.dst_size
    return Result(
        case=case.name,
        num_params=len(params),
        numel=int(src.numel.sum()),
        layouts_s=round(layouts_s, 4),
        num_segments=plan.num_segments,
        source_files=len(plan.source_ranks),
        plan_s=(min(seconds), median(seconds), max(seconds)),
        plan_cpu_s=median(cpu_seconds),
        plan_peak_bytes=peak,
        all_ranks_s=round(total, 3),
        all_ranks_measured=case.whole,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=9, help="ranks that are planned where not all are")
    parser.add_argument("--sub-group-size", type=int, default=10**9)
    parser.add_argument("--json", type=Path, help="where raw figures go")
    arguments = parser.parse_args()
    about = machine()
    results = []
    head = f"{'case':40}{'params':>9}{'layouts s':>10}{'segments':>9}{'files':>6}{'ms min':>9}{'median':>9}"
    print(f"{head}{'max':>9}{'cpu ms':>9}{'peak MiB':>9}{'all ranks s':>12}")
    for case in CASES:
        result = measure(case, sub_group_size=arguments.sub_group_size, sample=arguments.sample)
        results.append(result)
        low, middle, high = (1e3 * seconds for seconds in result.plan_s)
        print(
            f"{result.case:40}{result.num_params:9}{result.layouts_s:10.3f}{result.num_segments:9}"
            f"{result.source_files:6}{low:9.2f}{middle:9.2f}{high:9.2f}{1e3 * result.plan_cpu_s:9.2f}"
            f"{result.plan_peak_bytes / 2**20:9.1f}{result.all_ranks_s:12.2f}"
            f"{'' if result.all_ranks_measured else '~'}",
            flush=True,
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        document = {"machine": about, "rows": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
