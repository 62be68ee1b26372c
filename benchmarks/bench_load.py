"""What resuming on another number of ranks costs, system by system, on the same saved state in one run.

    python benchmarks/bench_load.py --out benchmarks/results          # 200M parameters, 4 -> 3 ranks
    python benchmarks/bench_load.py --small --repeats 1 --out /tmp/x  # a few million parameters, a minute

Writes load.json (every sample) and load.md (the tables). README.md says how it is measured.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from statistics import median
from typing import Any

from figures import times
from load_systems import (
    FEW_ROUNDS,
    RESHARDED,
    SAME_SIZE,
    Job,
    Sample,
    convert,
    filesystem,
    job_arguments,
    link_views,
    measure,
    num_rounds,
    save_all,
    temporary_job,
)
from meter import others_share
from report import describe, machine, noise, write_results

from zeroelastic.testing import RankPool

TITLES = {
    **{system.name: system.title for system in RESHARDED if system.checkpoint != "universal"},
    "universal-convert": "Universal Checkpoint, convert",
    "universal-load": "Universal Checkpoint, load",
    "universal": "Universal Checkpoint, convert + load",
    **{system.name: system.title for system in SAME_SIZE},
}
"""The systems in the order of the tables."""

OURS = ("tensors", "elastic-quick", "elastic-read", "elastic", "rigid-quick", "rigid-read", "rigid")
COMPARED = ("ceiling", "stock", "dcp", "universal")
_TIMEOUT_S = 7200.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One system under one state of the page cache. Seconds are of the slowest rank: min, median, max over rounds.

    ``first`` tells first loads, of a process or into new memory, from later ones. Bytes, files and memory are of the
    worst rank and the worst round; ``amplification`` is what all ranks together read, over the bytes of the state;
    ``other_cpu`` the median share of the processors that others used; ``reported`` the seconds of zeroelastic's report
    over those of a clock around the call and a barrier, least and most, and ``reported_of_call`` over those of a clock
    around the call.
    """

    system: str
    cache: str
    first: bool
    ranks: int
    seconds: tuple[float, float, float]
    cpu_seconds: float
    rank_bytes: int
    owned_bytes: int
    amplification: float
    mapped_bytes: int
    disk_bytes: int
    written_bytes: int
    files: int
    extra_rss: int
    other_cpu: float
    verified: bool
    raw_seconds: tuple[float, ...]
    reported: tuple[float, float] | None = None
    reported_of_call: tuple[float, float] | None = None


Round = Sequence[Sample]
"""The samples of all ranks for one system, cache and round, by rank."""


def summarise(rounds: Sequence[Round], state_bytes: int) -> Row:
    """One row from all rounds of a system."""
    seconds = [max(sample.cost.seconds for sample in ranks) for ranks in rounds]
    samples = [sample for ranks in rounds for sample in ranks]
    timed = [(sample.reported, sample) for sample in samples if sample.reported is not None]
    of_all = [seconds / sample.cost.seconds for seconds, sample in timed]
    of_call = [seconds / sample.call_seconds for seconds, sample in timed if sample.call_seconds is not None]
    others = [others_share([sample.cost for sample in ranks]) for ranks in rounds]
    return Row(
        system=samples[0].system,
        cache=samples[0].cache,
        first=samples[0].first,
        ranks=len(rounds[0]),
        seconds=(min(seconds), median(seconds), max(seconds)),
        cpu_seconds=median(sum(sample.cost.cpu_seconds for sample in ranks) for ranks in rounds),
        rank_bytes=max(sample.cost.bytes_in for sample in samples),
        owned_bytes=max(sample.owned_bytes for sample in samples),
        amplification=median(sum(sample.cost.bytes_in for sample in ranks) for ranks in rounds) / state_bytes,
        mapped_bytes=max(sample.cost.mapped_bytes for sample in samples),
        disk_bytes=max(sum(sample.cost.disk_bytes for sample in ranks) for ranks in rounds),
        written_bytes=max(sum(sample.cost.written_bytes for sample in ranks) for ranks in rounds),
        files=max(sample.cost.files for sample in samples),
        extra_rss=max(sample.cost.extra_rss for sample in samples),
        other_cpu=median(others),
        verified=not any(sample.wrong for sample in samples),
        raw_seconds=tuple(seconds),
        reported=(min(of_all), max(of_all)) if of_all else None,
        reported_of_call=(min(of_call), max(of_call)) if of_call else None,
    )


