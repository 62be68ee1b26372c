"""Seconds from the loss of a node to the first step at the new size, by phase: on disk, in memory, and in place.

    python benchmarks/bench_restart.py --out benchmarks/results

Each round plays the ways of examples/elastic/cluster.py through the same changes, one after the other: four nodes on
this machine lose one, three times. It goes by SIGKILL, with its workers and its shared memory; in place it is asked to
leave by SIGTERM, from which the time counts. The rounds take turns, and the medians are over all changes of a way.
Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples" / "elastic")]

from cluster import DISK, IN_PLACE, MEMORY, play  # noqa: E402
from judge import PHASES, lost_steps, read_trace, restarts  # noqa: E402
from report import machine  # noqa: E402

from zeroelastic.job_log.event_log import read_events  # noqa: E402
from zeroelastic.job_log.timeline import make_timeline  # noqa: E402

KILLS = ((4, -1), (9, -1), (14, -1))
STEPS, SAVE_STEPS = 19, 5
WAYS = {"disk": DISK, "memory": MEMORY, "in place": IN_PLACE}
TARGETS = {"memory": 1 / 3, "in place": 1 / 10}


def measure(way: str, out: Path, limit: float) -> dict[str, Any]:
    """One round of one way: its restarts after kills, the steps that they lost, and where they resumed from."""
    play(out, KILLS, steps=STEPS, save_steps=SAVE_STEPS, limit=limit, way=WAYS[way])
    found = restarts(make_timeline(read_events([out / "events.jsonl"])))
    resumes = [entry for entry in read_trace(out / "trace.jsonl") if entry["event"] == "resume" and entry["tag"]]
    assert all(entry["exact"] for entry in resumes)
    return {
        "restarts": [one for one in found if one["since_kill"]],
        "lost_steps": lost_steps(out / "trace.jsonl"),
        "tiers": [entry["tier"] for entry in resumes if entry["rank"] == 0],
    }


def summary(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians by way and phase, and the ratios to the first way."""
    rows: dict[str, Any] = {}
    for way, measured in rounds.items():
        after = [one for each in measured for one in each["restarts"]]
        totals = [one["total"] for one in after]
        rows[way] = {
            "kills": len(after),
            "lost_steps": [lost for each in measured for lost in each["lost_steps"]],
            **{phase: median([one[phase] or 0.0 for one in after]) for phase in PHASES},
            "total": median(totals),
            "least": min(totals),
            "most": max(totals),
        }
    ratios = {way: rows[way]["total"] / rows["disk"]["total"] for way in TARGETS}
    return {"ways": rows, "over_disk": ratios, "targets": TARGETS}


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    about = result["about"]
    lines = [
        "# From the loss of a node to the first step",
        "",
        f"`{about['command']}`, {about['cpu']}, {about['cores']} cores, torch {about['torch']}, commit "
        f"{about['commit'][:10]}, {about['time']}. Seconds, medians over the losses of a way; four agents of one "
        "worker. load is all of `resume`, in place the exchange of state. In place a node is asked to leave.",
        "",
    ]
    head = ("way", "kills", "steps lost", *(phase.replace("_", " ") for phase in PHASES), "total", "least", "most")
    lines += [f"| {' | '.join(head)} |", "|---|" + "--:|" * (len(head) - 1)]
    for way, row in result["ways"].items():
        lost = f"{min(row['lost_steps'])} to {max(row['lost_steps'])}"
        figures = [f"{row[key]:.2f}" for key in (*PHASES, "total", "least", "most")]
        lines += [f"| {WAYS[way].name} | {row['kills']} | {lost} | {' | '.join(figures)} |"]
    lines += [""]
    for way, target in result["targets"].items():
        ratio = result["over_disk"][way]
        lines += [f"{WAYS[way].name}: {ratio:.2f} of disk and cold starts (target: at most {target:.2f}).", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="of three kills for each way")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one round of one way")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    about = machine()
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(chosen.rounds):
            for way in WAYS:
                print(f"round {number + 1} of {chosen.rounds}, {WAYS[way].name}", file=sys.stderr)
                rounds[way].append(measure(way, Path(directory) / f"{way}{number}", chosen.limit))
    result = {"about": about, **summary(rounds), "rounds": rounds}
    print(page(result))
    if chosen.out is not None:
        (chosen.out / "restart.json").write_text(json.dumps(result, indent=1) + "\n")
        (chosen.out / "restart.md").write_text(page(result))


if __name__ == "__main__":
    main()
