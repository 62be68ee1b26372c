"""Compare the speed of two versions of zeroelastic: save, load, load at another size and reshard, in turns.

    python benchmarks/before_after.py --before ../old-checkout [--repeats 7] [--out benchmarks/results]

Each repeat runs both versions, one after the other, in an order that alternates; the ratio after / before is taken
within a repeat. Times are those of the slowest rank, without the start of processes and engines. The page cache is
warm: every file was written a moment ago.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

JOB = r"""
import json, sys, time
from pathlib import Path

from zeroelastic.testing import run_ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 3, "elastic_checkpoint": True, "sub_group_size": 20_000_000},
}


def timed(fn):
    import torch, torch.distributed as dist
    dist.barrier()
    begin = time.perf_counter()
    fn()
    seconds = torch.tensor([time.perf_counter() - begin])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def work(folder, hidden, layers, saves):
    import deepspeed, torch, zeroelastic

    zeroelastic.install()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(hidden, hidden) for _ in range(layers)))
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=CONFIG)
    engine.backward(engine(torch.ones(1, hidden, dtype=torch.bfloat16)).sum())
    engine.step()
    found = {}
    if saves:
        engine.save_checkpoint(folder, tag="warm")
        found["save"] = timed(lambda: engine.save_checkpoint(folder, tag="t"))
        engine.load_checkpoint(folder, tag="t")
        found["load"] = timed(lambda: engine.load_checkpoint(folder, tag="t"))
    else:
        engine.load_checkpoint(folder, tag="t")
        found["load at another size"] = timed(lambda: engine.load_checkpoint(folder, tag="t"))
    return found


if __name__ == "__main__":
    folder, hidden, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    found = run_ranks(work, 2, folder, hidden, layers, True, timeout=600)[0]
    found.update(run_ranks(work, 3, folder, hidden, layers, False, timeout=600)[0])
    print("RESULT " + json.dumps(found))
"""

RESHARD = r"""
import sys, time
import zeroelastic.cli.app
from zeroelastic.cli.app import main
begin = time.perf_counter()
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("RESULT " + str(time.perf_counter() - begin))
"""


def measure(tree: Path, hidden: int, layers: int) -> dict[str, float]:
    """The seconds of each operation with the package of one checkout."""
    env = dict(os.environ, PYTHONPATH=str(tree), OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.py").write_text(JOB)
        (Path(folder) / "verb.py").write_text(RESHARD)
        ckpt = f"{folder}/ckpt"

        def run(*arguments: str) -> str:
            done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)
            lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if done.returncode or not lines:
                raise SystemExit(done.stdout + done.stderr)
            return lines[-1]

        found: dict[str, float] = json.loads(run(f"{folder}/job.py", ckpt, str(hidden), str(layers)))
        found["reshard"] = float(
            run(f"{folder}/verb.py", "reshard", ckpt, f"{folder}/out", "--world-size", "3", "--tag", "t")
        )
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the version to compare with")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=48, help="48 layers of 1024: 50 million parameters")
    parser.add_argument("--out", type=Path, help="directory for before_after.json and .md")
    args = parser.parse_args()
    trees = {"before": args.before.resolve(), "after": ROOT}
    runs: list[dict[str, dict[str, float]]] = []
    for repeat in range(args.repeats):
        order = list(trees) if repeat % 2 == 0 else list(reversed(trees))
        found = {side: measure(trees[side], args.hidden, args.layers) for side in order}
        runs.append(found)
        print(json.dumps(found), flush=True)
    lines = ["| operation | before, s | after, s | after / before (least to most) |", "|---|---|---|---|"]
    for name in runs[0]["before"]:
        before, after = ([run[side][name] for run in runs] for side in ("before", "after"))
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        lines.append(
            f"| {name} | {statistics.median(before):.3f} | {statistics.median(after):.3f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
    print("\n".join(lines))
    if args.out:
        commits = {
            side: subprocess.check_output(["git", "-C", tree, "rev-parse", "--short", "HEAD"], text=True).strip()
            for side, tree in trees.items()
        }
        parameters = args.layers * args.hidden * (args.hidden + 1)
        head = (
            f"# Before and after: {commits['before']} and {commits['after']}\n\n"
            f"{parameters / 1e6:.0f} million parameters, AdamW under bf16, saved on 2 ranks and loaded on 2 and 3; "
            f"{args.repeats} repeats, medians; {os.cpu_count()} cores, {platform.machine()}, Python "
            f"{platform.python_version()}.\n\n    python benchmarks/before_after.py --before CHECKOUT --repeats "
            f"{args.repeats}\n\n"
        )
        (args.out / "before_after.md").write_text(head + "\n".join(lines) + "\n")
        (args.out / "before_after.json").write_text(json.dumps({"commits": commits, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
