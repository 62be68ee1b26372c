"""Writes the figures of docs/reliability.md from the raw results of the campaigns: ``make reliability``.

    python benchmarks/reliability.py            # writes the part of the page between its two marks
    python benchmarks/reliability.py --check    # exit status 1 if the page differs

A campaign without a result is shown as "not run yet"; a result of an unknown form is listed field by field.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs/reliability.md", ROOT / "benchmarks/results"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
NOT_RUN = "not run yet"

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Campaign:
    """A campaign: its result is ``results/NAME.json``, ``sentences`` describes it, one per line."""

    name: str
    target: str
    about: str
    sentences: Callable[[Result], list[str]]


def plain(result: Result) -> list[str]:
    """Every figure of a result: numbers, texts, and one level of mappings and lists of them."""
    lines = []
    for key, value in result.items():
        if key == "machine":  # shown with the link to the raw result
            continue
        name = key.replace("_", " ")
        if _is_figure(value):
            lines.append(f"{name}: {_figure(value)}")
        elif isinstance(value, Mapping) and value and all(map(_is_figure, value.values())):
            lines.append(f"{name}: " + _pairs(value))
        elif isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
            rows = [{k: v for k, v in row.items() if _is_figure(v)} for row in value]
            lines += [f"{name}: {_pairs(row)}" for row in rows if row]
    return lines


def _is_figure(value: object) -> bool:
    return isinstance(value, (int, float, str)) and len(str(value)) <= 80


def _figure(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _pairs(values: Result) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {_figure(value)}" for key, value in values.items())


def describe_crash_reshard(result: Result) -> list[str]:
    """`kill -9` of the offline verb."""
    outcomes = result["outcomes"]
    sizes = " -> ".join(map(str, result["world_sizes"]))
    stages = ", stage {} -> stage {}".format(*result["stages"]) if "stages" in result else ""
    return [
        f"{result['kills']} kills of a reshard {sizes} ranks{stages}, seed {result['seed']}: "
        f"{outcomes['absent']} left no target, {outcomes['complete']} a complete one; "
        "the source stayed the same byte for byte each time",
        f"{outcomes['resumed']} were run again and completed the target, with up to "
        f"{max(result['ranks_taken_over'])} ranks taken over from the killed run",
    ]


def describe_crash_training(result: Result) -> list[str]:
    """`kill -9` of jobs that save."""
    jobs = result.get("jobs", [result])
    errors = sum((Counter(job["errors_of_surviving_ranks"]) for job in jobs), Counter[str]())
    raised = _pairs(errors) if errors else "none"
    seeds = ", ".join(str(job["seed"]) for job in jobs)
    steps, minutes = sum(job["steps_trained"] for job in jobs), sum(job["minutes"] for job in jobs)
    return [
        f"{result['kills']} kills of one rank or all of {result['ranks']}, seed {seeds}, in {minutes:.0f} minutes and "
        f"{steps:,} steps; after each, `latest` and every tag that was saved verified, and a job of another size "
        "resumed with the recorded state",
        f"outcomes: {_pairs(result['outcomes'])}",
        f"errors of ranks that survived: {raised}",
    ]


def describe_crash_memory(result: Result) -> list[str]:
    """`kill -9` of jobs that keep checkpoints in memory."""
    jobs = result["jobs"]
    steps, minutes = sum(job["steps_trained"] for job in jobs), max(job["minutes"] for job in jobs)
    kinds = " and ".join(f"{job['kills']} with {job['kind']} at ZeRO stage {job['stage']}" for job in jobs)
    return [
        f"{result['kills']} kills of a worker or a node ({kinds}) in {minutes:.0f} minutes and {steps:,} steps; each "
        "time the job went on with the recorded state of one of its steps, and at the end "
        f"{result['files_left_in_memory']} files were left in memory",
        f"outcomes: {_pairs(result['outcomes'])}",
    ]


def describe_damage(result: Result) -> list[str]:
    """Loads of a checkpoint with one piece of damage each."""
    counts = result["counts"]
    verdicts = [key for key in counts[0] if key not in ("damage", "where")]

    def of(rows: list[Result]) -> str:
        total = sum(row[key] for row in rows for key in verdicts)
        found = {key: sum(row[key] for row in rows) for key in verdicts}
        return f"{total:,}: " + ", ".join(f"{found[key]:,} {key.lower()}" for key in verdicts)

    kinds = dict.fromkeys(row["damage"] for row in counts)
    at = f"stage {result['stage']} and " if "stage" in result else ""
    return [
        f"loads of a checkpoint of {at}{result['saved_on']} ranks on {result['loaded_on']}, seed {result['seed']}: "
        + of(counts),
        *(f"{kind}: {of([row for row in counts if row['damage'] == kind])}" for kind in kinds),
    ]


def describe_fuzz(result: Result) -> list[str]:
    """Each reader, fuzzed for some minutes."""
    return [
        f"{name}: {row['inputs']:,} inputs in {row['seconds']:,} s, {row['peak_mib']} MiB at most, "
        f"{len(row['findings'])} findings"
        for name, row in result["targets"].items()
    ]


def describe_lifecycle(result: Result) -> list[str]:
    """Sequences of actions, each compared with a model."""
    kinds = {failure["kind"]: failure["times"] for failure in result["failures"]}
    return [
        f"{result['actions']:,} actions in {result['sequences']} sequences, seed {result['seed']}, in "
        f"{result['minutes']} min, slowest {result['slowest_action_s']} s: {len(kinds)} kinds of failures",
        _pairs(result["counts"]),
        *(f"failed {times} times: {kind}" for kind, times in kinds.items()),
    ]


def describe_defects(result: Result) -> list[str]:
    """Defects that were put back, and what found them."""
    return [
        f"{row['defect']} Noticed by {'a fixed sequence' if row['fixed'] else 'no fixed sequence'}"
        + (f", and at drawn action {row['actions']}" if row["says"] else f"; {row['actions']} drawn actions passed")
        for row in result["defects"]
    ]


def describe_scale(result: Result) -> list[str]:
    """The time and memory of each step."""
    return [
        f"{name.replace('_', ' ')}: {found['median_seconds']:.1f} s, "
        f"{max(sample['extra_mib'] for sample in found['samples'])} MiB at most"
        for name, found in result["steps"].items()
    ]


CAMPAIGNS = (
    Campaign(
        "crash_training", "make crash-training", "kills of a training job that saves in a loop", describe_crash_training
    ),
    Campaign("crash_training_stage2", "make crash-training", "the same at ZeRO stage 2", describe_crash_training),
    Campaign("crash_memory", "make crash-memory", "kills of jobs with checkpoints in memory", describe_crash_memory),
    Campaign(
        "lifecycle",
        "make lifecycle",
        "saves, loads, kills and tools in any order on real engines, compared with a model after every action",
        describe_lifecycle,
    ),
    Campaign("lifecycle_stage2", "make lifecycle", "the same at ZeRO stage 2", describe_lifecycle),
    Campaign(
        "lifecycle_defects", "make lifecycle", "defects of older commits, put back one at a time", describe_defects
    ),
    Campaign("damage", "make damage", "loads of a damaged checkpoint", describe_damage),
    Campaign("damage_stage2", "make damage", "the same at ZeRO stage 2", describe_damage),
    Campaign("damage_autotp", "make damage", "the same for tensor parallel ranks (AutoTP)", describe_damage),
    Campaign("damage_moe_stage2", "make damage", "the same with experts (MoE) at ZeRO stage 2", describe_damage),
    Campaign("fuzz", "make fuzz", "the readers on generated files, after fixing what it found", describe_fuzz),
    Campaign("scale", "make bench-scale", "100,000 parameters, 4,096 ranks", describe_scale),
    Campaign("crash_reshard", "make crash", "kills of `zeroelastic reshard`", describe_crash_reshard),
    Campaign("crash_reshard_stage3_to_stage2", "make crash", "the same to ZeRO stage 2", describe_crash_reshard),
    Campaign("crash_reshard_stage2_to_stage3", "make crash", "the same from ZeRO stage 2", describe_crash_reshard),
)


def figures(results: Path) -> str:
    """The generated part of the page, from the raw results of a directory."""
    lines: list[str] = []
    for campaign in CAMPAIGNS:
        path = results / f"{campaign.name}.json"
        lines += [f"**`{campaign.target}`**: {campaign.about}.", ""]
        if not path.exists():
            lines += [f"* {NOT_RUN}", ""]
            continue
        result = json.loads(path.read_text())
        lines += [f"* {sentence}" for sentence in _sentences(campaign, result)]
        lines += [f"* raw: [{path.name}](../benchmarks/results/{path.name}){_where(result)}", ""]
    return "\n".join(lines)


def _sentences(campaign: Campaign, result: Result) -> list[str]:
    """The sentences about a result, or its figures if its form is unknown."""
    try:
        return campaign.sentences(result)
    except (KeyError, TypeError, IndexError, ValueError):
        return plain(result)


def _where(result: Result) -> str:
    machine = result.get("machine")
    if isinstance(machine, str):
        return f"; {machine}"
    if not isinstance(machine, Mapping):
        return ""
    facts = [str(machine[key]) for key in ("cpu", "time") if key in machine]
    facts += [f"commit {str(machine['commit'])[:12]}"] if machine.get("commit") else []
    return f"; {', '.join(facts)}" if facts else ""


def written(page: str, results: Path) -> str:
    """The page with new figures. Raises ValueError if its marks are missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{figures(results)}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    page = chosen.page.read_text()
    new = written(page, chosen.results)
    if chosen.check:
        sys.exit(None if new == page else f"{chosen.page}: its figures differ from the results: make reliability")
    chosen.page.write_text(new)


if __name__ == "__main__":
    main()