def add_universal(rows: Sequence[Row]) -> list[Row]:
    """The rows, with convert and load of Universal Checkpoint summed up after the load, for each cache."""
    found = {(row.system, row.cache): row for row in rows}
    result: list[Row] = []
    for row in rows:
        result.append(row)
        before = found.get(("universal-convert", row.cache))
        if row.system != "universal-load" or before is None:
            continue
        raw = tuple(a + b for a, b in zip(before.raw_seconds, row.raw_seconds, strict=False))
        low, middle, high = (a + b for a, b in zip(before.seconds, row.seconds, strict=True))
        result.append(
            replace(
                row,
                system="universal",
                seconds=(low, middle, high),
                cpu_seconds=before.cpu_seconds + row.cpu_seconds,
                rank_bytes=max(before.rank_bytes, row.rank_bytes),
                amplification=before.amplification + row.amplification,
                mapped_bytes=0,
                disk_bytes=before.disk_bytes + row.disk_bytes,
                written_bytes=before.written_bytes + row.written_bytes,
                files=before.files + row.files,
                extra_rss=max(before.extra_rss, row.extra_rss),
                other_cpu=max(before.other_cpu, row.other_cpu),
                raw_seconds=raw,
            )
        )
    return result


def run_all(
    job: Job, systems: set[str], caches: Sequence[str], repeats: int
) -> tuple[dict[str, Any], list[list[Sample]]]:
    """Save, convert, then load: what was saved, and the samples by rank of each group of ranks.

    Systems take turns within a round, and each round begins with another one. One that loads an engine has new
    processes each time; the others share one set in a round.
    """
    groups: list[list[Sample]] = []
    begun = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {what}", file=sys.stderr, flush=True)

    with RankPool() as pool:

        def on_ranks(fn: Callable[..., Any], world_size: int, *arguments: Any) -> Any:
            return pool.run(fn, world_size, *arguments, timeout=_TIMEOUT_S)

        say(f"saving on {job.save_ranks} ranks")
        forms = {system.checkpoint for system in (*RESHARDED, *SAME_SIZE) if system.name in systems}
        saved: dict[str, Any] = on_ranks(save_all, job.save_ranks, job, forms)[0]
        if "universal" in systems:
            for cache in sorted(caches):  # "warm" last; the cold conversion is long and disk-bound, once is enough
                say(f"converting to a universal checkpoint, {cache}")
                groups += on_ranks(convert, 1, job, cache, min(repeats, FEW_ROUNDS) if cache == "warm" else 1)
        link_views(job, max(job.save_ranks, job.load_ranks))
        chosen = [
            (ranks, system)
            for ranks, known in ((job.load_ranks, RESHARDED), (job.save_ranks, SAME_SIZE))
            for system in known
            if system.name in systems or (system.checkpoint == "universal" and "universal" in systems)
        ]
        for cache in caches:
            for number in range(1, repeats + 1):
                turns = [(ranks, s) for ranks, s in chosen if number <= num_rounds(s, cache, repeats)]
                together = [system.name for _, system in turns if not system.whole_engine]
                alone = [(ranks, [system.name]) for ranks, system in turns if system.whole_engine]
                parts = [(job.load_ranks, together)] * bool(together) + alone
                first = (number - 1) % len(parts) if parts else 0
                for ranks, names in parts[first:] + parts[:first]:
                    say(f"{cache}, round {number}: on {ranks} ranks: {', '.join(names)}")
                    groups += on_ranks(measure, ranks, job, names, cache, number)
    say("done")
    return saved, groups


def rounds_of(groups: Sequence[Sequence[Sample]]) -> dict[tuple[str, str, bool], list[Round]]:
    """The samples by system, cache and whether they are first loads, then by round, then by rank."""
    found: dict[tuple[str, str, bool], dict[int, list[Sample]]] = {}
    for samples in groups:
        for sample in samples:
            key = sample.system, sample.cache, sample.first
            found.setdefault(key, {}).setdefault(sample.round, []).append(sample)
    return {key: [by_round[number] for number in sorted(by_round)] for key, by_round in found.items()}


