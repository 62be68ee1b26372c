"""Thousands of actions on real engines, each compared with the model: ``make lifecycle``.

    python tests/lifecycle/campaign.py --actions 3000 --seed 1 --out benchmarks/results
    python tests/lifecycle/campaign.py --replay '[["start", {"job": "a", "world_size": 1}], ...]'

A failure ends its sequence and not the campaign. The sequence is written down; failures that say the same are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [os.environ.get("ZEROELASTIC_TEST_PACKAGE", str(ROOT)), str(ROOT / "tests")]

from lifecycle.jobs import Server  # noqa: E402
from lifecycle.machine import Plan, run  # noqa: E402
from lifecycle.world import Failed, World  # noqa: E402

Sequence_ = list[tuple[str, dict[str, Any]]]
STEPS, PROGRAM_STEPS = 25, 10
SAVING, COMPARING = {"save", "preempt"}, {"load", "resume", "load_during_save"}
"""Actions; a program has one of each."""


@dataclass
class Failure:
    """What failed, and after which sequence."""

    says: str
    sequence: Sequence_
    kind: dict[str, Any]
    """Of the jobs."""
    times: int = 1


def kind_of(says: str) -> str:
    """A failure without its names and numbers."""
    first = says.split("\n")[0]
    return re.sub(r"'[^' ]*'|/\S+|[0-9a-f]{8,}|\d+|x{9,}\S*", "_", first)[:120]


class Campaign:
    """Counts what was done, and keeps one failure of each kind."""

    def __init__(self, server: Server, scratch: Path, *, stage: int | None = 3) -> None:
        self.server, self.scratch, self.stage = server, scratch, stage
        self.counts: Counter[str] = Counter()
        self.sequences = 0
        self.slowest: tuple[float, str] = (0.0, "")
        self.failures: dict[str, Failure] = {}
        self.programs: list[dict[str, Any]] = []

    def ended(self, world: World, failed: Failed | None) -> None:
        self.counts.update(world.counts)
        self.sequences += 1
        self.slowest = max(self.slowest, world.slowest)
        if not (SAVING.isdisjoint(world.counts) or COMPARING.isdisjoint(world.counts)):
            self.programs.append(
                {**world.kind, "actions": dict(world.counts), "failed": failed and kind_of(str(failed))}
            )
        if failed is None:
            return
        kind = kind_of(str(failed))
        if kind in self.failures:
            self.failures[kind].times += 1
            return
        self.failures[kind] = Failure(str(failed), list(world.log), world.kind)
        print(f"FAILED {kind}: {json.dumps(asdict(self.failures[kind]))}", file=sys.stderr, flush=True)

    def replay(self, sequence: Sequence_, kind: dict[str, Any]) -> str | None:
        """What fails in a sequence, if anything does."""
        world = World(self.server, self.scratch / "replay", kind=kind)
        try:
            for name, params in sequence:
                world.act(name, **params)
        except Failed as failed:
            return str(failed)
        finally:
            world.close()
        return None

    def run(self, *, actions: int, seed: int) -> None:
        """Draw sequences until so many actions are done."""
        plan = Plan(self.server, self.scratch, collect=True, most_actions=actions, stage=self.stage)
        plan.ended = self.ended
        while plan.actions < actions:
            run(plan, examples=10, steps=STEPS, chosen=seed)
            seed += 1
            print(f"{plan.actions} actions, {len(self.failures)} kinds of failures", file=sys.stderr, flush=True)

    def run_programs(self, *, number: int, seed: int) -> None:
        """Draw sequences until so many of them have saved and loaded something, each with its own kind of jobs."""
        plan = Plan(self.server, self.scratch, collect=True, stage=None)
        plan.ended = self.ended
        while len(self.programs) < number:
            run(plan, examples=min(10, number - len(self.programs) + 1), steps=PROGRAM_STEPS, chosen=seed)
            seed += 1
            print(
                f"{len(self.programs)} programs, {plan.actions} actions, {list(self.failures)}",
                file=sys.stderr,
                flush=True,
            )


def commit() -> str:
    package = sys.path[0]
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=package, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def document(campaign: Campaign, *, seed: int, seconds: float) -> dict[str, Any]:
    return {
        "actions": sum(campaign.counts.values()),
        "sequences": campaign.sequences,
        "seed": seed,
        "stage": campaign.stage,
        "minutes": round(seconds / 60, 1),
        "slowest_action_s": round(campaign.slowest[0], 1),
        "counts": dict(sorted(campaign.counts.items())),
        "failures": [{"kind": kind, **asdict(failure)} for kind, failure in campaign.failures.items()],
        "machine": {
            "cpu": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
            "commit": commit(),
        },
    }


def write(out: Path | None, name: str, result: dict[str, Any]) -> None:
    """Show a result, and keep it where a directory is given; stacks name files from where they are imported."""
    sys.path.append(str(ROOT / "benchmarks"))
    from report import without_paths

    text = without_paths(json.dumps(result, indent=1))
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actions", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", help="a sequence, as JSON")
    parser.add_argument("--kind", type=json.loads, default={}, help="of the jobs of --replay, as JSON")
    parser.add_argument("--programs", type=int, help="that many sequences, each with another kind of jobs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3, help="the ZeRO stage of all jobs")
    chosen = parser.parse_args()
    began = time.monotonic()
    name = "lifecycle" if chosen.stage == 3 else f"lifecycle_stage{chosen.stage}"
    with tempfile.TemporaryDirectory() as directory, Server(Path(directory) / "jobs") as server:
        campaign = Campaign(server, Path(directory), stage=chosen.stage)
        if chosen.replay:
            says = campaign.replay(json.loads(chosen.replay), chosen.kind)
            print(says or "nothing fails")
            sys.exit(says is not None)
        if chosen.programs:
            campaign.run_programs(number=chosen.programs, seed=chosen.seed)
        else:
            campaign.run(actions=chosen.actions, seed=chosen.seed)
    result = document(campaign, seed=chosen.seed, seconds=time.monotonic() - began)
    if chosen.programs:
        del result["stage"]
        name, result["programs"] = "programs", campaign.programs
    write(chosen.out, name, result)


if __name__ == "__main__":
    main()
