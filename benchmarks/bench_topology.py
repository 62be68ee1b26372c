"""What slices cost: planning between topologies, and reading slices whose elements are not side by side.

    python benchmarks/bench_topology.py --out benchmarks/results --directory /a/disk
    python benchmarks/bench_topology.py --small --out /tmp/x --directory /tmp/x  # tests the benchmark itself

Plans are of one rank, of mixtures of experts whose data and expert parallel sizes change. Reading fills what one rank
has of the weights of a model's row parallel layers at another tensor parallel size (runs of a row each), and beside it,
in the same process and turn by turn, as many bytes of column parallel ones (one range). Files are in the page cache.
Writes topology.json (every sample) and topology.md (the tables).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import Others, benchmark_arguments, describe, machine, noise, spread, table, write_results

from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.core.layout import (
    Layout,
    Param,
    group_split_layout,
    joined_layouts,
    layout_from_sub_groups,
    with_slices,
)
from zeroelastic.core.plan import check_plan, make_plan
from zeroelastic.core.slices import RankSet, Strip, strips_of_box
from zeroelastic.deepspeed.fill import Target, fill

HIDDEN, EXPERT, LAYERS, VOCABULARY = 5120, 2048, 94, 151936
"""Of a mixture with 128 experts in each layer: 400 billion parameters."""

MOST_SECONDS, LEAST_SPEED = 0.1, 0.5
"""The goals: of the plan of one rank, and of the speed of strided reading in that of contiguous reading."""


@dataclass(frozen=True)
class PlanCase:
    """A mixture of experts, and two numbers of ranks and of expert parallel ranks.

    ``by_name``: each expert is a parameter, as in DeepSpeed's own layer; else those of a layer are one, as with AutoEP.
    """

    name: str
    experts: int
    by_name: bool
    stage: int
    src: tuple[int, int] = (4096, 64)
    dst: tuple[int, int] = (3072, 48)
    layers: int = LAYERS


def plan_cases(small: bool) -> list[PlanCase]:
    sizes: dict[str, Any] = {"src": (64, 8), "dst": (48, 6), "layers": 3} if small else {}
    kinds = [(128, False, "128 by layer"), (192, False, "192 by layer"), (192, True, "192 one by one")]
    return [
        PlanCase(f"{name}, stage {stage}", experts, by_name, stage, **sizes)
        for experts, by_name, name in kinds
        for stage in (3, 2)
    ]


def mixture_layout(case: PlanCase, ranks: int, ep: int) -> Layout:
    """The layout over all ranks. Experts that ``ep`` does not divide are cut unevenly, which DeepSpeed never does."""
    inner = EXPERT * 128 // case.experts
    dense = [Param("embed", (VOCABULARY, HIDDEN)), Param("head", (VOCABULARY, HIDDEN)), Param("norm", (HIDDEN,))]
    for layer in range(case.layers):
        shapes: dict[str, tuple[int, ...]] = {
            "q": (8192, HIDDEN),
            "k": (512, HIDDEN),
            "v": (512, HIDDEN),
            "o": (HIDDEN, 8192),
            "q_norm": (128,),
            "k_norm": (128,),
            "norm1": (HIDDEN,),
            "norm2": (HIDDEN,),
            "router": (case.experts, HIDDEN),
        }
        dense += [Param(f"layers.{layer}.{name}", shape) for name, shape in shapes.items()]
    weights = {"w1": (inner, HIDDEN), "w3": (inner, HIDDEN), "w2": (HIDDEN, inner)}
    layouts = []
    for number in range(ep):
        first, end = case.experts * number // ep, case.experts * (number + 1) // ep
        mine: list[Param] = []
        views: dict[str, tuple[Param, Sequence[Strip]]] = {}
        for layer in range(case.layers):
            for key, shape in weights.items():
                name = f"layers.{layer}.experts.{key}"
                if case.by_name:
                    mine += [Param(f"{name}.{expert}", shape) for expert in range(first, end)]
                    continue
                whole = (case.experts, *shape)
                mine.append(Param(name, (end - first, *shape)))
                box = [(first, end - first), *((0, size) for size in shape)]
                views[name] = (Param(name, whole), strips_of_box(whole, box))
        make = layout_from_sub_groups if case.stage == 3 else group_split_layout
        layout = make([[] if number else dense, mine], ranks, num_parts=[ranks, ranks // ep])
        layouts.append(with_slices(layout, [RankSet(0, 1, ranks), RankSet(number, ep, ranks // ep)], views))
    return joined_layouts(layouts)


@dataclass(frozen=True)
class PlanRow:
    """Seconds are min, median and max over ranks; ``numel`` is of the whole tensors."""

    case: str
    src: tuple[int, int]
    dst: tuple[int, int]
    numel: int
    num_slices: int
    num_segments: int
    source_files: int
    plan_s: tuple[float, float, float]
    other_cpu: float


def measure_plan(case: PlanCase, samples: int) -> PlanRow:
    src, dst = mixture_layout(case, *case.src), mixture_layout(case, *case.dst)
    others = Others()
    seconds, found = [], None
    for rank in sorted({i * case.dst[0] // samples for i in range(samples)}):
        begin = time.perf_counter()
        found = make_plan(src, dst.on_rank(rank), rank)
        seconds.append(time.perf_counter() - begin)
        check_plan(found)
    assert found is not None
    return PlanRow(
        case=case.name,
        src=case.src,
        dst=case.dst,
        numel=sum(tensor.numel for tensor in src.whole_tensors),
        num_slices=src.num_params,
        num_segments=found.num_segments,
        source_files=len(found.source_ranks),
        plan_s=spread(seconds),
        other_cpu=others.share(),
    )


@dataclass(frozen=True)
class ReadCase:
    """The row parallel weights of some layers, and two tensor parallel sizes."""

    name: str
    shapes: tuple[tuple[int, int], ...]
    layers: int
    src: int
    dst: int
    data_size: int = 1


def read_cases(small: bool) -> list[ReadCase]:
    models = {"7B": (((4096, 4096), (4096, 11008)), 8), "70B": (((8192, 8192), (8192, 28672)), 2)}
    if small:
        models = {"tiny": (((64, 64), (64, 176)), 2)}
    cases = [ReadCase(f"Llama {name}", shapes, layers, 8, 4) for name, (shapes, layers) in models.items()]
    more = [(8, 4, 4), (4, 8, 1), (2, 4, 1)]
    name, (shapes, layers) = next(iter(models.items()))
    return cases + [ReadCase(f"Llama {name}", shapes, layers, *sizes) for sizes in more]


def dense_layout(case: ReadCase, size: int, dim: int) -> Layout:
    """The layout at stage 3 over all ranks, of weights that are cut in one dimension."""
    layouts = []
    for t in range(size):
        local: list[Param] = []
        views: dict[str, tuple[Param, Sequence[Strip]]] = {}
        for layer in range(case.layers):
            for number, shape in enumerate(case.shapes):
                name = f"layers.{layer}.{number}"
                box = [(0, length) for length in shape]
                box[dim] = (t * shape[dim] // size, shape[dim] // size)
                local.append(Param(name, tuple(length for _, length in box)))
                views[name] = (Param(name, shape), strips_of_box(shape, box))
        layout = layout_from_sub_groups([local], size * case.data_size, num_parts=[case.data_size])
        layouts.append(with_slices(layout, [RankSet(t, size, case.data_size)], views))
    return joined_layouts(layouts)


@dataclass(frozen=True)
class ReadRow:
    """Bytes per second, min, median and max over rounds, of weights that are cut in dimension 0 and in dimension 1."""

    case: str
    sizes: tuple[int, int]
    data_size: int
    digest: bool
    nbytes: int
    num_rows: int
    num_runs: int
    bytes_read: int
    contiguous: tuple[float, float, float]
    strided: tuple[float, float, float]
    ratio: float
    other_cpu: float


def reader(case: ReadCase, dim: int, directory: Path) -> tuple[Callable[[bool], Any], int, int]:
    """A function that fills what rank 1 has, from files that are made here; the rows of its plan, and their runs."""
    src, dst = dense_layout(case, case.src, dim), dense_layout(case, case.dst, dim)
    mine = dst.on_rank(1)
    plan = make_plan(src, mine, 1)
    check_plan(plan)
    assert src.slices is not None
    extents = {}
    for rank in plan.source_ranks:
        own = src.on_rank(rank)
        path = directory / f"{case.src}-{dim}-{rank}"
        (np.arange(int(own.sub_group_numel[0]), dtype=np.float32) + rank).tofile(path)
        places = TensorExtents(path, {0: "float32"}, own.offset * 4)
        extents[rank] = {"fp32": places.among(np.flatnonzero(src.slices.has(rank)), src.num_params)}
    target = Target("fp32", 0, torch.zeros(int(mine.sub_group_numel[0])), "float32")
    runs = plan.num_segments if plan.runs is None else int(plan.runs.count.sum())
    return lambda digest: fill(plan, extents, [target], digest=digest), plan.num_segments, runs


def measure_read(case: ReadCase, rounds: int, directory: Path) -> list[ReadRow]:
    rows = []
    with tempfile.TemporaryDirectory(dir=directory) as place:
        readers = [reader(case, dim, Path(place)) for dim in (0, 1)]
        for digest in (False, True):
            others = Others()
            speeds: list[list[float]] = [[], []]
            filled = None
            for turn in range(rounds + 1):
                for dim, (read, _, _) in enumerate(readers):
                    begin = time.perf_counter()
                    filled = read(digest)
                    if turn:  # the first makes the memory
                        speeds[dim].append(filled.bytes_owned / (time.perf_counter() - begin))
            assert filled is not None
            contiguous, strided = spread(speeds[0]), spread(speeds[1])
            ratios = sorted(s / c for c, s in zip(*speeds, strict=True))
            rows.append(
                ReadRow(
                    case=case.name,
                    sizes=(case.src, case.dst),
                    data_size=case.data_size,
                    digest=digest,
                    nbytes=filled.bytes_owned,
                    num_rows=readers[1][1],
                    num_runs=readers[1][2],
                    bytes_read=filled.bytes_read,
                    contiguous=contiguous,
                    strided=strided,
                    ratio=ratios[len(ratios) // 2],
                    other_cpu=others.share(),
                )
            )
    return rows


def tables(document: dict[str, Any], plans: Sequence[PlanRow], reads: Sequence[ReadRow]) -> str:
    """The results as Markdown."""
    lines = [
        "# Slices of tensors",
        "",
        *describe(document["machine"]),
        "",
        "The plan of one rank, in milliseconds. Expert parallel ranks (ep) share the experts: 192 of them evenly, 128 "
        "not by 48, which DeepSpeed would refuse.",
        "",
        *table(
            ["experts", "ranks (ep)", "to", "10^9 parameters", "slices", "rows", "files", "ms min", "median", "max",
             "others' cpu"],
            [
                [row.case, f"{row.src[0]} ({row.src[1]})", f"{row.dst[0]} ({row.dst[1]})", f"{row.numel / 1e9:.0f}",
                 f"{row.num_slices:,}", f"{row.num_segments:,}", str(row.source_files),
                 *(f"{1e3 * seconds:.1f}" for seconds in row.plan_s), f"{row.other_cpu:.0%}"]
                for row in plans
            ],
        ),
        "",
        f"The goal is at most {1e3 * MOST_SECONDS:.0f} ms.",
        "",
        "Reading what one rank has of row parallel weights at another tensor parallel size (tp), where each row of the "
        "plan is many runs, and of column parallel weights of the same sizes, in GB/s; medians, and the median of the "
        "ratios of neighbouring rounds.",
        "",
        *table(
            ["weights", "tp", "data parallel size", "digests", "MB", "rows", "runs", "contiguous", "strided", "ratio",
             "read / owned", "others' cpu"],
            [
                [row.case, f"{row.sizes[0]} -> {row.sizes[1]}", str(row.data_size), "yes" if row.digest else "no",
                 f"{row.nbytes / 1e6:.0f}", f"{row.num_rows:,}", f"{row.num_runs:,}", f"{row.contiguous[1] / 1e9:.1f}",
                 f"{row.strided[1] / 1e9:.1f}", f"{row.ratio:.2f}", f"{row.bytes_read / row.nbytes:.3f}",
                 f"{row.other_cpu:.0%}"]
                for row in reads
            ],
        ),
        "",
        f"The goal is a ratio of at least {LEAST_SPEED} at tp 8 -> 4.",
    ]  # fmt: skip
    lines += noise([row.other_cpu for row in [*plans, *reads]])
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = benchmark_arguments(__doc__)
    parser.add_argument("--samples", type=int, default=9, help="ranks whose plan is timed")
    parser.add_argument("--rounds", type=int, default=15, help="turns of reading")
    arguments = parser.parse_args()
    about = machine()
    plans = []
    for case in plan_cases(arguments.small):
        print(case.name, file=sys.stderr, flush=True)
        plans.append(measure_plan(case, arguments.samples))
    reads = []
    for read in read_cases(arguments.small):
        print(read.name, read.src, read.dst, file=sys.stderr, flush=True)
        reads += measure_read(read, arguments.rounds, arguments.directory or Path(tempfile.gettempdir()))
    about["load_average_after"] = os.getloadavg()[0]
    document = {"machine": about, "plans": [asdict(row) for row in plans], "reads": [asdict(row) for row in reads]}
    write_results(arguments.out, "topology", document, tables(document, plans, reads))


if __name__ == "__main__":
    main()