def tables(document: dict[str, Any], rows: Sequence[Row]) -> str:
    """The results as Markdown."""
    about, saved = document["machine"], document["saved"]
    stage = "" if document["stage"] == 3 else f", ZeRO stage {document['stage']}"
    lines = [
        f"# Loading: {document['save_ranks']} -> {document['load_ranks']} ranks{stage}",
        "",
        f"{saved['numel']:,} parameters in {saved['num_params']} tensors, {saved['state_bytes'] / 1e9:.2f} GB of fp32 "
        f"state (master weights, exp_avg, exp_avg_sq); {document['filesystem']}, DeepSpeed {about['deepspeed']}.",
        "",
        *describe(about),
    ]
    for cache, first in ((cache, first) for cache in document["caches"] for first in (True, False)):
        shown = [row for row in rows if (row.cache, row.first) == (cache, first)]
        lines += [
            "",
            f"## {cache.capitalize()} page cache: "
            + ("the first load of a new process, or into new memory" if first else "a later load of the same"),
            "",
            "| system | ranks | s min | median | max | MiB read per rank | read / state | files per rank | "
            "extra peak MiB | cpu-s | others' cpu | verified |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
        ]
        for row in shown:
            low, middle, high = row.seconds
            lines.append(
                f"| {TITLES[row.system]} | {row.ranks} | {low:.3f} | {middle:.3f} | {high:.3f} | "
                f"{row.rank_bytes / _MIB:.1f} | {row.amplification:.3f} | {row.files} | {row.extra_rss / _MIB:.1f} | "
                f"{row.cpu_seconds:.2f} | {row.other_cpu:.0%} | "
                f"{'' if row.system == 'universal-convert' else 'yes' if row.verified else '**NO**'} |"
            )
        found = {row.system: row for row in shown}
        ours = [name for name in OURS if name in found]
        compared = [name for name in COMPARED if name in found]
        if ours and compared:
            lines += [
                "",
                "How many times longer than zeroelastic (median over rounds; for the ceiling, the share of its speed "
                "that zeroelastic reaches):",
                "",
                "| | " + " | ".join(TITLES[name].removeprefix("zeroelastic, ") for name in ours) + " |",
                "|---|" + "--:|" * len(ours),
            ]
            for name in compared:
                cells = [f"{times(vars(found[mine]), vars(found[name])):.2f}" for mine in ours]
                lines.append(f"| {TITLES[name]} | " + " | ".join(cells) + " |")
        if "stock" in found:
            for mine in [name for name in ("same-quick", "same-read", "same", "same-rigid") if name in found]:
                times_ours = times(vars(found[mine]), vars(found["stock"]))
                lines += ["", f"{TITLES['stock']} against {TITLES[mine]}: {times_ours:.2f}."]
        of_all = [bound for row in shown for bound in row.reported or ()]
        of_call = [bound for row in shown for bound in row.reported_of_call or ()]
        if of_all and of_call:
            lines += [
                "",
                "Seconds of zeroelastic's own report over those of the call: "
                f"{min(of_call):.3f} to {max(of_call):.3f}; over those of the call and a barrier: "
                f"{min(of_all):.3f} to {max(of_all):.3f}.",
            ]
    lines += [
        "",
        "Saving, once each: "
        + "; ".join(
            f"{name} {seconds:.2f} s, {saved['file_bytes'][name] / 1e9:.3f} GB"
            for name, seconds in saved["save_seconds"].items()
        )
        + ". (elastic is made durable and digested, dcp made durable, rigid neither.)",
    ]
    lines += noise([row.other_cpu for row in rows])
    return "\n".join(lines) + "\n"


def main() -> None:
    known = (*RESHARDED, *SAME_SIZE)
    stages = {"universal" if one.checkpoint == "universal" else one.name: one.stages for one in known}
    parser = job_arguments(__doc__)
    parser.add_argument("--save-ranks", type=int, default=4)
    parser.add_argument("--load-ranks", type=int, default=3)
    parser.add_argument("--caches", nargs="+", choices=("warm", "cold"), default=["warm", "cold"])
    parser.add_argument("--systems", nargs="+", choices=stages)
    parser.add_argument("--ceiling-threads", type=int, default=2)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3, help="the ZeRO stage of both runs")
    arguments = parser.parse_args()
    stage = arguments.stage
    systems = arguments.systems or [name for name in stages if stage in stages[name]]
    if refused := [name for name in systems if stage not in stages[name]]:
        parser.error(f"of stage 3 alone: {', '.join(refused)}")
    about = machine() | {"deepspeed": version("deepspeed")}
    ranks = arguments.save_ranks, arguments.load_ranks
    options = {"ceiling_threads": arguments.ceiling_threads, "stage": stage}
    with temporary_job("bench-load", arguments, *ranks, **options) as job:
        where = filesystem(job.directory)
        saved, groups = run_all(job, set(systems), arguments.caches, arguments.repeats)
    about["load_average_after"] = os.getloadavg()[0]
    by_system = rounds_of(groups)
    rows = [summarise(rounds, saved["state_bytes"]) for rounds in by_system.values()]
    order = list(TITLES)
    rows = add_universal(sorted(rows, key=lambda row: (row.cache != "warm", not row.first, order.index(row.system))))
    document = {
        "machine": about,
        "filesystem": where,
        "save_ranks": job.save_ranks,
        "load_ranks": job.load_ranks,
        "stage": stage,
        "model": job.model,
        "caches": arguments.caches,
        "saved": saved,
        "rows": [asdict(row) for row in rows],
        "samples": [
            asdict(sample) | {"rank": rank}
            for rounds in by_system.values()
            for ranks in rounds
            for rank, sample in enumerate(ranks)
        ],
    }
    name = "load" if stage == 3 else f"load_stage{stage}"
    write_results(arguments.out, name, document, tables(document, rows))
    wrong = {f"{sample.system}: {line}" for samples in groups for sample in samples for line in sample.wrong}
    if wrong:
        sys.exit("not loaded right:\n  " + "\n  ".join(sorted(wrong)))


if __name__ == "__main__":
    main()
