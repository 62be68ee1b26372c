"""What runs of train.py left behind: the samples of each step, the steps that were lost, and how two runs compare."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

WEIGHT_TOLERANCE = 1e-4
"""Of final weights: at another world size gradients are summed in another order, and Adam divides small ones."""
OUR_SHARE = 0.10
"""Of the time from the last step before a restart to the first after it, the most that ``resume`` may take."""
EXPECTED = {
    "steps_while_waiting": 0,
    "agents_waiting": 2,
    "workers_left": 0,
    "workers_of_new_agent": 0,
    "steps_by_lost_workers": 0,
}
"""Of what happened to a node that was lost; each scenario has some of these."""


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The lines that the ranks wrote so far."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def last_step(path: Path, *, world_size: int | None = None) -> int:
    """The furthest step that any rank trained, at a world size or at any."""
    return max(
        (
            entry["step"]
            for entry in read_trace(path)
            if entry["event"] == "step" and world_size in (None, entry["world_size"])
        ),
        default=0,
    )


def committed_samples(trace: Path) -> dict[int, tuple[int, list[int]]]:
    """The world size of each step's last training, and its samples of all ranks, sorted.

    A step that was trained again after a kill counts as it was the last time.
    """
    last: dict[int, dict[int, dict[str, Any]]] = {}
    for entry in read_trace(trace):
        if entry["event"] == "resume":
            for step in [step for step in last if step > entry["step"]]:
                if entry["rank"] == 0:
                    del last[step]
        if entry["event"] == "step":
            last.setdefault(entry["step"], {})[entry["rank"]] = entry
    return {
        step: (len(ranks), sorted(index for entry in ranks.values() for index in entry["samples"]))
        for step, ranks in sorted(last.items())
    }


def lost_steps(trace: Path) -> list[int]:
    """Steps that had to be trained again, at each start after the first."""
    lost: list[int] = []
    reached = 0
    for entry in read_trace(trace):
        if entry["event"] == "step":
            reached = max(reached, entry["step"])
        elif entry["event"] == "resume" and entry["rank"] == 0:
            if reached:
                lost.append(reached - entry["step"])
            reached = entry["step"]
    return lost


def world_sizes(trace: Path) -> list[int]:
    """The world size of each start that trained at least one step."""
    sizes: list[int] = []
    for entry in read_trace(trace):
        if entry["event"] == "step" and (not sizes or sizes[-1] != entry["world_size"]):
            sizes.append(entry["world_size"])
    return sizes


def furthest_weight(first: Path, second: Path) -> float:
    """The largest difference between two runs' final weights, relative to the largest weight of its tensor."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as read  # DeepSpeed's own reader

    one, other = read(str(first)), read(str(second))
    if one.keys() != other.keys():
        raise ValueError(f"the two runs hold different parameters: {sorted(one.keys() ^ other.keys())}")
    pairs = [(one[name].detach(), other[name].detach()) for name in one]
    return max(float((ours - theirs).abs().max() / ours.abs().max()) for ours, theirs in pairs)


def compare(whole: Path, elastic: Path, happened: dict[str, Any], *, save_steps: int) -> dict[str, Any]:
    """The results of the demonstration; ``problems`` are the expectations that were not met."""
    trace = elastic / "trace.jsonl"
    resumes = [entry for entry in read_trace(trace) if entry["event"] == "resume"]
    samples = {step: seen for step, (_, seen) in committed_samples(trace).items()}
    expected = {step: seen for step, (_, seen) in committed_samples(whole / "trace.jsonl").items()}
    found = {
        "world_sizes": world_sizes(trace),
        "steps": len(samples),
        "samples_as_uninterrupted": samples == expected and bool(samples),
        "resumes": sum(entry["rank"] == 0 for entry in resumes),
        "bit_exact_resumes": all(entry["exact"] for entry in resumes if entry["tier"] is not None),
        "lost_steps": lost_steps(trace),
        "furthest_weight": furthest_weight(whole / "ckpt", elastic / "ckpt"),
        "restarts": restarts(trace),
    }
    found["our_largest_share"] = max((one["our_share"] for one in found["restarts"]), default=0.0)
    problems = [what for what in ("samples_as_uninterrupted", "bit_exact_resumes") if not found[what]]
    problems += [what for what, value in EXPECTED.items() if happened.get(what, value) != value]
    problems += ["lost_steps"] if max(found["lost_steps"], default=0) > save_steps else []
    problems += ["our_largest_share"] if found["our_largest_share"] > OUR_SHARE else []
    problems += ["furthest_weight"] if not found["furthest_weight"] <= WEIGHT_TOLERANCE else []
    return {**happened, **found, "problems": problems}


def compare_memory(whole: Path, elastic: Path) -> dict[str, Any]:
    """The same for a job with checkpoints in memory: no step but one may be lost, and no checkpoint on a disk read."""
    found = compare(whole, elastic, {}, save_steps=1)
    resumes = [entry for entry in read_trace(elastic / "trace.jsonl") if entry["event"] == "resume"]
    from_disk = [entry for entry in resumes if entry["tier"] not in ("memory", None)]
    found["tiers"] = sorted({entry["tier"] for entry in resumes if entry["tag"] is not None})
    found["disk_bytes_read"] = sum(entry["nbytes"] for entry in from_disk if entry["rank"] == 0)
    problems = [what for what in found["problems"] if what != "our_largest_share"]  # of much less
    problems += ["disk_bytes_read"] if from_disk or found["tiers"] != ["memory"] else []
    return {**found, "problems": problems}


def restarts(trace: Path) -> list[dict[str, Any]]:
    """The cost of each start after the first, by the clock of the machine."""
    found: list[dict[str, Any]] = []
    reached, at = 0, 0.0
    begun: dict[str, Any] | None = None
    for entry in read_trace(trace):
        if entry["event"] == "resume" and entry["rank"] == 0:
            begun = {"world_size": entry["world_size"], "lost_steps": max(reached - entry["step"], 0)}
            begun["resume_seconds"] = entry["seconds"]
        elif entry["event"] == "step":
            if begun is not None and reached:
                seconds = entry["time"] - at
                found.append({**begun, "seconds": seconds, "our_share": begun["resume_seconds"] / seconds})
            begun, reached, at = None, entry["step"], entry["time"]
    return found


def write_result(directory: Path, found: dict[str, Any]) -> Path:
    """JSON and Markdown, named after the scenario. Returns the Markdown's path."""
    name = "elastic" if found["scenario"] == "elastic" else f"elastic_{found['scenario'].replace('-', '_')}"
    about = {
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
    (directory / f"{name}.json").write_text(json.dumps({"about": about, **found}, indent=1) + "\n")
    lines = [f"# Elastic job, scenario {found['scenario']}", ""]
    lines += [
        f"{about['cores']} cores, Linux {about['kernel']}, load {about['load_average']:.1f}; {about['time']}.",
        "",
    ]
    lines += ["| what | found |", "|---|---|"]
    lines += [f"| {key.replace('_', ' ')} | {_cell(value)} |" for key, value in found.items() if key != "restarts"]
    lines += ["", "Restarts, in seconds from the last step before to the first after it:", ""]
    lines += ["| ranks | lost steps | seconds | of them resume | share |", "|" + "--:|" * 5]
    for one in found["restarts"]:
        figures = [str(one["world_size"]), str(one["lost_steps"]), f"{one['seconds']:.2f}"]
        figures += [f"{one['resume_seconds']:.2f}", f"{one['our_share']:.1%}"]
        lines += [f"| {' | '.join(figures)} |"]
    path = directory / f"{name}.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
