"""``make front-ends``: each front end on 2 -> 3 -> 1 ranks at ZeRO stages 3 and 2, compared with its run on 2 ranks.

No file of a front end is changed, nor its configuration between the runs: two environment variables are set. The raw
output goes to benchmarks/results/front_ends.json, the table to front_ends.md beside it.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from front_ends.commands import FRONT_ENDS, STEPS, Run
from front_ends.running import ON, Outcome, environment_of, run_front_end, take_checkpoint

TOLERANCE = 0.01
"""Of a loss near 5: sums in another order, in fp32 and bf16, and some front ends log three digits."""
SHOWN = ("trl", "llamafactory", "ms_swift", "openrlhf", "axolotl", "transformers", "accelerate", "deepspeed", "torch")


def versions(name: str) -> dict[str, str]:
    code = (
        "import json; from importlib import metadata as m; print(json.dumps({d.metadata['Name'].replace('-', '_'): "
        f"d.version for d in m.distributions() if d.metadata['Name'].replace('-', '_') in {SHOWN}}}))"
    )
    # The first of two of one name is the one that is imported, so the last assignment must not win.
    code = code.replace("m.distributions()", "reversed(list(m.distributions()))")
    done = subprocess.run([environment_of(name) / "bin/python", "-c", code], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def chain(name: str, stage: int, work: Path) -> dict[str, Any]:
    """The run on 2 ranks; from its step 4 a run on 3; from that one's step 8 a run on 1."""
    task = work / "task"
    whole = Run(task, work / "on2", stage, 2)
    seen = run_front_end(name, whole, env={})
    found: dict[str, Any] = {"front_end": name, "stage": stage, "runs": [described(seen, 2, None, None)]}
    before = whole
    for ranks, step in ((3, 4), (1, 8)):
        if found["runs"][-1]["status"]:
            break
        out = work / f"on{ranks}"
        resume = take_checkpoint(name, before, step, out)
        run = Run(task, out, stage, ranks, resume)
        found["runs"].append(described(run_front_end(name, run), ranks, step, seen))
        before = run
    found["same"] = len(found["runs"]) == 3 and all(entry.get("same", True) for entry in found["runs"])
    return found


def described(seen: Outcome, ranks: int, step: int | None, whole: Outcome | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "ranks": ranks,
        "resumed_at": step,
        "status": seen.status,
        "losses": seen.losses,
        "samples": seen.samples,
        "said": seen.said,
    }
    if seen.status:
        entry["tail"] = seen.tail()
    if whole is not None and step is not None:
        steps = range(step + 1, STEPS + 1)
        entry["samples_same"] = all(seen.samples.get(at) == whole.samples.get(at, []) for at in steps)
        entry["loss_difference"] = max(
            (abs(seen.losses.get(at, 99.0) - whole.losses.get(at, -99.0)) for at in steps), default=99.0
        )
        entry["same"] = not seen.status and entry["samples_same"] and entry["loss_difference"] <= TOLERANCE
    return entry


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| front end | stage | 2 -> 3: samples, largest difference of a loss | 3 -> 1 | same run |"]
    lines.append("|---|---|---|---|---|")
    for one in results:
        cells = []
        for entry in one["runs"][1:]:
            same = "the same" if entry["samples_same"] else "OTHER"
            cells.append(
                f"exit code {entry['status']}" if entry["status"] else f"{same}, {entry['loss_difference']:.0e}"
            )
        cells += ["not reached"] * (2 - len(cells))
        lines.append(
            f"| {one['front_end']} | {one['stage']} | {cells[0]} | {cells[1]} | {'yes' if one['same'] else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=FRONT_ENDS, default=list(FRONT_ENDS))
    parser.add_argument("--stages", nargs="*", type=int, default=[3, 2])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", type=Path, help="leave the runs here")
    given = parser.parse_args()
    path = given.out / "front_ends.json"
    results = json.loads(path.read_text())["results"] if path.exists() else []
    for name in given.only:
        for stage in given.stages:
            work = Path(tempfile.mkdtemp(prefix="front-end-", dir=given.keep))
            make_task(name, work / "task")
            begin = time.monotonic()
            found = chain(name, stage, work)
            found |= {"seconds": round(time.monotonic() - begin, 1), "versions": versions(name)}
            results = [one for one in results if (one["front_end"], one["stage"]) != (name, stage)] + [found]
            print(table([found]).splitlines()[-1], flush=True)
            if given.keep is None:
                shutil.rmtree(work)
            order = list(FRONT_ENDS)
            results.sort(key=lambda one: (order.index(one["front_end"]), -one["stage"]))
            machine = {"python": platform.python_version(), "machine": platform.platform()}
            document = {"environment": ON, "machine": machine, "results": results}
            path.write_text(json.dumps(document, indent=1) + "\n")
            (given.out / "front_ends.md").write_text(table(results))
    if not all(one["same"] for one in results if one["front_end"] in given.only):
        sys.exit(1)


def make_task(name: str, directory: Path) -> None:
    """The model and data, written by the front end's own transformers."""
    script = Path(__file__).with_name("task.py")
    subprocess.run([environment_of(name) / "bin/python", script, directory], check=True, timeout=300)


if __name__ == "__main__":
    main()
