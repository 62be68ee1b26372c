"""What a change of size moves between processes, at 8 to 16,384 ranks: with the ranks that we assign, and in order.

    python benchmarks/bench_resize_plan.py --out benchmarks/results

Simulated: layouts of a GPT as ZeRO-3 and ZeRO-1 and 2 cut it, and no process. For each pair of world sizes it is
counted which share of the elements the processes of the new world do not hold already: if they get the ranks that a
running job gives them (``elastic.world_changes.by_rank``, with the layouts of both sizes); if the survivors are
numbered in order, as torchrun does; and at least, by ``least_moved``.

Writes resize_plan.json, resize_plan.md and resize_plan.png. Shares, unlike times, do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import report

from zeroelastic.core.layout import Layout, Param, group_split_layout, layout_from_sub_groups
from zeroelastic.core.movement import Recut, least_moved, moved_elements
from zeroelastic.elastic.world_changes import by_rank

CHANGES = (
    (8, 6),
    (64, 63),
    (64, 72),
    (1024, 1000),
    (1024, 1032),
    (16_384, 16_383),
    (16_384, 16_376),
    (16_384, 12_288),
)
SEED = 0
REPEATS = 3
LAYERS, HIDDEN, VOCABULARY, POSITIONS = 96, 12_288, 50_257, 2048


def gpt() -> list[list[Param]]:
    """The parameters of a GPT of 175 billion, in two optimizer groups: with weight decay and without."""
    decayed, others = [Param("wte", (VOCABULARY, HIDDEN)), Param("wpe", (POSITIONS, HIDDEN))], []
    for i in range(LAYERS):
        for name, rows, columns in (("qkv", 3, 1), ("proj", 1, 1), ("up", 4, 1), ("down", 1, 4)):
            decayed.append(Param(f"h.{i}.{name}.weight", (rows * HIDDEN, columns * HIDDEN)))
            others.append(Param(f"h.{i}.{name}.bias", (rows * HIDDEN,)))
        others += [Param(f"h.{i}.{name}", (HIDDEN,)) for name in ("ln_1.w", "ln_1.b", "ln_2.w", "ln_2.b")]
    return [decayed, [*others, Param("ln_f.w", (HIDDEN,)), Param("ln_f.b", (HIDDEN,))]]


STAGES: dict[str, Callable[[list[list[Param]], int], Layout]] = {
    "ZeRO-3": layout_from_sub_groups,
    "ZeRO-1 and 2": group_split_layout,
}


def survivors_of(old: int, new: int) -> dict[str, list[int]]:
    """Who stays, by which ranks leave; all of them where the job grows."""
    leave = old - new
    if leave <= 0:
        return {"none": list(range(old))}
    gone = {
        "random": random.Random(SEED).sample(range(old), leave),
        "evenly": [(2 * i + 1) * old // (2 * leave) for i in range(leave)],
        "the first": range(leave),
        "in the middle": range((old - leave) // 2, (old + leave) // 2),
    }
    return {name: [rank for rank in range(old) if rank not in set(ranks)] for name, ranks in gone.items()}


def measure(changes: Sequence[tuple[int, int]], model: list[list[Param]]) -> list[dict[str, Any]]:
    """The shares of each change of size and stage, and what an assignment takes."""
    rows = []
    for old, new in changes:
        for leaves, survivors in survivors_of(old, new).items():
            row: dict[str, Any] = {"old": old, "new": new, "leave": leaves, "shares": {}, "taken": []}
            for stage, make in STAGES.items():
                before, after = make(model, old), make(model, new)
                members, taken = timed(assigning(before, after, survivors))
                row["taken"].append(taken)
                assigned = {
                    "assigned": {member: rank for rank, member in enumerate(members) if member < old},
                    "in order": {rank: place for place, rank in enumerate(survivors)},
                }
                total = int(after.numel.sum())
                shares = {way: moved_elements(before, after, chosen) / total for way, chosen in assigned.items()}
                row["shares"][stage] = shares | {"least": least_moved(before, after, survivors) / total}
            rows.append(row)
    return rows


def assigning(before: Layout, after: Layout, survivors: Sequence[int]) -> Callable[[], tuple[int, ...]]:
    """What gives the members of the next world by rank; members are numbered as in the old one, newcomers above."""
    old = before.world_size
    newcomers = range(old, old + after.world_size - len(survivors))
    return lambda: by_rank(range(old), survivors, newcomers, [Recut(before, after)])


def timed(assign: Callable[[], tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[float, int]]:
    """What an assignment gives, the median of the seconds that it takes, and its peak of memory in bytes."""
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        assign()
        seconds.append(time.perf_counter() - began)
    tracemalloc.start()
    members = assign()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return members, (median(seconds), peak)


def largest_ratio(rows: Sequence[Mapping[str, Any]], way: str) -> float:
    """The most that a way of assigning ranks moves, in parts of what every assignment moves."""
    every = [share for row in rows for share in row["shares"].values()]
    return max(share[way] / share["least"] for share in every)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The shares as a page."""
    lines = [
        "# What a change of size moves between processes",
        "",
        f"Layouts of a GPT with {LAYERS} layers of {HIDDEN:,}, counted (`benchmarks/bench_resize_plan.py`): the share",
        "of the elements that the processes of the new world do not hold already. *assigned*: they have the ranks that",
        "`zeroelastic.elastic.worlds` gives them; *in order*: the survivors are numbered in order, as torchrun does;",
        "*at least*: no assignment of ranks moves less.",
        "",
    ]
    for stage in STAGES:
        lines += [
            f"## {stage}",
            "",
            "| ranks | leave | assigned | in order | at least | assigned / least | in order / least |",
            "|---|---|--:|--:|--:|--:|--:|",
        ]
        for row in rows:
            share = row["shares"][stage]
            numbers = [f"{100 * share[way]:.2f}%" for way in ("assigned", "in order", "least")]
            numbers += [f"{share[way] / share['least']:.3f}" for way in ("assigned", "in order")]
            lines.append(f"| {row['old']:,} -> {row['new']:,} | {row['leave']} | {' | '.join(numbers)} |")
        lines.append("")
    seconds, peaks = zip(*(each for row in rows for each in row["taken"]), strict=True)
    lines += [
        f"A change of size moves at most {largest_ratio(rows, 'assigned'):.3f} times what is necessary. An assignment",
        f"takes at most {max(seconds):.2f} s and {max(peaks) / 2**20:.0f} MiB, on rank 0.",
        "",
    ]
    return "\n".join(lines)


def plot(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The shares of ZeRO-3 as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 0.32 * len(rows) + 1.4))
    names = {"in order": "in order, as torchrun numbers", "assigned": "assigned", "least": "at least"}
    for place, (name, label) in enumerate(names.items()):
        shares = [100 * row["shares"]["ZeRO-3"][name] for row in rows]
        axis.barh([i + 0.27 * (place - 1) for i in range(len(rows))], shares, height=0.25, label=label)
    axis.set_yticks(range(len(rows)), [f"{row['old']:,} -> {row['new']:,}, {row['leave']}" for row in rows], fontsize=7)
    axis.invert_yaxis()
    axis.set(xlabel="% of the elements that move between processes (ZeRO-3)")
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--most", type=int, default=16_384, help="the largest world size")
    arguments = parser.parse_args()
    rows = measure([change for change in CHANGES if max(change) <= arguments.most], gpt())
    arguments.out.mkdir(parents=True, exist_ok=True)
    document = {"machine": report.machine(), "changes": rows}
    (arguments.out / "resize_plan.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.out / "resize_plan.md").write_text(markdown(rows))
    plot(arguments.out / "resize_plan.png", rows)
    print(markdown(rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
